"""Parsing of publish bodies by the server role: valid and invalid ones."""

from __future__ import annotations

from struct import pack

import pytest

from nsqext.protocol.server.command_parser import (
    BatchReader,
    CommandTarget,
    PublishItem,
    check_publish_size,
    check_room,
    parse_publish,
)
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.protocol.server.request_error import RequestError
from tests.support.commands import ext_body, multi_body, trace_body
from tests.support.tables import table

_REDESIGNED = ServerLimits()
_ORIGINAL = ServerLimits.original()
_SMALL = ServerLimits(max_msg_size=20, max_body_size=64)
_EXTEND = CommandTarget("t", extend=True)
_PLAIN = CommandTarget("t")
_LENIENT = CommandTarget("t", lenient=True)
_UNREADABLE = "E_INVALID_JSON_HEADER fail to parse json header:cannot parse JSON: "


def _one(header: bytes) -> bytes:
    return multi_body([ext_body(header, b"x")])


def test_single_bodies() -> None:
    assert parse_publish(b"PUB", b"b", _REDESIGNED, _PLAIN) == [PublishItem(b"b")]
    assert parse_publish(b"DPUB", b"b", _ORIGINAL, _PLAIN) == [PublishItem(b"b")]
    assert parse_publish(b"PUB_TRACE", trace_body(7, b"b"), _REDESIGNED, _PLAIN) == [PublishItem(b"b", 7, traced=True)]
    header = b'{"k":"v"}'
    assert parse_publish(b"PUB_EXT", ext_body(header, b"b"), _REDESIGNED, _EXTEND) == [PublishItem(b"b", 0, header, 4)]
    header = b'{"##trace_id":"0"}'
    assert parse_publish(b"PUB_EXT", ext_body(header, b"b"), _REDESIGNED, _EXTEND) == [
        PublishItem(b"b", 0, header, 4, True)
    ]


def test_batches() -> None:
    assert parse_publish(b"MPUB", multi_body([b"a", b"bc"]), _REDESIGNED, _EXTEND) == [
        PublishItem(b"a"),
        PublishItem(b"bc"),
    ]
    traced = multi_body([trace_body(1, b"a"), trace_body(2, b"b")])
    assert parse_publish(b"MPUB_TRACE", traced, _REDESIGNED, _PLAIN) == [PublishItem(b"a", 1), PublishItem(b"b", 2)]
    header = b'{"##trace_id":"55"}'
    mixed = multi_body([ext_body(header, b"a"), ext_body(b"", b"b"), ext_body(b"{}", b"c")])
    assert parse_publish(b"MPUB_EXT", mixed, _REDESIGNED, _EXTEND) == [
        PublishItem(b"a", 55, header, 4),
        PublishItem(b"b"),
        PublishItem(b"c", 0, b"{}", 4),
    ]
    plain = multi_body([ext_body(b"", b"a")])
    assert parse_publish(b"MPUB_EXT", plain, _REDESIGNED, _PLAIN) == [PublishItem(b"a")]


@table(
    ("verb", "body", "text"),
    [
        (b"PUB_EXT", ext_body(b"", b"x"), _UNREADABLE + 'cannot parse empty string; unparsed tail: ""'),
        (b"PUB_EXT", ext_body(b'{"##trace_id":7}', b"x"), "INVALID_TRACE_ID passin trace id should be string"),
        (b"PUB_EXT", ext_body(b'{"##trace_id":null}', b"x"), "INVALID_TRACE_ID passin trace id should be string"),
        (b"PUB_EXT", ext_body(b'{"##trace_id":""}', b"x"), "INVALID_TRACE_ID invalid trace id"),
        (b"PUB_EXT", ext_body(b'{"##trace_id":"+1"}', b"x"), "INVALID_TRACE_ID invalid trace id"),
        (b"PUB_EXT", ext_body(b'{"##trace_id":"18446744073709551616"}', b"x"), "INVALID_TRACE_ID invalid trace id"),
        (b"PUB_EXT", ext_body('{"##trace_id":"٣"}'.encode(), b"x"), "INVALID_TRACE_ID invalid trace id"),
        (b"MPUB_EXT", _one(b"{"), _UNREADABLE + "cannot parse object: missing '}'; unparsed tail: \"\""),
        (b"MPUB_EXT", _one(b'{"##trace_id":[]}'), "INVALID_TRACE_ID passin trace id should be string"),
    ],
)  # fmt: skip
def test_headers_that_the_server_refuses_leave_the_connection_open(verb: bytes, body: bytes, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_publish(verb, body, _REDESIGNED, _EXTEND)
    assert str(caught.value) == text
    assert not caught.value.fatal


def test_many_leading_zeros_are_a_number() -> None:
    header = b'{"##trace_id":"' + b"0" * 9000 + b'5"}'
    assert parse_publish(b"PUB_EXT", ext_body(header, b"x"), _REDESIGNED, _EXTEND)[0].trace_id == 5


@pytest.mark.parametrize("verb", [b"PUB_EXT", b"MPUB_EXT"])
def test_headers_on_a_plain_topic(verb: bytes) -> None:
    def publish(header: bytes, target: CommandTarget) -> PublishItem:
        body = ext_body(header, b"x")
        return parse_publish(verb, multi_body([body]) if verb == b"MPUB_EXT" else body, _REDESIGNED, target)[0]

    for header in (b"{}", b'{"##trace_id":"1"}', b'{"k":"v"}'):
        with pytest.raises(RequestError, match="E_EXT_NOT_SUPPORT ext content not supported in topic t"):
            publish(header, _PLAIN)
    internal = publish(b'{"##trace_id":"1","##client_dispatch_tag":"a","zan_test":true}', _LENIENT)
    assert internal == PublishItem(b"x", 1, traced=verb == b"PUB_EXT")
    assert publish(b"[1]", _LENIENT) == PublishItem(b"x")
    with pytest.raises(RequestError, match="E_EXT_NOT_SUPPORT") as caught:
        publish(b'{"##trace_id":"1","k":"v"}', _LENIENT)
    assert not caught.value.fatal


def test_a_single_publish_reads_the_header_before_it_asks_for_the_topic_and_a_batch_after() -> None:
    with pytest.raises(RequestError, match="E_INVALID_JSON_HEADER"):
        parse_publish(b"PUB_EXT", ext_body(b"{", b"x"), _REDESIGNED, _PLAIN)
    with pytest.raises(RequestError, match="E_EXT_NOT_SUPPORT"):
        parse_publish(b"MPUB_EXT", multi_body([ext_body(b"{", b"x")]), _REDESIGNED, _PLAIN)


@table(
    ("verb", "body", "text"),
    [
        (b"PUB", b"", "E_BAD_BODY invalid body size 0"),
        (b"PUB", bytes(21), "E_BAD_MESSAGE message too big 21 > 20"),
        (b"PUB_TRACE", bytes(8), "E_BAD_BODY invalid body size 8 with trace id enabled"),
        (b"PUB_EXT", bytes(2), "E_BAD_BODY invalid body size 2 with ext json header enabled"),
        (b"PUB_EXT", b"\x00\x02{}", "E_BAD_BODY invalid body size 4 in ext json header content length"),
        (b"PUB_EXT", b"\xff\xff{}x", "E_BAD_BODY invalid body size 5 in ext json header content length"),
        (b"MPUB", b"", "E_BAD_BODY invalid body size 0"),
        (b"MPUB", bytes(65), "E_BAD_BODY body too big 65 > 64"),
        (b"MPUB", b"\x00\x00\x00", "E_BAD_BODY MPUB failed to read message count"),
        (b"MPUB", bytes(4), "E_BAD_BODY MPUB invalid message count 0"),
        (b"MPUB", b"\xff\xff\xff\xff", "E_BAD_BODY MPUB invalid message count -1"),
        (b"MPUB", pack(">i", 13), "E_BAD_BODY MPUB invalid message count 13"),
        (b"MPUB", pack(">i", 12), "E_BAD_MESSAGE MPUB failed to read message(0) body size"),
        (b"MPUB", pack(">iibi", 2, 1, 1, 0), "E_BAD_MESSAGE MPUB invalid message(1) body size 0"),
        (b"MPUB", pack(">ii", 2, -5), "E_BAD_MESSAGE MPUB invalid message(0) body size -5"),
        (b"MPUB", pack(">ii", 1, 21), "E_BAD_MESSAGE MPUB message too big 21 > 20"),
        (b"MPUB", pack(">ii", 1, 3) + b"ab", "E_BAD_MESSAGE MPUB failed to read message body"),
        (b"MPUB_TRACE", pack(">ii", 1, 8) + bytes(8), "E_BAD_MESSAGE MPUB invalid message(0) body size 8 for tracing"),
        (b"MPUB_EXT", pack(">ii", 1, 1) + b"a", "E_BAD_BODY invalid body size 1 in ext json header content length"),
        (b"MPUB_EXT", pack(">ii", 1, 2) + bytes(2), "E_BAD_BODY invalid body size 2 in ext json header content length"),
    ],
)
def test_framing_that_the_server_refuses_ends_the_connection(verb: bytes, body: bytes, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_publish(verb, body, _SMALL, _EXTEND)
    assert str(caught.value) == text
    assert caught.value.fatal


@pytest.mark.parametrize(
    ("verb", "size", "text"),
    [
        (b"PUB", 0, "E_BAD_MESSAGE PUB invalid message body size 0"),
        (b"DPUB", -1, "E_BAD_MESSAGE DPUB invalid message body size -1"),
        (b"PUB", 1048577, "E_BAD_MESSAGE PUB message too big 1048577 > 1048576"),
        (b"MPUB", 0, "E_BAD_BODY MPUB invalid body size 0"),
        (b"MPUB", 5242881, "E_BAD_BODY MPUB body too big 5242881 > 5242880"),
    ],
)
def test_the_original_server_names_the_command(verb: bytes, size: int, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_publish_size(verb, size, _ORIGINAL)
    assert str(caught.value) == text


def test_the_largest_sizes_pass() -> None:
    for limits in (_REDESIGNED, _ORIGINAL):
        check_publish_size(b"PUB", 1048576, limits)
        check_publish_size(b"MPUB", 5242880, limits)
    check_room(b"PUB_TRACE", 9)
    check_room(b"PUB_EXT", 3)
    check_room(b"PUB", 1)


def test_a_batch_is_read_as_it_arrives() -> None:
    body = multi_body([b"first", b"second"])
    reader = BatchReader(b"MPUB", _REDESIGNED, _PLAIN)
    assert not reader.read(b"ab" + body[:6], 2)
    assert (reader.position, reader.need) == (6, 4)
    assert not reader.read(body[4:12], 0)
    assert (reader.position, reader.need) == (0, 9)
    assert reader.read(body[4:] + b"NOP\n", 0)
    assert reader.position == len(body) - 4
    assert reader.need == 0
    assert [item.body for item in reader.items] == [b"first", b"second"]


@pytest.mark.parametrize(("size", "count"), [(900, 2), (3, 286)])
def test_a_count_that_lies_cannot_fill_the_memory(size: int, count: int) -> None:
    limits = ServerLimits(max_msg_size=1000, max_body_size=2000)
    reader = BatchReader(b"MPUB", limits, _PLAIN)
    item = pack(">i", size) + bytes(size)
    with pytest.raises(RequestError, match="E_BAD_BODY body too big"):
        reader.read(pack(">i", 399) + item * (count + 1), 0)
    assert len(reader.items) == count
