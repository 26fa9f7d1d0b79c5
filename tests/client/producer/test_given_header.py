"""Messages with the bytes of their extend header: what is sent, and what is refused before anything is sent."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext import OutgoingMessage
from nsqext.client.producer.batch import BatchPlanner
from nsqext.client.producer.delayed_request import delayed as delayed_request
from nsqext.client.producer.given_header import trace_id_of
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.request import MessageRequest, encode_message
from nsqext.errors import InvalidBody, InvalidHeader, InvalidInput
from nsqext.protocol.hashing import key_hash
from nsqext.protocol.headers import MAX_STORED_HEADER
from nsqext.types import TopicMeta
from tests.support.header_values import WRITTEN
from tests.support.publish_bench import route_of
from tests.support.strategies import odd_headers

_OPTIONS = ProducerOptions()
_EXTEND = TopicMeta(partition_num=1, extend_support=True)
_PLAIN = TopicMeta(partition_num=1)


@given(st.sampled_from([written.header for written in WRITTEN]) | odd_headers(), st.binary(min_size=1))
def test_header_and_body_are_sent_as_they_are(header: bytes, body: bytes) -> None:
    options = ProducerOptions(compression="gzip", compression_min=1, on_unknown="settle")
    for given_options in (_OPTIONS, options):
        encoded = encode_message(given_options, _EXTEND, OutgoingMessage(body, header=header), b"key", default_trace=9)
        assert encoded == (body, header, trace_id_of(header))


def test_the_trace_id_is_the_first_of_the_header() -> None:
    assert trace_id_of(b'{"##trace_id":"7"}') == 7
    assert trace_id_of(b'{"##trace_id":"0018446744073709551615"}') == 2**64 - 1
    assert trace_id_of(b'{"##trace_id":"7","a":1,"##trace_id":"8"}') == 7
    assert trace_id_of(b'{"a":{"##trace_id":"7"}}') is None
    assert trace_id_of(b'["##trace_id"]') is None


@pytest.mark.parametrize("value", ["7", '""', '"-1"', '"+1"', '"1_0"', '"18446744073709551616"', '"\u0661"', "null"])
def test_a_trace_id_that_servers_refuse_is_refused(value: str) -> None:
    with pytest.raises(InvalidHeader, match="##trace_id"):
        encode_message(_OPTIONS, _EXTEND, OutgoingMessage(b"x", header=f'{{"##trace_id":{value}}}'.encode()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"headers": {}}, "header and headers were both given"),
        ({"tag": "t"}, "header and tag were both given"),
        ({"trace_id": 7}, "header and trace_id were both given"),
        ({"header": b"{"}, "not JSON that servers accept"),
        ({"header": "{}"}, "header must be bytes, not str"),
        ({"header": b'{"a":"' + b"x" * (MAX_STORED_HEADER - 7) + b'"}'}, "more than servers can deliver: 65506"),
        ({"body": b"x" * ((1 << 20) - 4)}, "larger than 1048576"),
        ({"header": b"", "body": b"x" * (1 << 20)}, "larger than 1048576"),
        ({"header": b"", "trace_id": -1}, "trace id"),
        ({"header": b"", "trace_id": 7, "body": b"x" * ((1 << 20) - 7)}, "larger than 1048576"),
    ],
)
def test_what_cannot_be_stored_as_it_is_is_refused(change: dict[str, Any], text: str) -> None:
    message = OutgoingMessage(**{"body": b"x", "header": b"{}", **change})
    with pytest.raises(InvalidInput, match=text):
        encode_message(_OPTIONS, _EXTEND, message)


def test_the_largest_messages_fit() -> None:
    largest = b'{"a":"' + b"x" * (MAX_STORED_HEADER - 8) + b'"}'
    assert encode_message(_OPTIONS, _EXTEND, OutgoingMessage(b"x", header=largest))[1] == largest
    for header, trace_id, meta, overhead in (
        (b"{}", None, _EXTEND, 5),
        (b"", None, _EXTEND, 1),
        (b"", None, _PLAIN, 0),
        (b"", 7, _PLAIN, 8),
    ):
        body = b"x" * ((1 << 20) - overhead)
        message = OutgoingMessage(body, trace_id=trace_id, header=header)
        assert encode_message(_OPTIONS, meta, message) == (body, header, trace_id)
        with pytest.raises(InvalidBody):
            encode_message(_OPTIONS, meta, OutgoingMessage(body + b"x", trace_id=trace_id, header=header))


def test_delays_key_tags_and_http_would_change_a_header() -> None:
    message = OutgoingMessage(b"x", header=b'{"a":"b"}')
    delayed = delayed_request(_OPTIONS, "t", message, 5.0)
    with pytest.raises(InvalidInput, match="header and delay were both given"):
        delayed.encoded(_EXTEND)
    with pytest.raises(InvalidInput, match="header and key_tags were both given"):
        encode_message(ProducerOptions(key_tags=2), _EXTEND, message)
    assert encode_message(ProducerOptions(key_tags=0), _EXTEND, message)[1] == message.header
    over_http = ProducerOptions(transport="http")
    with pytest.raises(InvalidHeader, match="published over HTTP"):
        encode_message(over_http, _EXTEND, message)
    assert encode_message(over_http, _EXTEND, OutgoingMessage(b"x", header=b"")) == (b"x", b"", None)


def test_a_publish_is_settled_by_a_trace_id_only_where_that_leaves_the_header_as_it_is() -> None:
    assert encode_message(_OPTIONS, _EXTEND, OutgoingMessage(b"x", header=b""), default_trace=9)[2] == 9
    assert encode_message(_OPTIONS, _EXTEND, OutgoingMessage(b"x", header=b"{}"), default_trace=9)[2] is None
    full = OutgoingMessage(b"x" * (1 << 20), header=b"")
    assert encode_message(_OPTIONS, _PLAIN, full, default_trace=9)[2] is None


def test_no_batch_makes_a_header_of_a_trace_id() -> None:
    route = route_of(extend=True)
    planner = BatchPlanner(route, _OPTIONS, key_hash("murmur3"), None, 0)
    headed, bare = OutgoingMessage(b"h", header=b'{"a":1}'), OutgoingMessage(b"b", trace_id=7, header=b"")
    planner.add([headed, OutgoingMessage(b"n", header=b""), bare, bare, OutgoingMessage(b"t", trace_id=8), headed])
    commands = [bytes(batch.command(route.targets[0])) for (row,) in [planner.rows] for batch in row]
    assert [command.partition(b" ")[0] for command in commands] == [b"MPUB_EXT", b"MPUB_TRACE", b"MPUB_EXT"]
    assert [command.count(b"##trace_id") for command in commands] == [0, 0, 0]
    item = struct.pack(">IQ", 9, 7) + b"b"
    assert commands[1].endswith(struct.pack(">I", 3) + item * 2 + struct.pack(">IQ", 9, 8) + b"t")


def test_a_message_with_a_header_of_its_own_has_a_command_of_its_own() -> None:
    assert not MessageRequest(_OPTIONS, "t", OutgoingMessage(b"x", header=b"")).joinable(_EXTEND)
    assert MessageRequest(_OPTIONS, "t", OutgoingMessage(b"x")).joinable(_EXTEND)
