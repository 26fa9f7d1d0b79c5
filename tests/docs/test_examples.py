"""The example programs run on a cluster of their own, and on a given one."""

from __future__ import annotations

import csv

import pytest

from nsqext.broker import Cluster
from tests.support.programs import ROOT, run_program

EXAMPLES = ROOT / "examples"

# program -> end of its output
ENDS = {
    "canary_by_tag.py": "old version: 16 orders, 0 of them tagged\nnew version: 4 orders, 4 of them tagged\n",
    "handler_callbacks.py": "handled 10 orders\n",
    "orders_in_order.py": "30 of 30 orders in order, handled by 3 workers\n",
    "publish_with_headers.py": "of its queue\n",
}


def test_every_example_is_tested() -> None:
    # tests/spark and tests/stories/test_postgres.py run the others
    programs = {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("spark_")}
    assert programs == {*ENDS, "orders_to_postgres.py"}


@pytest.mark.parametrize("name", sorted(ENDS))
def test_example_runs_on_its_own_cluster(name: str) -> None:
    run = run_program(EXAMPLES / name)
    assert (run.code, run.output.endswith(ENDS[name])) == (0, True), run.output


@pytest.mark.parametrize("name", ["canary_by_tag.py", "handler_callbacks.py", "publish_with_headers.py"])
def test_example_runs_on_a_given_cluster(name: str) -> None:
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("orders", partitions=2, extend=True, channels=["billing"])
        run = run_program(EXAMPLES / name, "--lookupd", cluster.lookupd[0])
    assert (run.code, run.output.endswith(ENDS[name])) == (0, True), run.output


def test_the_data_is_one_day_of_departures() -> None:
    with (EXAMPLES / "data" / "flights-2013-01-01.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 842
    assert {(row["year"], row["month"], row["day"]) for row in rows} == {("2013", "1", "1")}
    assert {row["origin"] for row in rows} == {"EWR", "JFK", "LGA"}
    assert all(row["tailnum"] != "NA" for row in rows)
