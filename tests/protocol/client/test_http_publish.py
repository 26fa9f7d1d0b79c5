"""Publish commands as HTTP requests, and HTTP responses as those of TCP."""

from __future__ import annotations

from urllib.parse import parse_qs, unquote

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidHeader, NsqError, OperationNotSupported, ProtocolError, ServerError
from nsqext.errors.server import (
    BadBody,
    BadMessage,
    BadTopic,
    ExtendRefused,
    InvalidCommand,
    NotLeader,
    NotWritable,
    PubFailed,
    PubRefused,
    TooMuchWaiting,
    TopicNotExist,
    Unauthorized,
    server_error,
)
from nsqext.protocol.client.batch_commands import multi, multi_ext, multi_trace
from nsqext.protocol.client.commands import LargeCommand, publish_ext, publish_line, publish_trace, sized
from nsqext.protocol.client.http_publish import MAX_QUERY, HttpPublish, decode_reply, encode_publish
from nsqext.protocol.frames import decode_trace_reply
from nsqext.protocol.headers import encode_headers
from tests.support.tables import table

ONE = b"\0\0\0\1"
TRACES = st.integers(0, 2**64 - 1)


def line(verb: str) -> bytes:
    return publish_line(verb, "orders#ephemeral", 3)


def arguments(publish: HttpPublish) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(publish.query, strict_parsing=True).items()}


WHERE = {"topic": "orders#ephemeral", "partition": "3"}


@given(st.binary(min_size=1))
def test_a_message_is_a_batch_of_one(body: bytes) -> None:
    publish = encode_publish(sized(line("PUB"), body))
    assert (publish.path, arguments(publish)) == ("/mpub", {**WHERE, "binary": "true"})
    assert publish.content == ONE + len(body).to_bytes(4) + body


def test_large_commands_are_joined() -> None:
    publish = encode_publish(LargeCommand(line("PUB") + b"\0\1\0\0", b"x" * 65536))
    assert publish.content == ONE + b"\0\1\0\0" + b"x" * 65536


@given(st.lists(st.binary(min_size=1), min_size=1))
def test_a_batch_has_the_body_of_mpub(bodies: list[bytes]) -> None:
    command = bytes(multi(line("MPUB"), bodies))
    publish = encode_publish(command)
    assert (publish.path, arguments(publish)) == ("/mpub", {**WHERE, "binary": "true"})
    assert command.endswith(len(publish.content).to_bytes(4) + publish.content)


def test_a_delay_is_given_in_milliseconds() -> None:
    publish = encode_publish(sized(publish_line("DPUB", "orders", delay=1.5), b"body"))
    assert (publish.path, arguments(publish), publish.content) == (
        "/pub",
        {"topic": "orders", "defer": "1500"},
        b"body",
    )


@given(TRACES, st.binary(min_size=1))
def test_a_trace_id_is_an_argument(trace_id: int, body: bytes) -> None:
    publish = encode_publish(publish_trace(line("PUB_TRACE"), trace_id, body))
    assert (publish.path, arguments(publish)) == ("/pubtrace", {**WHERE, "trace_id": str(trace_id)})
    assert (publish.content, publish.trace_id) == (body, trace_id)
    assert encode_publish(multi_trace(line("MPUB_TRACE"), [trace_id], [body])).query == publish.query


@given(st.dictionaries(st.text("059afzAFZ_.#-", min_size=1).filter(lambda name: name[:2] != "##"), st.text()))
def test_headers_survive_that_servers_decode_them_twice(headers: dict[str, str]) -> None:
    headers = {name: text.encode("utf-8", "replace").decode() for name, text in headers.items()}
    encoded = encode_headers(headers, tag="t", trace_id=7)
    publish = encode_publish(publish_ext(line("PUB_EXT"), encoded, b"body"))
    found = arguments(publish)
    assert orjson.loads(unquote(found.pop("ext").replace("+", " "))) == orjson.loads(encoded)
    assert (publish.path, found, publish.content, publish.trace_id) == ("/pub_ext", WHERE, b"body", 7)
    batch = encode_publish(multi_ext(line("MPUB_EXT"), [encoded], [b"body"]))
    assert (batch.query, batch.trace_id) == (publish.query, None)


@pytest.mark.parametrize(("size", "fits"), [(59_000, True), (60_000, False)])
def test_headers_that_are_too_long_for_a_url_are_refused(size: int, fits: bool) -> None:
    command = publish_ext(line("PUB_EXT"), encode_headers({"a": "x" * (size - 10)}), b"body")
    if fits:
        assert len(encode_publish(command).query) < MAX_QUERY
    else:
        with pytest.raises(InvalidHeader, match="characters of a URL"):
            encode_publish(command)


def test_a_message_of_a_batch_may_have_no_header() -> None:
    publish = encode_publish(multi_ext(line("MPUB_EXT"), [b""], [b"body"]))
    assert (publish.path, publish.content) == ("/mpub", ONE + b"\0\0\0\4body")


@pytest.mark.parametrize(
    "command",
    [
        multi_trace(line("MPUB_TRACE"), [1, 2], [b"a", b"b"]),
        multi_ext(line("MPUB_EXT"), [b"{}", b""], [b"a", b"b"]),
    ],
)
def test_larger_batches_with_headers_or_trace_ids_are_refused(command: bytes) -> None:
    with pytest.raises(OperationNotSupported, match="HTTP has no batches"):
        encode_publish(command)


def reply(publish: HttpPublish, content: bytes, status: int = 200) -> bytes:
    return decode_reply(publish, status, content)


PLAIN = encode_publish(sized(line("PUB"), b"x"))
TRACED = encode_publish(publish_trace(line("PUB_TRACE"), 2**64 - 1, b"x"))
BATCHED = encode_publish(multi_trace(line("MPUB_TRACE"), [7], [b"x"]))
STORED = b'{"status":"OK","id":1125899906842626,"trace_id":"18446744073709551615","queue_offset":31,"rawsize":33}'


def test_responses_are_those_of_tcp() -> None:
    assert reply(PLAIN, b"OK") == b"OK"
    assert reply(PLAIN, STORED) == b"OK"  # the trace log of the topic is on
    assert decode_trace_reply(reply(TRACED, STORED), 2**64 - 1) == (1125899906842626, 2**64 - 1, 31, 33)
    assert decode_trace_reply(reply(BATCHED, STORED), 0) == (1125899906842626, 0, 31, 33)


@pytest.mark.parametrize("content", [b"", b"<html>", b"{}", b"[1]", b'{"status":"OK","id":"x"}', b'{"status":"OK"'])
def test_responses_that_are_not_understood_are_unchanged(content: bytes) -> None:
    assert reply(TRACED, content) == content


ERRORS: list[tuple[int, bytes, type[NsqError]]] = [
    (404, b'{"message":"E_TOPIC_NOT_EXIST"}', TopicNotExist),
    (400, b'{"message":"E_FAILED_ON_NOT_LEADER"}', NotLeader),
    (400, b'{"message":"E_FAILED_ON_NOT_WRITABLE"}', NotWritable),
    (400, b'{"message":"E_EXT_NOT_SUPPORT"}', ExtendRefused),
    (500, b'{"status_code":500,"status_txt":"E_TOPIC_NOT_EXIST","data":null}', TopicNotExist),
    (429, b'{"message":"E_PUB_TOO_MUCH_WAITING pub too much waiting in the queue: 7"}', TooMuchWaiting),
    (503, b'{"message":"exiting"}', PubRefused),
    (503, b'{"message":"some "quoted" text"}', PubFailed),
    (503, b'{"message":"EXITING"}', PubFailed),
    (500, b'{"message":"INTERNAL_ERROR"}', PubFailed),
    (413, b'{"message":"MSG_TOO_BIG"}', BadMessage),
    (413, b'{"message":"BODY_TOO_BIG"}', BadBody),
    (413, b'{"message":"BAD_BODY"}', BadBody),
    (413, b'{"message":"BAD_MESSAGE"}', BadMessage),
    (406, b'{"message":"MSG_EMPTY"}', BadMessage),
    (400, b'{"message":"INVALID_TOPIC"}', BadTopic),
    (400, b'{"message":"INVALID_DEFER"}', InvalidCommand),
    (502, b"<html>bad gateway</html>", PubFailed),
    (504, b"", PubFailed),
    (429, b"slow down", TooMuchWaiting),
    (413, b"too large", BadBody),
    (401, b"who are you", Unauthorized),
    (403, b"", Unauthorized),
    (407, b"", Unauthorized),
    (404, b'{"message":"NOT_FOUND"}', ProtocolError),
    (404, b"<html>", ProtocolError),
    (301, b"", ProtocolError),
    (200 + 4, b"", ProtocolError),
]


@table(("status", "content", "kind"), ERRORS)
def test_refusals_are_those_of_tcp(status: int, content: bytes, kind: type[NsqError]) -> None:
    with pytest.raises(NsqError) as caught:
        reply(PLAIN, content, status)
    assert type(caught.value) is kind
    if kind is ProtocolError or not content.startswith(b"{"):
        assert str(status) in str(caught.value)


@pytest.mark.parametrize("code", ["E_TOPIC_NOT_EXIST", "E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE"])
def test_flags_are_those_of_tcp(code: str) -> None:
    with pytest.raises(ServerError) as caught:
        reply(PLAIN, b'{"message":"%b"}' % code.encode(), 400)
    assert type(caught.value) is type(server_error(code.encode()))


@given(st.integers(100, 599), st.binary())
def test_no_response_breaks_the_client(status: int, content: bytes) -> None:
    try:
        found = reply(TRACED, content, status)
    except NsqError:
        return
    assert status == 200
    assert isinstance(found, bytes)
