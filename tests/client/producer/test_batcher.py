"""The batcher: bounded, in order, without dropped messages or silent failures."""

from __future__ import annotations

import functools
import operator
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from nsqext import BatchFailed, OutgoingMessage, Producer, PublishFailed, Receipt
from nsqext.client.producer.batcher import Batcher, BatcherLimits
from nsqext.client.producer.keys import KeyLock
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.sender import Counters
from nsqext.errors import (
    DeliveryUnknown,
    InvalidBody,
    InvalidHeader,
    InvalidSetting,
    InvalidState,
    NsqError,
)
from nsqext.middleware import Middleware, Publishing, SendNext
from tests.support.fake_nsqd import obey, scripted_node, until

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

pytestmark = pytest.mark.anyio


class _Publisher:
    """Fake producer of batches; it can delay each of them until the test continues."""

    def __init__(self, lock: KeyLock | None = None) -> None:
        self.keys = SimpleNamespace(lock=KeyLock() if lock is None else lock)
        self.counters = Counters()
        self.batches: list[list[bytes]] = []
        self.failing: NsqError | None = None
        self.gate = anyio.Event()
        self.gate.set()

    async def publish(self, call: Publishing) -> list[Receipt]:
        messages = call.given
        self.batches.append([message.body if isinstance(message, OutgoingMessage) else message for message in messages])
        await self.gate.wait()
        if self.failing is not None:
            raise self.failing
        return [Receipt("t", 0, "n1", number + 1) for number in range(len(messages))]


def _made(
    publisher: _Publisher, tasks: TaskGroup, limits: BatcherLimits, options: ProducerOptions | None = None
) -> Batcher:
    """Return a batcher that is not open."""
    started: Any = SimpleNamespace(start_soon=tasks.start_soon, check_event_loop=lambda: None)
    return Batcher(cast("Any", publisher), options or ProducerOptions(), started, "t", limits)


@asynccontextmanager
async def _batcher(publisher: _Publisher, limits: BatcherLimits, timeout: float = 5.0) -> AsyncIterator[Batcher]:
    failure: Exception | None = None
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            try:
                async with _made(publisher, tasks, limits, ProducerOptions(timeout=timeout)) as batcher:
                    yield batcher
            except Exception as error:
                failure = error  # raised outside of the group, like by a producer
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def test_messages_join_in_batches_in_their_order() -> None:
    publisher = _Publisher()
    async with _batcher(publisher, BatcherLimits(linger=60, max_count=10)) as batcher:
        for number in range(25):
            await batcher.add(b"%d" % number)
        await batcher.flush()
        assert batcher.pending == 0
    assert [len(batch) for batch in publisher.batches] == [10, 10, 5]
    assert [body for batch in publisher.batches for body in batch] == [b"%d" % number for number in range(25)]


async def test_the_size_of_a_message_includes_its_header_and_its_trace_id() -> None:
    publisher = _Publisher()
    messages: list[bytes | OutgoingMessage] = [
        OutgoingMessage(b"x" * 81, headers={"a": "b"}),  # 10 bytes
        b"x" * 10,
        OutgoingMessage(b"x" * 92, trace_id=5),  # 8 bytes
        OutgoingMessage(b"x" * 93, trace_id=5),
        OutgoingMessage(b"x" * 82, headers={"a": "b"}),
        b"x" * 10,
    ]
    async with _batcher(publisher, BatcherLimits(linger=60, max_bytes=100)) as batcher:
        for message in messages:
            await batcher.add(message)
        await batcher.add(b"x" * 300)
    assert [len(batch) for batch in publisher.batches] == [2, 1, 1, 1, 1, 1], "a message above the limit is sent alone"


async def test_a_batch_is_published_as_soon_as_it_is_full() -> None:
    publisher = _Publisher()
    async with _batcher(publisher, BatcherLimits(linger=60, max_bytes=100, max_count=3)) as batcher:
        for sizes in ((60, 40), (1, 1, 1), (99, 1)):
            published = len(publisher.batches)
            for size in sizes:
                await anyio.lowlevel.checkpoint()
                assert len(publisher.batches) == published
                await batcher.add(b"x" * size)
            await until(lambda: batcher.pending == 0)
            assert [len(body) for body in publisher.batches[-1]] == list(sizes)


async def test_lingering_begins_with_the_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = []
    wait = anyio.move_on_after

    def record(delay: float) -> anyio.CancelScope:
        begun.append(delay)
        return wait(delay)

    monkeypatch.setattr(anyio, "move_on_after", record)
    async with _batcher(_Publisher(), BatcherLimits(linger=59, max_count=2)) as batcher:
        for count, body in enumerate((b"x", b"y", b"z"), 1):
            await anyio.wait_all_tasks_blocked()
            assert begun.count(59) == count // 2
            await batcher.add(body)


async def test_lingering_ends() -> None:
    publisher = _Publisher()
    async with _batcher(publisher, BatcherLimits(linger=0.01)) as batcher:
        assert (await batcher.publish(b"x")).message_id == 1
        await batcher.add(b"y")
        await until(lambda: publisher.batches == [[b"x"], [b"y"]])


async def test_adding_waits_while_too_much_is_pending() -> None:
    publisher = _Publisher()
    publisher.gate = anyio.Event()
    added: list[int] = []
    async with _batcher(publisher, BatcherLimits(linger=0, max_count=2, max_pending=4)) as batcher:

        async def add() -> None:
            for number in range(10):
                await batcher.add(b"%d" % number)
                added.append(number)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(add)
            await until(lambda: len(added) == 4)
            await anyio.wait_all_tasks_blocked()
            assert len(added) == batcher.pending == 4
            publisher.gate.set()
    assert len(added) == 10
    assert sum(map(len, publisher.batches)) == 10


async def test_flush_raises_failures_and_keeps_them_for_the_caller() -> None:
    publisher = _Publisher()
    publisher.failing = PublishFailed("no leader")
    async with _batcher(publisher, BatcherLimits(linger=0)) as batcher:
        await batcher.add(b"x")
        with pytest.raises(BatchFailed, match="no leader"):
            await batcher.flush()
        failed = batcher.take_failed()
        assert [(message, str(failure)) for message, failure in failed] == [(b"x", "no leader")]
        await batcher.flush()
        with pytest.raises(PublishFailed):
            await batcher.publish(b"y")
        await batcher.flush()


async def test_a_cancelled_flush_ends_only_its_wait() -> None:
    publisher = _Publisher()
    publisher.gate = anyio.Event()
    async with _batcher(publisher, BatcherLimits(linger=60)) as batcher:
        await batcher.add(b"x")
        with anyio.move_on_after(0.01):
            await batcher.flush()
        publisher.gate.set()
        await until(lambda: batcher.pending == 0)
        await batcher.add(b"y")
        await anyio.wait_all_tasks_blocked()
        assert publisher.batches == [[b"x"]], "the next message lingers"


async def test_exit_raises_failures_unless_another_error_is_raised() -> None:
    publisher = _Publisher()
    publisher.failing = BatchFailed([PublishFailed("no leader")])
    with pytest.raises(BatchFailed):
        async with _batcher(publisher, BatcherLimits(linger=0)) as batcher:
            await batcher.add(b"x")
    with pytest.raises(KeyError):
        async with _batcher(publisher, BatcherLimits(linger=0)) as batcher:
            await batcher.add(b"x")
            raise KeyError


async def test_failures_that_are_not_read_stop_add() -> None:
    publisher = _Publisher()
    publisher.failing = PublishFailed("no leader")
    async with _batcher(publisher, BatcherLimits(linger=0, max_count=1, max_pending=3)) as batcher:
        with pytest.raises(BatchFailed):
            for _ in range(10):
                await batcher.add(b"x")
        assert len(batcher.take_failed()) == 3


@asynccontextmanager
async def _full_batcher(publisher: _Publisher) -> AsyncIterator[Batcher]:
    """A batcher of three messages: two have failed, and one is sent until the end."""
    publisher.failing = PublishFailed("no leader")
    async with _batcher(publisher, BatcherLimits(linger=0, max_count=1, max_pending=3)) as batcher:
        for _ in range(2):
            await batcher.add(b"failed")
        await until(lambda: batcher.pending == 0)
        publisher.gate = anyio.Event()
        await batcher.add(b"flying")
        yield batcher
        publisher.failing = None
        publisher.gate.set()


async def test_failures_that_are_read_make_room() -> None:
    publisher = _Publisher()
    async with _full_batcher(publisher) as batcher:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batcher.add, b"waits")
            await anyio.wait_all_tasks_blocked()
            assert batcher.pending == 1
            assert len(batcher.take_failed()) == 2
        assert batcher.pending == 2


async def test_a_message_that_waits_for_room_is_accepted_before_later_ones() -> None:
    publisher = _Publisher()
    async with _full_batcher(publisher) as batcher, anyio.create_task_group() as tasks:
        tasks.start_soon(batcher.add, b"waits")
        await anyio.wait_all_tasks_blocked()
        batcher.take_failed()  # there is room, and the other task has not run yet
        await batcher.add(b"later")
    assert publisher.batches[2:] == [[b"flying"], [b"waits"], [b"later"]]


async def test_a_batcher_accepts_messages_while_it_is_open() -> None:
    publisher = _Publisher(lock := KeyLock())
    async with anyio.create_task_group() as tasks:
        batcher = _made(publisher, tasks, BatcherLimits(linger=0))
        with pytest.raises(InvalidState, match="the batcher is not open"):
            await batcher.add(b"early")
        async with batcher:
            await batcher.add(OutgoingMessage(b"x", key="k"))
        for publish in (batcher.add, batcher.publish):
            with pytest.raises(InvalidState, match="the batcher is not open"):
                await publish(b"late")
        with pytest.raises(InvalidState, match="opened once"):
            await batcher.__aenter__()
    assert (publisher.batches, len(lock)) == ([[b"x"]], 0), "its keys take no memory"


async def test_an_invalid_message_is_refused_alone() -> None:
    publisher = _Publisher()
    async with _batcher(publisher, BatcherLimits(linger=0)) as batcher:
        await batcher.add(b"x")
        with pytest.raises(InvalidBody):
            await batcher.add(b"")
        with pytest.raises(InvalidHeader):
            await batcher.add(OutgoingMessage(b"x", headers={"##no": "x"}))
        await batcher.add(OutgoingMessage(b"y", headers={"a": "b"}, key="k", trace_id=1))
    assert functools.reduce(operator.iadd, publisher.batches, []) == [b"x", b"y"]


async def test_publishes_cut_off_by_closing_are_reported() -> None:
    publisher = _Publisher()
    publisher.gate = anyio.Event()
    outcomes: list[type[NsqError]] = []
    with anyio.fail_after(25):
        async with anyio.create_task_group() as users, anyio.create_task_group() as tasks:
            batcher = _made(publisher, tasks, BatcherLimits(linger=0, max_count=1))
            await batcher.__aenter__()

            async def publish() -> None:
                try:
                    await batcher.publish(b"x")
                except NsqError as failure:
                    outcomes.append(type(failure))

            users.start_soon(publish)
            users.start_soon(publish)
            await until(lambda: batcher.pending == 2 and publisher.batches)
            tasks.cancel_scope.cancel()
        assert batcher.pending == 0
        with pytest.raises(InvalidState):
            await batcher.add(b"x")
        with pytest.raises(InvalidState):
            async with batcher:
                pass
    assert sorted(outcomes, key=str) == sorted([DeliveryUnknown, PublishFailed], key=str)


@pytest.mark.parametrize("limits", [{"linger": -1}, {"max_count": 0}, {"max_bytes": 0}, {"max_pending": 0}])
async def test_invalid_limits_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InvalidSetting):
        BatcherLimits(**limits)  # type: ignore[arg-type]


async def test_middleware_that_fails_or_returns_no_receipts_does_not_end_the_producer() -> None:
    """An exception ended producer and batcher; without receipts the batcher published again without end."""
    others = BatchFailed([PublishFailed("of another call")] * 2)

    class Bad(Middleware):
        async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
            match publishing.messages[0].body:
                case b"none":
                    return ()
                case b"fewer":
                    publishing.messages = []
                case b"late":
                    await send_next(publishing)
                    raise InvalidState("another producer is closed")
                case b"others":
                    raise others
                case b"raises":
                    raise KeyError("no schema")
            return await send_next(publishing)

    async with (
        scripted_node(obey()) as node,
        Producer(nsqd=str(node), middleware=[Bad()]) as producer,
        producer.batcher("t", linger=0) as batcher,
    ):
        for body, reason in (
            (b"raises", "KeyError: 'no schema'"),
            (b"none", "returned 0 receipts, not a receipt for each message .1."),
            (b"fewer", "returned 0 receipts, not a receipt for each message .1."),
            (b"late", "InvalidState: another producer is closed"),
            (b"others", "BatchFailed: 2 of 2"),
        ):
            with anyio.fail_after(25), pytest.raises(DeliveryUnknown, match=reason):
                await batcher.publish(body)


async def test_a_producer_that_ends_first_publishes_what_is_pending() -> None:
    with anyio.fail_after(25):
        async with scripted_node(obey()) as node:
            async with Producer(nsqd=str(node)) as producer:
                batcher = await producer.batcher("t", linger=60).__aenter__()
                await batcher.add(b"x")
            assert [command.words[0] for command in node.commands] == [b"MPUB"]
            with pytest.raises(InvalidState):
                await batcher.add(b"y")


async def test_messages_that_wait_when_the_producer_has_closed_are_reported_as_not_published() -> None:
    publisher = _Publisher()
    publisher.failing = InvalidState("the producer is closed")
    async with _batcher(publisher, BatcherLimits(linger=0)) as batcher:
        with pytest.raises(PublishFailed, match="not published before the producer was closed"):
            await batcher.publish(b"x")


async def test_messages_of_a_key_wait_for_an_earlier_publish_of_it() -> None:
    publisher = _Publisher(lock := KeyLock())
    other = lock.queue((("t", b"k"),))
    await other.enter(5.0)
    async with _batcher(publisher, BatcherLimits(linger=0)) as batcher:
        for message in (b"1", b"2", OutgoingMessage(b"3", key="k"), b"4", OutgoingMessage(b"5", key="k")):
            await batcher.add(message)
        await until(lambda: publisher.batches == [[b"1", b"2"]])
        await anyio.wait_all_tasks_blocked()
        assert (batcher.pending, publisher.batches) == (3, [[b"1", b"2"]]), "what was added later waits behind it"
        other.leave()
        await batcher.flush()
    assert publisher.batches[1:] == [[b"3", b"4", b"5"]]
    assert len(lock) == 0


async def test_a_message_whose_key_stays_in_use_fails_alone() -> None:
    publisher = _Publisher(lock := KeyLock())
    other = lock.queue((("t", b"k"),))
    await other.enter(5.0)
    limits = BatcherLimits(linger=60, max_bytes=100)
    async with _batcher(publisher, limits, timeout=0.05) as batcher:
        await batcher.add(OutgoingMessage(b"x" * 90, key="k"))
        with pytest.raises(BatchFailed, match="earlier publishes"):
            await batcher.flush()
        assert [message for message, _ in batcher.take_failed()] == [OutgoingMessage(b"x" * 90, key="k")]
        for body in (b"1", b"2"):
            await batcher.add(OutgoingMessage(body, key="k"))
        with pytest.raises(BatchFailed):
            await batcher.flush()
        assert len(batcher.take_failed()) == 2
        await batcher.add(b"y" * 90)
        await anyio.wait_all_tasks_blocked()
        assert publisher.batches == [], "the size of the message that failed does not count any more"
        await batcher.flush()
    assert publisher.batches == [[b"y" * 90]]
    other.leave()
    assert len(lock) == 0


async def test_a_message_that_is_not_accepted_leaves_its_place() -> None:
    publisher = _Publisher(lock := KeyLock())
    publisher.gate = anyio.Event()
    async with _batcher(publisher, BatcherLimits(linger=0, max_count=1, max_pending=1)) as batcher:
        await batcher.add(b"x")
        with anyio.move_on_after(0.01) as scope:
            await batcher.add(OutgoingMessage(b"y", key="k"))
        assert scope.cancelled_caught
        later = lock.queue((("t", b"k"),))
        await later.enter(0.1)
        later.leave()
        publisher.gate.set()
    assert (publisher.batches, len(lock)) == ([[b"x"]], 0)


async def test_each_message_of_a_batch_has_an_outcome_of_its_own() -> None:
    publisher = _Publisher()
    stored, failure = Receipt("t", 0, "n1", 7), PublishFailed("no leader")
    publisher.failing = BatchFailed([stored, failure])
    async with _batcher(publisher, BatcherLimits(linger=60, max_count=2)) as batcher:
        outcomes: list[object] = []

        async def publish(body: bytes) -> None:
            try:
                outcomes.append((body, await batcher.publish(body)))
            except NsqError as error:
                outcomes.append((body, error))

        async with anyio.create_task_group() as tasks:
            for body in (b"1", b"2"):
                tasks.start_soon(publish, body)
                await anyio.wait_all_tasks_blocked()
        assert sorted(outcomes, key=str) == sorted([(b"1", stored), (b"2", failure)], key=str)


async def test_a_message_that_another_check_refuses_fails_without_the_others() -> None:
    publisher = _Publisher()
    refused = InvalidBody("message 1: too large for this topic")
    refused.index = 1
    publish = publisher.publish

    async def refuse(call: Publishing) -> list[Receipt]:
        if len(call.given) == 3:
            raise refused
        return await publish(call)

    publisher.publish = refuse  # type: ignore[method-assign]
    async with _batcher(publisher, BatcherLimits(linger=60)) as batcher:
        for body in (b"1", b"2", b"3"):
            await batcher.add(body)
        with pytest.raises(BatchFailed):
            await batcher.flush()
        assert batcher.take_failed() == [(b"2", refused)]
        assert batcher.pending == 0
    assert publisher.batches == [[b"1", b"3"]]


async def test_a_refusal_that_names_no_message_is_one_of_all() -> None:
    publisher, refused = _Publisher(), InvalidBody("no such topic")
    publisher.failing = refused
    async with _batcher(publisher, BatcherLimits(linger=60)) as batcher:
        for body in (b"1", b"2"):
            await batcher.add(body)
        with pytest.raises(BatchFailed):
            await batcher.flush()
        assert batcher.take_failed() == [(b"1", refused), (b"2", refused)]


async def test_failures_that_the_error_of_the_block_hides_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    publisher = _Publisher()
    publisher.failing = PublishFailed("down")
    with pytest.raises(KeyError):
        async with _batcher(publisher, BatcherLimits()) as batcher:
            await batcher.add(b"early")
            with pytest.raises(BatchFailed):
                await batcher.flush()
            assert caplog.messages == []
            await batcher.add(b"late")
            await batcher.add(b"later")
            raise KeyError
    assert caplog.messages == ["3 messages of a batcher that was left by an exception were not stored: down"]
    assert len(batcher.take_failed()) == 3


@pytest.mark.parametrize("inside", [True, False])
async def test_failures_behind_a_cancelled_exit_are_logged(caplog: pytest.LogCaptureFixture, inside: bool) -> None:
    publisher, scope = _Publisher(), anyio.CancelScope()
    publisher.failing, publisher.gate = PublishFailed("down"), anyio.Event()
    async with anyio.create_task_group() as tasks:
        with scope:
            async with _made(publisher, tasks, BatcherLimits()) as batcher:
                await batcher.add(b"x")
                tasks.start_soon(until, lambda: publisher.batches)
                scope.deadline = anyio.current_time() + 0.02
                if inside:
                    await anyio.sleep_forever()
        assert (scope.cancelled_caught, caplog.messages) == (True, [])
        publisher.gate.set()
        await until(lambda: not batcher.pending)
    assert caplog.messages == ["1 messages of a batcher that was left by an exception were not stored: down"]


async def test_failures_behind_a_cancelled_exit_are_logged_after_earlier_ones_were_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher, scope = _Publisher(), anyio.CancelScope()
    publisher.failing, publisher.gate = PublishFailed("down"), anyio.Event()
    async with anyio.create_task_group() as tasks:
        with scope:
            async with _made(publisher, tasks, BatcherLimits(max_count=1)) as batcher:
                for body in (b"1", b"2"):
                    await batcher.add(body)
                scope.cancel()
        await until(lambda: publisher.batches)
        first, publisher.gate = publisher.gate, anyio.Event()
        first.set()
        await until(lambda: caplog.messages)
        assert len(batcher.take_failed()) == 1
        publisher.gate.set()
        await until(lambda: not batcher.pending)
    assert caplog.messages == ["1 messages of a batcher that was left by an exception were not stored: down"] * 2


async def test_failures_that_the_exit_raises_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    publisher = _Publisher()
    publisher.failing = PublishFailed("down")
    with pytest.raises(BatchFailed):
        async with _batcher(publisher, BatcherLimits()) as batcher:
            await batcher.add(b"x")
    assert caplog.messages == []
