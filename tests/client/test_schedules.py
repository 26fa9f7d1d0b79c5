"""Key locks, batcher, pool and seeker under random schedules: tasks start, fail, or are cancelled at any time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqext import OutgoingMessage, Position
from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions import channel_seeker as seeking
from nsqext.client.consumer.subscriptions.assignment import Assignment
from nsqext.client.events import ClientEvents
from nsqext.client.producer.batcher import Batcher, BatcherLimits
from nsqext.client.producer.connection_pool import ConnectionPool
from nsqext.client.producer.keys import KeyLock
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.sender import Counters
from nsqext.errors import (
    BatchFailed,
    ConnectionFailed,
    InvalidBody,
    InvalidState,
    NsqError,
    PartitionUnavailable,
    PublishFailed,
)
from nsqext.lookup.partition_map import PartitionMap
from nsqext.protocol.identify import Negotiated
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address, Receipt

if TYPE_CHECKING:
    from nsqext.client.producer.publishing import Publishing, TopicKey

_BACKENDS = ("asyncio", "trio")
_FEW = settings(max_examples=60, deadline=None)
_SOON = st.integers(0, 6)
"""Turns of the event loop until the next event."""


def _run(backend: str, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(25):
            await function()

    anyio.run(bounded, backend=backend)


async def _wait(turns: int) -> None:
    for _ in range(turns):
        await checkpoint()


@pytest.mark.parametrize("backend", _BACKENDS)
@_FEW
@given(st.lists(st.tuples(_SOON, st.lists(st.sampled_from("abc"), min_size=1, unique=True), _SOON, st.none() | _SOON)))
def test_keys_are_exclusive_and_entered_in_the_order_of_the_queue(
    backend: str, visits: list[tuple[int, list[str], int, int | None]]
) -> None:
    """Each visit has a start, keys, a duration, and possibly a time of cancellation."""
    lock = KeyLock()
    inside: set[TopicKey] = set()
    queued: dict[TopicKey, list[int]] = {}
    entered: dict[TopicKey, list[int]] = {}
    ended: list[int] = []

    async def visit(number: int, come: int, names: list[str], stay: int, cancel: int | None) -> None:
        await _wait(come)
        keys = [("t", name.encode()) for name in names]
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                place = lock.queue(keys)
                for key in keys:
                    queued.setdefault(key, []).append(number)
                tasks.start_soon(_cancel, scope, cancel)
                try:
                    await place.enter(10.0)
                    assert not inside.intersection(keys)
                    inside.update(keys)
                    for key in keys:
                        entered.setdefault(key, []).append(number)
                    try:
                        await _wait(stay)
                    finally:
                        inside.difference_update(keys)
                finally:
                    place.leave()
                tasks.cancel_scope.cancel()
        ended.append(number)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for number, given_visit in enumerate(visits):
                tasks.start_soon(visit, number, *given_visit)
        assert len(ended) == len(visits)
        assert len(lock) == 0
        for key, numbers in entered.items():
            assert numbers == [number for number in queued[key] if number in numbers]

    _run(backend, main)


async def _cancel(scope: anyio.CancelScope, turns: int | None) -> None:
    if turns is None:
        await anyio.sleep_forever()
    else:
        await _wait(turns)
        scope.cancel()


class _Publisher:
    """Fake producer of batches, whose outcomes are given by a list."""

    def __init__(self, ends: list[str]) -> None:
        self.options = ProducerOptions()
        self.calls: list[list[bytes | OutgoingMessage]] = []
        self.stored: list[bytes | OutgoingMessage] = []
        self.keys = SimpleNamespace(lock=KeyLock())
        self.counters = Counters()
        self._ends = ends

    async def publish(self, call: Publishing) -> list[Receipt]:
        messages = call.given
        self.calls.append(list(messages))
        await checkpoint()
        end = self._ends.pop(0) if self._ends else "stored"
        receipt = Receipt("t", 0, "n")
        if end == "one is wrong":
            wrong = InvalidBody("wrong")
            wrong.index = len(messages) // 2
            raise wrong
        if end == "all fail":
            raise PublishFailed("failed")
        if end == "half fails":
            half = len(messages) // 2
            self.stored += messages[:half]
            raise BatchFailed([*[receipt] * half, *[PublishFailed("failed")] * (len(messages) - half)])
        self.stored += messages
        return [receipt] * len(messages)


@pytest.mark.parametrize("backend", _BACKENDS)
@_FEW
@given(
    st.lists(st.integers(1, 7), max_size=6),
    st.lists(st.sampled_from(["stored", "one is wrong", "all fail", "half fails"]), max_size=8),
    st.integers(1, 5),
    st.integers(3, 12),
)
def test_a_batcher_loses_nothing_and_keeps_the_order(
    backend: str, adders: list[int], ends: list[str], max_count: int, max_pending: int
) -> None:
    """Each adder adds a number of messages; every message is either stored or reported as failed."""
    publisher = _Publisher(list(ends))
    limits = BatcherLimits(linger=0.0, max_count=max_count, max_pending=max_pending)
    failed: list[bytes | OutgoingMessage] = []
    taken: list[bytes] = []
    asked: dict[bytes, bool] = {}

    async def add(batcher: Batcher, number: int, count: int) -> None:
        for place in range(count):
            body = b"%d.%d" % (number, place)
            if place % 2:
                try:
                    await batcher.publish(body)
                    asked[body] = True
                except NsqError:
                    asked[body] = False
                continue
            while True:
                try:
                    await batcher.add(body)
                    break
                except BatchFailed:
                    failed.extend(message for message, _ in batcher.take_failed())
            taken.append(body)
            assert batcher.pending <= max_pending

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            started: Any = SimpleNamespace(start_soon=tasks.start_soon, check_event_loop=lambda: None)
            batcher = Batcher(cast("Any", publisher), ProducerOptions(), started, "t", limits)
            try:
                async with batcher, anyio.create_task_group() as adding:
                    for number, count in enumerate(adders):
                        adding.start_soon(add, batcher, number, count)
            except BatchFailed:
                failed.extend(message for message, _ in batcher.take_failed())
            assert batcher.pending == 0

    _run(backend, main)
    stored = list(publisher.stored)
    expected = [body for body, kept in asked.items() if kept]
    assert sorted(stored) == sorted([body for body in taken if body not in failed] + expected)
    assert set(failed).isdisjoint(stored)
    for number in range(len(adders)):
        mine = [body for body in stored if isinstance(body, bytes) and body.startswith(b"%d." % number)]
        assert mine == sorted(mine, key=lambda body: int(body.partition(b".")[2]))


class _Connection:
    """A connection that can be closed."""

    in_flight = 0
    error = None

    def __init__(self) -> None:
        self.closed = False

    @property
    def usable(self) -> bool:
        return not self.closed

    def tick(self) -> None:
        """Do nothing."""

    async def drain(self) -> None:
        await checkpoint()

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("backend", _BACKENDS)
@_FEW
@given(
    st.lists(st.tuples(_SOON, st.none() | _SOON), min_size=1, max_size=8),
    st.lists(st.tuples(st.booleans(), _SOON), max_size=8),
    st.none() | st.integers(0, 12),
)
def test_a_pool_has_one_connection_at_a_time_and_leaves_none_open(
    backend: str, callers: list[tuple[int, int | None]], attempts: list[tuple[bool, int]], close: int | None
) -> None:
    """Callers start and are cancelled; attempts to connect succeed or fail later; the pool is closed, or loses one."""
    made: list[_Connection] = []
    connecting: list[int] = []
    plan = list(attempts)

    async def open_connection(*_: object) -> tuple[_Connection, Negotiated]:
        works, turns = plan.pop(0) if plan else (True, 1)
        connecting.append(1)
        assert len(connecting) == 1, "two concurrent attempts to connect"
        try:
            await _wait(turns)
            if not works:
                raise ConnectionFailed("refused")
        finally:
            connecting.pop()
        assert all(connection.closed for connection in made), "a connection exists already"
        made.append(_Connection())
        return made[-1], Negotiated()

    ended: list[str] = []

    async def call(pool: ConnectionPool, come: int, cancel: int | None) -> None:
        await _wait(come)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel, scope, cancel)
                try:
                    connection = await pool.connection(pool.node(Address("n", 1)))
                    ended.append("connected" if connection.usable else "stale")
                except (ConnectionFailed, InvalidState):
                    ended.append("failed")
                tasks.cancel_scope.cancel()

    async def main() -> None:
        pool = ConnectionPool(ConnectionOptions(), ClientEvents())
        async with anyio.create_task_group() as tasks:
            for come, cancel in callers:
                tasks.start_soon(call, pool, come, cancel)
            if close is not None:
                await _wait(close)
                await pool.aclose()
        if close is None:
            for connection in made:
                connection.close()  # it is lost, and the next caller opens another one
            await call(pool, 0, None)
            await pool.aclose()
        pool.tick()
        assert "stale" not in ended
        assert all(connection.closed for connection in made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nsqext.transport.handshake.open_connection", open_connection)
        _run(backend, main)


class _Subscription:
    """The interface of a subscription that a seeker uses."""

    def __init__(self) -> None:
        self.request = self
        self.address = Address("n", 1)
        self.start: Position | None = None
        self.stopped = False
        self.ended = anyio.Event()

    def skip_to(self, position: Position) -> None:
        self.start = position

    async def close(self) -> None:
        await checkpoint()
        self.end()

    def flush(self) -> None:
        """Nothing is kept."""

    def end(self) -> None:
        self.ended.set()


@pytest.mark.parametrize("backend", _BACKENDS)
@_FEW
@given(
    st.lists(st.tuples(_SOON, st.integers(1, 5), st.none() | _SOON), min_size=1, max_size=5),
    st.lists(st.tuples(st.booleans(), _SOON), max_size=8),
)
def test_all_seeks_end_and_the_last_one_decides_the_position(
    backend: str, seeks: list[tuple[int, int, int | None]], moves: list[tuple[bool, int]]
) -> None:
    """Seeks come and are cancelled, while moves of the channel work or fail after a while."""
    place = Assignment(0)
    live: dict[Any, Any] = {}
    view = PartitionMap("t", "r", http={Address("n", 1): Address("n", 2)})
    plan, moved, asked = list(moves), list[str](), list[str]()

    async def move_channel(node: Address, topic: str, partition: int, channel: str, position: str) -> None:
        works, turns = plan.pop(0) if plan else (True, 1)
        await _wait(turns)
        if not works:
            raise PartitionUnavailable("not now")
        moved.append(position)

    metadata = SimpleNamespace(channels=SimpleNamespace(move=move_channel), cached=lambda topic, access: view)
    context: Any = SimpleNamespace(channel="ch", options=ConsumerOptions(), metadata=metadata)
    seeker = seeking.ChannelSeeker("t", context, {0: place}, live)

    async def keep() -> None:
        while True:
            subscription = _Subscription()
            await checkpoint()
            try:
                await seeker.move(place, subscription, view)  # type: ignore[arg-type]
            except PartitionUnavailable:
                continue
            live[0] = subscription
            await subscription.ended.wait()
            live.pop(0)

    async def seek(come: int, number: int, cancel: int | None) -> None:
        await _wait(come)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel, scope, cancel)
                asked.append(str(Position.message(number)))
                await seeker.seek(Position.message(number), None)
                assert place.pending is not None or moved[-1] == asked[-1]
                tasks.cancel_scope.cancel()

    async def main() -> None:
        async with anyio.create_task_group() as keeping:
            keeping.start_soon(keep)
            async with anyio.create_task_group() as seeking_tasks:
                for given_seek in seeks:
                    seeking_tasks.start_soon(seek, *given_seek)
            while place.pending is not None:
                await checkpoint()
            assert moved[-1] == asked[-1]
            keeping.cancel_scope.cancel()

    _run(backend, main)
