"""Publish commands as HTTP requests to nsqd, and responses as TCP responses, without I/O.

A message without headers and trace id is sent as a batch, in the binary form of ``/mpub``: when a connection ends
within a body, the redesigned server stores the received part of ``/pub``, but refuses an incomplete batch. Arguments
and codes are captured (http_pub, http_mpub, http_pubtrace, http_pub_ext).
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import orjson
from attrs import frozen

from nsqext.errors import InvalidHeader, NsqError, OperationNotSupported, ProtocolError, outside_text
from nsqext.errors.server import Unauthorized, server_error
from nsqext.protocol.frames import OK, encode_trace_reply
from nsqext.protocol.messages import TRACE_ID_HEADER

if TYPE_CHECKING:
    from nsqext.protocol.client.commands import Command

__all__ = ("MAX_QUERY", "HttpPublish", "decode_reply", "encode_publish")

_SIZE = Struct(">I")
_COUNT: Final = 4
_U16 = Struct(">H")
_U64 = Struct(">Q")
_ONE = _SIZE.pack(1)
_BINARY: Final = (("binary", "true"),)
# codes that only HTTP has, and TCP's codes for them
_CODES: Final = {
    "BODY_TOO_BIG": "E_BAD_BODY",
    "EXITING": "E_PUB_FAILED",
    "INTERNAL_ERROR": "E_PUB_FAILED",
    "INVALID_DEFER": "E_INVALID",
    "INVALID_TOPIC": "E_BAD_TOPIC",
    "MSG_EMPTY": "E_BAD_MESSAGE",
    "MSG_TOO_BIG": "E_BAD_MESSAGE",
}
_STATUSES: Final = {413: "E_BAD_BODY", 429: "E_PUB_TOO_MUCH_WAITING"}
MAX_QUERY: Final = 60_000
"""Characters of a URL's query; proxies and servers refuse much longer ones."""
_FAILED_INSIDE: Final = 503
_MOST_TEXT: Final = 200


@frozen
class HttpPublish:
    """A request that publishes."""

    path: str
    query: str  #: encoded
    content: bytes
    trace_id: int | None = None  #: in the response; None for the response OK


def encode_publish(command: Command) -> HttpPublish:
    """Return the request for a publish command; for MPUB_TRACE and MPUB_EXT of a single message.

    Raises InvalidHeader (too long for a URL), or OperationNotSupported for a batch with headers or trace ids.
    """
    line, _, rest = bytes(command).partition(b"\n")
    verb, topic, *words = line.decode().split(" ")
    content = rest[_SIZE.size :]
    where = [("topic", topic), *(("partition", word) for word in words if verb != "DPUB")]
    if verb == "PUB":
        return _request("/mpub", (*where, *_BINARY), b"".join((_ONE, rest)))
    if verb == "DPUB":
        return _request("/pub", (*where, ("defer", words[0])), content)
    if verb == "MPUB":
        return _request("/mpub", (*where, *_BINARY), content)
    if verb in ("MPUB_TRACE", "MPUB_EXT"):
        if content[:_COUNT] != _ONE:
            raise OperationNotSupported("HTTP has no batches of messages with headers or trace ids", topic=topic)
        content = content[_COUNT + _SIZE.size :]
    if verb in ("PUB_TRACE", "MPUB_TRACE"):
        (trace_id,) = _U64.unpack_from(content)
        replied = trace_id if verb == "PUB_TRACE" else 0
        return _request("/pubtrace", (*where, ("trace_id", str(trace_id))), content[_U64.size :], replied)
    (length,) = _U16.unpack_from(content)
    header, body = content[_U16.size : _U16.size + length], content[_U16.size + length :]
    if not header:
        return _request("/mpub", (*where, *_BINARY), b"".join((_ONE, _SIZE.pack(len(body)), body)))
    traced = orjson.loads(header).get(TRACE_ID_HEADER) if verb == "PUB_EXT" else None
    # servers decode it twice
    publish = _request("/pub_ext", (*where, ("ext", quote(header, safe=""))), body, traced and int(traced))
    if len(publish.query) > MAX_QUERY:
        raise InvalidHeader(
            f"headers take {len(publish.query)} characters of a URL, more than {MAX_QUERY}",
            topic=topic,
            hint="put large values into the body, or publish over TCP",
        )
    return publish


def _request(path: str, query: Any, content: bytes, trace_id: int | None = None) -> HttpPublish:
    return HttpPublish(path, urlencode(query, quote_via=quote, safe=""), content, trace_id)


def decode_reply(publish: HttpPublish, status: int, content: bytes) -> bytes:
    """Return the TCP response for an HTTP response; an unknown response stays unchanged.

    Raises ServerError (server or proxy refuses the publish) or ProtocolError (not nsqd, nothing was stored).
    """
    if status == 200:
        if content[:1] != b"{":
            return content
        reply = _read(content)
        if publish.trace_id is None or reply is None:
            return OK if reply is not None and reply.get("status") == "OK" else content
        try:
            values = (int(reply["id"]), int(reply["trace_id"]), int(reply["queue_offset"]), int(reply["rawsize"]))
        except (KeyError, TypeError, ValueError):
            return content
        message_id, trace_id, offset, size = values
        return encode_trace_reply(message_id, trace_id if publish.trace_id else 0, offset, size)
    raise _refusal(status, content)


def _refusal(status: int, content: bytes) -> NsqError:
    """Return the error for a response with an error status; a proxy may send any body."""
    reply = _read(content)
    text = str((reply or {}).get("message") or (reply or {}).get("status_txt") or "")
    if text and text != "NOT_FOUND":
        code = text.partition(" ")[0]
        if code.startswith("BAD_"):
            text = f"E_{text}"
        elif code in _CODES:
            text = f"{_CODES[code]} {text}"
        elif status == _FAILED_INSIDE and not code.startswith("E_"):
            text = f"E_PUB_FAILED {text}"
        return server_error(text.encode())
    shown = outside_text(f"HTTP status {status} {content[:_MOST_TEXT].decode('utf-8', 'replace').strip()}".rstrip())
    if status in (401, 403, 407):
        return Unauthorized("E_UNAUTHORIZED", shown)
    if status in _STATUSES or status >= 500:
        return server_error(f"{_STATUSES.get(status, 'E_PUB_FAILED')} {shown}".encode())
    return ProtocolError(shown, hint="is this nsqd's HTTP port, 4151 by default?")


def _read(content: bytes) -> dict[str, Any] | None:
    try:
        reply = orjson.loads(content)
    except orjson.JSONDecodeError:
        # error texts are not escaped, so some are not JSON
        text = content.decode("utf-8", "replace")
        prefix, suffix = '{"message":"', '"}'
        return (
            {"message": text[len(prefix) : -len(suffix)]} if text.startswith(prefix) and text.endswith(suffix) else None
        )
    return reply if isinstance(reply, dict) else None
