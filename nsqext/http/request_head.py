"""Heads of requests, judged as Go's `net/http` does, whose answers the clients of the real servers see.

What h11 judges differently is refused here, or rewritten so that h11 reads it as Go does (captured: http_heads). The
rest, such as a header without a name, h11 refuses itself.
"""

from __future__ import annotations

import re
from http import HTTPStatus

MAX_HEAD = (1 << 20) + 4096
"""Largest head, in bytes."""

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VERSION = re.compile(rb"HTTP/(\d)\.(\d)")
_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.\-]*://[^/?#]*")
_BAD_ESCAPE = re.compile(rb"%(?![0-9a-fA-F]{2})")
_HOST = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=:\[\]%]*")
_END = re.compile(rb"\n\r?\n")
_LONGEST_END = 3
_MAX_LENGTH = 1 << 63

Header = tuple[bytes, bytes]
"""Name in lower case, and value."""


def refusal(status: int, text: str = "") -> bytes:
    """Return the whole answer to a head that is refused; the connection ends after it."""
    line = f"{status} {HTTPStatus(status).phrase}{': ' if text else ''}{text}"
    return f"HTTP/1.1 {line}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n{line}".encode()


BAD_REQUEST = refusal(400)
TOO_LARGE = refusal(431)
_NO_CODING = refusal(501).replace(b"\r\n\r\n501 Not Implemented", b"\r\n\r\nUnsupported transfer encoding")
_NO_EXPECTATION = b"HTTP/1.1 417 Expectation Failed\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HeadRefused(Exception):
    """The head is answered without a request.

    Attributes:
        answer: the bytes of the answer.
    """

    def __init__(self, answer: bytes) -> None:
        super().__init__(answer)
        self.answer = answer


def end_of_head(data: bytes | bytearray, searched: int = 0) -> int:
    """Return the length of a head with its empty line; -1 while that has not arrived.

    Args:
        searched: bytes in which no end was found.
    """
    match = _END.search(data, max(0, searched - _LONGEST_END + 1))
    return -1 if match is None else match.end()


def checked_head(head: bytes) -> bytes:
    """Return a head as h11 has to read it.

    Args:
        head: request line and headers, with the empty line.

    Raises HeadRefused.
    """
    line, *lines = head.replace(b"\r\n", b"\n").removesuffix(b"\n\n").split(b"\n")
    method, target, (major, minor) = _read_line(line)
    if lines and lines[0][:1] in (b" ", b"\t"):
        raise HeadRefused(BAD_REQUEST)  # it continues no header
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
    """Check the request line as soon as it has arrived: who speaks another protocol sends no empty line.

    Raises HeadRefused.
    """
    line, ended, _ = data.partition(b"\n")
    if ended:
        _read_line(bytes(line).removesuffix(b"\r"))


def _read_line(line: bytes) -> tuple[bytes, bytes, tuple[int, int]]:
    """Return method, path and version of a request line; raise HeadRefused where it is none."""
    method, _, rest = line.partition(b" ")
    target, _, version = rest.partition(b" ")
    number = _VERSION.fullmatch(version)
    if number is None or _TOKEN.fullmatch(method) is None:
        raise HeadRefused(BAD_REQUEST)
    return method, _path(method, target), (int(number[1]), int(number[2]))


def _split(line: bytes) -> Header:
    name, _, value = line.partition(b":")
    return name.lower(), value.strip(b" \t")


def _path(method: bytes, target: bytes) -> bytes:
    """Return the target of a request without scheme and host; raise HeadRefused if it is not a URL."""
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
    """Check the headers that say where the body ends; return the names of those that do not count.

    Args:
        headers: name and value of each.
    """
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
    """Check the host, the names and what the client expects."""
    hosts = [value for name, value in headers if name == b"host"]
    if needs_host and not hosts:
        raise HeadRefused(refusal(400, "missing required Host header"))
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise HeadRefused(refusal(400, "malformed Host header"))
    for name, _ in headers:
        continues_another = name[:1] in (b" ", b"\t")
        if not continues_another and b" " in name and _TOKEN.fullmatch(name.replace(b" ", b"")):
            raise HeadRefused(refusal(400, "invalid header name"))
    expected = b",".join(value for name, value in headers if name == b"expect").lower()
    if expected and b"100-continue" not in map(bytes.strip, expected.split(b",")):
        raise HeadRefused(_NO_EXPECTATION)
