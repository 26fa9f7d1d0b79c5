"""Publishing over HTTP: /pub, /pubtrace, /pub_ext, /mpub of the redesigned generation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from anyio import to_thread

from nsqext.broker.nsqd.batch_store import store_in_parts
from nsqext.broker.nsqd.http.go_json import read_object, write_json
from nsqext.broker.nsqd.http.request_args import NOT_LEADER, NOT_WRITABLE, RequestArgs
from nsqext.broker.nsqd.publish_commands import commit, store
from nsqext.http.api import Call, Form, HttpFault, HttpPanic, route
from nsqext.protocol.headers import TRACE_ID_HEADER
from nsqext.protocol.messages import EXT_JSON
from nsqext.protocol.server.go_format import parse_unsigned
from nsqext.protocol.server.publish_bodies import PublishItem, Target, parse_publish
from nsqext.protocol.server.request_error import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.routing import Route

    from nsqext.broker.engine.publish import Stored
    from nsqext.broker.nsqd.node import Hosted
    from nsqext.protocol.server.negotiate import ServerLimits

_HEADER_PREFIX = "x-nsqext-"
_MAX_HEADER = 0xFFFF
_LARGE_BODY = 65_536
_BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2})")


async def read_batch(call: Call, topic: str, limits: ServerLimits, *, binary: bool) -> list[PublishItem]:
    """Read the messages of /mpub: the body is that of MPUB (``binary``), or each line is a message."""
    body = await call.body(limits.max_body_size, partial=binary)
    if not binary:
        return await _parse_aside(lambda: _read_lines(body, limits.max_msg_size, limits.max_body_size), body)
    try:
        return await _parse_aside(lambda: parse_publish(b"MPUB", body, limits, Target(topic)), body)
    except RequestError as error:
        raise HttpFault(413, error.code[2:]) from None


def _read_lines(body: bytes, max_msg_size: int, max_body_size: int) -> list[PublishItem]:
    """Split the body of /mpub into lines, without empty ones."""
    if len(body) > max_body_size:
        raise HttpFault(413, "BODY_TOO_BIG")
    lines = [line for line in body.split(b"\n") if line]
    if any(len(line) > max_msg_size for line in lines):
        raise HttpFault(413, "MSG_TOO_BIG")
    return [PublishItem(line) for line in lines]


async def _parse_aside(parse: Callable[[], list[PublishItem]], body: bytes) -> list[PublishItem]:
    """Parse the body of /mpub; a large one in a thread, so that other clients are served meanwhile."""
    return parse() if len(body) <= _LARGE_BODY else await to_thread.run_sync(parse)


def _read_ext(call: Call) -> dict[str, Any] | None:
    """Return the header that ``ext=`` (escaped twice) and the X-NSQEXT- headers make (captured: http_pub_ext)."""
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


def _ext_item(call: Call, body: bytes, target: Target) -> tuple[PublishItem, str | None]:
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

    async def pub(self, call: Call) -> object:
        return await self._publish(call, lambda body, target: (PublishItem(body), None))

    async def pubtrace(self, call: Call) -> object:
        def read(body: bytes, _: Target) -> tuple[PublishItem, str]:
            trace = call.arg("trace_id")
            return PublishItem(body, _trace_id(trace)), trace

        return await self._publish(call, read)

    async def pub_ext(self, call: Call) -> object:
        return await self._publish(call, lambda body, target: _ext_item(call, body, target))

    async def _publish(self, call: Call, read: Any) -> object:
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
        target = Target(hosted.partition.topic, hosted.partition.extend, self.node.switches.allow_ext_compatible)
        item, trace = read(body, target)
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
        except RequestError as error:
            if error.code in (NOT_LEADER, NOT_WRITABLE):
                raise HttpFault(400, NOT_WRITABLE) from None
            raise HttpFault(503, error.text or error.code) from None
        return stored

    def table(self) -> list[Route]:
        return [
            route("POST", "/pub", self.pub, Form.NEGOTIATED),
            route("POST", "/pub_ext", self.pub_ext, Form.NEGOTIATED),
            route("POST", "/pubtrace", self.pubtrace, Form.V1),
            route("POST", "/mpub", self.mpub, Form.NEGOTIATED),
        ]


def _content_length(call: Call) -> int:
    """Return the announced size; -1 for a body in chunks, which is refused as empty (captured: http_pub)."""
    if "transfer-encoding" in call.headers:
        return -1
    return int(call.headers.get("content-length") or 0)
