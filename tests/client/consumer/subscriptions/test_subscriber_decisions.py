"""What a subscriber does after each kind of end of a subscription, with connections and lookup of the test."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
from anyio.lowlevel import checkpoint

from nsqext import Position
from nsqext.client.consumer.options import BackoffOptions, ConsumerOptions, FailureOptions
from nsqext.client.consumer.subscriptions import subscriber as module
from nsqext.client.consumer.subscriptions.rdy_distributor import Backoff
from nsqext.client.consumer.subscriptions.subscriber import Subscriber
from nsqext.dispatch.buckets import KeySharing
from nsqext.errors import (
    ConnectionFailed,
    ConnectionLost,
    InvalidPartition,
    InvalidSetting,
    LookupFailed,
    NegotiationFailed,
    NsqError,
)
from nsqext.errors.server import AuthFailed, BadTopic, ExtendRequired, NotLeader, OrderRequired
from nsqext.lookup.partition_map import PartitionMap
from nsqext.types import Address, TopicMeta
from tests.support.sleeps import recorded_sleeps

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.assignment import SubscriberContext
    from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest

pytestmark = pytest.mark.anyio

_N, _M = Address("n", 1), Address("m", 1)


def _view(*leaders: Address, meta: TopicMeta | None = None, nodes: tuple[Address, ...] = ()) -> PartitionMap:
    return PartitionMap(
        "t", meta=meta or TopicMeta(len(leaders)), leaders=dict(enumerate(leaders)), nodes=nodes, http={_N: _N, _M: _M}
    )


class Connection:
    """A subscription; it lasts until `end` or `fail`."""

    def __init__(self, request: SubscribeRequest, backoff: Backoff) -> None:
        self.request, self.backoff = request, backoff
        self.partition, self.node = request.partition, str(request.address)
        self.number = self.in_flight = 0
        self.live, self.stopped = True, False
        self.key_sharing = KeySharing.NONE
        self.over = anyio.Event()
        self.error: NsqError | None = ConnectionLost("closed")
        self.closes = 0

    async def receive(self) -> None:
        try:
            await self.over.wait()
        finally:
            self.live = False
        if self.error is not None:
            raise self.error

    def fail(self, error: NsqError) -> None:
        self.error = error
        self.over.set()

    def end(self) -> None:
        self.live = False
        self.over.set()

    async def close(self) -> None:
        self.closes += 1
        self.stopped = True
        self.end()

    def skip_to(self, position: Position) -> None:
        pass


class Scene:
    """A subscriber of topic t, and what surrounds it."""

    def __init__(self, tasks: Any, view: PartitionMap, discovered: bool, settings: dict[str, Any]) -> None:
        self.view: PartitionMap | None = view
        self.refusals: list[NsqError] = []
        self.opened: list[Connection] = []
        self.refreshed: list[int | None] = []
        self.unknown = False
        self.failed: list[NsqError] = []
        self.events: list[tuple[object, ...]] = []
        self.retired: list[Connection] = []
        self.added: list[Connection] = []
        self.flushes = self.reconnects = 0
        self.others = 1
        self.unwatched = 0
        self.changed: Callable[[PartitionMap], None] = lambda view: None
        self.backoff = Backoff(BackoffOptions())
        self.channels = self
        given = {"reconnect_wait": 0.0001, "max_reconnect_wait": 0.0002, "close_timeout": 5.0, **settings}
        self.options = ConsumerOptions(**given)
        context = SimpleNamespace(
            channel="ch",
            options=self.options,
            group=self,
            metadata=self,
            events=SimpleNamespace(emit=lambda *event: self.events.append(event)),
            tasks=tasks,
            deliver=None,
            forget=lambda subscription: None,
            wants=lambda key: self.options.partitions is None or key in self.options.partitions,
        )
        self.subject = Subscriber("t", cast("SubscriberContext", context), self.failed.append, discovered=discovered)

    # As the metadata

    def watch(self, topic: str, access: str, changed: Callable[[PartitionMap], None]) -> Callable[[], None]:
        self.changed = changed

        def unwatch() -> None:
            self.unwatched += 1

        return unwatch

    def cached(self, topic: str, access: str) -> PartitionMap | None:
        return self.view

    def is_unknown(self, topic: str, access: str) -> bool:
        return self.unknown

    async def refresh(self, topic: str, access: str, view: PartitionMap, suspect: int | None) -> None:
        self.refreshed.append(suspect)

    async def clients(self, *place: object) -> int:
        return self.others

    # As the group

    def add(self, connection: Connection) -> None:
        self.added.append(connection)

    def remove(self, connection: Connection) -> bool:
        return connection in self.added

    def retire(self, connections: list[Connection]) -> None:
        self.retired += connections

    def flush(self) -> None:
        self.flushes += 1

    async def open(self, request: SubscribeRequest, *, backoff: Backoff, **_: Any) -> Connection:
        if self.refusals:
            raise self.refusals.pop(0)
        self.opened.append(Connection(request, backoff))
        return self.opened[-1]

    def moved(self, view: PartitionMap) -> None:
        """Let lookup answer something else."""
        self.view = view
        self.changed(view)

    async def connections(self, count: int) -> list[Connection]:
        """Wait until so many subscriptions were opened."""
        while len(self.opened) < count:  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.001)
        await anyio.wait_all_tasks_blocked()
        return self.opened


@asynccontextmanager
async def _scene(
    monkeypatch: pytest.MonkeyPatch, view: PartitionMap, *refusals: NsqError, discovered: bool = False, **settings: Any
) -> AsyncIterator[Scene]:
    """Run a subscriber."""
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            scene = Scene(tasks, view, discovered, settings)
            scene.refusals = list(refusals)
            monkeypatch.setattr(module, "Subscription", scene)
            tasks.start_soon(scene.subject.run)
            await anyio.wait_all_tasks_blocked()
            yield scene
            tasks.cancel_scope.cancel()


def _texts(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


async def test_each_partition_is_subscribed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nsqext.consumer")
    async with _scene(monkeypatch, _view(_N, _M, _N)) as scene:
        assert sorted((one.partition, one.node) for one in scene.opened) == [(0, "n:1"), (1, "m:1"), (2, "n:1")]
        assert {one.number for one in scene.opened} == {1}
        assert scene.subject.started.is_set()
        (text,) = _texts(caplog, "subscribed to")
        first, *others = (f"{one.partition}" for one in scene.opened if one.node == "n:1")
        assert f"n:1 (partitions {first}, {others[0]})" in text
        assert "m:1 (partitions 1)" in text
        assert scene.events == [("connected", "t", one.partition, one.node) for one in scene.opened]
        assert (scene.flushes, scene.reconnects, scene.subject.idle) == (3, 0, False)
        scene.moved(_view(_N, _M, _N, _M))
        await scene.connections(4)
        assert scene.opened[-1].partition == 3
        assert len(_texts(caplog, "partition 3 at m:1: subscribed")) == 1
        scene.subject.forget()
        assert scene.unwatched == 1


async def test_only_the_chosen_partitions_are_subscribed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _scene(monkeypatch, _view(_N, _M, _N), partitions=(1, 2)) as scene:
        assert sorted(one.partition for one in scene.opened) == [1, 2]
    for view, kind in ((_view(_N), InvalidPartition), (_view(nodes=(_N,), meta=TopicMeta()), InvalidSetting)):
        scene = Scene(None, view, False, {"partitions": (1,)})
        with pytest.raises(kind):
            await scene.subject.run()
    Scene(None, _view(_N), False, {"partitions": (1,)}).subject._check_partitions(_view(_N, meta=TopicMeta()))


async def test_a_subscription_ends_when_its_leader_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _scene(monkeypatch, _view(_N, _N)) as scene:
        first, second = sorted(scene.opened, key=lambda one: one.partition)
        scene.moved(_view(_N, _N))
        await anyio.wait_all_tasks_blocked()
        assert first.live
        scene.events.clear()
        scene.moved(_view(_M, _N))
        await scene.connections(3)
        assert (first.live, first.stopped, second.live) == (False, True, True)
        assert (scene.opened[2].node, scene.opened[2].number, scene.reconnects) == ("m:1", 2, 1)
        assert scene.events == [
            ("leader_moved", "t", 0, "m:1", "was n:1"),
            ("disconnected", "t", 0, "n:1", "closed"),
            ("connected", "t", 0, "m:1"),
        ]


@pytest.mark.parametrize(
    ("meta", "ends"), [(TopicMeta(1, extend_support=True), True), (TopicMeta(), False), (TopicMeta(1), False)]
)
async def test_a_subscription_ends_when_its_topic_was_upgraded(
    monkeypatch: pytest.MonkeyPatch, meta: TopicMeta, ends: bool
) -> None:
    async with _scene(monkeypatch, _view(_N)) as scene:
        scene.moved(_view(_N, meta=meta))
        await anyio.wait_all_tasks_blocked()
        assert scene.opened[0].stopped is ends
        if ends:
            await scene.connections(2)
            assert scene.opened[1].request.meta == meta


async def test_a_partition_without_leader_is_given_up_until_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _scene(monkeypatch, _view(_N)) as scene:
        assignment = scene.subject._assignments[0]
        scene.view = _view()
        scene.opened[0].fail(ConnectionLost("x"))
        while not scene.subject.idle:  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.001)
        assert (assignment.moved.is_set(), scene.refreshed) == (True, [None])
        scene.moved(_view(_M))
        await scene.connections(2)
        assert (scene.opened[1].number, scene.subject.vanished) == (1, False)


@pytest.mark.parametrize("discovered", [True, False])
async def test_a_found_topic_that_lookup_does_not_know_any_more_is_given_up(
    monkeypatch: pytest.MonkeyPatch, discovered: bool
) -> None:
    async with _scene(monkeypatch, _view(_N), discovered=discovered) as scene:
        scene.unknown = True
        scene.opened[0].fail(ConnectionLost("x"))
        if discovered:
            while not scene.subject.idle:  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.001)
        else:
            await scene.connections(2)
        assert scene.subject.vanished is discovered


async def test_errors_that_end_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _scene(monkeypatch, _view(_N)) as scene:
        error = BadTopic("E_BAD_TOPIC")
        scene.opened[0].fail(error)
        await anyio.wait_all_tasks_blocked()
        assert (scene.failed, len(scene.opened)) == ([error], 1)
        assert scene.subject._assignments[0].moved.is_set()
    async with _scene(monkeypatch, _view(_N), AuthFailed("E_AUTH_FAILED")) as scene:
        assert [type(error) for error in scene.failed] == [AuthFailed]
    async with _scene(monkeypatch, _view(_N)) as scene:
        scene.opened[0].fail(AuthFailed("E_AUTH_FAILED"))
        await scene.connections(2)
        assert scene.failed == []


async def test_wrong_addresses_end_the_consumer_once_all_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = NegotiationFailed("no nsqd")
    async with _scene(monkeypatch, _view(_N, _M), wrong, wrong) as scene:
        assert scene.failed == [wrong]
    async with _scene(monkeypatch, _view(_N, _M), wrong) as scene:
        await scene.connections(2)
        for connection in list(scene.opened):
            connection.fail(wrong)
        await scene.connections(4)
        assert scene.failed == []
    async with _scene(monkeypatch, _view(_N), ConnectionFailed("down")) as scene:
        await scene.connections(1)
        assert scene.failed == []


@pytest.mark.parametrize(
    ("error", "suspect"),
    [(NotLeader("E_FAILED_ON_NOT_LEADER"), 0), (ConnectionLost("x"), None), (LookupFailed("x"), None)],
)
async def test_lookup_is_asked_for_the_partition_that_a_node_does_not_lead(
    monkeypatch: pytest.MonkeyPatch, error: NsqError, suspect: int | None
) -> None:
    async with _scene(monkeypatch, _view(_N), error) as scene:
        await scene.connections(1)
        assert scene.refreshed == [suspect]
    nodes = _view(nodes=(_N,), meta=TopicMeta())
    async with _scene(monkeypatch, nodes, error) as scene:
        await scene.connections(1)
        assert scene.refreshed == [None]
        assert scene.opened[0].partition == -1


async def test_a_topic_that_has_changed_is_subscribed_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = recorded_sleeps(monkeypatch)
    stale = ExtendRequired("E_SUB_EXTEND_NEED")
    async with _scene(monkeypatch, _view(_N), stale) as scene:
        while not scene.opened:
            await checkpoint()
        assert pauses == []
        assert scene.opened[0].request.meta.extend_support
    pauses.clear()
    async with _scene(monkeypatch, _view(_N), stale, stale, stale) as scene:
        while not scene.opened:
            await checkpoint()
        assert len(pauses) == 2


async def test_what_a_server_requires_is_reported_once_and_counts_more_than_lookup(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    order = OrderRequired("E_SUB_ORDER_IS_MUST")
    async with _scene(monkeypatch, _view(_N), order, order) as scene:
        await scene.connections(1)
        assert scene.opened[0].request.ordered
    assert len(_texts(caplog, "the server requires what lookup does not report")) == 1
    caplog.clear()
    ordered = TopicMeta(1, ordered=True)
    async with _scene(monkeypatch, _view(_N, meta=ordered), order) as scene:
        await scene.connections(1)
    assert _texts(caplog, "the server requires what lookup does not report") == []
    async with _scene(monkeypatch, _view(_N), order, ordered=False) as scene:
        await anyio.wait_all_tasks_blocked()
        assert [type(error) for error in scene.failed] == [InvalidSetting]
        assert scene.failed[0].__cause__ is order


async def test_failures_of_a_partition_are_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module, "_clock", lambda: now[0])
    down = [ConnectionFailed("down")] * 3
    async with _scene(monkeypatch, _view(_N), *down) as scene:
        await scene.connections(1)
        assert len(_texts(caplog, "subscription ended: down")) == 1
        caplog.clear()
        scene.opened[0].fail(ConnectionLost("lost"))
        await scene.connections(2)
        assert _texts(caplog, "subscription ended") == []
        scene.opened[1].fail(ConnectionLost("again"))  # it had worked meanwhile
        await scene.connections(3)
        (text,) = _texts(caplog, "subscription ended")
        assert text == "t/ch partition 0 at n:1: subscription ended: again (and 3 earlier failures)"
        assignment = scene.subject._assignments[0]
        for seconds, logged in ((0.0, 1), (0.0, 1), (59.9, 1), (0.2, 2)):
            now[0] += seconds
            scene.subject._warn(assignment, ConnectionFailed("late"), "n:1")
            assert len(_texts(caplog, "late")) == logged
        assert _texts(caplog, "late")[1].endswith("late (and 2 earlier failures)")


async def test_a_seek_subscribes_again_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _scene(monkeypatch, _view(_N)) as scene:
        assignment, first = scene.subject._assignments[0], scene.opened[0]
        moves: list[object] = []

        async def move(*place: object) -> None:
            moves.append(place[-1])

        scene.move = move  # type: ignore[attr-defined]
        assignment.pending = Position.latest()
        first.stopped = True
        first.end()
        await scene.connections(2)
        assert (moves, scene.refreshed) == ([str(Position.latest())], [])


@pytest.mark.parametrize(("mode", "own"), [("connection", True), ("consumer", False)])
async def test_whose_backoff_counts(monkeypatch: pytest.MonkeyPatch, mode: Any, own: bool) -> None:
    async with _scene(monkeypatch, _view(_N), backoff=BackoffOptions(mode=mode)) as scene:
        assert (scene.opened[0].backoff is not scene.backoff) is own


@pytest.mark.parametrize(
    ("meta", "settings", "text"),
    [
        (TopicMeta(2), {"tag": "red"}, "does not support tags"),
        (TopicMeta(2, ordered=True), {"failure": FailureOptions(max_attempts=3)}, "max_attempts has no effect"),
        (
            TopicMeta(2, ordered=True),
            {"failure": FailureOptions(max_attempts=3, dead_letter="d")},
            "max_attempts and dead_letter has no effect",
        ),
        (TopicMeta(2), {"key": "k"}, "2 further connections consume t/ch"),
        (TopicMeta(2, extend_support=True), {"tag": "red"}, None),
        (TopicMeta(2, ordered=True), {"failure": FailureOptions(max_attempts=3, reject_ordered=True)}, None),
        (TopicMeta(2), {"failure": FailureOptions(max_attempts=3)}, None),
        (TopicMeta(2, ordered=True), {"key": "k"}, None),
    ],
)
async def test_settings_without_effect_are_logged_once(
    monkeypatch: pytest.MonkeyPatch,
    meta: TopicMeta,
    settings: dict[str, Any],
    text: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened = Scene.__init__

    def many(scene: Scene, *arguments: Any) -> None:
        opened(scene, *arguments)
        scene.others = 3

    monkeypatch.setattr(Scene, "__init__", many)
    async with _scene(monkeypatch, _view(_N, meta=meta), **settings) as scene:
        scene.opened[0].fail(ConnectionLost("lost"))
        await scene.connections(2)
    warnings = [one.getMessage() for one in caplog.records if "subscription ended" not in one.getMessage()]
    assert [text in warning for warning in warnings] == [True] if text is not None else warnings == []


async def test_a_topic_that_is_left_waits_for_answers_and_then_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _scene(monkeypatch, _view(_N, _M)) as scene:
        one, two = scene.opened
        two.in_flight = 1
        ended: list[bool] = []

        async def leave() -> None:
            await scene.subject.leave()
            ended.append(True)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            await anyio.sleep(0.05)
            assert (scene.retired, ended, one.closes) == ([one, two], [], 0)
            two.in_flight = 0
        assert (one.closes, two.closes, scene.subject.closing) == (1, 1, True)
        assert all(assignment.moved.is_set() for assignment in scene.subject._assignments.values())
        assert scene.refreshed == []
        scene.changed(_view(_M, _M))
        await scene.subject.run()
        assert len(scene.opened) == 2
    async with _scene(monkeypatch, _view(_N), close_timeout=0.02) as scene:
        scene.opened[0].in_flight = 1
        await scene.subject.leave()
        assert scene.opened[0].closes == 1
