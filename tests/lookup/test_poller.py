"""Refreshing and polling: one round at a time per topic, with pauses while maps do not change; one polling task."""

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
from nsqext.lookup.poller import Poller, PollPace, RefreshBudget, Refresher
from tests.support.clock import run_in_virtual_time
from tests.support.fake_lookupd import eventually, failed, listing, tcp, unknown

if TYPE_CHECKING:
    from nsqext.lookup.responses import LookupAnswer

pytestmark = pytest.mark.anyio


class Lookup:
    """Fake lookup service that counts requests and responds when the test allows it."""

    def __init__(self, *answers: LookupAnswer, held: bool = False, access: str = "w", **options: Any) -> None:
        self.answers: Sequence[LookupAnswer] = answers
        self.asked = 0
        self.at_once = 0
        self.held = held
        self.open = anyio.Event()
        self.maps: list[PartitionMap] = []
        self.refresher = Refresher(
            "orders", access, self.ask, LookupOptions(**options), self.maps.append, RefreshBudget()
        )

    async def ask(self) -> Sequence[LookupAnswer]:
        """Respond to one round."""
        self.asked += 1
        self.at_once += 1
        try:
            if self.held:
                await self.open.wait()
            else:
                await checkpoint()
        finally:
            self.at_once -= 1
        assert self.at_once == 0, "two concurrent rounds"
        return self.answers


async def test_a_round_of_answers_builds_a_map() -> None:
    lookup = Lookup(listing("a", {0: "n1"}, num=1))
    assert lookup.refresher.map is None
    await lookup.refresher.refresh()
    assert lookup.refresher.map is not None
    assert lookup.maps == [lookup.refresher.map]
    assert lookup.refresher.map.version == 1


async def test_a_topic_without_leaders_has_a_map() -> None:
    lookup = Lookup(listing("a"))
    await lookup.refresher.refresh()
    assert lookup.refresher.map == PartitionMap("orders")


async def test_concurrent_refreshes_share_a_round() -> None:
    lookup = Lookup(listing("a", {0: "n1"}, num=1), held=True)
    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(lookup.refresher.refresh)
        await anyio.wait_all_tasks_blocked()
        lookup.open.set()
    assert lookup.asked == 1


async def test_a_newer_map_is_not_refreshed() -> None:
    lookup = Lookup(listing("a", {0: "n1"}, num=1))
    await lookup.refresher.refresh()
    old = lookup.refresher.map
    lookup.answers = [listing("a", {0: "n2"}, num=1)]
    await lookup.refresher.refresh(failed=old)
    await lookup.refresher.refresh(failed=old)
    assert lookup.asked == 2
    await lookup.refresher.refresh(failed=lookup.refresher.map)
    assert lookup.asked == 3


async def test_another_task_continues_a_cancelled_round() -> None:
    lookup = Lookup(listing("a", {0: "n1"}, num=1), held=True)
    scope = anyio.CancelScope()

    async def give_up() -> None:
        with scope:
            await lookup.refresher.refresh()

    with anyio.fail_after(25):
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
    assert lookup.refresher.map is not None


async def test_a_waiting_task_can_be_cancelled() -> None:
    lookup = Lookup(listing("a", {0: "n1"}, num=1), held=True)
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lookup.refresher.refresh)
            await anyio.wait_all_tasks_blocked()
            with anyio.move_on_after(0.01):
                await lookup.refresher.refresh()
            lookup.open.set()
    assert lookup.asked == 1


async def test_a_failed_round_keeps_the_map_and_its_reason() -> None:
    lookup = Lookup(failed("a"), unknown("b"), max_pause=0)
    await lookup.refresher.refresh()
    assert lookup.refresher.map is None
    assert isinstance(lookup.refresher.error, TopicNotFound)
    assert lookup.refresher.error.topic == "orders"
    lookup.answers = [listing("a", {0: "n1"}, num=1)]
    await lookup.refresher.refresh()
    view = lookup.refresher.map
    lookup.answers = [failed("a")]
    await lookup.refresher.refresh(failed=view)
    assert lookup.refresher.map is view
    assert isinstance(lookup.refresher.error, LookupFailed)
    assert len(lookup.maps) == 1


async def test_a_leader_that_refused_is_not_preferred() -> None:
    lookup = Lookup(listing("a", {0: "n2"}, num=1), listing("b", {0: "n1"}, num=1), max_pause=0)
    await lookup.refresher.refresh()
    view = lookup.refresher.map
    assert view is not None
    wrong = view.leaders[0]
    await lookup.refresher.refresh(failed=view, partition=0)
    assert lookup.refresher.map is not None
    assert {wrong, lookup.refresher.map.leaders[0]} == {tcp("n1"), tcp("n2")}
    await lookup.refresher.refresh(failed=lookup.refresher.map, partition=7)


async def test_rounds_that_change_nothing_are_paced() -> None:
    lookup = Lookup(listing("a", {0: "n1"}, num=1), max_pause=0.2)
    await lookup.refresher.refresh()
    began = anyio.current_time()
    for _ in range(5):
        await lookup.refresher.refresh(failed=lookup.refresher.map)
    assert lookup.asked == 6
    assert anyio.current_time() - began > 0.25


async def test_a_poll_that_is_requested_during_a_round_follows_it() -> None:
    lookup = Lookup(listing("a", {0: "n1"}, num=1), held=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lookup.refresher.refresh)
        await anyio.wait_all_tasks_blocked()
        lookup.refresher.poll_soon()
        lookup.open.set()
    assert lookup.refresher.poll_at == float("-inf"), "its answers may be older than the request"
    await lookup.refresher.refresh()
    assert lookup.refresher.poll_at > 0


async def test_the_map_of_other_lookup_nodes_is_newer() -> None:
    lookup, other = Lookup(listing("a", {0: "n1"}, num=1)), Lookup(listing("b", {0: "n1"}, num=1))
    refresher = lookup.refresher
    await refresher.refresh()
    former = refresher.map
    refresher.start_over(other.ask)
    await refresher.refresh(failed=former)
    await refresher.refresh(failed=former)
    assert (lookup.asked, other.asked) == (1, 1)


async def test_a_topic_that_is_known_again_is_reported_with_the_same_map() -> None:
    lookup = Lookup(listing("a", {0: "n1"}, num=1), max_pause=0)
    refresher = lookup.refresher
    await refresher.refresh()
    known = lookup.answers
    lookup.answers = [unknown("a")]
    await refresher.refresh()
    assert (refresher.unknown, lookup.maps) == (True, [refresher.map])
    lookup.answers = known
    for _ in range(2):
        await refresher.refresh()
    assert (refresher.unknown, lookup.maps) == (False, [refresher.map] * 2)


async def next_poll(refresher: Refresher, *, after_error: bool = False) -> tuple[float, float]:
    """Run a round; return bounds of the seconds from its end to the next poll, however long the process was paused."""
    began = anyio.current_time()
    await refresher.refresh(after_error=after_error)
    return refresher.poll_at - anyio.current_time(), refresher.poll_at - began


async def test_settled_topics_are_polled_within_the_jitter() -> None:
    lookup = Lookup(listing("a", {0: "n1"}, num=1), poll_interval=100.0, max_poll_interval=100.0, poll_jitter=0.2)
    bounds = [await next_poll(lookup.refresher) for _ in range(50)]
    assert all(least <= 120 and most >= 80 for least, most in bounds)
    assert max(least for least, _ in bounds) - min(most for _, most in bounds) > 10


@pytest.mark.parametrize(("access", "delays"), [("w", [10, 20, 40, 40]), ("r", [10, 10, 10, 10])])
async def test_polls_of_producers_back_off_while_nothing_changes(access: str, delays: list[int]) -> None:
    lookup = Lookup(
        listing("a", {0: "n1"}, num=1), access=access, poll_interval=10.0, max_poll_interval=40.0, poll_jitter=0
    )
    refresher = lookup.refresher
    for delay in delays:
        least, most = await next_poll(refresher)
        assert least <= delay <= most
    lookup.answers = [listing("a", {0: "n2"}, num=1)]
    least, most = await next_poll(refresher)
    assert least <= 10 <= most


@pytest.mark.parametrize("answer", [listing("a", {0: "n1"}, num=2), failed("a"), listing("a", {}, num=1), listing("a")])
async def test_a_missing_leader_is_polled_sooner(answer: LookupAnswer) -> None:
    lookup = Lookup(answer, poll_interval=100.0, poll_jitter=0)
    least, most = await next_poll(lookup.refresher, after_error=True)
    assert least <= 1
    assert most > 0


async def test_an_unlisted_partition_is_polled_sooner() -> None:
    lookup = Lookup(listing("a", {0: "n1"}, num=1), poll_interval=100.0, poll_jitter=0)
    await lookup.refresher.refresh()
    lookup.answers = [listing("a", {}, num=1)]
    least, most = await next_poll(lookup.refresher)
    assert least <= 1
    assert most > 0


@pytest.mark.parametrize(
    ("answer", "delay"), [(listing("a", {0: "n1"}, num=3), 2.0), (listing("a", {}, num=1), 40.0)], ids=["added", "lost"]
)
def test_added_partitions_are_polled_more_often_than_lost_ones(
    answer: LookupAnswer, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def change() -> None:
        lookup = Lookup(listing("a", {0: "n1"}, num=1), poll_interval=100.0, poll_jitter=0)
        await lookup.refresher.refresh()
        lookup.answers = [answer]
        await anyio.sleep(40.0)
        assert await next_poll(lookup.refresher) == (delay, delay)

    run_in_virtual_time(monkeypatch, change)


def full(pause: float = 1.0) -> PollPace:
    """Return a pace without jitter."""
    return PollPace(pause, lambda: 1.0)


def test_the_first_round_after_an_error_is_not_waited_for() -> None:
    pace = full()
    assert pace.wait(100.0) == 0
    pace.ended(100.0, changed=True, after_error=True)
    assert pace.wait(100.0) == 0


def test_pauses_double_up_to_the_longest() -> None:
    pace, now, pauses = full(), 100.0, []
    for _ in range(8):
        pauses.append(round(pace.wait(now), 6))
        now += pace.wait(now)
        pace.ended(now, changed=False, after_error=True)
    assert pauses == [0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_change_or_a_quiet_time_resets_the_pause() -> None:
    pace = full()
    for _ in range(5):
        pace.ended(100.0, changed=False, after_error=True)
    assert pace.wait(100.0) > 0.5
    assert pace.wait(102.0) == 0
    pace.ended(102.0, changed=False, after_error=True)
    assert pace.wait(102.0) > 0.5
    assert pace.wait(106.0) == 0
    pace.ended(106.0, changed=False, after_error=True)
    assert pace.wait(106.0) == pytest.approx(0.05)
    pace.ended(106.0, changed=True, after_error=True)
    assert pace.wait(106.0) == 0


def test_polls_do_not_lengthen_the_pause() -> None:
    pace = full()
    for _ in range(5):
        pace.ended(100.0, changed=False, after_error=False)
    assert pace.wait(100.0) == 0


@given(rounds=st.lists(st.tuples(st.floats(0, 5), st.booleans(), st.booleans()), max_size=20), longest=st.floats(0, 2))
def test_no_pause_is_longer_than_allowed(rounds: list[tuple[float, bool, bool]], longest: float) -> None:
    pace, now = PollPace(longest), 0.0
    for later, changed, after_error in rounds:
        now += later
        assert 0 <= pace.wait(now) <= longest
        pace.ended(now, changed=changed, after_error=after_error)


@given(pauses=st.lists(st.floats(0, 0.2), min_size=1, max_size=200), rate=st.integers(1, 50))
def test_no_second_has_more_rounds_than_the_budget_allows(pauses: list[float], rate: int) -> None:
    budget, now = RefreshBudget(rate), 0.0
    starts = []
    for pause in pauses:
        now += pause
        starts.append(now + budget.take(now))
    assert starts == sorted(starts)
    for number, start in enumerate(starts):
        assert sum(start <= other < start + 1.0 for other in starts[number:]) <= 2 * rate + 1


def test_the_budget_of_many_topics_lets_all_of_them_refresh_within_five_seconds() -> None:
    budget = RefreshBudget()
    budget.topics = 1000
    assert [budget.take(100.0) for _ in range(1000)][-1] == pytest.approx(4.0)


async def test_errors_of_many_topics_share_a_budget_and_first_lookups_do_not_take_from_it() -> None:
    rounds = 0

    async def ask() -> Sequence[LookupAnswer]:
        nonlocal rounds
        rounds += 1
        await checkpoint()
        return [listing("a", {0: "n1"}, num=1)]

    budget = RefreshBudget(4)
    refreshers = [Refresher(f"t{number}", "w", ask, LookupOptions(), lambda view: None, budget) for number in range(20)]
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            for refresher in refreshers:
                tasks.start_soon(refresher.refresh)
    assert rounds == 20
    began = anyio.current_time()
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            for refresher in refreshers:
                tasks.start_soon(refresher.refresh, refresher.map)
            await eventually(lambda: rounds >= 24)
            for _ in range(100):
                await checkpoint()
            tasks.cancel_scope.cancel()
    assert rounds <= 25 + 4 * (anyio.current_time() - began)


# Polling


class Asked:
    """A refresher whose requests are counted; some of them hang."""

    def __init__(self, interval: float = 60.0) -> None:
        self.count = 0
        self.hanging = 0
        self.refresher = Refresher(
            "t",
            "r",
            self._ask,
            LookupOptions(poll_interval=interval, poll_jitter=0),
            lambda view: None,
            RefreshBudget(),
        )
        self.refresher.poll_at = float("-inf")

    async def _ask(self) -> Sequence[LookupAnswer]:
        self.count += 1
        if self.hanging:
            self.hanging -= 1
            await anyio.sleep_forever()
        await checkpoint()
        return (listing("a", {0: "n1"}, num=1),)


async def test_several_runs_poll_once() -> None:
    asked = Asked()
    poller = Poller(lambda: [asked.refresher])
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(poller.run)
            await eventually(lambda: asked.refresher.map is not None)
            await anyio.wait_all_tasks_blocked()
            assert asked.count == 1
            poller.stop()


async def test_another_run_continues_a_cancelled_poll() -> None:
    asked = Asked()
    asked.hanging = 1
    poller = Poller(lambda: [asked.refresher])
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as first:
                first.start_soon(poller.run)
                await eventually(lambda: asked.count == 1)
                tasks.start_soon(poller.run)
                await anyio.wait_all_tasks_blocked()
                first.cancel_scope.cancel()
            await eventually(lambda: asked.refresher.map is not None)
            assert asked.count == 2
            tasks.cancel_scope.cancel()


async def test_a_waiting_run_can_be_cancelled() -> None:
    asked = Asked(interval=0.01)
    poller = Poller(lambda: [asked.refresher])
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poller.run)
            await eventually(lambda: asked.count == 1)
            async with anyio.create_task_group() as second:
                second.start_soon(poller.run)
                await anyio.wait_all_tasks_blocked()
                second.cancel_scope.cancel()
            polled = asked.count
            await eventually(lambda: asked.count > polled + 1)
            poller.stop()


async def test_a_poll_does_not_count_as_a_refresh_after_an_error() -> None:
    class Recorded:
        poll_at = float("-inf")

        async def refresh(self, *, after_error: bool) -> None:
            assert not after_error
            poller.stop()

    recorded = Recorded()
    poller = Poller(lambda: [recorded])
    with anyio.fail_after(25):
        await poller.run()
    assert recorded.poll_at == float("inf")


async def test_a_stopped_poller_does_not_poll() -> None:
    asked = Asked()
    poller = Poller(lambda: [asked.refresher])
    poller.stop()
    with anyio.fail_after(25):
        await poller.run()
    assert asked.count == 0
