"""HTTP connections that answer malformed requests as the real servers, with Go's `net/http`.

Heads that h11 judges differently are refused or rewritten before h11 reads them (captured: http_heads).
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

MAX_HEAD = (1 << 20) + 4096
"""Bytes."""
BROKEN_BODY = "nsqext.broken_body"
"""In the scope of a request whose body ended early or had invalid chunks."""
_CLOSE = (b"connection", b"close")
_LINGER = 0.5  # seconds, as in the real servers
_SKIPPED = 256 << 10  # bytes of an unread body that the real servers read before the next request

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VERSION = re.compile(rb"HTTP/(\d)\.(\d)")
_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.\-]*://[^/?#]*")
_BAD_ESCAPE = re.compile(rb"%(?![0-9a-fA-F]{2})")
_HOST = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=:\[\]%]*")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_END = re.compile(rb"\n\r?\n")
_LONGEST_END = 3
_MAX_LENGTH = 1 << 63

Header = tuple[bytes, bytes]
"""Name in lower case, and value."""


def refusal(status: int, text: str = "") -> bytes:
    """Return the answer to a refused head."""
    line = f"{status} {HTTPStatus(status).phrase}{': ' if text else ''}{text}"
    return f"HTTP/1.1 {line}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n{line}".encode()


BAD_REQUEST = refusal(400)
TOO_LARGE = refusal(431)
_NO_CODING = refusal(501).replace(b"\r\n\r\n501 Not Implemented", b"\r\n\r\nUnsupported transfer encoding")
_NO_EXPECTATION = b"HTTP/1.1 417 Expectation Failed\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HeadRefused(Exception):
    """The head is answered without a request."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(answer)
        self.answer = answer


def end_of_head(data: bytes | bytearray, searched: int = 0) -> int:
    """Return the length of a head with its empty line; -1 while incomplete."""
    match = _END.search(data, max(0, searched - _LONGEST_END + 1))
    return -1 if match is None else match.end()


def checked_head(head: bytes) -> bytes:
    """Return a head, with its empty line, as h11 must read it; raises HeadRefused."""
    line, *lines = head.replace(b"\r\n", b"\n").removesuffix(b"\n\n").split(b"\n")
    method, target, (major, minor) = _read_line(line)
    if lines and lines[0][:1] in (b" ", b"\t"):
        raise HeadRefused(BAD_REQUEST)  # it continues no header
    if _CONTROL.search(b" ".join(lines)):
        raise HeadRefused(BAD_REQUEST)
    lines = _unfolded(lines)
    headers = [_split(line) for line in lines]
    dropped = _check_framing(headers, chunks=(major, minor) >= (1, 1))
    if sum(name == b"host" for name, _ in headers) > 1:
        raise HeadRefused(BAD_REQUEST)
    if major != 1:
        raise HeadRefused(refusal(505, "unsupported protocol version"))
    _check_headers(headers, needs_host=minor > 0 and method != b"CONNECT")
    kept = [line for line, (name, _) in zip(lines, headers, strict=True) if name not in dropped]
    return b"\r\n".join((b"%b %b HTTP/%d.%d" % (method, target, major, minor), *kept, b"", b""))


def check_first_line(data: bytes | bytearray) -> None:
    """Check the request line on arrival: clients of another protocol send no empty line. Raises HeadRefused."""
    line, ended, _ = data.partition(b"\n")
    if ended:
        _read_line(bytes(line).removesuffix(b"\r"))


def _read_line(line: bytes) -> tuple[bytes, bytes, tuple[int, int]]:
    method, _, rest = line.partition(b" ")
    target, _, version = rest.partition(b" ")
    number = _VERSION.fullmatch(version)
    if number is None or _TOKEN.fullmatch(method) is None:
        raise HeadRefused(BAD_REQUEST)
    return method, _path(method, target), (int(number[1]), int(number[2]))


def _unfolded(lines: list[bytes]) -> list[bytes]:
    """Join lines that continue a header with its first line."""
    found: list[bytes] = []
    for line in lines:
        if line[:1] in (b" ", b"\t"):
            found[-1] += b" " + line.strip(b" \t")
        else:
            found.append(line)
    return found


def _split(line: bytes) -> Header:
    name, _, value = line.partition(b":")
    return name.lower(), value.strip(b" \t")


def _path(method: bytes, target: bytes) -> bytes:
    if method == b"CONNECT" or target == b"*":
        return target
    absolute = _ABSOLUTE.match(target)
    if absolute is not None:
        target = target[absolute.end() :]
        target = target if target.startswith(b"/") else b"/" + target
    if not target.startswith(b"/") or _BAD_ESCAPE.search(target.partition(b"?")[0]):
        raise HeadRefused(BAD_REQUEST)
    return target


def _check_framing(headers: list[Header], *, chunks: bool) -> set[bytes]:
    """Check the headers that define the body's end; return the names of headers to ignore."""
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and chunks:
        if len(codings) > 1 or codings[0].lower() != b"chunked":
            raise HeadRefused(_NO_CODING)
        return {b"content-length"}
    lengths = {value for name, value in headers if name == b"content-length"}
    for length in lengths:
        if len(lengths) > 1 or (length and not (length.isdigit() and int(length[:20]) < _MAX_LENGTH)):
            raise HeadRefused(BAD_REQUEST)
    return {b"transfer-encoding", *([b"content-length"] if lengths == {b""} else [])}


def _check_headers(headers: list[Header], *, needs_host: bool) -> None:
    hosts = [value for name, value in headers if name == b"host"]
    if needs_host and not hosts:
        raise HeadRefused(refusal(400, "missing required Host header"))
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise HeadRefused(refusal(400, "malformed Host header"))
    for name, _ in headers:
        if b" " in name and _TOKEN.fullmatch(name.replace(b" ", b"")):
            raise HeadRefused(refusal(400, "invalid header name"))
    expected = b",".join(value for name, value in headers if name == b"expect").lower()
    if expected and b"100-continue" not in map(bytes.strip, expected.split(b",")):
        raise HeadRefused(_NO_EXPECTATION)


# Connections


def _close_after(scope: Any) -> None:
    """Close the connection after the response, and announce it."""
    if _CLOSE not in scope["headers"]:
        scope["headers"].append(_CLOSE)


def closing_after_unread_body(scope: Any, receive: Any, send: Any) -> tuple[Any, Any]:
    """Return ``receive`` and ``send``; a response before the end of a long body closes the connection."""
    announced = int(dict(scope["headers"]).get(b"content-length", 0))
    if announced <= _SKIPPED:
        return receive, send
    read = False

    async def received() -> Any:
        nonlocal read
        message = await receive()
        read = read or not message.get("more_body", False)
        return message

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start" and not read:
            _close_after(scope)
        await send(message)

    return received, sent


class GoProtocol(H11Protocol):
    """A connection that judges heads before h11 reads them, except pipelined heads."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head = bytearray()
        self._line_checked = self._ended = self._refused = False

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._head or (self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]):
            try:
                data = self._read_head(data)
            except HeadRefused as refused:
                self._refuse(refused.answer)
                return
        if data:
            super().data_received(data)

    def _read_head(self, data: bytes) -> bytes:
        """Return what h11 reads, with the checked head; nothing while the head is incomplete."""
        seen = len(self._head)
        self._head += data
        end = end_of_head(self._head, seen)
        if (end if end >= 0 else len(self._head)) > MAX_HEAD:
            raise HeadRefused(TOO_LARGE)
        if end < 0:
            if not self._line_checked and b"\n" in data:
                check_first_line(self._head)
                self._line_checked = True
            return b""
        whole = checked_head(bytes(self._head[:end])) + bytes(self._head[end:])
        self._head.clear()
        self._line_checked = False
        return whole

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Answer what the client has sent before it ended; True keeps the transport open."""
        if self._refused:
            return None
        if self._head:
            self._refuse(BAD_REQUEST)
            return None
        if self.cycle is None or self.cycle.response_started:
            return None  # kept open, a stream of events would never notice a lost reader
        if self.cycle.more_body:
            self._break_body(self.cycle)
        self._ended = True
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._ended:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 refuses; within a body, the handler answers."""
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            self._break_body(self.cycle)
        else:
            self._refuse(BAD_REQUEST)

    @staticmethod
    def _break_body(cycle: RequestResponseCycle) -> None:
        scope: Any = cycle.scope
        scope[BROKEN_BODY] = True
        if b"transfer-encoding" in dict(scope["headers"]):  # not behind a body with a length that ends early
            _close_after(scope)
        cycle.more_body = False
        cycle.message_event.set()

    def _refuse(self, answer: bytes) -> None:
        """Answer, read for a while, as unread bytes reset the connection, and close."""
        self._head.clear()
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self._refused = True
            self.transport.write_eof()
            self.loop.call_later(_LINGER, self.transport.close)
        else:
            self.transport.close()
