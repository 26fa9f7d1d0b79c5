"""Dead letters published to a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import anyio
import orjson
import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint

from nsqext import Producer, Reject
from nsqext.client.consumer.handlers.dead_letter import (
    DEAD_LETTER_PREFIX,
    FIRST_ADDED,
    HEADER_OF_ORIGINAL,
    DeadLetterTopic,
)
from nsqext.client.consumer.handlers.failure_policy import FailurePolicy
from nsqext.client.consumer.options import FailureOptions
from nsqext.client.consumer.subscriptions.early_messages import EarlyMessages
from nsqext.client.consumer.subscriptions.subscription_group import RejectedCounts
from nsqext.errors import InvalidState, LookupFailed, NsqError, TopicNotFound, TopicNotReady
from nsqext.errors.server import BadTopic
from nsqext.protocol.frames import encode_trace_reply
from nsqext.protocol.header_members import without_members
from nsqext.protocol.headers import MAX_STORED_HEADER
from nsqext.protocol.messages import EXT_JSON, EXT_NONE, EXT_TAG
from nsqext.types import TopicMeta
from tests.support.fake_nsqd import PLAIN, error, obey, ok, scripted_lookup, scripted_node
from tests.support.messages import RecordingOwner, make_message

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from tests.support.fake_nsqd import ScriptedNode

pytestmark = pytest.mark.anyio

_RECEIPT = encode_trace_reply(1, 7, 0, 34)


async def bury(*messages: Message, node: ScriptedNode, lookupd: str = "", error: Exception | None = None) -> None:
    """Publish messages as dead letters."""
    producer = Producer(lookupd, nsqd="" if lookupd else str(node), timeout=20.0)
    dead_letters = DeadLetterTopic("dead", "ch", producer)
    async with create_task_group() as tasks:
        tasks.start_soon(dead_letters.run)
        try:
            with anyio.fail_after(25):
                for message in messages:
                    await dead_letters.publish(message, error)
        finally:
            tasks.cancel_scope.cancel()


def sent(node: ScriptedNode) -> list[tuple[bytes, bytes]]:
    """Return the publishes: command and body."""
    return [(command.words[0], command.body or b"") for command in node.commands if b"PUB" in command.words[0]]


class _Meta:
    """A producer that answers questions about its topic."""

    def __init__(self, answer: TopicMeta | NsqError) -> None:
        self.answer = answer
        self.asked: list[str] = []

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def meta(self, topic: str) -> TopicMeta:
        self.asked.append(topic)
        if isinstance(self.answer, NsqError):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (TopicMeta(1), "dead letters will lose key, tag and headers, and cannot be replayed: the topic dead"),
        (TopicMeta(1, extend_support=True), None),
        (TopicMeta(), None),
        (TopicNotFound("no such topic"), "dead letters cannot be published: no such topic"),
        (TopicNotReady("no leader"), "dead letters cannot be published: no leader"),
        (LookupFailed("down"), None),
    ],
)
async def test_a_topic_that_keeps_no_letters_or_no_headers_is_reported_at_the_start(
    caplog: pytest.LogCaptureFixture, answer: TopicMeta | NsqError, text: str | None
) -> None:
    producer = _Meta(answer)
    async with create_task_group() as tasks:
        tasks.start_soon(DeadLetterTopic("dead", "ch", cast("Producer", producer)).run)
        for _ in range(5):
            await checkpoint()
        tasks.cancel_scope.cancel()
    assert producer.asked == ["dead"]
    assert [record.getMessage().partition(" does not")[0] for record in caplog.records] == (
        [] if text is None else [text]
    )


async def test_headers_are_dropped_if_the_target_does_not_support_them(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_lookup() as lookup, scripted_node(obey({"PUB_TRACE": ok(_RECEIPT)})) as node:
        lookup.set_leaders({0: node}, num=1)
        await bury(make_message(RecordingOwner(), headers={"a": "b"}, trace_id=7), node=node, lookupd=str(lookup))
        assert sent(node) == [(b"PUB_TRACE", bytes(7) + b"\x07body")]
        assert "cannot be replayed" in caplog.text


async def test_a_message_that_leaves_no_room_for_its_origin_is_published_as_it_is_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    long_header, long_body = (
        make_message(RecordingOwner()),
        make_message(RecordingOwner(), body=b"x" * ((1 << 20) - 14)),
    )
    long_header.version, long_header.header = EXT_JSON, b'{"a":"' + b"x" * (MAX_STORED_HEADER - 8) + b'"}'
    long_body.version, long_body.header = EXT_JSON, b'{"a": null}'
    for message in (long_header, long_body):
        async with scripted_lookup() as lookup, scripted_node(obey()) as node:
            lookup.set_leaders({0: node}, num=1, extend=True)
            await bury(message, node=node, lookupd=str(lookup))
            content = len(message.header).to_bytes(2) + message.header + message.body
            assert sent(node) == [(b"PUB_EXT", content)]
        assert "dead letter without origin, it cannot be replayed" in caplog.text
        caplog.clear()


async def test_a_message_that_the_server_refuses_with_its_origin_is_published_as_it_is_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusal = error("E_BAD_MESSAGE PUB_EXT message too big 1048600 > 1048576")
    async with scripted_lookup() as lookup, scripted_node(obey({"PUB_EXT": [refusal, ok()]})) as node:
        lookup.set_leaders({0: node}, num=1, extend=True)
        await bury(make_message(RecordingOwner(), headers={"a": "b"}), node=node, lookupd=str(lookup))
        (_, first), (_, second) = sent(node)
        assert b"dead-letter-topic" in first
        assert second == len(header := b'{"a":"b"}').to_bytes(2) + header + b"body"
    assert "dead letter without origin, it cannot be replayed" in caplog.text


async def test_a_dead_letter_without_headers_goes_to_the_partition_of_its_key() -> None:
    messages = [make_message(RecordingOwner(), key="k") for _ in range(2)]
    async with scripted_lookup() as lookup, scripted_node(obey()) as node:
        lookup.set_leaders({0: node, 1: node}, num=2)
        await bury(*messages, node=node, lookupd=str(lookup))
        places = [command.words[2] for command in node.commands if command.words[0] == b"PUB"]
        assert len(places) == 2
        assert places[0] == places[1]


@pytest.mark.parametrize("header", [b"", b'{"##trace_id":"7","a":"b"}'])
async def test_the_header_of_a_dead_letter_is_short_and_has_a_trace_id_once(header: bytes) -> None:
    message = make_message(RecordingOwner(), trace_id=7)
    message.version, message.header = EXT_JSON if header else EXT_NONE, header
    async with scripted_lookup() as lookup, scripted_node(obey({"PUB_EXT": ok(_RECEIPT)})) as node:
        lookup.set_leaders({0: node}, num=1, extend=True)
        await bury(message, node=node, lookupd=str(lookup), error=ValueError("x" * 5000))
        ((_, content),) = sent(node)
        assert content.count(b"##trace_id") == 1
        assert content.count(b"x") == 1000 - len("ValueError: ")


async def test_a_dead_letter_of_a_tag_alone_keeps_its_tag() -> None:
    message = make_message(RecordingOwner(), trace_id=7)
    message.version, message.header = EXT_TAG, b"red"
    async with scripted_lookup() as lookup, scripted_node(obey({"PUB_EXT": ok(_RECEIPT)})) as node:
        lookup.set_leaders({0: node}, num=1, extend=True)
        await bury(message, node=node, lookupd=str(lookup))
        ((_, content),) = sent(node)
    header = content[2 : 2 + int.from_bytes(content[:2])]
    members = orjson.loads(header)
    assert (header.count(b"##trace_id"), members["##trace_id"], members["##client_dispatch_tag"]) == (1, "7", "red")
    assert without_members(header, FIRST_ADDED, DEAD_LETTER_PREFIX, original=HEADER_OF_ORIGINAL) == (
        b'{"##client_dispatch_tag":"red","##trace_id":"7"}'
    )


async def test_a_dead_letter_of_the_original_nsq_has_the_body_alone() -> None:
    async with scripted_node(obey(), granted=PLAIN) as node:
        await bury(make_message(RecordingOwner(), trace_id=7), node=node)
        assert sent(node) == [(b"PUB", b"body")]


async def test_a_refusal_is_raised() -> None:
    async with scripted_node(obey({"PUB": error("E_BAD_TOPIC no")}), granted=PLAIN) as node:
        with pytest.raises(BaseExceptionGroup) as caught:
            await bury(make_message(RecordingOwner()), node=node)
        assert caught.group_contains(BadTopic, match="E_BAD_TOPIC no")


async def test_a_message_whose_dead_letter_has_an_unknown_outcome_is_requeued() -> None:
    """It is not known to be stored, so the message is kept: a second letter is better than none."""
    owner = RecordingOwner()
    async with scripted_node(obey({"PUB": None}), granted=PLAIN) as node:
        dead_letters = DeadLetterTopic("dead", "ch", Producer(nsqd=str(node), timeout=0.3, close_timeout=0.0))
        policy = FailurePolicy(FailureOptions(requeue_delay=0.0), dead_letters.publish, EarlyMessages, RejectedCounts())
        async with create_task_group() as tasks:
            tasks.start_soon(dead_letters.run)
            with anyio.fail_after(25):
                await policy.failed(make_message(owner), Reject("no"))
            tasks.cancel_scope.cancel()
        assert sent(node) == [(b"PUB", b"body")]
    assert owner.commands == ["REQ 1 0!"]


async def test_a_dead_letter_is_not_published_to_its_own_topic() -> None:
    """An app with a dead letter topic in its options may have a handler of that topic as well."""
    owner = RecordingOwner()
    owner.topic = "dead"
    async with scripted_node(obey(), granted=PLAIN) as node:
        with pytest.raises(BaseExceptionGroup) as caught:
            await bury(make_message(owner), node=node)
        assert caught.group_contains(InvalidState, match="of the dead letter topic was rejected")
        assert sent(node) == []
