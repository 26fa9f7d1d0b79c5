"""How a consumer claims, takes over and gives away the buckets of a partition, with connections of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
from anyio import create_task_group
from attrs import evolve, frozen

from nsqext.client.consumer.subscriptions import key_buckets as module
from nsqext.client.consumer.subscriptions.key_buckets import BucketWatch, KeyBuckets
from nsqext.errors import ConnectionLost, InvalidSetting, NsqError, PartitionUnavailable
from nsqext.types import Address
from tests.support.clock import replace_clock
from tests.support.stats import channel_stats, client_entry
from tests.support.subscriber_scene import make_context

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from nsqext.client.consumer.subscriptions.assignment import SubscriberContext
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.lookup.node_stats import PartitionChannelStats

pytestmark = pytest.mark.anyio

_NODE = Address("n", 1)
_A, _B, _SHARED = "keys-2-0", "keys-2-1", "keys-2-none"


@frozen
class Request:
    """What a subscription asks for."""

    tag: str = _SHARED
    client_id: str = "me"
    topic: str = "t"
    channel: str = "ch"
    partition: int = 3
    address: Address = _NODE
    key_tags: int = 2


class Connection:
    """A subscription; it lasts until `fail` or `close`."""

    def __init__(self, request: Request = Request(), error: NsqError | None = None) -> None:
        self.request, self.topic = request, request.topic
        self.ready = self.in_flight = 0
        self.max_ready = 50
        self.stopped = self.taking_over = False
        self.over = anyio.Event()
        self.error: NsqError | None = error
        self.calls: list[str] = []

    async def receive_beside(self, work: Callable[[TaskGroup], Coroutine[Any, Any, None]]) -> None:
        async with create_task_group() as tasks:
            tasks.start_soon(work, tasks)
            await self.over.wait()
            tasks.cancel_scope.cancel()
        if self.error is not None:
            raise self.error

    def set_ready(self, count: int) -> None:
        self.ready = count
        self.calls.append(f"RDY {count}")

    async def stop(self) -> None:
        self.stopped = True
        self.calls.append("CLS")

    async def close(self) -> None:
        self.stopped = True
        self.calls.append("close")
        self.fail(ConnectionLost("closed"))

    def fail(self, error: NsqError) -> None:
        self.error = error
        self.over.set()

    def end(self) -> None:
        self.calls.append("end")


class Scene:
    """The buckets of partition 3 of topic t, and what surrounds them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.member = Connection()
        self.member.ready = 1
        self.opened: dict[str, Connection] = {}
        self.earlier: list[dict[str, Any]] = []
        self.others: list[dict[str, Any]] = []
        self.changes: dict[str, Any] = changes
        self.refusals: list[NsqError] = []
        self.places: set[tuple[object, ...]] = set()
        self.looks = 0
        # as the group
        self.flow = SimpleNamespace(max_in_flight=10, paused=False)
        self.paused_topics: set[str] = set()
        self.backoff = object()
        self.log: list[str] = []
        self.forgotten: list[Connection] = []
        self.metadata = SimpleNamespace(channels=self)
        self.watch = BucketWatch()
        context = make_context(self, self.forgotten)
        self.subject = KeyBuckets(cast("Subscription", self.member), _NODE, context, self.watch)
        monkeypatch.setattr(module, "Subscription", self)
        for name in ("POLL", "TAKEOVER_POLL", "ANSWER_POLL"):
            monkeypatch.setattr(module, name, 0.001)

    async def channel(self, *place: object) -> PartitionChannelStats:
        """Return the statistics of the channel: the connections of this consumer, and those of others."""
        self.looks += 1
        self.places.add(place)
        if self.refusals:
            raise self.refusals.pop(0)
        mine = (
            client_entry("me", one.request.tag, ready_count=one.ready, in_flight_count=one.in_flight)
            for one in self.all_open()
        )
        return evolve(channel_stats(*self.earlier, *mine, *self.others), **self.changes)

    def all_open(self) -> list[Connection]:
        return [one for one in (self.member, *self.opened.values()) if not one.over.is_set()]

    async def open(self, request: Request, **_: Any) -> Connection:
        self.opened[request.tag] = Connection(request)
        return self.opened[request.tag]

    def add(self, one: Connection) -> None:
        self.log.append(f"add {one.request.tag}")

    def remove(self, one: Connection) -> None:
        self.log.append(f"remove {one.request.tag}")

    def retire(self, some: list[Connection]) -> None:
        self.log += [f"retire {one.request.tag}" for one in some]

    def flush(self) -> None:
        self.log.append("flush")

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that the buckets do."""
        with anyio.fail_after(25):
            while not condition():  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.001)

    @property
    def owned(self) -> list[str]:
        return sorted(one.request.tag or "" for one in self.subject.subscriptions)


@asynccontextmanager
async def _reading(scene: Scene) -> AsyncIterator[list[NsqError]]:
    """Share the buckets; yields why that ended."""
    reasons: list[NsqError] = []

    async def read() -> None:
        try:
            await scene.subject.read()
        except NsqError as error:
            reasons.append(error)

    async with create_task_group() as tasks:
        tasks.start_soon(read)
        yield reasons
        tasks.cancel_scope.cancel()


async def _shown(scene: Scene, looks: list[PartitionChannelStats]) -> list[NsqError]:
    """Show statistics one after the other to a consumer that cannot open connections; return why it ended, if so."""
    shown = iter(looks)
    over = anyio.Event()

    async def channel(*_: object) -> PartitionChannelStats:
        for found in shown:
            return found
        over.set()
        raise PartitionUnavailable("over")

    async def never(*_: object, **__: object) -> Connection:
        await anyio.sleep_forever()
        raise AssertionError

    with pytest.MonkeyPatch.context() as patch, anyio.fail_after(25):
        patch.setattr(module, "POLL", 0.0)
        patch.setattr(scene, "channel", channel)
        patch.setattr(scene, "open", never)
        async with _reading(scene) as reasons:
            await scene.until(lambda: over.is_set() or reasons)
    return reasons


def _other(tag: str, ready: int = 1, in_flight: int = 0, delivered: int = 0) -> dict[str, Any]:
    return client_entry("other", tag, ready_count=ready, message_count=delivered, in_flight_count=in_flight)


async def test_a_lone_consumer_takes_all_buckets_over_and_has_them_until_its_connection_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    async with _reading(scene) as reasons:
        await scene.until(lambda: {f"add {_A}", f"add {_B}"} <= {*scene.log})
        assert scene.owned == [_A, _B]
        assert scene.places == {(_NODE, "t", 3, "ch")}
        assert {tuple(one.calls) for one in scene.opened.values()} == {("RDY 5",)}, "an equal share of max_in_flight"
        assert {one.taking_over for one in scene.opened.values()} == {False}
        for tag in (_A, _B):
            assert scene.log[scene.log.index(f"add {tag}") + 1] == "flush"
        looks = scene.looks
        await scene.until(lambda: scene.looks > looks + 3)
        assert len(scene.opened) == 2
        first = scene.opened[_A]
        first.fail(ConnectionLost("lost"))
        await scene.until(lambda: scene.opened[_A] is not first and scene.owned == [_A, _B])
        assert (first.calls[-1], scene.forgotten) == ("end", [first])
        assert f"remove {_A}" in scene.log
        scene.member.fail(ConnectionLost("over"))
        await scene.until(lambda: reasons)
    assert str(reasons[0]).startswith("over")
    assert scene.owned == []
    assert sorted(one.request.tag for one in scene.forgotten) == [_A, _A, _B]


async def test_a_bucket_is_claimed_once_while_its_connection_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, connected, asked = Scene(monkeypatch), anyio.Event(), list[str]()
    open_one = scene.open

    async def slowly(request: Request, **members: Any) -> Connection:
        asked.append(request.tag)
        await connected.wait()
        return await open_one(request, **members)

    monkeypatch.setattr(scene, "open", slowly)
    async with _reading(scene):
        await scene.until(lambda: scene.looks > 3)
        assert sorted(asked) == [_A, _B]
        connected.set()
        await scene.until(lambda: {f"add {_A}", f"add {_B}"} <= {*scene.log})
    assert len(asked) == 2


async def test_a_bucket_of_another_consumer_is_claimed_when_that_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, depth=40, unread=10, in_flight=1)
    scene.others = [_other(_SHARED), _other(_A, ready=20)]
    async with _reading(scene):
        await scene.until(lambda: f"add {_B}" in scene.log)
        assert [*scene.opened] == [_B]
        scene.others = []
        await scene.until(lambda: f"add {_A}" in scene.log)
    assert scene.opened[_A].calls[0] == "RDY 20", "as many as the last owner may have in flight"
    assert scene.opened[_B].calls[0] == "RDY 5"


@pytest.mark.parametrize(("ready", "unread", "requested"), [(70, 0, 50), (20, 92, 8), (20, 98, 5), (3, 0, 5)])
async def test_the_first_request_covers_what_may_be_redelivered(
    monkeypatch: pytest.MonkeyPatch, ready: int, unread: int, requested: int
) -> None:
    scene = Scene(monkeypatch, depth=100, unread=unread, in_flight=1)
    scene.others = [_other(_A, ready=ready)]
    async with _reading(scene):
        await scene.until(lambda: _B in scene.opened)
        scene.others = []
        await scene.until(lambda: _A in scene.opened and scene.opened[_A].calls)
        assert scene.opened[_A].calls[0] == f"RDY {requested}"


async def test_of_two_that_claim_a_bucket_the_one_that_sees_the_other_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)

    async def opened_by_both(request: Request, **_: Any) -> Connection:
        if request.tag == _A and len(scene.opened) < 2:
            scene.others = [_other(_SHARED), _other(_A), _other(_B)]
        return await open_one(request)

    open_one = scene.open
    monkeypatch.setattr(scene, "open", opened_by_both)
    async with _reading(scene):
        await scene.until(lambda: scene.forgotten)
        left = scene.forgotten[0]
        assert (left.request.tag, left.calls) == (_A, ["close", "end"])
        assert _A not in scene.owned
        assert f"add {_A}" not in scene.log


async def test_a_bucket_that_cannot_be_looked_at_is_not_claimed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(monkeypatch)
    scene.refusals = [PartitionUnavailable("down")]
    open_one = scene.open

    async def opened(request: Request, **members: Any) -> Connection:
        if not scene.opened:
            assert "t/ch partition 3: the other consumers are not known: down" in caplog.text
            scene.refusals = [PartitionUnavailable("down again")]
        return await open_one(request, **members)

    monkeypatch.setattr(scene, "open", opened)
    async with _reading(scene):
        await scene.until(lambda: scene.forgotten)
        assert scene.forgotten[0].calls == ["close", "end"]
        assert "the other consumers are not known: down again" in caplog.text
        await scene.until(lambda: len(scene.owned) == 2)


async def test_a_bucket_that_another_consumer_claims_at_the_same_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    monkeypatch.setattr(module, "POLL", 60.0)

    async def open_beside_another(request: Request, **members: Any) -> Connection:
        if request.tag == _A:
            scene.earlier.append(_other(_A))
        return await Scene.open(scene, request, **members)

    monkeypatch.setattr(scene, "open", open_beside_another)
    async with _reading(scene):
        await scene.until(lambda: scene.forgotten and scene.owned == [_B])
        assert [(one.request.tag, one.calls) for one in scene.forgotten] == [(_A, ["close", "end"])]


async def test_a_bucket_is_given_away_after_its_messages_were_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    async with _reading(scene):
        await scene.until(lambda: {f"add {_A}", f"add {_B}"} <= {*scene.log})
        for one in scene.opened.values():
            one.in_flight = 1
        scene.log.clear()
        scene.others = [_other(_SHARED)]
        await scene.until(lambda: any("CLS" in one.calls for one in scene.opened.values()))
        looks = scene.looks
        await scene.until(lambda: scene.looks > looks + 3)
        (given,) = (one for one in scene.opened.values() if "CLS" in one.calls)
        assert given.calls == ["RDY 5", "CLS"]
        assert scene.log == [f"retire {given.request.tag}", "flush"]
        scene.others.append(_other(given.request.tag))
        given.in_flight = 0
        await scene.until(lambda: scene.forgotten)
        assert given.calls == ["RDY 5", "CLS", "close", "end"]
        assert scene.log[2:4] == ["flush", "flush"]
        assert len(scene.owned) == 1


async def test_a_bucket_that_is_released_during_its_takeover_is_left_without_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, paused=True)
    async with _reading(scene):
        await scene.until(lambda: len(scene.owned) == 2)
        scene.others = [_other(_SHARED)]
        await scene.until(lambda: scene.forgotten)
        assert scene.forgotten[0].calls == ["RDY 5", "close", "end"]
        assert scene.forgotten[0].taking_over
        scene.others.append(_other(scene.forgotten[0].request.tag))
        assert not any(line.startswith("add") for line in scene.log)


async def test_a_consumer_that_leaves_the_topic_claims_no_bucket_and_gives_each_away_when_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    scene.others = [_other(_SHARED), _other(_B)]
    async with _reading(scene):
        await scene.until(lambda: f"add {_A}" in scene.log)
        given = scene.opened[_A]
        given.in_flight = 1
        scene.subject.leave()
        scene.others = []  # the owner of the other bucket is gone
        await scene.until(lambda: "CLS" in given.calls)
        looks = scene.looks
        await anyio.sleep(0.02)
        assert (scene.looks, [*scene.opened], scene.owned) == (looks, [_A], [_A])
        given.in_flight = 0
        await scene.until(lambda: scene.forgotten == [given])
    assert given.calls == ["RDY 5", "CLS", "close", "end"]


async def test_a_consumer_that_leaves_the_topic_while_it_claims_a_bucket_requests_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    open_one = scene.open

    async def open_while_it_leaves(request: Request, **members: Any) -> Connection:
        scene.subject.leave()
        return await open_one(request, **members)

    monkeypatch.setattr(scene, "open", open_while_it_leaves)
    async with _reading(scene):
        await scene.until(lambda: len(scene.forgotten) == 2)
    assert [one.calls for one in scene.forgotten] == [["close", "end"], ["close", "end"]]


async def test_more_is_requested_during_a_takeover_while_nothing_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, paused=True)
    async with _reading(scene):
        await scene.until(lambda: len(scene.owned) == 2)
        one, two = scene.opened[_A], scene.opened[_B]
        one.in_flight = 5
        await scene.until(lambda: one.ready == 10)
        looks = scene.looks
        await scene.until(lambda: scene.looks > looks + 3)
        assert (one.calls, two.calls) == (["RDY 5", "RDY 10"], ["RDY 5"])
        one.in_flight = 50
        await scene.until(lambda: one.ready == 50)
        scene.changes = {}
        one.in_flight = 49
        await scene.until(lambda: f"add {_A}" in scene.log)


async def test_during_a_takeover_one_bucket_looks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, paused=True)
    monkeypatch.setattr(module, "POLL", 60.0)
    replace_clock(monkeypatch, lambda: 1000.0)  # they have just looked
    async with _reading(scene):
        await scene.until(lambda: len(scene.owned) == 2)
        for one in scene.opened.values():
            one.in_flight = 50
        await scene.until(lambda: [one.ready for one in scene.opened.values()] == [50, 50])
        assert scene.looks == 3, "one before two claims, and one for each"


async def test_a_takeover_ends_after_five_looks_at_which_the_server_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_TAKEOVER", 20.0)
    scene = Scene(monkeypatch, paused=True)
    async with _reading(scene):
        await scene.until(lambda: len(scene.owned) == 2)
        scene.changes = {}
        before = scene.looks
        await scene.until(lambda: f"add {_A}" in scene.log)
        assert scene.looks - before >= 5


async def test_a_takeover_that_takes_too_long_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LONGEST_TAKEOVER", 0.02)
    scene = Scene(monkeypatch, paused=True)
    async with _reading(scene):
        await scene.until(lambda: {f"add {_A}", f"add {_B}"} <= {*scene.log})
    assert f"have held back those of {_A}" in caplog.text


@pytest.mark.parametrize(
    ("topics", "most", "requested"), [(("t",), 10, []), (("u",), 10, ["RDY 5"]), ((), 1, ["RDY 2"])]
)
async def test_nothing_is_requested_of_a_bucket_while_its_topic_is_paused(
    monkeypatch: pytest.MonkeyPatch, topics: tuple[str, ...], most: int, requested: list[str]
) -> None:
    scene = Scene(monkeypatch)
    scene.flow.max_in_flight = most
    scene.paused_topics.update(topics)
    async with _reading(scene):
        await scene.until(lambda: len(scene.owned) == 2)
        looks = scene.looks
        await scene.until(lambda: scene.looks > looks + 3)
        assert [one.calls for one in scene.opened.values()] == [requested, requested]


async def test_a_pause_during_a_takeover_does_not_end_what_was_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, paused=True)
    scene.flow.paused = True
    async with _reading(scene):
        await scene.until(lambda: len(scene.owned) == 2)
        one, two = scene.opened[_A], scene.opened[_B]
        looks = scene.looks
        await scene.until(lambda: scene.looks > looks + 3)
        assert (one.calls, two.calls) == ([], [])
        two.ready = two.in_flight = 7
        await scene.until(lambda: two.ready > 7)
        assert (one.ready, two.calls[0]) == (0, "RDY 12")


_READY = (_other(_A), _other(_B))


@pytest.mark.parametrize(
    ("found", "blocked"),
    [
        (channel_stats(*_READY, depth=1), True),
        (channel_stats(*_READY, depth=1, delayed_queue_count=1), True),
        (channel_stats(*_READY, depth=0), False),
        (channel_stats(*_READY, depth=1, in_flight_count=1), False),
        (channel_stats(*_READY, depth=1, deferred_count=1), False),
        (channel_stats(*_READY, depth=1, paused=True), False),
        (channel_stats(_other(_A), _other(_B, ready=0), depth=1), False),
        (channel_stats(_other(_A), _other(_SHARED), depth=1), False),
    ],
)
async def test_a_partition_that_delivers_nothing_ends_a_consumer_whose_buckets_never_worked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: PartitionChannelStats, blocked: bool
) -> None:
    interrupted = [*[found] * 3, channel_stats(), *[found] * 4]
    for looks, refused in (([found] * 4, False), (interrupted, False), ([found] * 5, blocked)):
        assert bool(await _shown(Scene(monkeypatch), looks)) is refused
    assert "no message is delivered" not in caplog.text
    worked = Scene(monkeypatch)
    assert await _shown(worked, [channel_stats(_other(_A, delivered=1)), *[found] * 65]) == []
    assert worked.watch.worked
    assert caplog.text.count("no message is delivered, and 1 wait") == 2 * blocked
    for looks, logged in (([found] * 4, 0), ([found] * 5, 1), ([found] * 64, 1)):
        caplog.clear()
        again = Scene(monkeypatch)
        again.watch.worked = True
        assert await _shown(again, looks) == []
        assert caplog.text.count("no message is delivered, and 1 wait") == logged * blocked


async def test_a_refusal_ends_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, depth=1)
    async with _reading(scene) as reasons:
        await scene.until(lambda: reasons)
    (error,) = reasons
    assert isinstance(error, InvalidSetting)
    assert (error.topic, error.partition, error.node) == ("t", 3, "n:1")
    assert "no message was ever delivered, and 1 wait" in str(error)


async def test_other_numbers_of_buckets_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(monkeypatch)
    await _shown(scene, [channel_stats(*_READY, _other("keys-4-1"), _other("blue"), _other(""))] * 2)
    assert caplog.text.count("other consumers have key_tags=4, and this consumer 2") == 1
    assert caplog.text.count("other consumers have") == 1


def test_the_address_of_the_node_is_needed() -> None:
    with pytest.raises(InvalidSetting, match="key_tags needs the HTTP addresses of nodes"):
        KeyBuckets(cast("Subscription", Connection()), None, cast("SubscriberContext", None), BucketWatch())
