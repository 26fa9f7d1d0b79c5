"""Many messages in one call: batches, an outcome for each, and nothing sent if one is invalid."""

from __future__ import annotations

from typing import Any

import pytest

from nsqext import (
    BatchFailed,
    OutgoingMessage,
    Producer,
    Receipt,
)
from nsqext.errors import ExtendNotSupported, InvalidBody, InvalidInput
from nsqext.errors.server import BadMessage
from nsqext.middleware import Middleware, Publishing, SendNext
from tests.support.commands import ext_body, multi_body
from tests.support.fake_nsqd import (
    PLAIN,
    error,
    obey,
    scripted_node,
)
from tests.support.producers import bodies, bounded, producing, quick_direct

pytestmark = pytest.mark.anyio


async def test_bodies_with_trace_ids_are_one_traced_batch() -> None:
    async with producing({}) as (producer, (node,), _):
        receipts = await producer.publish_many("t", [b"a", b"bc"], trace_ids=[5, 0])
        assert [receipt.trace_id for receipt in receipts] == [5, 0]
        with pytest.raises(InvalidInput, match="1 trace ids were given for 2 messages"):
            await producer.publish_many("t", [b"a", b"bc"], trace_ids=[5])
        with pytest.raises(InvalidInput, match="message 0: a body must be bytes"):
            await producer.publish_many("t", [OutgoingMessage(b"a")], trace_ids=[5])
        with pytest.raises(InvalidInput, match="message 1"):
            await producer.publish_many("t", [b"a", b"bc"], trace_ids=[5, -1])
    assert len(bodies(node, "MPUB_TRACE")) == 1


async def test_bodies_with_headers_are_one_batch_with_headers() -> None:
    async with producing({}, extend=True) as (producer, (node,), _):
        receipts = await producer.publish_many("t", [b"a", b"bc"], headers={"n": ["1", "2"]})
        assert [receipt.partition for receipt in receipts] == [0, 0]
        with pytest.raises(InvalidInput, match="1 values were given as header 'n' of 2 messages"):
            await producer.publish_many("t", [b"a", b"bc"], headers={"n": ["1"]})
        with pytest.raises(InvalidInput, match="one text was given as header 'n' of 2 messages"):
            await producer.publish_many("t", [b"a", b"bc"], headers={"n": "12"})
        with pytest.raises(InvalidInput, match="message 0: header name '##n' is reserved"):
            await producer.publish_many("t", [b"a"], headers={"##n": ["1"]})
    assert bodies(node, "MPUB_EXT") == [multi_body([ext_body(b'{"n":"1"}', b"a"), ext_body(b'{"n":"2"}', b"bc")])]


async def test_middleware_sees_bodies_and_trace_ids_as_messages() -> None:
    seen: list[OutgoingMessage] = []

    class Noting(Middleware):
        async def publish(self, publishing: Publishing, send_next: SendNext) -> Any:
            seen.extend(publishing.messages)
            publishing.messages[1] = OutgoingMessage(b"replaced", trace_id=7)
            return await send_next(publishing)

    async with producing({}) as (_, (node,), lookup):
        lookup.set_leaders({0: node}, num=1)
        async with Producer(str(lookup), middleware=[Noting()]) as producer:
            receipts = await producer.publish_many("t", [b"a", b"bc"], trace_ids=[5, 6])
            await producer.publish_many("t", (b"d", b"e"))
    assert seen[:2] == [OutgoingMessage(b"a", trace_id=5), OutgoingMessage(b"bc", trace_id=6)]
    assert seen[2:] == [OutgoingMessage(b"d"), OutgoingMessage(b"e")]
    assert [receipt.trace_id for receipt in receipts] == [5, 7]


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_generator_is_read_once(key: str | None) -> None:
    async with producing({}) as (producer, nodes, _):
        receipts = await producer.publish_many("t", (body for body in (b"a", b"bc")), key=key)
        assert len(receipts) == 2
        assert bodies(nodes[0], "MPUB") == [multi_body([b"a", b"bc"])]


async def test_every_message_has_its_own_outcome() -> None:
    async with producing({}, {"MPUB": error("E_BAD_MESSAGE x")}) as (producer, _, _):
        drafts = [OutgoingMessage(b"a", key=key) for key in ("polygenelubricants", "user:42", "polygenelubricants")]
        with pytest.raises(BatchFailed, match="1 of 3") as caught:
            await producer.publish_many("t", drafts)
        outcomes = caught.value.outcomes
        assert [type(outcome) for outcome in outcomes] == [Receipt, BadMessage, Receipt]


async def test_nothing_is_sent_when_one_message_is_invalid() -> None:
    async with producing({}) as (producer, nodes, _):
        wrong: list[Any] = [[b"x", b""], [b"x", "y"], b"xy", [b"x" * 2_000_000]]
        for messages in wrong:
            with pytest.raises(InvalidBody):
                await producer.publish_many("t", messages)
        assert nodes[0].commands == []


async def test_headers_on_the_original_nsq_are_refused_before_anything_is_sent() -> None:
    marks: list[tuple[OutgoingMessage, str]] = [
        (OutgoingMessage(b"x", headers={"a": "b"}), "headers and tags"),
        (OutgoingMessage(b"x", tag="canary"), "headers and tags"),
        (OutgoingMessage(b"x", trace_id=0), "trace ids"),
    ]
    async with bounded(), scripted_node(obey(), granted=PLAIN) as node:
        for connected in (False, True):
            options = quick_direct(max_batch_count=2)
            async with Producer(nsqd=["127.0.0.1:1", str(node)], **options) as producer:
                if connected:
                    await producer.publish_many("t", [b"a"])
                for mark, what in marks:
                    with pytest.raises(
                        ExtendNotSupported, match=f"message 3: the original NSQ does not support {what}"
                    ) as caught:
                        await producer.publish_many("t", [b"a", b"b", b"c", mark, b"d"])
                    assert (caught.value.index, caught.value.topic) == (3, "t")
        assert [command.words[0] for command in node.commands] == [b"MPUB"]


async def test_headers_without_lookup_are_sent_to_a_redesigned_server() -> None:
    async with bounded(), scripted_node(obey()) as node, Producer(nsqd=str(node), **quick_direct()) as producer:
        await producer.publish_many("t", [b"a", OutgoingMessage(b"x", headers={"a": "b"})])
        assert len(bodies(node, "MPUB_EXT")) == 1


async def test_headers_for_unreachable_nodes_fail_like_other_publishes() -> None:
    async with bounded(), Producer(nsqd="127.0.0.1:1", **quick_direct(timeout=0.1)) as producer:
        with pytest.raises(BatchFailed, match="2 of 2"):
            await producer.publish_many("t", [b"a", OutgoingMessage(b"x", headers={"a": "b"})])
