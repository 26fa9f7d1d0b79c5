"""``nsqext demo``: its flights, its check, and the whole command on a cluster of its own."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest
from anyio.lowlevel import checkpoint
from attrs import define, field

from nsqext import Message, Producer, Receipt
from nsqext.broker import Cluster
from nsqext.cli import main
from nsqext.cli.demo import demo
from nsqext.cli.demo.demo import CANARY, Flight, FlightCheck, read_flights
from nsqext.errors import MessageNotInFlight
from tests.support.blocking_client import eventually
from tests.support.command_line import started

if TYPE_CHECKING:
    from nsqext.types import Address


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


# Flights


def test_a_day_of_flights() -> None:
    flights = read_flights()
    assert [one.number for one in flights] == list(range(1, 843))
    assert sum(one.tag == CANARY for one in flights) == 94
    first = flights[0]
    assert (first.key, first.headers, first.tag) == ("N14228", {"carrier": "UA", "origin": "EWR", "dest": "IAH"}, None)
    assert json.loads(first.body)["time_hour"] == "2013-01-01T10:00:00Z"


# Check


@define
class FakeMessage:
    """The fields of a message that the check compares."""

    trace_id: int
    body: bytes = b"x"
    tag: str | None = None
    headers: Mapping[str, Any] = field(factory=dict)
    internal_id: int = 2
    partition: int = 0
    offset: int = 0
    size: int = 31


def check_of(*flights: Flight) -> FlightCheck:
    """Return the check of these flights, all published to partition 0."""
    check = FlightCheck(flights)
    for one in flights:
        check.receipts[one.number] = Receipt("t", 0, "n1", one.number + 1, one.number, (one.number - 1) * 31, 31)
    return check


def flight(number: int, tag: str | None = None, key: str = "") -> Flight:
    """Return a flight; every one has a key of its own by default."""
    return Flight(number, b"x", {}, key or str(number), tag)


def message(number: int, **changes: Any) -> Any:
    """Return the message of a flight as it should be received."""
    values: dict[str, Any] = {"internal_id": number + 1, "offset": (number - 1) * 31, **changes}
    return FakeMessage(number, **values)


def violations(check: FlightCheck) -> dict[str, int]:
    """Return the violations that occurred, with their counts."""
    return {kind: count for kind, count in check.violations().items() if count}


def test_a_good_run_has_no_violations() -> None:
    check = check_of(flight(1), flight(2, CANARY), flight(3))
    assert not check.complete
    check.add(None, message(3))
    check.add(None, message(1))
    check.add(CANARY, message(2, tag=CANARY))
    assert check.complete
    assert violations(check) == {}
    assert check.received == {(0, CANARY): 1, (0, None): 2}


def test_a_flight_that_is_never_received_is_lost() -> None:
    check = check_of(flight(1), flight(2))
    check.add(None, message(2))
    assert violations(check) == {"lost": 1}


def test_messages_delivered_twice_are_reported() -> None:
    check = check_of(flight(1))
    check.add(None, message(1))
    check.add(None, message(1))
    assert violations(check) == {"duplicated": 1}


@pytest.mark.parametrize("tag", [CANARY, None])
def test_messages_received_by_the_wrong_consumer_are_reported(tag: str | None) -> None:
    check = check_of(flight(1, tag))
    check.add(None if tag else CANARY, message(1, tag=tag))
    assert violations(check) == {"received by the wrong consumer": 1}


@pytest.mark.parametrize(
    "changes", [{"body": b"y"}, {"tag": CANARY}, {"headers": {"a": "b"}}, {"trace_id": 9}, {"trace_id": 0}]
)
def test_an_altered_message_does_not_count_as_received(changes: dict[str, Any]) -> None:
    check = check_of(flight(1))
    altered = message(1)
    for name, value in changes.items():
        setattr(altered, name, value)
    check.add(None, altered)
    assert violations(check) == {"lost": 1, "altered": 1}


def test_messages_of_one_key_have_to_keep_their_order_at_each_consumer() -> None:
    check = check_of(flight(1, key="k"), flight(2, key="k"), flight(3, key="l"), flight(4, CANARY, "k"))
    check.add(CANARY, message(4, tag=CANARY))
    check.add(None, message(3))
    check.add(None, message(2))
    assert violations(check) == {"lost": 1}
    check.add(None, message(1))
    assert violations(check) == {"out of order": 1}


@pytest.mark.parametrize("name", ["partition", "internal_id", "offset", "size"])
def test_a_message_is_delivered_from_the_position_of_its_receipt(name: str) -> None:
    check = check_of(flight(1))
    check.add(None, message(1, **{name: 7}))
    assert violations(check) == {"at another position than in the receipt": 1}


def test_a_publish_without_receipt_and_an_unfinished_message_are_reported() -> None:
    check = FlightCheck([flight(1)])
    check.add(None, message(1))
    check.wrong["not finished"] += 1
    assert violations(check) == {"not acknowledged": 1, "not finished": 1}


# Command


def test_every_flight_is_received_by_the_right_consumer(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run_demo(capsys)
    assert "842 flights: no violations" in output
    assert len(counts(output)) == 8
    assert set(counts(output).values()) == {0}
    assert code == 0


class RepeatingProducer(Producer):
    """Publishes one row twice."""

    async def publish(self, *arguments: Any, **options: Any) -> Receipt:
        if options["trace_id"] == 2:
            await super().publish(*arguments, **options)
        return await super().publish(*arguments, **options)


class LosingProducer(Producer):
    """Returns a receipt for one row without publishing it."""

    async def publish(self, *arguments: Any, **options: Any) -> Receipt:
        if options["trace_id"] == 2:
            await checkpoint()
            return Receipt(arguments[0], 0, "nowhere", 2, 2, 0, 31)
        return await super().publish(*arguments, **options)


class ForgetfulProducer(Producer):
    """Publishes without tags."""

    async def publish(self, *arguments: Any, **options: Any) -> Receipt:
        return await super().publish(*arguments, **{**options, "tag": None})


@pytest.mark.parametrize(
    ("producer", "expected"),
    [
        (RepeatingProducer, {"duplicated": 1}),
        (LosingProducer, {"lost": 1}),
        (ForgetfulProducer, {"lost": 94, "altered": 94}),
    ],
)
def test_a_failed_run_prints_the_violation_and_exits_with_1(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    producer: Callable[..., Producer],
    expected: dict[str, int],
) -> None:
    monkeypatch.setattr(demo, "Producer", producer)
    monkeypatch.setattr(demo, "IDLE_TIMEOUT", 0.5)
    code, output = run_demo(capsys, "--partitions", "2", "--nodes", "1")
    assert "cluster of 1 nodes" in output
    assert "violations found" in output
    assert counts(output).items() >= expected.items()
    assert code == 1


def test_a_message_that_timed_out_before_it_was_finished_is_a_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Message.finish

    async def finish_late(message: Message) -> None:
        await finish(message)
        if message.trace_id == 2:
            raise MessageNotInFlight("too late")

    monkeypatch.setattr(Message, "finish", finish_late)
    code, output = run_demo(capsys, "--partitions", "1", "--nodes", "1")
    assert (code, counts(output)["not finished"]) == (1, 1)


def test_an_interrupted_demo_deletes_its_topic() -> None:
    with Cluster(1) as cluster, started("demo", "--lookupd", cluster.lookupd[0]) as process:
        eventually(lambda: cluster.topics)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert cluster.topics == {}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--lookupd", "127.0.0.1:4161", "--nodes", "2"), "--nodes has no effect on the cluster of --lookupd"),
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
    assert "no lookup node returned a usable response" in output
    assert code == 2
