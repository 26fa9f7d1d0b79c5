"""What a loop over messages, a loop over batches and `fetch` wait for, and what is a batch, without connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
import pytest
from anyio.lowlevel import checkpoint

from nsqext.client.consumer.handlers.iteration import MessageIteration
from nsqext.client.consumer.handlers.workers import BatchLimits, ConsumerState, MessageQueue
from nsqext.client.consumer.options import BackoffOptions
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.rdy_distributor import RdyDistributor
from nsqext.client.consumer.subscriptions.subscription import Subscription
from nsqext.client.consumer.unpacking import UnpackBudget
from nsqext.errors import InvalidState, ProtocolError
from tests.support.clock import replace_clock
from tests.support.messages import RecordingOwner, make_message
from tests.support.sleeps import settled

if TYPE_CHECKING:
    from nsqext import Message
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup

pytestmark = pytest.mark.anyio

T = TypeVar("T")


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock: an iteration that never waits sends its answers now and then."""
    replace_clock(monkeypatch, lambda: 100.0)


class Bench:
    """The iteration over an open consumer."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.backoff = Backoff(BackoffOptions())
        self.flow = RdyDistributor[Subscription](10, self.backoff)
        self.subscriptions: list[Any] = []
        self.state = ConsumerState(opened=True)
        self.tasks = SimpleNamespace(check=self._refuse, check_event_loop=lambda: self.calls.append("check"))
        self.queue = MessageQueue()
        self.owner = RecordingOwner()
        group = cast("SubscriptionGroup", self)
        self.subject = MessageIteration(self.state, self.queue, group, lambda: len(self.queue.messages))

    def _refuse(self) -> None:
        raise InvalidState("not open")

    def flush_before_wait(self, waiting: object) -> None:
        """Record that answers are sent."""
        assert waiting is self.queue.messages
        self.calls.append("flush")

    def fit_windows(self) -> None:
        """Record that RDY counts may be raised."""
        self.calls.append("fit")

    def flush(self) -> None:
        """Record that answers are sent."""
        self.calls.append("send")

    def put(self, *messages: Message) -> None:
        """Receive messages."""
        self.queue.put(list(messages))

    def put_aged(self, *numbers: int, age: float = 0.0) -> None:
        """Receive messages that were delivered some seconds ago, on a clock that shows 100 s."""
        for message in map(self.message, numbers):
            message.delivered = message.received = 100.0 - age
            self.put(message)

    async def collect(
        self, count: int, max_wait: float, meanwhile: Callable[[], object] = lambda: None, deadline: float = inf
    ) -> list[int]:
        """Return the numbers of the next batch; something happens as soon as the collector waits."""
        taken: list[int] = []

        async def collect() -> None:
            found = await self.subject.collect(BatchLimits(count, max_wait), deadline)
            taken.extend(message.internal_id for message in found)

        with anyio.fail_after(25):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(collect)
                await settled()
                meanwhile()
        return taken

    def message(self, number: int) -> Message:
        """Return a message in flight."""
        return make_message(self.owner, number, b"x" * 9)

    async def result(self, call: Callable[[], Coroutine[Any, Any, T]], then: Callable[[], object]) -> T:
        """Return what a call returns, while something happens as soon as it waits."""
        found: list[T] = []

        async def run() -> None:
            found.append(await call())

        with anyio.fail_after(25):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                for _ in range(10):
                    await checkpoint()
                assert not found
                then()
        return found[0]


@pytest.mark.usefixtures("still")
async def test_the_next_message_is_waited_for() -> None:
    bench = Bench()
    bench.state.raises = False
    one, two = bench.message(1), bench.message(2)
    assert await bench.result(bench.subject.next, lambda: bench.put(one, two)) is one
    assert (bench.calls, bench.state.raises) == (["check", "flush"], True)
    assert await bench.subject.next() is two
    assert bench.calls == ["check", "flush"]


async def test_a_loop_that_never_waits_sends_its_answers_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, now = Bench(), [100.0]
    replace_clock(monkeypatch, lambda: now[0])
    bench.put(*(bench.message(number) for number in range(5)))
    for number, calls in enumerate((2, 2, 2, 4, 4)):
        assert (await bench.subject.next()).internal_id == number
        assert len(bench.calls) == calls
        now[0] += 0.009


async def test_expired_messages_are_not_handed_out() -> None:
    bench = Bench()
    lost, packed, good = bench.message(1), bench.message(2), bench.message(3)
    packed.budget = UnpackBudget(100)
    bench.owner.horizon = 1.0
    good.received = 2.0
    bench.put(lost, packed, good)
    assert await bench.subject.next() is good
    assert packed.budget.used == 0


@pytest.mark.usefixtures("still")
async def test_a_message_waits_for_the_budget_of_unpacked_bytes() -> None:
    bench, budget = Bench(), UnpackBudget(10)
    one, two, three = (bench.message(number) for number in (1, 2, 3))
    one.budget = two.budget = three.budget = budget
    bench.put(one, two, three)
    assert await bench.subject.next() is one
    bench.calls.clear()
    assert await bench.result(bench.subject.next, lambda: budget.release(one)) is two
    assert bench.calls.count("flush") == 1


async def test_how_a_loop_ends() -> None:
    bench = Bench()
    bench.put(bench.message(1))
    bench.state.error = error = ProtocolError("no nsqd")
    with pytest.raises(ProtocolError):
        await bench.subject.next()
    bench.state.error = None
    bench.queue.stopped = True
    with pytest.raises(StopAsyncIteration):
        await bench.subject.next()
    bench.state.opened = False
    for call in (bench.subject.next, lambda: bench.subject.next_batch(BatchLimits())):
        with pytest.raises(InvalidState):
            await call()
    other = Bench()

    def fail() -> None:
        other.state.error = error
        other.queue.wake()

    with pytest.raises(ExceptionGroup) as caught:
        await other.result(other.subject.next, fail)
    assert caught.value.exceptions == (error,)


async def test_batches_are_held_by_the_task_that_received_them() -> None:
    bench = Bench()
    bench.state.raises = False
    one, two = bench.message(1), bench.message(2)
    bench.put(one, two)
    batch = await bench.subject.next_batch(BatchLimits(2, 60.0))
    assert (list(batch), bench.state.raises, bench.flow.concurrency) == ([one, two], True, 2)
    assert bench.subject.held() == [one, two]
    await bench.subject.next_batch(BatchLimits(1, 60.0), 0.0)
    assert bench.flow.concurrency == 2, "it does not shrink"
    bench.subject.requeue_held(-1)
    assert bench.owner.commands == []
    bench.subject.requeue_held(anyio.get_current_task().id)
    assert bench.owner.commands == ["REQ 1 0", "REQ 2 0"]


async def test_how_a_loop_over_batches_ends() -> None:
    bench = Bench()
    assert len(await bench.subject.next_batch(BatchLimits(), 0.0)) == 0
    assert len(await bench.subject.next_batch(BatchLimits(), 0.01)) == 0
    three = bench.message(3)
    fetch = await bench.result(lambda: bench.subject.next_batch(BatchLimits(1, 60.0), 20.0), lambda: bench.put(three))
    assert list(fetch) == [three]
    bench.state.ended.set()
    with pytest.raises(StopAsyncIteration):
        await bench.subject.next_batch(BatchLimits())
    bench.state.error = ProtocolError("no nsqd")
    with pytest.raises(ProtocolError):
        await bench.subject.next_batch(BatchLimits())


@pytest.mark.parametrize(
    ("connections", "state", "paused", "patience"),
    [
        ([], "running", False, float("inf")),
        ([(2, 1), (2, 0)], "running", False, float("inf")),
        ([(0, 0)], "running", False, float("inf")),
        ([(0, 1)], "running", False, 0.0),
        ([(1, 1), (2, 0)], "running", False, 0.005),
        ([(2, 2)], "running", False, 0.005),
        ([(1, 1)], "running", False, 0.0),
        ([(3, 0)], "running", True, 0.005),
        ([(1, 0)], "running", True, 0.0),
        ([(3, 0)], "waiting", False, 0.005),
        ([(0, 0)], "waiting", False, 0.0),
    ],
)
async def test_a_batch_waits_briefly_where_a_connection_has_used_up_its_rdy(
    connections: list[tuple[int, int]], state: str, paused: bool, patience: float
) -> None:
    bench = Bench()
    bench.subscriptions = [SimpleNamespace(ready=ready, in_flight=in_flight) for ready, in_flight in connections]
    bench.flow.paused = paused
    if state == "waiting":
        bench.backoff.failed(0.0)
    bench.put(bench.message(1))
    assert bench.subject.request_more() == patience
    assert bench.calls == ["fit", "send"], "the answers make room for further messages"


# Which messages are a batch


@pytest.mark.usefixtures("still")
async def test_a_full_batch_does_not_wait() -> None:
    bench = Bench()
    bench.put_aged(1, 2, 3)
    assert (await bench.collect(2, 60.0), bench.calls) == ([1, 2], [])
    assert await bench.collect(2, 60.0, lambda: bench.put_aged(4, 5)) == [3, 4]
    assert bench.calls == ["fit", "send"], "answers are sent before it waits"


@pytest.mark.usefixtures("still")
async def test_a_batch_waits_for_further_messages_until_its_first_one_is_old_enough() -> None:
    bench = Bench()
    bench.put_aged(1, age=4.1)
    assert await bench.collect(2, 4.0, lambda: bench.put_aged(2)) == [1]
    assert await bench.collect(2, 60.0, lambda: bench.put_aged(3)) == [2, 3]
    bench.put_aged(4, age=3.1)
    assert await bench.collect(2, 4.0, lambda: bench.put_aged(5)) == [4, 5], "0.9 s are left"
    bench.put_aged(6, age=3.98)
    assert await bench.collect(2, 4.0) == [6]
    bench.put_aged(7, age=4.1)
    bench.put_aged(8)
    assert await bench.collect(3, 4.0, lambda: bench.put_aged(9)) == [7, 8], "not until its last one is"


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize(("ready", "in_flight"), [(0, 1), (2, 2)])
async def test_a_batch_does_not_wait_longer_than_messages_can_be_received(ready: int, in_flight: int) -> None:
    bench = Bench()
    bench.subscriptions = [SimpleNamespace(ready=ready, in_flight=in_flight)]
    bench.put_aged(1)
    assert await bench.collect(2, 60.0) == [1]


async def test_a_batch_is_empty_at_its_deadline_and_at_the_end() -> None:
    bench = Bench()
    for seconds in (0.0, 0.01):
        assert await bench.collect(2, 60.0, deadline=time.monotonic() + seconds) == []

    def end() -> None:
        bench.state.ended.set()
        bench.queue.stop()

    assert await bench.collect(2, 60.0, end) == []
    bench.queue.stopped = False
    bench.put(bench.message(1))
    assert await bench.collect(1, 60.0) == [], "no batch is handed out any more"


@pytest.mark.usefixtures("still")
async def test_expired_messages_do_not_make_a_batch() -> None:
    bench = Bench()
    bench.owner.horizon = 50.0
    bench.put_aged(1, age=60.0)
    assert await bench.collect(2, 1.0, lambda: bench.put_aged(2, age=2.0)) == [2]


async def test_a_batch_waits_while_others_use_up_the_budget_for_unpacked_bytes() -> None:
    bench, budget = Bench(), UnpackBudget(20)
    one, two, three, four = map(bench.message, range(1, 5))
    for message in (one, two, three, four):
        message.budget, message.delivered = budget, time.monotonic()
    bench.put(one, two, three, four)
    assert await bench.collect(4, 60.0) == [1, 2]
    assert [*bench.queue.messages] == [three, four], "those that do not fit stay, in order"
    assert await bench.collect(2, 60.0, lambda: budget.release(one)) == [3]
    assert bench.calls == ["fit", "send"], "answers are sent before it waits"
    assert await bench.collect(1, 60.0, deadline=time.monotonic() + 0.01) == []
    budget.release(two)
    assert await bench.collect(1, 60.0) == [4]


@pytest.mark.usefixtures("still")
async def test_tasks_that_collect_take_turns() -> None:
    bench, batches = Bench(), list[list[int]]()

    async def collect() -> None:
        batches.append(await bench.collect(2, 60.0))

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(collect)
            await settled()
            for number in range(4):
                bench.put_aged(number)
                await settled()
    assert batches == [[0, 1], [2, 3]]
