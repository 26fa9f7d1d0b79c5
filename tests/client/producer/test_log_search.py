"""The search of a partition's log for messages, with a log and connections of the test."""

from __future__ import annotations

from collections.abc import Callable
from struct import pack
from typing import TYPE_CHECKING, cast

import anyio
import anyio.lowlevel
import pytest
from anyio.lowlevel import current_token

from nsqext.client.consumer.subscriptions.partition_reader import PartitionReader
from nsqext.client.producer import settling as module
from nsqext.client.producer.settling import LogSearch
from nsqext.errors import ConnectionLost, DataLoss, NsqError, PartitionUnavailable
from nsqext.lookup.node_channels import LogBounds
from nsqext.lookup.partition_map import PartitionMap
from nsqext.protocol.identify import Negotiated
from nsqext.transport.event_loop import call_soon
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address, Receipt, TopicMeta
from tests.support.sleeps import recorded_sleeps
from tests.support.subscriptions import FakeConnection, delivered

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest
    from nsqext.lookup.metadata import MetadataCache
    from nsqext.transport.connection import Connection

pytestmark = pytest.mark.anyio

_NODE, _HTTP = Address("n", 4150), Address("n", 4151)
_SIZE = 100


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("GRACE", 0.001), ("TICK", 0.005), ("STALL", 25.0)):
        monkeypatch.setattr(module, name, seconds)


class Log:
    """The log of a partition: record n has trace id 10 * n, and begins at byte 100 * (n - 1).

    Attributes:
        bounds: what the node answers about the log, one after the other; the last answer is repeated.
        first: records that a connection delivers before those of the position that the channel was moved to.
        opened: the connections so far.
        moves: where channels were moved to.
        refreshed: partitions for which lookup was asked again.
    """

    def __init__(self, records: int, begin: int = 0) -> None:
        self.numbers = list(range(1 + begin // _SIZE, records + 1))
        self.bounds = [LogBounds(begin, records * _SIZE)]
        self.first: list[int] = []
        self.opened: list[Reading] = []
        self.moves: list[str] = []
        self.refreshed: list[int | None] = []
        self.views = [PartitionMap("t", meta=TopicMeta(1), leaders={0: _NODE}, http={_NODE: _HTTP})]
        self.endings: list[NsqError | bytes] = []
        self.on_bounds: Callable[[], None] = lambda: None
        self.ids = 0
        self.channels = self

    # As the metadata of a producer

    async def resolve(self, topic: str, access: str) -> PartitionMap:
        return self.views.pop(0) if len(self.views) > 1 else self.views[0]

    async def refresh(self, topic: str, access: str, view: PartitionMap | None, partition: int | None) -> None:
        self.refreshed.append(partition)

    async def log_bounds(self, http: Address, topic: str, partition: int) -> LogBounds:
        assert (http, topic, partition) == (_HTTP, "t", 0)
        self.on_bounds()
        return self.bounds.pop(0) if len(self.bounds) > 1 else self.bounds[0]

    async def move(self, http: Address, topic: str, partition: int, channel: str, position: str) -> None:
        assert channel.endswith("#ephemeral")
        self.moves.append(position)

    # As the node

    async def open(self, request: SubscribeRequest) -> PartitionReader:
        assert (request.verb, request.address, request.partition) == ("SUB_ADVANCED", _NODE, 0)
        self.opened.append(Reading(self))
        return PartitionReader(request, cast("Connection", self.opened[-1]), Negotiated())

    def frame(self, number: int) -> bytes:
        position = pack(">QI", _SIZE * (number - 1), _SIZE)
        return delivered(number + self.ids, trace_id=10 * number, position=position)

    def frames(self) -> list[bytes]:
        begin = int(self.moves[-1].partition(":")[2])
        later = [number for number in self.numbers if _SIZE * (number - 1) >= begin]
        return [self.frame(number) for number in (*self.first, *later)]

    def receipt(self, number: int) -> Receipt:
        return Receipt("t", 0, str(_NODE), number + self.ids, 10 * number, _SIZE * (number - 1), _SIZE)

    async def search(self, since: int | None, *wanted: int) -> LogSearch:
        """Search for records by their numbers, from a known one."""
        known = None if since is None else self.receipt(since)
        search = LogSearch(cast("MetadataCache", self), ConnectionOptions(), "t", 0, known)
        with anyio.fail_after(25):
            await search.run({10 * number for number in wanted})
        return search


class Reading(FakeConnection):
    """A connection on which the node sends two messages at a time.

    Attributes:
        takes: after each flush, before any other task runs, whether messages are taken.
    """

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.takes: list[bool] = []
        self._log = log
        self._over = anyio.Event()

    def flush(self) -> None:
        super().flush()
        call_soon(current_token().native_token, lambda: self.takes.append(self.on_messages is not None))

    def fail(self, error: NsqError) -> None:
        super().fail(error)
        self._over.set()

    def close(self) -> None:
        super().close()
        self._over.set()

    async def read_forever(self) -> None:
        assert self.sent[0].startswith(b"RDY 2000\n")
        assert self.on_messages is not None
        frames = self._log.frames()
        while frames and not self.ended:
            self.on_messages(frames[:2])
            del frames[:2]
            if frames:
                await anyio.lowlevel.checkpoint()
        if self._log.endings and not self.ended:
            ending = self._log.endings.pop(0)
            if isinstance(ending, NsqError):
                raise ending
            self.on_messages([ending])
        await self._over.wait()
        raise self.ended[0] or ConnectionLost("closed")


@pytest.fixture(autouse=True)
def _readers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_reader(request: SubscribeRequest) -> PartitionReader:
        assert _current
        return await _current[-1].open(request)

    monkeypatch.setattr(PartitionReader, "open", open_reader)


_current: list[Log] = []


def _log(records: int, begin: int = 0) -> Log:
    log = Log(records, begin)
    _current[:] = [log]
    return log


async def test_messages_are_found_behind_the_last_known_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK", 3600.0)
    log = _log(7)
    search = await log.search(3, 4, 6)
    assert search.found == {40: log.receipt(4), 60: log.receipt(6)}
    assert (search.node, search.error, log.moves) == (str(_NODE), None, ["virtual_queue:200"])
    (connection,) = log.opened
    assert connection.ended == [None]
    assert b"".join(connection.sent).count(b"FIN ") >= 2
    assert len(log.refreshed) == 0


async def test_messages_are_taken_before_the_node_can_send_any() -> None:
    """uvloop may read a socket before it starts a task: each search ended with a message that was not expected."""
    log = _log(7)
    await log.search(3, 6)
    assert log.opened[0].takes[0]


async def test_messages_that_are_not_in_the_log_are_looked_for_twice() -> None:
    log = _log(5)
    search = await log.search(3, 4, 9)
    assert search.found == {40: log.receipt(4)}
    assert len(log.opened) == 1, "nothing is new the second time"
    log = _log(5)
    log.bounds = [LogBounds(0, 400), LogBounds(0, 500)]
    log.numbers.remove(5)

    def add() -> None:
        if log.opened and 5 not in log.numbers:
            log.numbers.append(5)

    log.on_bounds = add
    search = await log.search(3, 5)
    assert search.found == {50: log.receipt(5)}
    assert log.moves == ["virtual_queue:200", "virtual_queue:300"]


@pytest.mark.parametrize(("records", "begin", "opened"), [(5, 200, 1), (2, 200, 0), (3, 200, 1)])
async def test_without_a_known_record_the_whole_log_is_searched(records: int, begin: int, opened: int) -> None:
    log = _log(records, begin)
    search = await log.search(None, 3)
    assert set(search.found) == ({30} if opened else set())
    assert log.moves == ["virtual_queue:200"] * opened
    assert len(log.opened) == opened


async def test_records_that_were_removed_cannot_be_searched() -> None:
    log = _log(7, 400)
    with pytest.raises(DataLoss, match="begins at byte 400; its records from byte 300 on were removed"):
        await log.search(3, 6)
    log = _log(7, 300)
    assert set((await log.search(3, 6)).found) == {60}
    assert log.moves == ["virtual_queue:300"]


async def test_a_new_log_that_is_shorter_is_searched_from_its_begin() -> None:
    log = _log(2)
    assert set((await log.search(5, 2)).found) == {20}
    assert log.moves == ["virtual_queue:0"]
    log = _log(2)
    with pytest.raises(DataLoss, match="the log was replaced"):
        await log.search(5, 9)
    log = _log(4)
    assert set((await log.search(5, 2)).found) == {20}, "one byte less is another log as well"


async def test_a_new_log_with_another_record_in_the_known_place_is_searched_from_its_begin() -> None:
    log = _log(6)
    since = log.receipt(4)
    log.ids = 1000
    search = LogSearch(cast("MetadataCache", log), ConnectionOptions(), "t", 0, since)
    with anyio.fail_after(25):
        await search.run([20])
    assert set(search.found) == {20}
    assert log.moves == ["virtual_queue:300", "virtual_queue:0"]
    assert search.error is not None
    assert "another record is at byte 300" in search.error.message
    assert (search.error.topic, search.error.partition, log.refreshed) == ("t", 0, [0])


async def test_a_new_log_is_noticed_when_it_is_as_long_as_the_known_one_was() -> None:
    log = _log(4)
    since = log.receipt(4)
    log.ids = 1000
    search = LogSearch(cast("MetadataCache", log), ConnectionOptions(), "t", 0, since)
    with anyio.fail_after(25), pytest.raises(DataLoss, match="the log was replaced"):
        await search.run([90])
    assert log.moves[:2] == ["virtual_queue:300", "virtual_queue:0"]


async def test_pauses_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = recorded_sleeps(monkeypatch)
    await _log(4).search(3, 4)
    assert pauses == []
    await _log(4).search(3, 9)
    assert pauses == [module.GRACE], "commands of connections that have ended may be executed until then"
    pauses.clear()
    log = _log(4)
    log.views = [PartitionMap("t", meta=TopicMeta(1), leaders={})] * 6 + log.views
    assert set((await log.search(3, 4)).found) == {40}
    assert [round(pause, 6) for pause in pauses] == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]


async def test_records_of_the_position_before_a_move_are_passed_over() -> None:
    log = _log(6)
    log.first = [1, 2]
    search = await log.search(3, 1, 6)
    assert set(search.found) == {10, 60}
    assert len(log.opened) == 1


async def test_an_end_that_moves_back_ends_the_search() -> None:
    log = _log(4)
    log.numbers.remove(4)  # it was never confirmed
    log.bounds = [LogBounds(0, 400), LogBounds(0, 300)]
    search = await log.search(2, 9)
    assert (search.found, search.error, len(log.opened)) == ({}, None, 1)
    assert log.opened[0].ticks > 0
    log = _log(4)
    log.numbers.remove(4)
    log.bounds = [LogBounds(0, 400), LogBounds(0, 200)]
    with pytest.raises(DataLoss):
        await log.search(2, 9)


async def test_a_channel_that_stands_still_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL", 0.05)
    log = _log(4)
    log.numbers.remove(4)

    def add() -> None:
        if len(log.opened) == 2:
            log.numbers[3:] = [4]

    log.on_bounds = add
    search = await log.search(2, 4)
    assert set(search.found) == {40}
    assert search.error is not None
    assert "no record at byte 300 was received for 0.05 s" in search.error.message
    assert all(connection.ended for connection in log.opened)


@pytest.mark.parametrize("ending", [ConnectionLost("lost"), b"no message"])
async def test_a_connection_that_ends_too_early_is_replaced_at_once(
    ending: NsqError | bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK", 3600.0)
    log = _log(4)
    log.numbers.remove(4)
    log.endings = [ending]

    def add() -> None:
        if log.opened and log.opened[0].ended:
            log.numbers[3:] = [4]

    log.on_bounds = add
    search = await log.search(2, 4)
    assert set(search.found) == {40}
    assert (len(log.opened), log.refreshed) == (2, [0])
    assert search.error is not None


async def test_a_search_ends_where_the_log_ended_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK", 0.0)
    log = _log(10)

    def grow() -> None:
        log.bounds = [LogBounds(0, 9900 if log.opened and not log.opened[-1].ended else 1000)]

    log.on_bounds = grow
    search = await log.search(None, 99)
    assert (search.found, search.error, len(log.opened)) == ({}, None, 1)
    assert log.opened[0].ticks > 0


async def test_a_search_that_reads_records_does_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module, "TICK", 0.0)
    monkeypatch.setattr(module, "_clock", lambda: clock[0])
    log = _log(40)

    def pass_time() -> None:
        clock[0] += 0.3 * module.STALL

    log.on_bounds = pass_time
    search = await log.search(None, 40)
    assert (set(search.found), search.error, len(log.opened)) == ({400}, None, 1)


async def test_an_error_at_the_end_is_none() -> None:
    log = _log(4)
    log.endings = [ConnectionLost("lost")]
    search = await log.search(2, 4)
    assert (set(search.found), search.error) == ({40}, None)


@pytest.mark.parametrize(
    "view",
    [
        PartitionMap("t", meta=TopicMeta(1), leaders={}),
        PartitionMap("t", meta=TopicMeta(1), leaders={0: _NODE}),
    ],
)
async def test_a_leader_without_http_address_is_waited_for(view: PartitionMap) -> None:
    log = _log(4)
    log.views.insert(0, view)
    search = await log.search(2, 4)
    assert set(search.found) == {40}
    assert isinstance(search.error, PartitionUnavailable)
    assert log.refreshed == [0]
