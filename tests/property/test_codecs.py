"""Codecs: encoded values are decoded unchanged, and any bytes are decoded or refused as documented."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import ProtocolError
from nsqext.errors.server import server_error
from nsqext.protocol.extjson import UnreadableHeader, read_header
from nsqext.protocol.frames import decode_trace_reply, encode_trace_reply
from nsqext.protocol.headers import decode_headers, encode_headers
from nsqext.protocol.identify import IdentifyRequest, Negotiated
from nsqext.protocol.json_fields import UnreadableFields, read_fields
from nsqext.protocol.lookupd_tcp import PeerInfo
from nsqext.protocol.messages import RawMessage, decode_into, message_id, tag_of
from nsqext.protocol.record import Record, decode_record, encode_record
from nsqext.protocol.server.command_parser import PUBLISH_VERBS, CommandTarget, parse_publish
from nsqext.protocol.server.negotiate import ClientSettings, ServerLimits, identify_reply, negotiate
from nsqext.protocol.server.request_error import RequestError
from tests.support.commands import ext_body, multi_body
from tests.support.message_frames import encode_message
from tests.support.strategies import (
    HEADERS,
    JSON,
    SMALL,
    U32,
    U64,
    damaged,
)


@given(st.sampled_from(sorted(PUBLISH_VERBS)), st.data(), st.booleans(), st.booleans())
def test_any_body_is_messages_or_an_error(verb: bytes, data: st.DataObject, extend: bool, lenient: bool) -> None:
    header = ext_body(b'{"##trace_id":"1"}', b"x")
    good = multi_body([header, b"\x00\x00x"]) if verb.startswith(b"M") else header
    body = data.draw(st.binary(max_size=80) | damaged(good))
    try:
        items = parse_publish(verb, body, SMALL, CommandTarget("t", extend, lenient))
    except RequestError as error:
        assert error.frame()
    else:
        assert items
        assert all(item.body and 0 <= item.trace_id < 1 << 64 for item in items)


_SHAPES = st.tuples(st.booleans(), st.booleans())


@st.composite
def _messages(draw: st.DrawFn) -> RawMessage:
    message = RawMessage()
    message.timestamp = draw(st.integers(0, (1 << 63) - 1))
    message.attempts = draw(st.integers(0, 65535))
    message.id = message_id(draw(U64), draw(U64))
    message.version = draw(st.sampled_from([0, 2, 4]))
    message.header = draw(st.binary(max_size=30)) if message.version else b""
    message.offset = draw(U64)
    message.size = draw(U32)
    message.body = draw(st.binary(max_size=40))
    return message


def _fields(message: RawMessage) -> list[Any]:
    return [getattr(message, name) for name in RawMessage.__slots__]


@given(_messages(), _SHAPES)
def test_messages_survive_a_round_trip(message: RawMessage, shape: tuple[bool, bool]) -> None:
    extend, detail = shape
    if not extend:
        message.version, message.header = 0, b""
    if not detail:
        message.offset, message.size = -1, 0
    again = RawMessage()
    decode_into(again, encode_message(message, extend, detail), extend, detail)
    assert _fields(again) == _fields(message)


@given(st.data(), _messages(), _SHAPES)
def test_any_bytes_are_a_message_or_an_error_of_the_peer(
    data: st.DataObject, message: RawMessage, shape: tuple[bool, bool]
) -> None:
    stream = data.draw(st.binary(max_size=80) | damaged(encode_message(message, *shape)))
    again = RawMessage()
    try:
        decode_into(again, stream, *shape)
    except ProtocolError:
        return
    assert len(again.header) + len(again.body) <= len(stream)
    assert encode_message(again, *shape) == stream


@given(
    st.builds(Record, st.integers(0, (1 << 63) - 1), U64, U64, st.binary(max_size=40), attempts=st.integers(0, 4000))
)
def test_plain_records_survive_a_round_trip(record: Record) -> None:
    data = encode_record(record)
    assert decode_record(data) == (record, len(data))


@given(st.data(), st.binary(max_size=20), st.sampled_from([0, 2, 4]))
def test_any_bytes_are_a_record_or_torn(data: st.DataObject, header: bytes, version: int) -> None:
    record = Record(1, 2, 3, b"body", version, header if version else b"", 0, True)
    position, whole = data.draw(st.integers(0, 5)), encode_record(record)
    stream = bytes(position) + data.draw(st.binary(max_size=60) | st.just(whole) | damaged(whole))
    try:
        found, stop = decode_record(stream, position)
    except ProtocolError:
        return
    assert position < stop <= len(stream)
    assert len(found.header) + len(found.body) < stop - position


@given(st.binary(max_size=60) | JSON.map(str).map(str.encode) | st.just(b"OK"))
def test_any_bytes_answer_identify_or_are_an_error_of_the_peer(data: bytes) -> None:
    try:
        granted = Negotiated.decode(data)
    except ProtocolError:
        return
    assert granted.max_rdy_count > 0


_ASKED = st.dictionaries(
    st.sampled_from([
        "client_id", "hostname", "heartbeat_interval", "output_buffer_size", "output_buffer_timeout", "sample_rate",
        "msg_timeout", "desired_tag", "extend_support", "ext_filter", "tls_v1", "snappy", "deflate", "deflate_level",
        "feature_negotiation", "Msg_Timeout",
    ]),
    JSON | st.integers(-2, 100_000) | st.booleans(),
)  # fmt: skip


@given(st.data(), _ASKED, st.sampled_from([ServerLimits(tls=True), ServerLimits.original()]))
def test_any_identify_is_granted_or_refused(data: st.DataObject, asked: dict[str, Any], limits: ServerLimits) -> None:
    body = data.draw(st.binary(max_size=30) | st.just(json.dumps(asked).encode()))
    settings = ClientSettings.defaults(limits)
    try:
        negotiate(body, limits, settings)
        reply = identify_reply(settings, limits)
    except RequestError as error:
        assert error.code in ("E_BAD_BODY", "E_IDENTIFY_FAILED")
        assert error.fatal
        return
    granted = Negotiated.decode(reply)
    assert granted.max_rdy_count == 2500
    assert settings.heartbeat_interval == 0 or 1 <= settings.heartbeat_interval <= 60
    assert 1 <= settings.msg_timeout <= 900


_SAMPLE_RATES = st.integers(0, 99)


@given(st.builds(
    IdentifyRequest, heartbeat_interval=st.floats(1, 60), msg_timeout=st.floats(1, 900), sample_rate=_SAMPLE_RATES,
    snappy=st.booleans(), tls=st.booleans(), extend_support=st.booleans(), client_id=st.text(max_size=10),
))  # fmt: skip
def test_requests_within_bounds_are_granted(request: IdentifyRequest) -> None:
    limits = ServerLimits(tls=True)
    settings = ClientSettings.defaults(limits)
    negotiate(request.encode(), limits, settings)
    granted = Negotiated.decode(identify_reply(settings, limits))
    assert (granted.tls, granted.snappy, granted.sample_rate) == (request.tls, request.snappy, request.sample_rate)
    assert settings.extend_support == request.extend_support


@given(HEADERS, st.none() | st.from_regex(r"[a-zA-Z0-9_-]{1,100}", fullmatch=True), st.none() | U64)
def test_headers_survive_a_round_trip_and_servers_read_them(
    headers: dict[str, str], tag: str | None, trace_id: int | None
) -> None:
    encoded = encode_headers(headers, tag=tag, trace_id=trace_id)
    decoded = decode_headers(encoded)
    assert tag_of(decoded) == tag
    assert {name: value for name, value in decoded.items() if not name.startswith("##")} == headers
    (item,) = parse_publish(b"PUB_EXT", ext_body(encoded, b"x"), ServerLimits(), CommandTarget("t", extend=True))
    assert (item.header, item.trace_id, item.traced) == (encoded, trace_id or 0, trace_id is not None)


_HEADER_BYTES = st.binary(max_size=40) | st.text('{}[]",:\\ntf01-e.# _drace', max_size=40).map(str.encode)


_DECODERS: list[tuple[Callable[[bytes], object], type[Exception]]] = [
    (decode_headers, ProtocolError),
    (lambda data: read_header(data, "##trace_id"), UnreadableHeader),
    (lambda data: read_fields(data, {"a": str, "b": {"c": int}, "d": [{"e": bool}]}), UnreadableFields),
    (lambda data: decode_trace_reply(data, 0), ProtocolError),
    (PeerInfo.decode, ProtocolError),
    (server_error, ProtocolError),
]


@pytest.mark.parametrize(("decode", "error"), _DECODERS)
@given(data=_HEADER_BYTES | st.binary(min_size=30, max_size=30).map(lambda tail: b"OK" + tail[2:]))
def test_any_bytes_are_read_or_refused_as_documented(
    decode: Callable[[bytes], object], error: type[Exception], data: bytes
) -> None:
    try:
        decode(data)
    except error:
        return


@given(U64, U64, U64, U32)
def test_trace_replies_survive_a_round_trip(message: int, trace: int, offset: int, size: int) -> None:
    reply = encode_trace_reply(message, trace, offset, size)
    assert decode_trace_reply(reply, trace) == (message, trace, offset, size)
