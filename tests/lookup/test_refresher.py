"""One round at a time, shared by all who ask, paced while nothing changes, taken over when its runner is cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import LookupFailed, TopicNotFound
from nsqext.lookup.options import LookupOptions
from nsqext.lookup.partition_map import PartitionMap
from nsqext.lookup.refresher import Pace, Refresher
from tests.support.fake_lookupd import failed, tcp, told, unknown

if TYPE_CHECKING:
    from nsqext.lookup.responses import LookupAnswer


class Lookup:
    """Stands for the lookup service: answers when it is let, counts the questions."""

    def __init__(self, *answers: LookupAnswer, held: bool = False, **options: Any) -> None:
        self.answers: Sequence[LookupAnswer] = answers
        self.asked = 0
        self.at_once = 0
        self.held = held
        self.open = anyio.Event()
        self.views: list[PartitionMap] = []
        self.refresher = Refresher("orders", "w", self.ask, LookupOptions(**options), self.views.append)

    async def ask(self) -> Sequence[LookupAnswer]:
        """Answer one round."""
        self.asked += 1
        self.at_once += 1
        try:
            if self.held:
                await self.open.wait()
            else:
                await checkpoint()
        finally:
            self.at_once -= 1
        assert self.at_once == 0, "two rounds at the same time"
        return self.answers


@pytest.mark.anyio
async def test_a_round_makes_a_view() -> None:
    lookup = Lookup(told("a", {0: "n1"}, num=1))
    assert lookup.refresher.view is None
    await lookup.refresher.refresh()
    assert lookup.refresher.view is not None
    assert lookup.views == [lookup.refresher.view]
    assert lookup.refresher.view.version == 1


@pytest.mark.anyio
async def test_a_topic_that_is_known_and_nowhere_has_a_view() -> None:
    lookup = Lookup(told("a"))
    await lookup.refresher.refresh()
    assert lookup.refresher.view == PartitionMap("orders")


@pytest.mark.anyio
async def test_many_who_ask_share_one_round() -> None:
    lookup = Lookup(told("a", {0: "n1"}, num=1), held=True)
    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(lookup.refresher.refresh)
        await anyio.wait_all_tasks_blocked()
        lookup.open.set()
    assert lookup.asked == 1


@pytest.mark.anyio
async def test_a_newer_view_is_not_asked_for() -> None:
    lookup = Lookup(told("a", {0: "n1"}, num=1))
    await lookup.refresher.refresh()
    old = lookup.refresher.view
    lookup.answers = [told("a", {0: "n2"}, num=1)]
    await lookup.refresher.refresh(failed=old)
    await lookup.refresher.refresh(failed=old)
    assert lookup.asked == 2
    await lookup.refresher.refresh(failed=lookup.refresher.view)
    assert lookup.asked == 3


@pytest.mark.anyio
async def test_the_next_takes_over_when_the_one_who_asks_is_cancelled() -> None:
    lookup = Lookup(told("a", {0: "n1"}, num=1), held=True)
    scope = anyio.CancelScope()

    async def give_up() -> None:
        with scope:
            await lookup.refresher.refresh()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(lookup.refresher.refresh)
            tasks.start_soon(lookup.refresher.refresh)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            await anyio.wait_all_tasks_blocked()
            lookup.open.set()
    assert lookup.asked == 2
    assert lookup.refresher.view is not None


@pytest.mark.anyio
async def test_who_waits_can_be_cancelled() -> None:
    lookup = Lookup(told("a", {0: "n1"}, num=1), held=True)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lookup.refresher.refresh)
            await anyio.wait_all_tasks_blocked()
            with anyio.move_on_after(0.01):
                await lookup.refresher.refresh()
            lookup.open.set()
    assert lookup.asked == 1


@pytest.mark.anyio
async def test_a_failed_round_keeps_the_view_and_tells_why() -> None:
    lookup = Lookup(failed("a"), unknown("b"), max_pause=0)
    await lookup.refresher.refresh()
    assert lookup.refresher.view is None
    assert isinstance(lookup.refresher.error, TopicNotFound)
    assert lookup.refresher.error.topic == "orders"
    lookup.answers = [told("a", {0: "n1"}, num=1)]
    await lookup.refresher.refresh()
    view = lookup.refresher.view
    lookup.answers = [failed("a")]
    await lookup.refresher.refresh(failed=view)
    assert lookup.refresher.view is view
    assert isinstance(lookup.refresher.error, LookupFailed)
    assert len(lookup.views) == 1


@pytest.mark.anyio
async def test_the_leader_that_refused_is_not_believed() -> None:
    lookup = Lookup(told("a", {0: "n2"}, num=1), told("b", {0: "n1"}, num=1), max_pause=0)
    await lookup.refresher.refresh()
    view = lookup.refresher.view
    assert view is not None
    wrong = view.leaders[0]
    await lookup.refresher.refresh(failed=view, partition=0)
    assert lookup.refresher.view is not None
    assert {wrong, lookup.refresher.view.leaders[0]} == {tcp("n1"), tcp("n2")}
    await lookup.refresher.refresh(failed=lookup.refresher.view, partition=7)


@pytest.mark.anyio
async def test_rounds_that_change_nothing_are_paced() -> None:
    lookup = Lookup(told("a", {0: "n1"}, num=1), max_pause=0.2)
    await lookup.refresher.refresh()
    began = anyio.current_time()
    for _ in range(5):
        await lookup.refresher.refresh(failed=lookup.refresher.view)
    assert lookup.asked == 6
    assert anyio.current_time() - began > 0.25


@pytest.mark.anyio
async def test_settled_topics_are_polled_within_the_jitter() -> None:
    lookup = Lookup(told("a", {0: "n1"}, num=1), poll_interval=100.0, poll_jitter=0.2)
    delays = []
    for _ in range(50):
        await lookup.refresher.refresh(asked_for=False)
        delays.append(lookup.refresher.poll_at - anyio.current_time())
    assert all(79 < delay <= 120 for delay in delays)
    assert max(delays) - min(delays) > 10


@pytest.mark.anyio
@pytest.mark.parametrize("answer", [told("a", {0: "n1"}, num=2), failed("a"), told("a", {}, num=1), told("a")])
async def test_what_is_missing_is_asked_for_sooner(answer: LookupAnswer) -> None:
    lookup = Lookup(answer, poll_interval=100.0, poll_jitter=0)
    await lookup.refresher.refresh()
    assert 0 < lookup.refresher.poll_at - anyio.current_time() <= 1


@pytest.mark.anyio
async def test_a_partition_that_is_not_offered_any_more_is_asked_for_sooner() -> None:
    lookup = Lookup(told("a", {0: "n1"}, num=1), poll_interval=100.0, poll_jitter=0)
    await lookup.refresher.refresh()
    lookup.answers = [told("a", {}, num=1)]
    await lookup.refresher.refresh(asked_for=False)
    assert 0 < lookup.refresher.poll_at - anyio.current_time() <= 1


def full(pause: float = 1.0) -> Pace:
    """Return a pace without jitter."""
    return Pace(pause, lambda: 1.0)


def test_the_first_round_after_an_error_is_not_waited_for() -> None:
    pace = full()
    assert pace.wait(100.0) == 0
    pace.ended(100.0, changed=True, asked_for=True)
    assert pace.wait(100.0) == 0


def test_pauses_double_up_to_the_longest() -> None:
    pace, now, pauses = full(), 100.0, []
    for _ in range(8):
        pauses.append(round(pace.wait(now), 6))
        now += pace.wait(now)
        pace.ended(now, changed=False, asked_for=True)
    assert pauses == [0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_change_or_a_quiet_time_starts_anew() -> None:
    pace = full()
    for _ in range(5):
        pace.ended(100.0, changed=False, asked_for=True)
    assert pace.wait(100.0) > 0.5
    assert pace.wait(102.0) == 0
    pace.ended(102.0, changed=False, asked_for=True)
    assert pace.wait(102.0) > 0.5
    assert pace.wait(106.0) == 0
    pace.ended(106.0, changed=False, asked_for=True)
    assert pace.wait(106.0) == pytest.approx(0.05)
    pace.ended(106.0, changed=True, asked_for=True)
    assert pace.wait(106.0) == 0


def test_polls_do_not_lengthen_the_pause() -> None:
    pace = full()
    for _ in range(5):
        pace.ended(100.0, changed=False, asked_for=False)
    assert pace.wait(100.0) == 0


@given(rounds=st.lists(st.tuples(st.floats(0, 5), st.booleans(), st.booleans()), max_size=20), longest=st.floats(0, 2))
def test_no_pause_is_longer_than_allowed(rounds: list[tuple[float, bool, bool]], longest: float) -> None:
    pace, now = Pace(longest), 0.0
    for later, changed, asked_for in rounds:
        now += later
        assert 0 <= pace.wait(now) <= longest
        pace.ended(now, changed=changed, asked_for=asked_for)
