"""The batches of a call: which errors are raised as they are, what waits for a key, and what is not sent."""

from __future__ import annotations

import time
from collections import Counter
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext import BatchFailed, OutgoingMessage, PublishFailed, Receipt
from nsqext.client.producer import batch_publisher
from nsqext.client.producer.batch_publisher import BatchPublisher
from nsqext.client.producer.keys import KeyLock, Place
from nsqext.client.producer.publishing import Publishing
from nsqext.errors import (
    ExtendNotSupported,
    InvalidBody,
    InvalidName,
    InvalidPartition,
    LookupUnreachable,
    NotLookupd,
    NsqError,
    TopicNotFound,
    TopicNotReady,
)
from nsqext.errors.server import BadMessage
from nsqext.types import TopicMeta
from tests.support.commands import multi_items
from tests.support.publish_bench import Bench

if TYPE_CHECKING:
    from nsqext.client.producer.batch import Batch

pytestmark = pytest.mark.anyio


class Calls:
    """Calls with routes and connections of the test."""

    def __init__(self, *outcomes: bytes | NsqError, **settings: Any) -> None:
        self.bench = Bench(*outcomes, **settings)
        self.lock = KeyLock()
        self.publisher = BatchPublisher(self.bench.sender, self.lock)

    async def publish(self, *messages: bytes | OutgoingMessage, topic: str = "t", **members: Any) -> list[Receipt]:
        """Publish messages in one call; no key is in use afterwards."""
        try:
            with anyio.fail_after(25):
                return await self.publisher.publish(
                    Publishing(topic=topic, messages=list(messages), batch=True, **members)
                )
        finally:
            assert len(self.lock) == 0

    @property
    def sent(self) -> list[tuple[str, str]]:
        """Node and verb of each command."""
        return [(node, command.split(b" ")[0].decode()) for node, command, _ in self.bench.connections.commands]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (TopicNotReady("no channel"), TopicNotReady),
        (TopicNotFound("no topic"), TopicNotFound),
        (NotLookupd("a web page"), NotLookupd),
        (BadMessage("E_BAD_MESSAGE"), BatchFailed),
    ],
)
async def test_errors_of_lookup_are_raised_as_they_are(error: NsqError, raised: type[NsqError]) -> None:
    calls = Calls(error if raised is BatchFailed else b"OK")
    if raised is not BatchFailed:  # the topic has no route any more when the batch is sent
        seen = iter([calls.bench.routes.made])
        calls.bench.routes.current = lambda topic: next(seen, None)  # type: ignore[method-assign]
        calls.bench.routes.answers = [error]
        calls.bench.routes.waits = False
    with pytest.raises(raised) as caught:
        await calls.publish(b"a", b"b")
    assert type(caught.value) is raised


@pytest.mark.parametrize(
    ("known", "arguments", "kind"),
    [
        (False, {"topic": "a b"}, InvalidName),
        (False, {"topic": 5}, InvalidName),
        (False, {"key": "k", "partition": 0}, InvalidPartition),
        (True, {"key": "k", "partition": 0}, InvalidPartition),
        (False, {"partition": -1}, InvalidPartition),
        (True, {"partition": -1}, InvalidPartition),
    ],
)
async def test_a_call_that_is_not_valid_asks_and_sends_nothing(
    known: bool, arguments: dict[str, Any], kind: type[NsqError]
) -> None:
    calls = Calls()
    calls.bench.routes.known = known
    calls.bench.routes.answers = [LookupUnreachable("down")]
    with pytest.raises(kind):
        await calls.publish(b"a", **arguments)
    assert (calls.sent, len(calls.bench.routes.answers)) == ([], 1)


@pytest.mark.parametrize("key", [None, "1"])
async def test_a_call_without_messages_sends_nothing(key: str | None) -> None:
    calls = Calls()
    assert await calls.publish(key=key) == []
    assert calls.sent == []


async def test_messages_of_several_partitions_are_a_batch_for_each() -> None:
    calls = Calls()
    messages = [OutgoingMessage(b"%d" % number, key=str(number)) for number in range(4)]
    receipts = await calls.publish(*messages)
    assert [receipt.partition for receipt in receipts] == [0, 1, 0, 1]
    assert sorted(calls.sent) == [("n0:1", "MPUB"), ("n1:1", "MPUB")]
    calls = Calls(max_batch_count=1)
    assert len(await calls.publish(b"1", b"2", partition=1)) == 2
    assert calls.sent == [("n1:1", "MPUB")] * 2


async def test_what_follows_a_batch_that_failed_is_not_sent() -> None:
    calls = Calls(b"OK", BadMessage("E_BAD_MESSAGE"), max_batch_count=2)
    with pytest.raises(BatchFailed) as caught:
        await calls.publish(*[b"x"] * 7, partition=0)
    assert [type(one) for one in caught.value.outcomes] == [Receipt] * 2 + [BadMessage] * 2 + [PublishFailed] * 3
    assert isinstance(caught.value.outcomes[-1], PublishFailed)
    assert isinstance(caught.value.outcomes[-1].__cause__, BadMessage)
    assert calls.bench.counts == (2, 0)


@pytest.mark.parametrize("known", [True, False])
async def test_a_call_waits_for_earlier_publishes_of_its_key(known: bool) -> None:
    calls = Calls()
    calls.bench.routes.known = known
    assert calls.lock.try_enter(("t", b"1"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: calls.publish(b"x", key="1"))
        await anyio.wait_all_tasks_blocked()
        await anyio.sleep(0.001)  # a timeout that has passed already would end the wait
        assert calls.sent == []
        calls.lock.leave(("t", b"1"))
    assert calls.sent == [("n1:1", "MPUB")]


async def test_the_wait_for_a_key_ends_with_the_time_of_the_call() -> None:
    calls = Calls(timeout=0.01)
    assert calls.lock.try_enter(("t", b"1"))
    with anyio.fail_after(25), pytest.raises(PublishFailed, match="earlier publishes of its key"):
        await calls.publisher.publish(Publishing(topic="t", messages=[b"x"], batch=True, key="1"))
    calls.lock.leave(("t", b"1"))
    assert (calls.sent, len(calls.lock)) == ([], 0)


async def test_a_key_that_the_caller_has_is_not_waited_for() -> None:
    calls = Calls()
    assert calls.lock.try_enter(("t", b"1"))
    call = Publishing(topic="t", messages=[OutgoingMessage(b"x", key="1")], batch=True, entered=[("t", b"1")])
    with anyio.fail_after(25):
        assert len(await calls.publisher.publish(call)) == 1
    assert len(calls.lock) == 1


@pytest.mark.parametrize("upgraded", [True, False])
async def test_headers_ask_lookup_whether_the_topic_was_upgraded(upgraded: bool) -> None:
    calls = Calls()
    routes = calls.bench.routes
    routes.upgrades = [upgraded]
    asked: list[object] = []

    async def find(topic: str) -> Any:
        asked.append(topic)
        if len(asked) > 1:
            routes.meta = TopicMeta(2, extend_support=True)
            return routes.renewed()
        return routes.made

    routes.find = find  # type: ignore[method-assign]
    message = OutgoingMessage(b"x", headers={"a": "b"})
    if upgraded:
        assert len(await calls.publish(message)) == 1
        assert [verb for _, verb in calls.sent] == ["MPUB_EXT"]
        return
    with pytest.raises(ExtendNotSupported, match="message 0"):
        await calls.publish(message)
    assert (routes.asked, calls.sent) == ([("upgraded", 0)], [])


async def test_an_invalid_message_is_found_before_lookup_is_asked_only_where_the_topic_is_known() -> None:
    calls = Calls()
    for known in (True, False):
        calls.bench.routes.known = known
        with pytest.raises(InvalidBody, match="message 1"):
            await calls.publish(b"x", b"")
    assert calls.sent == []


async def test_only_the_messages_that_an_outdated_plan_left_are_published_again() -> None:
    calls = Calls(b"OK", ExtendNotSupported("created again"), b"OK")
    calls.bench.routes.upgrades = [False]
    messages = [OutgoingMessage(b"%d" % number, key=str(number)) for number in range(6)]
    receipts = await calls.publish(*messages)
    assert [receipt.partition for receipt in receipts] == [0, 1, 0, 1, 0, 1]
    first, refused, again = (
        multi_items(command.partition(b"\n")[2][4:]) for _, command, _ in calls.bench.connections.commands
    )
    assert (again, calls.bench.counts) == (refused, (6, 1))
    assert sorted(first + again) == [b"%d" % number for number in range(6)]


async def test_what_the_first_plan_has_stored_is_known_when_the_rest_is_refused_again() -> None:
    calls = Calls(b"OK", ExtendNotSupported("created again"), BadMessage("E_BAD_MESSAGE"))
    calls.bench.routes.upgrades = [False]
    with pytest.raises(BatchFailed) as caught:
        await calls.publish(*(OutgoingMessage(b"x", key=str(number)) for number in range(6)))
    assert Counter(map(type, caught.value.outcomes)) == {Receipt: 3, BadMessage: 3}


async def test_the_first_node_decides_about_headers_of_a_topic_without_metadata() -> None:
    calls = Calls(meta=TopicMeta())
    first, _ = calls.bench.routes.made.targets
    first.node.redesigned = True  # the other node is of the original NSQ
    assert len(await calls.publish(OutgoingMessage(b"x", {"a": "b"}), partition=0)) == 1


async def test_nothing_is_published_again_if_a_batch_failed_for_another_reason() -> None:
    keyed = [OutgoingMessage(b"x", key=str(number)) for number in range(2)]
    refused, gone = BadMessage("E_BAD_MESSAGE"), InvalidPartition("created again with fewer partitions")
    for outcomes, messages, partition in (
        ([ExtendNotSupported("created again"), refused], keyed, None),
        ([gone], [b"x"], 0),  # the caller has chosen it
    ):
        calls = Calls(*outcomes, b"OK")
        calls.bench.routes.upgrades = [False]
        with pytest.raises(BatchFailed) as caught:
            await calls.publish(*messages, partition=partition)
        assert {type(one) for one in caught.value.outcomes} == set(map(type, outcomes))
        assert len(calls.sent) == len(outcomes)


async def test_the_time_of_a_later_batch_begins_when_the_batch_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, clock, started = Calls(max_batch_count=1), [100.0], list[float]()

    async def publish(batch: Batch) -> list[Receipt]:
        started.append(batch.started)
        clock[0] += 5.0
        return [Receipt("t", 0, "n0:1")]

    monkeypatch.setattr(batch_publisher, "_clock", lambda: clock[0])
    monkeypatch.setattr(calls.bench.sender, "publish", publish)
    await calls.publish(b"a", b"b", b"c", partition=0)
    assert started == [100.0, 105.0, 110.0]


async def test_a_key_is_waited_for_in_the_time_that_lookup_left(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, began, times = Calls(timeout=30.0), time.monotonic(), list[float]()
    clock = chain([began], repeat(began + 4.0))

    async def enter(self: Place, timeout: float) -> None:
        times.append(timeout)

    monkeypatch.setattr(batch_publisher, "_clock", lambda: next(clock))
    monkeypatch.setattr(Place, "enter", enter)
    await calls.publish(b"x", key="1")
    assert times == [pytest.approx(26.0)]
