"""What a subscriber does after each kind of end of a subscription, with connections and lookup of the test."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from nsqext import ExtFilter, Position
from nsqext.client.consumer.message import KeySharing
from nsqext.client.consumer.options import BackoffOptions, FailureOptions
from nsqext.client.consumer.subscriptions import key_buckets
from nsqext.client.consumer.subscriptions.assignment import STABLE, Assignment
from nsqext.errors import (
    ConnectionFailed,
    ConnectionLost,
    FrameTooLarge,
    InvalidPartition,
    InvalidSetting,
    InvalidState,
    LookupFailed,
    NegotiationFailed,
    NsqError,
)
from nsqext.errors.server import AuthFailed, BadTopic, ExtendRequired, NotLeader, OrderRequired
from nsqext.lookup.partition_map import PartitionMap
from nsqext.transport.options import ConnectionOptions
from nsqext.types import TopicMeta
from tests.support.clock import replace_clock
from tests.support.consumers import eventually
from tests.support.sleeps import recorded_sleeps, settled
from tests.support.subscriber_scene import NODE, OTHER, Connection, Scene, running_subscriber, texts_with, view_of

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest

pytestmark = pytest.mark.anyio

_RED = ExtFilter(1, "colour", "red")
_LOST = ConnectionLost("lost")


async def test_each_consumer_with_a_given_name_can_be_told_from_the_others_of_this_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = set[str]()
    for _ in range(2):
        async with running_subscriber(
            monkeypatch, view_of(NODE), connection=ConnectionOptions(client_id="billing")
        ) as scene:
            (connection,) = await scene.connections(1)
            names.add(connection.request.client_id)
    assert {name.rpartition("-")[0] for name in names} == {"billing"}
    assert len(names) == 2


async def test_each_partition_is_subscribed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nsqext.consumer")
    async with running_subscriber(monkeypatch, view_of(NODE, OTHER, NODE)) as scene:
        assert sorted((one.partition, one.node) for one in scene.opened) == [(0, "n:1"), (1, "m:1"), (2, "n:1")]
        assert {one.number for one in scene.opened} == {1}
        assert scene.subject.started.is_set()
        (text,) = texts_with(caplog, "subscribed to")
        first, *others = (f"{one.partition}" for one in scene.opened if one.node == "n:1")
        assert f"n:1 (partitions {first}, {others[0]})" in text
        assert "m:1 (partitions 1)" in text
        assert scene.emitted == [("connected", "t", one.partition, one.node) for one in scene.opened]
        assert (scene.flushes, scene.reconnects, scene.subject.idle) == (1, 0, False)
        scene.moved(view_of(NODE, OTHER, NODE, OTHER))
        await scene.connections(4)
        assert scene.opened[-1].partition == 3
        assert len(texts_with(caplog, "partition 3 at m:1: subscribed")) == 1
        scene.subject.forget()
        assert scene.unwatched == 1


async def test_only_the_chosen_partitions_are_subscribed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE, OTHER, NODE), partitions=(1, 2)) as scene:
        assert {one.partition for one in scene.opened} == {1, 2}
        assert len(scene.opened) == 2
    for view, kind, text in (
        (view_of(NODE), InvalidPartition, "partition 1 does not exist: the last is 0"),
        (view_of(nodes=(NODE,), meta=TopicMeta()), InvalidSetting, "original"),
    ):
        scene = Scene(None, view, False, {"partitions": (0, 1)})
        with pytest.raises(kind, match=text):
            await scene.subject.run()


async def test_a_subscription_ends_when_its_leader_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE, NODE)) as scene:
        first, second = sorted(scene.opened, key=lambda one: one.partition or 0)
        for view in (view_of(NODE, NODE), PartitionMap("t", meta=TopicMeta(2), leaders={1: NODE}, http={})):
            scene.moved(view)
            await settled()
            assert first.live
        scene.emitted.clear()
        scene.moved(view_of(OTHER, NODE))
        await scene.connections(3)
        assert (first.live, first.stopped, second.live) == (False, True, True)
        assert (scene.opened[2].node, scene.opened[2].number, scene.reconnects) == ("m:1", 2, 1)
        assert scene.emitted == [
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
    async with running_subscriber(monkeypatch, view_of(NODE)) as scene:
        scene.moved(view_of(NODE, meta=meta))
        await settled()
        assert scene.opened[0].stopped is ends
        if ends:
            await scene.connections(2)
            assert scene.opened[1].request.meta == meta


async def test_what_servers_required_of_a_topic_is_not_required_of_the_next_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE), OrderRequired("E_SUB_ORDER_IS_MUST")) as scene:
        await scene.connections(1)
        scene.moved(view_of(NODE, meta=TopicMeta(1, ordered=True)))
        scene.moved(view_of(NODE))
        await scene.connections(2)
        assert [one.request.ordered for one in scene.opened] == [True, False]


async def test_a_partition_without_leader_is_given_up_until_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE)) as scene:
        scene.view = view_of()
        scene.opened[0].fail(ConnectionLost("x"))
        while not scene.subject.idle:  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.001)
        assert scene.refreshed == [None]
        scene.moved(view_of(OTHER))
        await scene.connections(2)
        assert (scene.opened[1].number, scene.subject.vanished) == (1, False)


async def test_a_node_of_the_original_that_lacks_the_topic_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nsqext.consumer")
    async with running_subscriber(monkeypatch, view_of(nodes=(NODE, OTHER))) as scene:
        one, other = sorted(await scene.connections(2), key=lambda connection: connection.node, reverse=True)
        assert scene.asked == 0, "lookup has just listed it"
        scene.lacking = {NODE}
        one.fail(ConnectionLost("the topic was deleted"))
        other.fail(ConnectionLost("the node was restarted"))
        await scene.connections(3)
        await eventually(lambda: scene.asked > 5)
        assert [connection.node for connection in scene.opened[2:]] == [str(OTHER)]
        text = "waiting until lookup lists the node and the node has the topic"
        assert caplog.text.count(text) == 1
        scene.lacking = set()
        await scene.connections(4)
        scene.lacking = {NODE}
        scene.opened[3].fail(ConnectionLost("closed"))
        await eventually(lambda: caplog.text.count(text) == 2)
        scene.moved(view_of(nodes=(OTHER,)))
        scene.lacking = set()
        await anyio.sleep(0.02)
        assert (len(scene.opened), scene.subject.idle) == (4, False)


@pytest.mark.parametrize("discovered", [True, False])
async def test_a_found_topic_that_lookup_does_not_know_any_more_is_given_up(
    monkeypatch: pytest.MonkeyPatch, discovered: bool
) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE), discovered=discovered) as scene:
        scene.unknown = True
        scene.opened[0].fail(ConnectionLost("x"))
        if discovered:
            while not scene.subject.idle:  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.001)
        else:
            await scene.connections(2)
        assert scene.subject.vanished is discovered
        assert scene.forgotten == (scene.opened if discovered else []), "or their order would stay for ever"


async def test_errors_that_end_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE)) as scene:
        error = BadTopic("E_BAD_TOPIC")
        scene.opened[0].fail(error)
        await settled()
        assert (scene.failed, len(scene.opened), scene.opened[0].ends) == ([error], 1, 1)
    async with running_subscriber(monkeypatch, view_of(NODE), AuthFailed("E_AUTH_FAILED")) as scene:
        assert [type(error) for error in scene.failed] == [AuthFailed]
    async with running_subscriber(monkeypatch, view_of(NODE)) as scene:
        scene.opened[0].fail(AuthFailed("E_AUTH_FAILED"))
        await scene.connections(2)
        assert scene.failed == []


async def test_wrong_addresses_end_the_consumer_once_all_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = NegotiationFailed("no nsqd")
    async with running_subscriber(monkeypatch, view_of(NODE, OTHER), wrong, wrong) as scene:
        assert scene.failed == [wrong]
    async with running_subscriber(monkeypatch, view_of(NODE, OTHER), wrong) as scene:
        await scene.connections(2)
        for connection in list(scene.opened):
            connection.fail(wrong)
        await scene.connections(4)
        assert scene.failed == []
    async with running_subscriber(monkeypatch, view_of(NODE), ConnectionFailed("down")) as scene:
        await scene.connections(1)
        assert scene.failed == []


@pytest.mark.parametrize(
    ("error", "suspect"),
    [(NotLeader("E_FAILED_ON_NOT_LEADER"), 0), (ConnectionLost("x"), None), (LookupFailed("x"), None)],
)
async def test_lookup_is_asked_for_the_partition_that_a_node_does_not_lead(
    monkeypatch: pytest.MonkeyPatch, error: NsqError, suspect: int | None
) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE), error) as scene:
        await scene.connections(1)
        assert scene.refreshed == [suspect]
    nodes = view_of(nodes=(NODE,), meta=TopicMeta())
    async with running_subscriber(monkeypatch, nodes, error) as scene:
        await scene.connections(1)
        assert (scene.refreshed, scene.asked) == ([], 1)
        assert scene.opened[0].partition is None


async def test_a_topic_that_has_changed_is_subscribed_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = recorded_sleeps(monkeypatch)
    stale = ExtendRequired("E_SUB_EXTEND_NEED")
    async with running_subscriber(monkeypatch, view_of(NODE), stale) as scene:
        while not scene.opened:
            await checkpoint()
        assert pauses == []
        assert scene.opened[0].request.meta.extend_support
    pauses.clear()
    async with running_subscriber(monkeypatch, view_of(NODE), stale, stale, stale) as scene:
        while not scene.opened:
            await checkpoint()
        assert len(pauses) == 2


async def test_what_a_server_requires_is_reported_once_and_counts_more_than_lookup(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    order = OrderRequired("E_SUB_ORDER_IS_MUST")
    async with running_subscriber(monkeypatch, view_of(NODE), order, order) as scene:
        await scene.connections(1)
        assert scene.opened[0].request.ordered
    assert len(texts_with(caplog, "the server requires what lookup does not report")) == 1
    caplog.clear()
    ordered = TopicMeta(1, ordered=True)
    async with running_subscriber(monkeypatch, view_of(NODE, meta=ordered), order) as scene:
        await scene.connections(1)
    assert texts_with(caplog, "the server requires what lookup does not report") == []
    async with running_subscriber(monkeypatch, view_of(NODE), order, ordered=False) as scene:
        await settled()
        (error,) = scene.failed
        assert (type(error), error.__cause__) == (InvalidSetting, order)
        assert "leave out ordered=False" in str(error)


async def test_failures_of_a_partition_are_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    replace_clock(monkeypatch, lambda: now[0])
    down = [ConnectionFailed("down")] * 3
    async with running_subscriber(monkeypatch, view_of(NODE), *down) as scene:
        await scene.connections(1)
        assert len(texts_with(caplog, "subscription ended: down")) == 1
        caplog.clear()
        scene.opened[0].fail(ConnectionLost("lost"))
        await scene.connections(2)
        assert texts_with(caplog, "subscription ended") == []
        scene.opened[1].fail(ConnectionLost("again"))  # it had worked meanwhile
        await scene.connections(3)
        (text,) = texts_with(caplog, "subscription ended")
        assert text == "t/ch partition 0 at n:1: subscription ended: again (and 3 earlier failures)"

        async def refuse(*_: object, **__: object) -> Connection:
            while not late:  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.001)
            raise late.pop()

        late: list[NsqError] = []
        monkeypatch.setattr(scene, "open", refuse)
        scene.opened[2].fail(ConnectionLost("lost"))
        for seconds, logged in ((0.0, 0), (59.9, 0), (0.2, 1)):
            now[0] += seconds
            late.append(ConnectionFailed("late"))
            await eventually(lambda: not late)
            await settled()
            assert len(texts_with(caplog, "late")) == logged
        assert texts_with(caplog, "late")[0].endswith("late (and 2 earlier failures)")


async def test_a_node_that_comes_back_and_refuses_the_settings_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = 0

    async def refuse(*_: object, **__: object) -> Connection:
        nonlocal refusals
        refusals += 1
        raise NegotiationFailed("no snappy")

    async with running_subscriber(monkeypatch, view_of(NODE)) as scene:
        await scene.connections(1)
        monkeypatch.setattr(scene, "open", refuse)
        scene.opened[0].fail(ConnectionLost("lost"))
        await eventually(lambda: refusals > 2)
    assert [text.rpartition(": ")[2] for text in texts_with(caplog, "subscription ended")] == ["lost", "no snappy"]


async def test_a_seek_subscribes_again_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE)) as scene:
        moves: list[object] = []

        async def move(*place: object) -> None:
            moves.append(place[-1])

        monkeypatch.setattr(scene, "move", move, raising=False)
        await scene.subject.seeker.seek(Position.latest(), None)
        await scene.connections(2)
        assert (moves, scene.refreshed) == ([str(Position.latest())], [])


async def test_a_move_is_known_until_a_message_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE), reconnect_wait=0.001) as scene:
        scene.opened[0].moved = True
        for received, start, moved in ((0, None, True), (1, Position.latest(), True), (1, None, False)):
            last = scene.opened[-1]
            last.received, last.start = received, start
            last.fail(ConnectionLost("x"))
            assert (await scene.connections(len(scene.opened) + 1))[-1].moved is moved


@pytest.mark.parametrize("end", ["partition", "error", "topic"])
async def test_a_seek_ends_with_its_partition(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE)) as scene:
        moving = anyio.Event()

        async def move(*_: object) -> None:
            moving.set()
            await anyio.sleep_forever()

        monkeypatch.setattr(scene, "move", move, raising=False)
        if end == "partition":
            scene.view = view_of()
        elif end == "error":
            scene.refusals = [BadTopic("E_BAD_TOPIC")]
        async with anyio.create_task_group() as tasks:
            if end == "topic":
                tasks.start_soon(_leave_after, scene, moving)
            with pytest.raises(InvalidState, match="before the channel could be moved"):
                await scene.subject.seeker.seek(Position.latest(), None)


async def _leave_after(scene: Scene, moving: anyio.Event) -> None:
    await moving.wait()
    await scene.subject.leave()


@pytest.mark.parametrize(("mode", "own"), [("connection", True), ("consumer", False)])
async def test_whose_backoff_counts(monkeypatch: pytest.MonkeyPatch, mode: Any, own: bool) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE), backoff=BackoffOptions(mode=mode)) as scene:
        assert (scene.opened[0].backoff is not scene.backoff) is own


@pytest.mark.parametrize(
    ("meta", "settings", "text"),
    [
        (TopicMeta(2), {"tag": "red"}, "does not support tags and headers: tag has no effect"),
        (TopicMeta(2), {"ext_filter": _RED}, "does not support tags and headers: ext_filter has no effect"),
        (TopicMeta(2, ordered=True), {"failure": FailureOptions(max_attempts=3)}, "max_attempts has no effect"),
        (
            TopicMeta(2, ordered=True),
            {"failure": FailureOptions(max_attempts=3, dead_letter="d")},
            "max_attempts and dead_letter has no effect",
        ),
        (TopicMeta(2), {"key": "k"}, "2 further connections consume t/ch"),
        (TopicMeta(2, extend_support=True), {"tag": "red"}, None),
        (TopicMeta(2, extend_support=True), {"ext_filter": _RED}, None),
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
    async with running_subscriber(monkeypatch, view_of(NODE, meta=meta), **settings) as scene:
        scene.opened[0].fail(ConnectionLost("lost"))
        await scene.connections(2)
    warnings = [one.getMessage() for one in caplog.records if "subscription ended" not in one.getMessage()]
    assert [text in warning for warning in warnings] == [True] if text is not None else warnings == []


async def test_a_topic_that_is_left_waits_for_answers_and_then_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE, OTHER)) as scene:
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
        scene.subject.forget_messages()
        assert scene.forgotten in ([one, two], [two, one])  # trio opens them in any order
        assert scene.refreshed == []
        scene.changed(view_of(OTHER, OTHER))
        await scene.subject.run()
        assert len(scene.opened) == 2
    async with running_subscriber(monkeypatch, view_of(NODE), close_timeout=0.02) as scene:
        scene.opened[0].in_flight = 1
        await scene.subject.leave()
        assert scene.opened[0].closes == 1
        flushes = scene.flushes
        await scene.subject.close()
        assert scene.flushes == flushes + 1, "answers are sent first"


async def test_a_partition_that_lookup_removes_does_not_delay_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Scene.open

    async def open_first(scene: Scene, request: SubscribeRequest, **members: Any) -> Connection:
        if request.partition == 1:
            raise ConnectionLost("its node is down")
        return await opened(scene, request, **members)

    monkeypatch.setattr(Scene, "open", open_first)
    async with running_subscriber(monkeypatch, view_of(NODE, OTHER)) as scene:
        await scene.connections(1)
        assert not scene.subject.started.is_set()
        scene.moved(view_of(NODE))
        await scene.subject.started.wait()


async def test_a_long_message_blocks_its_partition_until_a_subscription_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]

    def now() -> float:
        clock[0] += 0.001
        return clock[0]

    replace_clock(monkeypatch, now)
    async with running_subscriber(monkeypatch, view_of(NODE)) as scene:
        counts = [len(scene.subject.blocked)]
        for seconds, error in ((0.0, FrameTooLarge("a long message")), (1.0, _LOST), (10.0, _LOST)):
            clock[0] += seconds
            number = len(scene.opened)
            scene.opened[-1].fail(error)
            await scene.connections(number + 1)
            counts.append(len(scene.subject.blocked))
        assert counts == [0, 1, 1, 0]


def test_a_partition_is_stable_some_seconds_after_a_subscription_that_has_not_ended() -> None:
    assignment, moments = Assignment(0), (100.0, 100.0 + STABLE, 101.0 + STABLE)
    assignment.opened_at = 100.0
    assert [assignment.is_stable(now) for now in moments] == [False, False, True]
    assignment.ended_at = 102.0
    assert not any(assignment.is_stable(now) for now in moments)


async def test_a_topic_that_is_left_gives_its_buckets_away_and_closes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, owned, left = Scene.open, list[Connection](), list[str]()

    class Buckets:
        """The buckets of a partition, of which this consumer owns one."""

        def __init__(self, member: Connection, *_: object) -> None:
            self._member = member
            self.subscriptions = owned
            owned.append(Connection(member.request, member.backoff))

        async def read(self) -> None:
            await self._member.receive()

        def leave(self) -> None:
            left.append("before the close" if not owned[0].closes else "behind it")

    async def open_member(scene: Scene, request: SubscribeRequest, **members: Any) -> Connection:
        connection = await opened(scene, request, **members)
        connection.key_sharing = KeySharing.TAGS
        return connection

    monkeypatch.setattr(Scene, "open", open_member)
    monkeypatch.setattr(key_buckets, "KeyBuckets", Buckets)
    async with running_subscriber(monkeypatch, view_of(NODE)) as scene:
        (member,) = await scene.connections(1)
        await scene.subject.leave()
        assert scene.retired == [member, *owned]
        assert [one.closes for one in (member, *owned)] == [1, 1]
        assert left == ["before the close"]
