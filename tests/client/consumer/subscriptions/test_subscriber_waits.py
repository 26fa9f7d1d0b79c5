"""What a subscriber waits for: the first partition, the next attempt, the end of its topic."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from attrs import evolve

from nsqext.client.consumer.message import KeySharing
from nsqext.client.consumer.subscriptions import key_buckets
from nsqext.client.consumer.subscriptions import subscriber as module
from nsqext.errors import (
    ConnectionFailed,
    ConnectionLost,
    InvalidState,
    LookupFailed,
    LookupUnreachable,
    NsqError,
)
from nsqext.errors.server import TopicNotExist
from nsqext.types import TopicMeta
from tests.support.clock import replace_clock
from tests.support.sleeps import recorded_sleeps, settled
from tests.support.subscriber_scene import NODE, Connection, Scene, running_subscriber, texts_with, view_of

if TYPE_CHECKING:
    from nsqext.lookup.partition_map import PartitionMap

pytestmark = pytest.mark.anyio


_UNREACHABLE, _WRONG, _CLOSED = LookupUnreachable("down"), LookupFailed("wrong"), InvalidState("closed")
_NONE, _FILTERED, _ONE = view_of(), evolve(view_of(), filtered=((0, NODE),)), view_of(NODE)


@pytest.mark.parametrize(
    ("answers", "lookup_timeout", "pauses", "reason"),
    [
        ([_ONE], 0.0, 0, None),
        ([_NONE, _ONE], 0.0, 1, "no partition has a leader"),
        ([_FILTERED, _NONE, _ONE], 0.0, 2, "node_filter leaves out every node"),
        ([_UNREACHABLE, _UNREACHABLE, view_of(nodes=(NODE,), meta=TopicMeta())], 60.0, 2, "down"),
        ([_UNREACHABLE], 0.0, 0, None),
        ([_WRONG], 60.0, 0, None),
        ([_NONE, _WRONG, _UNREACHABLE, _ONE], 0.0, 3, "no partition has a leader"),
        ([TopicNotExist("E_TOPIC_NOT_EXIST"), _WRONG, _ONE], 0.0, 2, "E_TOPIC_NOT_EXIST"),
    ],
)
async def test_the_first_partition_is_waited_for_unless_no_lookup_service_answers(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answers: list[PartitionMap | NsqError],
    lookup_timeout: float,
    pauses: int,
    reason: str | None,
) -> None:
    slept, attempts = recorded_sleeps(monkeypatch), list[tuple[float, int]]()

    def pause(wait: float, longest: float, failures: int) -> float:
        attempts.append((longest, failures))
        return 0.25

    monkeypatch.setattr(module, "pause_after", pause)
    last = answers[-1]
    async with anyio.create_task_group() as tasks:
        scene = Scene(tasks, _ONE, False, {"lookup_timeout": lookup_timeout, "max_reconnect_wait": 30.0})
        scene.view, scene.answers = None, list(answers)
        monkeypatch.setattr(module, "Subscription", scene)
        if isinstance(last, NsqError):
            with pytest.raises(type(last)):
                await scene.subject.run()
        else:
            tasks.start_soon(scene.subject.run)
            (connection,) = await scene.connections(1)
            assert connection.request.meta == last.meta
            tasks.cancel_scope.cancel()
    assert (slept.count(0.25), attempts) == (pauses, [(1.0, number + 1) for number in range(pauses)])
    assert texts_with(caplog, "waiting for a partition") == (
        [] if reason is None else [f"waiting for a partition to subscribe to: {reason}"]
    )


async def test_the_wait_for_the_first_partition_ends_with_the_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_sleeps(monkeypatch)
    scene = Scene(None, _NONE, False, {})
    scene.answers = [_NONE, _CLOSED]

    async def resolve(topic: str, access: str) -> PartitionMap:
        scene.subject.closing = len(scene.answers) == 1
        return await ask(topic, access)

    ask = scene.resolve
    monkeypatch.setattr(scene, "resolve", resolve)
    for _ in range(2):
        await scene.subject.run()
    assert (scene.opened, scene.answers) == ([], [])


async def test_pauses_grow_until_a_subscription_was_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    now, attempts = [1000.0], list[tuple[int, NsqError | None]]()

    def pause(wait: float, longest: float, failures: int, error: NsqError | None) -> float:
        attempts.append((failures, error))
        return 0.0

    replace_clock(monkeypatch, lambda: now[0])
    monkeypatch.setattr(module, "pause_after", pause)
    down, lost = ConnectionFailed("down"), ConnectionLost("lost")
    async with running_subscriber(monkeypatch, view_of(NODE), down, down) as scene:
        scene.lookup_refusals = [_WRONG]
        for seconds in (0.0, 5.0, 5.1, 0.0):
            connection = (await scene.connections(len(scene.opened) or 1))[-1]
            now[0] += seconds
            count = len(scene.opened)
            connection.fail(lost)
            await scene.connections(count + 1)
    assert attempts == [(2, down), (3, down), (4, lost), (5, lost), (1, lost), (2, lost)]


async def test_a_lookup_that_fails_is_logged_unless_the_consumer_closes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_subscriber(monkeypatch, view_of(NODE)) as scene:
        scene.lookup_refusals = [_WRONG]
        scene.opened[0].fail(ConnectionLost("lost"))
        await scene.connections(2)
        assert texts_with(caplog, "lookup failed") == ["lookup failed: wrong"]

        async def refresh(*_: object) -> None:
            scene.subject.closing = True
            raise _CLOSED

        monkeypatch.setattr(scene, "refresh", refresh)
        scene.opened[1].fail(ConnectionLost("lost"))
        with anyio.fail_after(20):
            while not scene.subject.closing:  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.001)
        await settled()
        assert (len(scene.opened), len(texts_with(caplog, "lookup failed"))) == (2, 1)


async def test_the_messages_of_a_partition_are_forgotten_when_its_keys_are_shared_in_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nsqext.consumer")
    shared: list[object] = []

    class Buckets:
        subscriptions = ()

        def __init__(self, member: Connection, http: object, *_: object) -> None:
            self.member = member
            shared.append(http)

        async def read(self) -> None:
            await self.member.receive()

    kinds = iter((KeySharing.SERVER, KeySharing.SERVER, KeySharing.TAGS, KeySharing.TAGS))
    made = Connection.__init__

    def make(connection: Connection, *arguments: Any) -> None:
        made(connection, *arguments)
        connection.key_sharing = next(kinds)

    monkeypatch.setattr(Connection, "__init__", make)
    monkeypatch.setattr(key_buckets, "KeyBuckets", Buckets)
    async with running_subscriber(monkeypatch, view_of(NODE), dispatch="key_failover") as scene:
        for count in (1, 2, 3):
            (await scene.connections(count))[-1].fail(ConnectionLost("lost"))
        _, second, third, fourth = await scene.connections(4)
        assert scene.forgotten == [second, third], "the last one by the server; the bucket of an ended connection"
        assert shared == [NODE, NODE]
        fourth.live = False
        await scene.subject.close()
        assert fourth.closes == 0
    texts = texts_with(caplog, "consumers share the keys")
    assert [text.partition("keys ")[2] for text in texts] == ["by the server", "by the server"]
