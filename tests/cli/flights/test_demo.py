"""``nsqext demo``: its rows, its results, and the whole command on a cluster of its own."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from anyio.lowlevel import checkpoint
from attrs import define, field

from nsqext import Producer, Receipt
from nsqext.cli import main
from nsqext.cli.flights import demo_run
from nsqext.cli.flights.results import ConsumerCounts, DemoResults
from nsqext.cli.flights.rows import CANARY, FLIGHTS, Columns, Flight, find_flights, read_flights
from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from nsqext.types import Address

PEOPLE = "name,home town,age\nAda,London,36\nNA,Turing,41\n,Princeton,53\n"


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """Return the path of a small table without flights."""
    path = tmp_path / "people.csv"
    path.write_text(PEOPLE, encoding="utf-8")
    return path


def run_demo(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command in this process; return its exit code and output."""
    code: Any = 0
    try:
        main(["demo", *arguments])
    except SystemExit as end:
        code = end.code or 0
    printed = capsys.readouterr()
    assert isinstance(code, int)
    return code, printed.out + printed.err


def counts(output: str) -> dict[str, int]:
    """Read the table of violations."""
    cells = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in output.splitlines()]
    return {row[0]: int(row[1]) for row in cells if len(row) == 2 and row[1].isdigit()}


# Rows


def test_a_day_of_flights() -> None:
    flights = read_flights(find_flights(), FLIGHTS)
    assert [flight.number for flight in flights] == list(range(1, 843))
    assert sum(flight.tag == CANARY for flight in flights) == 94
    first = flights[0]
    assert (first.key, first.headers, first.tag) == (
        "N14228",
        {"carrier": "UA", "origin": "EWR", "dest": "IAH"},
        None,
    )
    assert json.loads(first.body)["time_hour"] == "2013-01-01T10:00:00Z"


def test_an_aircraft_without_tail_number_gives_the_flight_number_as_key(tmp_path: Path) -> None:
    path = tmp_path / "flights.csv"
    path.write_text("carrier,flight,tailnum\nUA,1545,NA\nUA,7,\nAA,8,N1\n", encoding="utf-8")
    assert [flight.key for flight in read_flights(path, FLIGHTS)] == ["1545", "7", "N1"]


def test_columns_that_are_not_requested_may_be_missing(people: Path) -> None:
    flights = read_flights(people, FLIGHTS)
    assert {(flight.key, flight.tag, len(flight.headers)) for flight in flights} == {(None, None, 0)}


def test_a_row_without_a_value_has_no_key_and_column_names_become_header_names(people: Path) -> None:
    columns = Columns(keys=("name",), headers=("home town",), tag="age", tag_value="41")
    flights = read_flights(people, columns)
    assert [flight.key for flight in flights] == ["Ada", None, None]
    assert flights[0].headers == {"home_town": "London"}
    assert [flight.tag for flight in flights] == [None, CANARY, None]


def test_a_byte_order_mark_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xef\xbb\xbfname,age\r\n\r\nAda,36\r\n")
    assert [json.loads(flight.body) for flight in read_flights(path, Columns())] == [{"name": "Ada", "age": "36"}]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "must contain the column names"),
        (b"a,a\n1,2\n", "must contain the column names"),
        (b"a,b\n", "has no rows"),
        (b"a,b\n1\n", "row 1 of .* has 1 cells, but there are 2 columns"),
        (b"a,b\n1,\xff\n", "is not a CSV file in UTF-8"),
        (b'a,b\n1,"2\n', "is not a CSV file in UTF-8"),
    ],
)
def test_a_file_without_a_table_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidSetting, match=complaint):
        read_flights(path, FLIGHTS)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="cannot be read: No such file"):
        read_flights(tmp_path / "nowhere.csv", FLIGHTS)


def test_a_requested_column_must_exist(people: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"no column 'shoe size'.*: its columns: name, home town, age"):
        read_flights(people, Columns(keys=("shoe size",), required=frozenset({"shoe size"})))


# Results


@define
class FakeMessage:
    """The fields of a message that the results compare."""

    trace_id: int
    body: bytes = b"x"
    tag: str | None = None
    headers: Mapping[str, Any] = field(factory=dict)
    internal_id: int = 2
    partition: int = 0
    offset: int = 0
    size: int = 31


def results_of(*flights: Flight) -> tuple[DemoResults, ConsumerCounts, ConsumerCounts]:
    """Return the results of these flights, all published to partition 0, and the counts of the two consumers."""
    tagged, untagged = ConsumerCounts("tagged", CANARY), ConsumerCounts("untagged", None)
    results = DemoResults(flights, [tagged, untagged])
    for flight in flights:
        receipt = Receipt("t", 0, "n1", flight.number + 1, flight.number, (flight.number - 1) * 31, 31)
        results.add_receipt(flight, receipt)
    return results, tagged, untagged


def flight(number: int, tag: str | None = None, key: str | None = None) -> Flight:
    """Return a flight."""
    return Flight(number, b"x", {}, key, tag)


def message(number: int, **changes: Any) -> FakeMessage:
    """Return the message of a flight as it should be received."""
    values: dict[str, Any] = {"internal_id": number + 1, "offset": (number - 1) * 31, **changes}
    return FakeMessage(number, **values)


def violations(results: DemoResults) -> dict[str, int]:
    """Return the violations that occurred, with their counts."""
    return {kind: count for kind, count in results.violations().items() if count}


def test_a_good_run_has_no_violations() -> None:
    results, tagged, untagged = results_of(flight(1), flight(2, CANARY), flight(3))
    assert not results.complete
    results.add_message(untagged, message(3))
    results.add_message(untagged, message(1))
    results.add_message(tagged, message(2, tag=CANARY))
    assert results.complete
    assert violations(results) == {}
    assert (tagged.total, untagged.total, results.total) == (1, 2, 3)
    line = results.partitions(1)[0]
    assert (line.partition, line.nodes, line.receipts, line.received, line.last_offset) == (0, ("n1",), 3, 3, 62)


def test_a_flight_that_is_never_received_is_lost() -> None:
    results, _, untagged = results_of(flight(1), flight(2))
    results.add_message(untagged, message(2))
    assert violations(results) == {"lost": 1}


def test_messages_delivered_twice_are_reported() -> None:
    results, _, untagged = results_of(flight(1))
    results.add_message(untagged, message(1))
    results.add_message(untagged, message(1))
    assert violations(results) == {"duplicated": 1}


@pytest.mark.parametrize("tag", [CANARY, None])
def test_messages_received_by_the_wrong_consumer_are_reported(tag: str | None) -> None:
    results, tagged, untagged = results_of(flight(1, tag))
    results.add_message(untagged if tag else tagged, message(1, tag=tag))
    assert violations(results) == {"received by the wrong consumer": 1}


@pytest.mark.parametrize("changes", [{"body": b"y"}, {"tag": CANARY}, {"headers": {"a": "b"}}, {"trace_id": 9}])
def test_an_altered_message_does_not_count_as_received(changes: dict[str, Any]) -> None:
    results, _, untagged = results_of(flight(1))
    altered = message(1)
    for name, value in changes.items():
        setattr(altered, name, value)
    results.add_message(untagged, altered)
    assert violations(results) == {"lost": 1, "altered": 1}


def test_messages_of_one_key_have_to_keep_their_order_at_each_consumer() -> None:
    results, tagged, untagged = results_of(
        flight(1, key="k"), flight(2, key="k"), flight(3, key="l"), flight(4, CANARY, "k")
    )
    results.add_message(tagged, message(4, tag=CANARY))
    results.add_message(untagged, message(3))
    results.add_message(untagged, message(2))
    assert violations(results) == {"lost": 1}
    results.add_message(untagged, message(1))
    assert violations(results) == {"out of order": 1}


@pytest.mark.parametrize("name", ["partition", "internal_id", "offset", "size"])
def test_a_message_is_delivered_from_the_position_of_its_receipt(name: str) -> None:
    results, _, untagged = results_of(flight(1))
    results.add_message(untagged, message(1, **{name: 7}))
    assert violations(results) == {"at another position than in the receipt": 1}
    assert [line.partition for line in results.partitions(1)] == ([0, 7] if name == "partition" else [0])


def test_a_publish_without_receipt_and_an_unfinished_message_are_reported() -> None:
    results = DemoResults([flight(1)], [ConsumerCounts("untagged", None)])
    results.add_message(results.consumers[None], message(1))
    results.unfinished += 1
    assert violations(results) == {"not acknowledged": 1, "not finished": 1}


# Command


def test_every_flight_is_received_by_the_right_consumer(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run_demo(capsys)
    assert "842 rows, 842 with a key, 94 with the tag canary" in output
    assert "no violations" in output
    assert len(counts(output)) == 8
    assert set(counts(output).values()) == {0}
    assert code == 0


def test_another_table_can_be_published(capsys: pytest.CaptureFixture[str], people: Path) -> None:
    code, output = run_demo(
        capsys,
        *("--csv", str(people), "--key-column", "name", "--tag-column", "home town", "--tag-value", "London"),
        *("--header-columns", "home town, age", "--partitions", "2", "--nodes", "1"),
    )
    assert "people.csv: 3 rows, 1 with a key, 1 with the tag canary" in output
    assert code == 0, output


class RepeatingProducer(Producer):
    """Publishes one row twice."""

    async def publish(self, *arguments: Any, **options: Any) -> Receipt:
        """Publish."""
        if options["trace_id"] == 2:
            await super().publish(*arguments, **options)
        return await super().publish(*arguments, **options)


class LosingProducer(Producer):
    """Returns a receipt for one row without publishing it."""

    async def publish(self, *arguments: Any, **options: Any) -> Receipt:
        """Publish."""
        if options["trace_id"] == 2:
            await checkpoint()
            return Receipt(arguments[0], 0, "nowhere", 2, 2, 0, 31)
        return await super().publish(*arguments, **options)


class ForgetfulProducer(Producer):
    """Publishes without tags."""

    async def publish(self, *arguments: Any, **options: Any) -> Receipt:
        """Publish."""
        return await super().publish(*arguments, **{**options, "tag": None})


@pytest.mark.parametrize(
    ("producer", "expected"),
    [
        (RepeatingProducer, {"duplicated": 1}),
        (LosingProducer, {"lost": 1}),
        (ForgetfulProducer, {"lost": 1, "altered": 1}),
    ],
)
def test_a_failed_run_prints_the_violation_and_exits_with_1(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    people: Path,
    producer: Callable[..., Producer],
    expected: dict[str, int],
) -> None:
    monkeypatch.setattr(demo_run, "Producer", producer)
    monkeypatch.setattr(demo_run, "_IDLE_TIMEOUT", 0.5)
    arguments = ("--csv", str(people), "--tag-column", "name", "--tag-value", "Ada", "--partitions", "2")
    code, output = run_demo(capsys, *arguments)
    assert "violations found" in output
    assert counts(output).items() >= expected.items()
    assert code == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--lookupd", "127.0.0.1:4161", "--nodes", "2"), "--nodes has no effect on the cluster of --lookupd"),
        (("--tag-column", "carrier"), "--tag-column needs --tag-value"),
        (("--key-column", "shoe"), "no column 'shoe'"),
        (("--lookupd", "nonsense:"), "'nonsense:' is not an address"),
        (("--partitions", "300"), "254"),
    ],
)
def test_bad_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    code, output = run_demo(capsys, *arguments)
    assert complaint in output
    assert code == 2


def test_a_missing_lookup_service_is_reported(capsys: pytest.CaptureFixture[str], closed_address: Address) -> None:
    code, output = run_demo(capsys, "--lookupd", str(closed_address))
    assert "no lookup node returned a usable response" in output or "no response" in output
    assert code == 2


def test_the_published_file_has_842_rows() -> None:
    with find_flights().open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 842
