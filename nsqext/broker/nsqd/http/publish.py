"""Publishing over HTTP: /pub, /pubtrace, /pub_ext, /mpub of the redesigned generation.

Headers are JSON as the redesigned server writes it (captured: http_pub_ext_delivered): numbers are doubles, members are
sorted. Bytes that are not UTF-8 and surrogate halves become U+FFFD, in an X-NSQEXT- header the escape of U+FFFD.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import orjson
from anyio import to_thread

from nsqext.arguments import is_number
from nsqext.broker.nsqd.http.common import NOT_LEADER, NOT_WRITABLE, RequestArgs
from nsqext.broker.nsqd.publish_commands import commit, store, store_in_parts
from nsqext.http.api import Call, Form, HttpFault, HttpPanic, route
from nsqext.protocol.json_fields import encodable
from nsqext.protocol.messages import EXT_JSON, TRACE_ID_HEADER
from nsqext.protocol.server.command_parser import CommandTarget, PublishItem, parse_publish
from nsqext.protocol.server.go_format import parse_unsigned
from nsqext.protocol.server.request_error import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.routing import Route

    from nsqext.broker.engine.storage.partition_store import Stored
    from nsqext.broker.nsqd.node import Hosted
    from nsqext.protocol.server.negotiate import ServerLimits

_UNDECODED = re.compile("[\udc80-\udcff]")
_ESCAPES = (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))
_HEADER_PREFIX = "x-nsqext-"
_MAX_HEADER = 0xFFFF
_LARGE_BODY = 65_536
_BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2})")


def _one_each(error: UnicodeError) -> tuple[str, int]:
    """Replace each byte that is not UTF-8; Python's ``replace`` joins several."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("nsqext.one_each", _one_each)


def _number_of(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def read_object(data: bytes) -> dict[str, Any] | None:
    """Return the object in ``ext=``, or None for null."""
    text = data.decode("utf-8", "nsqext.one_each")
    try:
        value = json.loads(text, parse_int=_number_of, parse_float=_number_of, parse_constant=_number_of)
    except (ValueError, RecursionError):
        raise HttpFault(400, "E_INVALID_JSON_HEADER") from None
    if value is not None and not isinstance(value, dict):
        raise HttpFault(400, "E_INVALID_JSON_HEADER")
    whole: dict[str, Any] | None = _replaced(value) if "\\ud" in text.lower() else value
    return whole


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_replaced(item) for item in value]
    if isinstance(value, dict):
        return {_replaced(name): _replaced(content) for name, content in value.items()}
    return value


def write_json(value: Any) -> bytes:
    """Return the stored bytes of a header; refuse deep nesting."""
    try:
        return _json(value).encode("utf-8", "replace")
    except RecursionError:
        raise HttpFault(400, "E_INVALID_JSON_HEADER") from None


def _json(value: Any) -> str:
    if isinstance(value, dict):
        members = sorted(value.items(), key=lambda member: member[0].encode("utf-8", "surrogatepass"))
        return "{" + ",".join(f"{_json_text(name)}:{_json(content)}" for name, content in members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    if isinstance(value, str):
        return _json_text(value)
    if is_number(value, -math.inf):
        return _json_number(float(value))
    return {None: "null", True: "true", False: "false"}[value]


def _json_text(value: str) -> str:
    parts = (orjson.dumps(part)[1:-1].decode() for part in _UNDECODED.split(value))
    text = '"' + "\\ufffd".join(parts) + '"'
    for plain, escaped in _ESCAPES:
        if plain in text:
            text = text.replace(plain, escaped)
    return text


def _json_number(value: float) -> str:
    """Return the shortest digits; exponents only below 1e-6 and from 1e21 on."""
    if value and not 1e-6 <= abs(value) < 1e21:
        return repr(value).replace("e-0", "e-")
    return format(Decimal(repr(value)), "f").removesuffix(".0")


async def read_batch(call: Call, topic: str, limits: ServerLimits, *, binary: bool) -> list[PublishItem]:
    """Parse the body of /mpub: as of MPUB (``binary``), or a message per line."""
    body = await call.body(limits.max_body_size, partial=binary)
    if not binary:
        return await _parse_aside(lambda: _read_lines(body, limits.max_msg_size, limits.max_body_size), body)
    try:
        return await _parse_aside(lambda: parse_publish(b"MPUB", body, limits, CommandTarget(topic)), body)
    except RequestError as error:
        raise HttpFault(413, error.code[2:]) from None


def _read_lines(body: bytes, max_msg_size: int, max_body_size: int) -> list[PublishItem]:
    if len(body) > max_body_size:
        raise HttpFault(413, "BODY_TOO_BIG")
    lines = [line for line in body.split(b"\n") if line]
    if any(len(line) > max_msg_size for line in lines):
        raise HttpFault(413, "MSG_TOO_BIG")
    return [PublishItem(line) for line in lines]


async def _parse_aside(parse: Callable[[], list[PublishItem]], body: bytes) -> list[PublishItem]:
    """Parse a body; a large body in a thread, so that other clients are served."""
    return parse() if len(body) <= _LARGE_BODY else await to_thread.run_sync(parse)


def _read_ext(call: Call) -> dict[str, Any] | None:
    """Return the header made of ``ext=`` (escaped twice) and X-NSQEXT- headers (captured: http_pub_ext)."""
    text = call.arg("ext").replace("+", " ")
    if not text or _BAD_ESCAPE.search(text):
        raise HttpFault(400, "E_INVALID_JSON_HEADER")
    value = read_object(unquote_to_bytes(text.encode("utf-8", "surrogateescape")))
    for name, content in reversed(call.request.headers.items()):
        if name.startswith(_HEADER_PREFIX):
            if value is None:
                raise HttpPanic
            value[name.removeprefix(_HEADER_PREFIX)] = content.encode("latin-1").decode("utf-8", "surrogateescape")
    return value


def _trace_id(text: object) -> int:
    number = parse_unsigned(text) if isinstance(text, str) else None
    if number is None:
        raise HttpFault(400, "INVALID_TRACE_ID")
    return number


def _traced_item(call: Call, body: bytes, _: CommandTarget) -> tuple[PublishItem, str]:
    trace = call.arg("trace_id")
    return PublishItem(body, _trace_id(trace)), trace


def _ext_item(call: Call, body: bytes, target: CommandTarget) -> tuple[PublishItem, str | None]:
    header = _read_ext(call)
    trace = None if header is None else header.get(TRACE_ID_HEADER)
    trace_id = _trace_id(trace) if header and TRACE_ID_HEADER in header else 0
    if not target.extend:
        if not (target.lenient and all(name.startswith("##") for name in header or ())):
            raise HttpFault(400, "E_EXT_NOT_SUPPORT")
        return PublishItem(body, trace_id), trace
    encoded = write_json(header)
    if len(encoded) > _MAX_HEADER:
        raise HttpFault(400, "E_INVALID_JSON_HEADER")  # its length has two bytes; the real server crashes
    return PublishItem(body, trace_id, encoded, EXT_JSON), trace


class PublishRoutes(RequestArgs):
    """Routes /pub, /pubtrace, /pub_ext and /mpub."""

    async def pub(
        self, read: Callable[[Call, bytes, CommandTarget], tuple[PublishItem, str | None]], call: Call
    ) -> object:
        size = _content_length(call)
        if size > self.node.limits.max_msg_size:
            raise HttpFault(413, "MSG_TOO_BIG")
        if size <= 0:
            raise HttpFault(406, "MSG_EMPTY")
        try:
            hosted = self.topic(call)
        except HttpFault:
            raise HttpFault(404, "E_TOPIC_NOT_EXIST") from None
        self._check_waiting(hosted, size + 1)
        body = await call.body(self.node.limits.max_msg_size, "MSG_TOO_BIG", partial=True)
        if not body:
            raise HttpFault(406, "MSG_EMPTY")
        self._check_write(hosted)
        target = CommandTarget(hosted.partition.topic, hosted.partition.extend, self.node.switches.allow_ext_compatible)
        item, trace = read(call, body, target)
        stored = await self._put(hosted, [item])
        if trace is None:
            return "OK"
        return {
            "status": "OK",
            "id": stored.message_id,
            "trace_id": trace,
            "queue_offset": stored.offset,
            "rawsize": stored.size,
        }

    async def mpub(self, call: Call) -> object:
        limits = self.node.limits
        size = _content_length(call)
        if size > limits.max_body_size:
            raise HttpFault(413, "BODY_TOO_BIG")
        hosted = self.topic(call)
        self._check_waiting(hosted, size)
        items = await read_batch(call, hosted.partition.topic, limits, binary="binary" in call.args)
        self._check_write(hosted)
        if items:
            await self._put(hosted, items)
        return "OK"

    def _check_waiting(self, hosted: Hosted, size: int) -> None:
        waiting = hosted.waiting + size
        if waiting > self.node.switches.max_pub_waiting:
            raise HttpFault(429, f"E_PUB_TOO_MUCH_WAITING pub too much waiting in the queue: {waiting}")

    def _check_write(self, hosted: Hosted) -> None:
        if not self.node.may_write(hosted):
            raise HttpFault(400, NOT_LEADER)

    async def _put(self, hosted: Hosted, items: list[PublishItem]) -> Stored:
        try:
            epoch = hosted.epoch
            stored = await store_in_parts(hosted, items, lambda part: store(self.node, hosted, part, "E_PUB_FAILED"))
            await commit(self.node, hosted, stored, epoch, "E_PUB_FAILED")
            hosted.traffic.durations[0] += 1
        except RequestError as error:
            if error.code in (NOT_LEADER, NOT_WRITABLE):
                raise HttpFault(400, NOT_WRITABLE) from None
            raise HttpFault(503, error.text or error.code) from None
        return stored

    def table(self) -> list[Route]:
        return [
            route("POST", "/pub", partial(self.pub, lambda _, body, __: (PublishItem(body), None)), Form.NEGOTIATED),
            route("POST", "/pub_ext", partial(self.pub, _ext_item), Form.NEGOTIATED),
            route("POST", "/pubtrace", partial(self.pub, _traced_item), Form.V1),
            route("POST", "/mpub", self.mpub, Form.NEGOTIATED),
        ]


def _content_length(call: Call) -> int:
    """Return the announced size; -1 for chunks, refused as an empty body (captured: http_pub)."""
    if "transfer-encoding" in call.headers:
        return -1
    return int(call.headers.get("content-length") or 0)
