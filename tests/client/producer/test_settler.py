"""When a publish of unknown outcome counts as stored, as not stored, or stays unknown, with searches of the test."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from nsqext.client.producer import settling
from nsqext.client.producer.batch import Batch
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.request import Known
from nsqext.client.producer.settling import Settler
from nsqext.errors import ConnectionLost, DataLoss, DeliveryUnknown, NsqError, RequestTimeout
from nsqext.errors.server import PubFailed
from nsqext.types import Receipt
from tests.support.sleeps import recorded_sleeps

if TYPE_CHECKING:
    from nsqext.client.producer.connection_pool import PooledConnection
    from nsqext.client.producer.request import PublishRequest
    from nsqext.client.producer.route import Target
    from nsqext.lookup.metadata import MetadataCache

pytestmark = pytest.mark.anyio


class Log:
    """What the searches find.

    Attributes:
        stored: trace ids of the messages in the log.
        searches: what each search looked for, and since which record.
    """

    def __init__(self) -> None:
        self.stored: set[int] = set()
        self.searches: list[tuple[list[int], Receipt | None]] = []
        self.node = "n:1"
        self.error: NsqError | None = None
        self.loss: DataLoss | None = None
        self.hold: anyio.Event | None = None


class Connection:
    """The connection of a publish.

    Attributes:
        finished: the server executes no further command of it.
        answers: the server ends the connection when the client does.
        failures: why the client ended it.
        resets: how often it was closed at once.
    """

    def __init__(self, *, finished: bool = False, answers: bool = True) -> None:
        self.finished = finished
        self.answers = answers
        self.failures: list[NsqError] = []
        self.resets = 0

    def fail(self, error: NsqError) -> None:
        self.finished = self.answers
        self.failures.append(error)

    def close(self) -> None:
        self.resets += 1


def _receipt(trace: int, offset: int | None = 0, partition: int = 0) -> Receipt:
    return Receipt("t", partition, "n:1", 7, trace, offset, 30)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()

    class Search:
        def __init__(self, metadata: Any, connection: Any, topic: str, partition: int, since: Receipt | None) -> None:
            assert (topic, partition) == ("t", 0)
            self.found: dict[int, Receipt] = {}
            self.since, self.node, self.error = since, made.node, made.error

        async def run(self, wanted: Collection[int]) -> None:
            made.searches.append((list(wanted), self.since))
            stored = set(made.stored)
            if made.hold is not None:
                await made.hold.wait()
            if made.loss is not None:
                raise made.loss
            self.found = {trace: _receipt(trace) for trace in wanted if trace in stored}

    monkeypatch.setattr(settling, "LogSearch", Search)
    recorded_sleeps(monkeypatch)
    return made


def _settler(settle_timeout: float = 0.05) -> Settler:
    options = ProducerOptions(on_unknown="settle", settle_timeout=settle_timeout)
    return Settler(options, cast("MetadataCache", None))


def _sent(settler: Settler, *traces: int, connection: Connection | None = None) -> PublishRequest:
    """Return a batch that was sent to partition 0."""
    batch = Batch("t", None, [b"x"] * len(traces), 1, trace_ids=traces)
    target = SimpleNamespace(partition=0, node=SimpleNamespace(node="n:1"))
    connection = connection or Connection(finished=True)
    settler.sending(batch, cast("Target", target), cast("PooledConnection", connection))
    return batch


def _unknown(cause: NsqError | None) -> DeliveryUnknown:
    unknown = DeliveryUnknown("the message may have been stored: lost", hint="a hint", topic="t", partition=0)
    unknown.attempts = (ConnectionLost("first"),)
    unknown.__cause__ = cause
    return unknown


async def test_a_request_remembers_the_record_that_was_acknowledged_last(log: Log) -> None:
    settler = _settler()
    assert (await _since(settler)) is None
    settler.stored([_receipt(1, 300), _receipt(2, None), _receipt(3, 100, partition=5)])
    assert (await _since(settler)) == Known(0, _receipt(1, 300))
    settler.stored([_receipt(4, 0)])
    assert (await _since(settler)) == Known(2, _receipt(4, 0)), "a topic that was created again begins with 0"


async def _since(settler: Settler) -> Known | None:
    sent = _sent(settler, 1).sent_to
    assert sent is not None
    assert (sent.partition, sent.node) == (0, "n:1")
    return sent.since


@pytest.mark.parametrize(
    ("cause", "finished", "certain"),
    [
        (PubFailed("E_PUB_FAILED"), False, True),
        (ConnectionLost("lost"), True, True),
        (ConnectionLost("lost"), False, False),
        (RequestTimeout("late"), False, False),
        (None, False, False),
        (RequestTimeout("late"), True, True),
    ],
)
async def test_what_is_not_in_the_log_will_not_be_stored_once_the_server_executes_it_no_more(
    log: Log, cause: NsqError | None, finished: bool, certain: bool
) -> None:
    settler, connection = _settler(), Connection(finished=finished)
    request = _sent(settler, 5, connection=connection)
    if certain:
        assert await settler.settle(request, _unknown(cause)) is None
        assert len(log.searches) == 1
        return
    with pytest.raises(DeliveryUnknown) as caught:
        await settler.settle(request, _unknown(cause))
    assert len(log.searches) > 1
    assert caught.value.message == "the message may have been stored: lost; still unknown after 0.05 s"
    assert (caught.value.hint, caught.value.topic, caught.value.partition) == ("a hint", "t", 0)
    assert [str(error) for error in caught.value.attempts] == [str(ConnectionLost("first"))]
    assert connection.failures == []


async def test_what_may_be_executed_during_the_search_is_searched_for_again(log: Log) -> None:
    """The connection ends while the log is read: the command may have been executed behind the place that was read."""
    settler, connection = _settler(5.0), Connection()
    request = _sent(settler, 5, connection=connection)
    log.hold = anyio.Event()
    found: list[object] = []

    async def settle() -> None:
        found.append(await settler.settle(request, _unknown(RequestTimeout("late"))))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(settle)
        await anyio.wait_all_tasks_blocked()
        log.stored, connection.finished = {5}, True
        log.hold.set()
    assert found == [[_receipt(5)]]
    assert len(log.searches) == 2


async def test_what_has_no_place_or_no_trace_id_cannot_be_looked_for(log: Log) -> None:
    settler, unknown = _settler(), _unknown(ConnectionLost("lost"))
    unsent = Batch("t", None, [b"x"], 1, trace_ids=[5])
    for request in (unsent, _sent(settler, 0), _sent(settler, 5, 0)):
        with pytest.raises(DeliveryUnknown) as caught:
            await settler.settle(request, unknown)
        assert caught.value is unknown
    assert log.searches == []


async def test_a_batch_of_which_a_part_is_found_stays_unknown(log: Log) -> None:
    settler = _settler()
    log.stored = {5}
    with pytest.raises(DeliveryUnknown, match="still unknown"):
        await settler.settle(_sent(settler, 5, 6), _unknown(ConnectionLost("lost")))
    log.stored = {5, 6}
    found = await settler.settle(_sent(settler, 6, 5), _unknown(ConnectionLost("lost")))
    assert found == [_receipt(6), _receipt(5)]


@pytest.mark.parametrize(("answers", "searches", "resets"), [(True, 2, 0), (False, 6, 1)])
async def test_the_connection_to_a_former_leader_ends_before_the_log_decides(
    log: Log, monkeypatch: pytest.MonkeyPatch, answers: bool, searches: int, resets: int
) -> None:
    """A former leader that does not end it in time is dead or frozen."""
    pauses = recorded_sleeps(monkeypatch)
    monkeypatch.setattr(settling, "_clock", lambda: sum(pauses))
    settler, connection = _settler(5.0), Connection(answers=answers)
    log.node = "m:1"
    assert await settler.settle(_sent(settler, 5, connection=connection), _unknown(RequestTimeout("late"))) is None
    assert len(connection.failures) == 1
    assert "the leader has changed" in connection.failures[0].message
    assert (len(log.searches), pauses, connection.resets) == (searches, [0.5] * (searches - 1), resets)


async def test_records_that_were_removed_leave_the_outcome_unknown(log: Log) -> None:
    settler = _settler()
    log.loss, log.error = DataLoss("its records were removed"), ConnectionLost("reset")
    with pytest.raises(DeliveryUnknown, match="; its records were removed; last error of the search: reset"):
        await settler.settle(_sent(settler, 5), _unknown(ConnectionLost("lost")))
    log.loss, log.stored = None, {5, 6}
    assert await settler.settle(_sent(settler, 6), _unknown(ConnectionLost("lost"))) == [_receipt(6)]
    assert log.searches[-1] == ([6], None), "what has ended is not looked for"


async def test_publishes_that_wait_share_a_search_from_the_earliest_record(log: Log) -> None:
    settler = _settler(5.0)
    settler.stored([_receipt(1, 100)])
    requests = [_sent(settler, 5)]
    settler.stored([_receipt(2, 200)])
    requests += [_sent(settler, 6), _sent(settler, 7)]
    log.stored, log.hold = {5, 6, 7}, anyio.Event()
    found: dict[int, object] = {}

    async def settle(number: int) -> None:
        found[number] = await settler.settle(requests[number], _unknown(ConnectionLost("lost")))

    async with anyio.create_task_group() as tasks:
        for number in (1, 0, 2):
            tasks.start_soon(settle, number)
            await anyio.wait_all_tasks_blocked()
        log.hold.set()
    assert found == {0: [_receipt(5)], 1: [_receipt(6)], 2: [_receipt(7)]}
    first, second = log.searches
    assert first == ([6], _receipt(2, 200))
    assert (sorted(second[0]), second[1]) == ([5, 7], _receipt(1, 100))
    fresh = _settler(5.0)
    log.hold = None
    assert await fresh.settle(_sent(fresh, 5), _unknown(ConnectionLost("lost"))) == [_receipt(5)]
    assert log.searches[-1] == ([5], None)
