"""A short run of all parts of a service on the embedded cluster, and how its numbers are judged."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from tests.campaigns.soak.service import Sample, ServiceSoak, growth, run, watch_all
from tests.campaigns.soak.service_parts import PARTS, KeyRecord, Ledger, OutboxPart, Site


@pytest.mark.timeout(180)
def test_nothing_is_lost_and_tables_are_empty_while_programs_and_nodes_are_killed(tmp_path: Path) -> None:
    (soak,) = run(["embedded"], 5.0, tmp_path, names=list(PARTS), every=1.0, pause=0.1, seed=7)
    assert soak.violations == []
    assert {part.name for part in soak.parts} == set(PARTS)
    assert all(any(part.ledger.published.values()) for part in soak.parts)
    assert soak.faults.total() > 1
    names = (
        "producers and consumers of all clusters",
        "outbox relay 2",
        "delay run 2",
        "key consumer 2",
        "Celery 2",
        "cluster",
    )
    assert set(soak.samples) == {f"embedded: {name}" for name in names}
    rows = ("outbox", "set aside by the outbox", "delayed")
    assert set(soak.rows) == {f"embedded: {name}" for name in rows}


@pytest.mark.timeout(90)
def test_an_outbox_sends_no_keys_to_the_original_nsq_which_would_set_its_rows_aside(tmp_path: Path) -> None:
    (soak,) = run(["original"], 2.5, tmp_path, names=["outbox"], every=10.0, pause=0.1, seed=7)
    assert soak.violations == []
    assert any(soak.parts[0].ledger.published.values())
    assert soak.rows["original: set aside by the outbox"][-1] == 0


def test_a_record_counts_what_is_late_and_repeated_and_forgets_what_is_complete() -> None:
    record = KeyRecord()
    for number in (0, 1, 3, 2, 3, 0, 5):
        record.add(number)
    assert (record.low, record.ahead, record.late, record.repeated) == (4, {5}, 1, 2)


def test_lost_and_late_numbers_and_rows_that_are_left_are_violations(tmp_path: Path) -> None:
    site = Site(["127.0.0.1:1"], True, 1, "t")
    part = OutboxPart(site, site, tmp_path)
    ledger: Ledger = part.ledger
    ledger.published["c0"], ledger.published["c1"] = 2, 3
    for key, number in (("c0", 0), ("c1", 1), ("c1", 0), ("c1", 2)):
        ledger.add(key, number)
    soak = ServiceSoak("embedded", None, site, tmp_path, [part])  # type: ignore[arg-type]
    soak.rows["embedded: outbox"] = [5, 1]
    soak.judge()
    assert soak.violations == [
        "outbox: 1 numbers were lost",
        "outbox: 1 numbers came late",
        "embedded: outbox: 1 rows are left",
    ]
    part.ordered = False
    soak.violations.clear()
    soak.judge()
    assert len(soak.violations) == 2


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        ([Sample(50_000, 20)] * 20, 0),
        ([Sample(50_000 + 500 * number, 20) for number in range(20)], 0),
        ([Sample(50_000 + 5000 * number, 20) for number in range(20)], 1),
        ([Sample(50_000, 20 + 3 * number) for number in range(20)], 1),
        ([Sample(50_000 + 5000 * number, 20) for number in range(19)], 0),
    ],
    ids=["flat", "little", "memory", "descriptors", "few samples"],
)
def test_a_program_that_grows_is_a_violation(tmp_path: Path, samples: list[Sample], found: int) -> None:
    site = Site(["127.0.0.1:1"], True, 1, "t")
    soak = ServiceSoak("embedded", None, site, tmp_path, samples={"relay": samples})  # type: ignore[arg-type]
    soak.judge()
    assert len(soak.violations) == found


def test_a_fault_that_ends_late_adds_no_samples(tmp_path: Path) -> None:
    class _Cluster:
        def pids(self) -> dict[str, int]:
            return {}

    ended = threading.Event()
    fault = threading.Thread(target=ended.wait)
    soak = ServiceSoak("embedded", _Cluster(), Site(["127.0.0.1:1"], True, 1, "t"), tmp_path)  # type: ignore[arg-type]
    end = threading.Timer(0.5, ended.set)
    for thread in (fault, end):
        thread.start()
    watch_all([soak], [fault], 0.12)
    assert ended.is_set()
    assert 1 <= len(soak.samples["embedded: producers and consumers of all clusters"]) <= 12
    end.join()


def test_growth_is_measured_without_the_start() -> None:
    samples = [Sample(1000 * (number + 1), 5) for number in range(8)]
    assert growth(samples) == (Sample(3500, 5), Sample(7500, 5))
    assert growth(samples[:1]) == (samples[0], samples[0])


def test_the_second_program_of_a_kind_is_never_killed(tmp_path: Path) -> None:
    site = Site(["127.0.0.1:1"], True, 1, "t")
    part = OutboxPart(site, site, tmp_path)
    killed: list[str] = []

    class _Program:
        def __init__(self, name: str) -> None:
            self.name = name

        def kill(self) -> None:
            killed.append(self.name)

    part.programs = {name: _Program(name) for name in ("relay 1", "relay 2")}  # type: ignore[misc]
    chance = random.Random(1)
    assert {part.kill(chance) for _ in range(20)} == {"relay 1"} == set(killed)


def test_faults_that_end_early_are_a_violation(tmp_path: Path) -> None:
    class _Cluster:
        kinds = ("kill",)
        shortest = 0.0

        def begin(self, fault: object, topics: object) -> object:
            raise RuntimeError("the node did not start")

    site = Site(["127.0.0.1:1"], True, 1, "t")
    part = OutboxPart(site, site, tmp_path)
    part.kill = lambda chance: "relay 1"  # type: ignore[method-assign]
    soak = ServiceSoak("embedded", _Cluster(), site, tmp_path, [part])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        soak.disturb(time.monotonic() + 60.0, 0.001, seed=1)
    assert soak.violations == ["no further faults after RuntimeError('the node did not start')"]
