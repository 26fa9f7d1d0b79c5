"""Messages that the caller has encoded: sent as they are, or decoded and published as any messages."""

from __future__ import annotations

from typing import Any

import pytest

from nsqext import OutgoingMessage
from nsqext.client.producer.batch import BatchPlanner, PackedBatch, plain_batches
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.packed import PackedMessages, Verb
from nsqext.errors import ExtendNotSupported, InvalidInput, ProtocolError
from nsqext.protocol.client.commands import sized
from nsqext.protocol.frames import encode_trace_reply
from nsqext.types import TopicMeta
from tests.support.commands import ext_body, multi_body, trace_body
from tests.support.producers import bodies, producing
from tests.support.publish_bench import route_of, target_of

pytestmark = pytest.mark.anyio

_OPTIONS = ProducerOptions(max_message_size=300, max_batch_count=8, max_batch_size=1000)
_ITEMS: dict[Verb, list[bytes]] = {
    "MPUB": [b"a", b"bc"],
    "MPUB_TRACE": [trace_body(7, b"a"), trace_body(2**64 - 1, b"bc")],
    "MPUB_EXT": [ext_body(b'{"a":"1"}', b"a"), ext_body(b'{"a":"\\u00fc"}', b"bc")],
}
_MESSAGES: dict[Verb, list[bytes | OutgoingMessage]] = {
    "MPUB": [b"a", b"bc"],
    "MPUB_TRACE": [OutgoingMessage(b"a", trace_id=7), OutgoingMessage(b"bc", trace_id=2**64 - 1)],
    "MPUB_EXT": [OutgoingMessage(b"a", {"a": "1"}), OutgoingMessage(b"bc", {"a": "ü"})],
}
_VERBS: tuple[Verb, ...] = ("MPUB", "MPUB_TRACE", "MPUB_EXT")


def _packed(verb: Verb, largest: int = 20) -> PackedMessages:
    items = [memoryview(multi_body([item])[4:]) for item in _ITEMS[verb]]
    return PackedMessages(verb, items[:1], 1, 1) + PackedMessages(verb, items[1:], 1, largest)


@pytest.mark.parametrize("verb", _VERBS)
def test_packed_messages_are_sent_as_they_are(verb: Verb) -> None:
    packed, target = _packed(verb), route_of(extend=True).at(0)
    batches = plain_batches(route_of(extend=True), 0, packed, _OPTIONS)
    assert batches is not None
    (batch,) = batches
    assert batch.command(target) == sized(f"{verb} t 0\n".encode(), multi_body(_ITEMS[verb]))
    assert (batch.count, [*batch.indexes], batch.trace_ids) == (2, [0, 1], [None, None])
    assert (batch.largest, batch.breaks) == (20, verb == "MPUB_EXT")
    assert batch.receipts(target, b"OK") == [target.receipt] * 2
    response = encode_trace_reply(9, 0, 500, 70)
    if verb == "MPUB_TRACE":
        assert batch.receipts(target, response) == [target.receipt] * 2
        with pytest.raises(ProtocolError):
            batch.receipts(target, b"OK?")
    else:
        with pytest.raises(ProtocolError, match="in response to a batch"):
            batch.receipts(target, response)


@pytest.mark.parametrize("verb", _VERBS)
def test_packed_messages_are_a_sequence_of_messages(verb: Verb) -> None:
    packed = _packed(verb)
    assert list(packed) == packed[:] == _MESSAGES[verb]
    assert (len(packed), packed[-1]) == (2, _MESSAGES[verb][1])
    joined = PackedMessages(verb, [b"".join(packed.items)], 2, 20)
    assert (len(joined), list(joined)) == (2, _MESSAGES[verb])


@pytest.mark.parametrize(
    ("verb", "topic", "options", "largest"),
    [
        ("MPUB", {}, {"transport": "http"}, 20),
        ("MPUB", {}, {"on_unknown": "settle"}, 20),
        ("MPUB", {}, {}, 301),
        ("MPUB", {"extend": True}, {}, 300),
        ("MPUB_TRACE", {}, {}, 293),
        ("MPUB_EXT", {"extend": True}, {}, 298),
        ("MPUB_EXT", {"extend": False}, {}, 20),
        ("MPUB_TRACE", {"partitions": 0}, {}, 20),
        ("MPUB", {}, {"max_batch_count": 1}, 20),
        ("MPUB", {}, {"max_batch_size": 14}, 20),
        ("MPUB", {"extend": True}, {"compression": "snappy", "compression_min": 20}, 20),
    ],
)
def test_packed_messages_that_need_a_check_are_decoded(
    verb: Verb, topic: dict[str, Any], options: dict[str, Any], largest: int
) -> None:
    given = ProducerOptions(**{"max_message_size": 300, **options})
    assert plain_batches(route_of(**topic), 0, _packed(verb, largest), given) is None


@pytest.mark.parametrize(
    ("verb", "topic", "options", "largest"),
    [
        ("MPUB", {}, {}, 300),
        ("MPUB", {"extend": True}, {}, 299),
        ("MPUB", {"partitions": 0}, {}, 300),
        ("MPUB_TRACE", {}, {}, 292),
        ("MPUB_EXT", {"extend": True}, {}, 297),
        ("MPUB", {}, {"max_batch_count": 2}, 20),
        ("MPUB", {}, {"max_batch_size": 15}, 20),
        ("MPUB", {"extend": True}, {"compression": "snappy", "compression_min": 20}, 19),
        ("MPUB", {}, {"compression": "snappy", "compression_min": 20}, 300),
    ],
)
def test_packed_messages_up_to_the_limits_are_one_batch(
    verb: Verb, topic: dict[str, Any], options: dict[str, Any], largest: int
) -> None:
    given = ProducerOptions(**{"max_message_size": 300, **options})
    batches = plain_batches(route_of(**topic), None, _packed(verb, largest), given)
    assert batches is not None
    assert [type(batch) for batch in batches] == [PackedBatch]


def test_a_planner_decodes_packed_messages_and_checks_each_of_them() -> None:
    planner = BatchPlanner(route_of(), _OPTIONS, lambda key, partitions: 0, None, 0)
    with pytest.raises(ExtendNotSupported, match="message 0: the topic does not accept headers"):
        planner.add(_packed("MPUB_EXT"))
    planner.add(_packed("MPUB_TRACE", 293))
    ((batch,),) = planner.rows
    assert batch.trace_ids == [7, 2**64 - 1]


@pytest.mark.parametrize(("verb", "what"), [("MPUB_TRACE", "trace ids"), ("MPUB_EXT", "headers and tags")])
def test_a_batch_that_the_original_nsq_does_not_understand_is_not_sent(verb: Verb, what: str) -> None:
    with pytest.raises(InvalidInput, match=what):
        PackedBatch("t", None, _packed(verb)).command(target_of(TopicMeta(), "1.3.0"))


async def test_a_producer_sends_packed_messages_and_messages_of_any_form() -> None:
    async with producing({}) as (producer, (node,), _):
        receipts = await producer.publish_many("t", _packed("MPUB_TRACE"))
        assert [(receipt.topic, receipt.trace_id, receipt.offset) for receipt in receipts] == [("t", 0, None)] * 2
        receipts = await producer.publish_many("t", _packed("MPUB"), key="k")
        assert len(receipts) == 2
    assert bodies(node, "MPUB_TRACE") == [multi_body(_ITEMS["MPUB_TRACE"])]
    assert bodies(node, "MPUB") == [multi_body(_ITEMS["MPUB"])]
