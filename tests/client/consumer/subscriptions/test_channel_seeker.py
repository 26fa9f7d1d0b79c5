"""When a channel is moved, and what ends meanwhile, with subscriptions and nodes of the test."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
from attrs import evolve

from nsqext import Position
from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions.assignment import Assignment
from nsqext.client.consumer.subscriptions.channel_seeker import ChannelSeeker
from nsqext.errors import InvalidPartition, InvalidSetting, InvalidState, PartitionUnavailable
from nsqext.lookup.node_channels import LogBounds
from nsqext.lookup.partition_map import PartitionMap
from nsqext.types import Address, TopicMeta
from tests.support.subscriber_scene import make_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nsqext.client.consumer.subscriptions.subscription import Subscription

pytestmark = pytest.mark.anyio

_NODE, _HTTP = Address("n", 4150), Address("n", 4151)
_VIEW = PartitionMap("t", meta=TopicMeta(2), leaders={0: _NODE, 1: _NODE}, http={_NODE: _HTTP})
_FIRST, _LAST = Position.earliest(), Position.latest()


class Channels:
    """The channels of a node."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.known = False
        self.on_move: Callable[[], None] = lambda: None

    async def exists(self, *place: object) -> bool:
        self.calls.append(("exists", *place))
        return self.known

    async def move(self, *place: object) -> None:
        self.calls.append(("move", *place))
        self.on_move()

    async def log_bounds(self, *place: object) -> LogBounds:
        self.calls.append(("log_bounds", *place))
        return LogBounds(0, 500)


class Open:
    """An open subscription that records its calls."""

    def __init__(self, partition: int) -> None:
        self.calls: list[str] = []
        self.stopped = False
        self.skipped: list[Position] = []
        self.hold: anyio.Event | None = None
        self.request = SimpleNamespace(address=_NODE, partition=partition)

    def skip_to(self, position: Position) -> None:
        self.skipped.append(position)

    async def close(self) -> None:
        if self.hold is not None:
            await self.hold.wait()
        self.calls.append("close")

    def end(self) -> None:
        self.calls.append("end")


class Scene:
    """A seeker of the channel ch, with partitions 0 and 1, both subscribed."""

    def __init__(self, **settings: Any) -> None:
        self.channels = Channels()
        self.assignments: dict[Any, Assignment] = {number: Assignment(number) for number in (0, 1)}
        self.live = {number: Open(number) for number in (0, 1)}
        self.view: PartitionMap | None = _VIEW
        metadata = SimpleNamespace(channels=self.channels, cached=lambda topic, access: self.view)
        group = SimpleNamespace(options=ConsumerOptions(**settings), metadata=metadata)
        context = make_context(group, [])
        self.seeker = ChannelSeeker("t", context, self.assignments, cast("dict[Any, Subscription]", self.live))

    async def start(self, number: int = 0, view: PartitionMap = _VIEW) -> Position | None:
        """Apply the start position of a partition; return where its channel has to be moved to."""
        assignment = self.assignments[number]
        await self.seeker.apply_start(assignment, view, _NODE)
        return assignment.pending

    async def move(self, number: int) -> None:
        await self.seeker.move(self.assignments[number], cast("Subscription", self.live[number]), _VIEW)


# Start positions


async def test_each_new_channel_starts_where_the_options_say() -> None:
    scene = Scene(start=_FIRST)
    assert await scene.start() == _FIRST
    assert scene.channels.calls == [("exists", _HTTP, "t", 0, "ch")]
    scene.assignments[0].opened += 1
    scene.channels.known = True
    assert await scene.start() == _FIRST, "it was created, and not moved"
    await scene.move(0)
    assert await scene.start() is None
    scene.channels.known = False  # deleted, with its topic or alone
    assert await scene.start() == _FIRST


async def test_a_channel_that_another_leader_has_is_not_moved() -> None:
    scene = Scene(start=_LAST)
    assert await scene.start() == _LAST
    scene.channels.known = True  # no subscription was opened meanwhile, which would have created it
    assert await scene.start() is None


async def test_a_channel_that_exists_is_moved_on_demand() -> None:
    scene = Scene(start={1: _FIRST}, start_existing=True)
    scene.channels.known = True
    assert [await scene.start(number) for number in (0, 1)] == [None, _FIRST]
    assert scene.channels.calls == []
    scene.assignments[1].opened += 1
    await scene.move(1)
    assert await scene.start(1) is None


async def test_a_seek_counts_more_than_the_start_position() -> None:
    scene = Scene(start=_FIRST)
    scene.assignments[0].pending = _LAST
    assert [await scene.start(), await scene.start()] == [_LAST, _LAST]


class Positions:
    """Positions that are looked up before each subscription."""

    def __init__(self, *found: Position | None) -> None:
        self.found = list(found)
        self.asked: list[tuple[object, ...]] = []

    async def start_of(self, topic: str, channel: str, partition: int, log: LogBounds) -> Position | None:
        self.asked.append((topic, channel, partition, log))
        return self.found.pop(0)


async def test_positions_that_are_looked_up_are_asked_for_each_time() -> None:
    positions = Positions(_FIRST, None, _FIRST)
    scene = Scene(start=positions)
    assert await scene.start() == _FIRST
    scene.assignments[0].pending = None
    assert await scene.start() is None
    scene.assignments[0].pending = _LAST
    assert await scene.start() == _LAST
    assert positions.asked == [("t", "ch", 0, LogBounds(0, 500))] * 3
    assert scene.channels.calls == [("log_bounds", _HTTP, "t", 0, "ch")] * 3


async def test_where_no_channel_can_be_moved() -> None:
    scene = Scene(start=_FIRST)
    with pytest.raises(PartitionUnavailable, match="does not name the HTTP address") as caught:
        await scene.start(view=PartitionMap("t", meta=TopicMeta(2), leaders={0: _NODE}))
    assert (caught.value.topic, caught.value.partition, caught.value.node) == ("t", 0, str(_NODE))
    scene.assignments[0] = Assignment(_NODE)
    with pytest.raises(InvalidSetting, match="the original NSQ has no start positions"):
        await scene.seeker.apply_start(scene.assignments[0], _VIEW, _NODE)


# Moves


async def test_messages_before_the_position_are_skipped_once_it_is_moved() -> None:
    scene = Scene()
    assignment, subscription = scene.assignments[0], scene.live[0]
    await scene.move(0)
    assert (scene.channels.calls, subscription.skipped) == ([], [])
    assignment.pending = _FIRST
    scene.channels.on_move = lambda: subscription.calls.append(f"moved, {len(subscription.skipped)} skipped")
    await scene.move(0)
    assert scene.channels.calls == [("move", _HTTP, "t", 0, "ch", "msgcount:0")]
    assert (subscription.skipped, subscription.calls) == ([_FIRST], ["moved, 1 skipped"])
    assert (scene.assignments[0].pending, assignment.moved.is_set()) == (None, True)


async def test_of_two_seeks_during_a_move_the_last_one_counts() -> None:
    scene = Scene()
    assignment = scene.assignments[0]
    assignment.pending = _FIRST

    def seek_again() -> None:
        if len(scene.channels.calls) == 1:
            assignment.pending = _LAST
            assert not assignment.moved.is_set()

    scene.channels.on_move = seek_again
    await scene.move(0)
    assert [call[-1] for call in scene.channels.calls] == [str(_FIRST), str(_LAST)]
    assert (scene.assignments[0].pending, assignment.moved.is_set()) == (None, True)


# Seeks


async def _seek(scene: Scene, *partitions: int, ended: list[object]) -> None:
    try:
        await scene.seeker.seek(_LAST, partitions or None)
    except InvalidState as error:
        ended.append(error.partition)
    else:
        ended.append("moved")


@pytest.mark.parametrize("partitions", [(), (1,), (0, 1)])
async def test_a_seek_ends_the_subscriptions_and_waits_for_the_moves(partitions: tuple[int, ...]) -> None:
    scene, ended = Scene(), list[object]()
    chosen = partitions or (0, 1)
    for assignment in scene.assignments.values():
        assignment.moved.set()
    del scene.live[0]  # it has no connection at the moment
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:

            async def seek() -> None:
                await _seek(scene, *partitions, ended=ended)

            tasks.start_soon(seek)
            await anyio.wait_all_tasks_blocked()
            assert scene.live[1].calls == ["close", "end"]
            assert scene.live[1].stopped
            assert [scene.assignments[number].pending for number in chosen] == [_LAST] * len(chosen)
            scene.live[0] = Open(0)
            for number in chosen:
                assert ended == []
                await scene.move(number)
                await anyio.wait_all_tasks_blocked()
    assert ended == ["moved"]


async def test_a_cancelled_seek_ends_all_subscriptions() -> None:
    scene = Scene()
    scene.live[0].hold = anyio.Event()
    with anyio.move_on_after(0.01) as scope:
        await scene.seeker.seek(_LAST, None)
    assert scope.cancelled_caught
    assert [one.calls for one in scene.live.values()] == [["end"]] * 2
    assert [one.stopped for one in scene.live.values()] == [True, True]
    assert [one.pending for one in scene.assignments.values()] == [_LAST] * 2


@asynccontextmanager
async def _waiting_seek(scene: Scene, ended: list[object]) -> AsyncIterator[None]:
    """A seek of a partition that waits for its move; its end is awaited."""

    async def seek() -> None:
        await _seek(scene, 1, ended=ended)

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(seek)
            await anyio.wait_all_tasks_blocked()
            yield


async def test_a_seek_fails_when_the_partition_is_given_up_before_the_move() -> None:
    scene, ended = Scene(), list[object]()
    async with _waiting_seek(scene, ended):
        scene.assignments[1].moved.set()
    assert ended == [1]


async def test_a_seek_whose_channel_was_moved_succeeds_though_another_seek_begins() -> None:
    scene, ended = Scene(), list[object]()
    assignment = scene.assignments[1]
    async with _waiting_seek(scene, ended):
        await scene.move(1)
        assignment.pending, assignment.moved = _FIRST, anyio.Event()  # before the first one continues
    assert ended == ["moved"]


async def test_a_move_ends_all_seeks_that_wait_for_it() -> None:
    scene, ended = Scene(), list[object]()
    async with _waiting_seek(scene, ended), _waiting_seek(scene, ended):
        await scene.move(1)
    assert ended == ["moved", "moved"]


async def test_a_seek_before_the_first_subscription_replaces_the_start_position() -> None:
    scene, ended = Scene(start=_FIRST), list[object]()
    assert await scene.start(1) == _FIRST
    async with _waiting_seek(scene, ended):
        scene.channels.known = True
        assert await scene.start(1) == _LAST
        await scene.move(1)
    assert ended == ["moved"]


async def test_partitions_that_cannot_be_moved_are_refused_before_anything_ends() -> None:
    scene = Scene()
    with pytest.raises(InvalidPartition, match="partition 2 is not consumed") as caught:
        await scene.seeker.seek(_LAST, [0, 2])
    assert caught.value.topic == "t"
    scene.assignments[_NODE] = Assignment(_NODE)
    with pytest.raises(InvalidSetting, match="cannot seek"):
        await scene.seeker.seek(_LAST, None)
    assert [one.calls for one in scene.live.values()] == [[], []]
    assert [one.pending for one in scene.assignments.values()] == [None] * 3


@pytest.mark.parametrize("partitions", [None, [2], [0, 2]])
async def test_a_seek_fails_and_moves_nothing_while_a_partition_has_had_no_leader(partitions: list[int] | None) -> None:
    scene = Scene()
    scene.view = evolve(_VIEW, meta=TopicMeta(3))
    with pytest.raises(PartitionUnavailable, match=r"no leader of partitions \[2\] so far; the channel was not moved"):
        await scene.seeker.seek(_LAST, partitions)
    assert [one.calls for one in scene.live.values()] == [[], []]
    scene.view = evolve(scene.view, filtered=((2, _NODE),))
    scene.seeker.chosen(None)  # what node_filter excludes is not consumed
    with pytest.raises(InvalidPartition):
        scene.seeker.chosen([2])
    scene.view = None
    scene.assignments.clear()
    with pytest.raises(PartitionUnavailable, match="no leader of any partition"):
        await scene.seeker.seek(_LAST, None)


async def test_a_seek_of_chosen_partitions_needs_no_leader_of_others() -> None:
    scene = Scene(partitions=(0, 1))
    scene.view = evolve(_VIEW, meta=TopicMeta(3))
    assert [one.key for one in scene.seeker.chosen(None)] == [0, 1]


def test_the_partition_of_an_assignment() -> None:
    assert [(Assignment(key).partition, str(Assignment(key))) for key in (0, 3, _NODE)] == [
        (0, "partition 0"),
        (3, "partition 3"),
        (None, "n:4150"),
    ]
