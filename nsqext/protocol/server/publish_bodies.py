"""Parse bodies of publish commands with the limits, the order of checks and the error texts of both generations.

A batch (MPUB, MPUB_TRACE, MPUB_EXT) is parsed item by item from the stream, as by the servers: an invalid item is
refused before later ones are received, and their bytes remain in the stream (captured: pub_ext_on_plain).
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from nsqext.protocol.extjson import UnreadableHeader, read_header
from nsqext.protocol.frames import RequestError
from nsqext.protocol.headers import RESERVED_PREFIX, TRACE_ID_HEADER
from nsqext.protocol.messages import EXT_JSON, EXT_NONE
from nsqext.protocol.server.go_format import parse_unsigned

if TYPE_CHECKING:
    from nsqext.protocol.server.negotiate import ServerLimits

BATCH_VERBS = frozenset((b"MPUB", b"MPUB_TRACE", b"MPUB_EXT"))
"""Commands with many messages."""
PUBLISH_VERBS = BATCH_VERBS | {b"PUB", b"PUB_TRACE", b"PUB_EXT", b"DPUB"}
"""Commands with messages."""

_I32 = Struct(">i")
_U64 = Struct(">Q")
_U16 = Struct(">H")
_TRACE_SIZE = 8
_LENGTH_SIZE = 2


class Target(NamedTuple):
    """The topic of a publish, with the settings that affect parsing."""

    topic: str  # its name, for error texts
    extend: bool = False  # the topic accepts JSON headers
    # a topic without extend support drops headers that are all internal (server option allow-ext-compatible)
    lenient: bool = False


class PublishItem(msgspec.Struct, gc=False):
    """One message of a publish."""

    body: bytes  # the body to store
    trace_id: int = 0  # of PUB_TRACE, or of the header's ``##trace_id``
    header: bytes = b""  # JSON header, unchanged
    version: int = EXT_NONE  # version of the extend part that is stored
    traced: bool = False  # the response has a trace


def check_publish_size(verb: bytes, size: int, limits: ServerLimits) -> None:
    """Check the announced size of a publish command, before its body (captured: pub_errors)."""
    batch = verb in BATCH_VERBS
    largest = limits.max_body_size if batch else limits.max_msg_size
    if 0 < size <= largest:
        return
    if limits.generation == "ha":
        name, what = "", "body"
        code = "E_BAD_BODY" if batch or size <= 0 else "E_BAD_MESSAGE"
    else:
        name, what = f"{verb.decode()} ", "body" if batch else "message body"
        code = "E_BAD_BODY" if batch else "E_BAD_MESSAGE"
    if size <= 0:
        raise RequestError(code, f"{name}invalid {what} size {size}")
    raise RequestError(code, f"{name}{'body' if batch else 'message'} too big {size} > {largest}")


def check_room(verb: bytes, size: int) -> None:
    """Check that a body has room for a message after its trace id or header length.

    The server does so after it has found the topic, and before it reads the body (captured: pub_trace, pub_ext_errors).
    """
    if verb == b"PUB_TRACE" and size <= _TRACE_SIZE:
        raise RequestError("E_BAD_BODY", f"invalid body size {size} with trace id enabled")
    if verb == b"PUB_EXT" and size <= _LENGTH_SIZE:
        raise RequestError("E_BAD_BODY", f"invalid body size {size} with ext json header enabled")


def parse_publish(verb: bytes, body: bytes, limits: ServerLimits, target: Target) -> list[PublishItem]:
    """Return the messages in a complete body; raises `RequestError` with the server's text, which may not be fatal."""
    check_publish_size(verb, len(body), limits)
    if verb in BATCH_VERBS:
        reader = BatchReader(verb, limits, target)
        reader.read(body, 0)
        reader.check_end()
        return reader.items
    check_room(verb, len(body))
    if verb == b"PUB_TRACE":
        return [PublishItem(body[_TRACE_SIZE:], _U64.unpack_from(body)[0], traced=True)]
    if verb == b"PUB_EXT":
        return [_read_ext(body, target, batch=False)]
    return [PublishItem(body)]


def _cut_header(body: bytes) -> bytes:
    """Return the header of an ext body; its length is checked."""
    stop = _LENGTH_SIZE + _U16.unpack_from(body)[0] if len(body) >= _LENGTH_SIZE else _LENGTH_SIZE
    if len(body) <= stop:
        raise RequestError("E_BAD_BODY", f"invalid body size {len(body)} in ext json header content length")
    return body[_LENGTH_SIZE:stop]


def _read(header: bytes) -> tuple[int | None, bool]:
    """Return the trace id in a header, if there is one, and whether all its names are internal."""
    try:
        members = read_header(header, TRACE_ID_HEADER)
    except UnreadableHeader as error:
        raise RequestError("E_INVALID_JSON_HEADER", f"fail to parse json header:{error}", fatal=False) from error
    internal = all(name.startswith(RESERVED_PREFIX) or name == "zan_test" for name in members)
    if TRACE_ID_HEADER not in members:
        return None, internal
    trace = members[TRACE_ID_HEADER]
    if not isinstance(trace, str):
        raise RequestError("INVALID_TRACE_ID", "passin trace id should be string", fatal=False)
    number = parse_unsigned(trace)
    if number is None:
        raise RequestError("INVALID_TRACE_ID", "invalid trace id", fatal=False)
    return number, internal


def _not_supported(target: Target) -> RequestError:
    return RequestError("E_EXT_NOT_SUPPORT", f"ext content not supported in topic {target.topic}", fatal=False)


def _read_ext(body: bytes, target: Target, *, batch: bool) -> PublishItem:
    """Return the message of PUB_EXT, or of an item of MPUB_EXT, whose header may be empty and requests no trace."""
    header = _cut_header(body)
    rest = body[_LENGTH_SIZE + len(header) :]
    if batch and not header:
        return PublishItem(rest)
    if batch and not (target.extend or target.lenient):
        raise _not_supported(target)
    trace_id, internal = _read(header)
    traced = trace_id is not None and not batch
    if target.extend:
        return PublishItem(rest, trace_id or 0, header, EXT_JSON, traced)
    if not (target.lenient and internal):
        raise _not_supported(target)
    return PublishItem(rest, trace_id or 0, traced=traced)


class BatchReader:
    """Parse a batch while it is received: the count, then item by item."""

    __slots__ = ("_left", "_limits", "_taken", "_target", "_verb", "items", "need", "position")

    def __init__(self, verb: bytes, limits: ServerLimits, target: Target) -> None:
        self._verb = verb  # one of the MPUB family
        self._limits = limits  # limits of the server
        self._target = target
        self._left = -1
        self._taken = 0
        self.items: list[PublishItem] = []  # the messages so far
        self.position: int = 0  # where parsing stopped in the last buffer; after a refused item, the position behind it
        self.need: int = 4  # bytes required from ``position`` before parsing can continue; 0 if the batch is complete

    def read(self, data: bytes | bytearray, position: int) -> bool:
        """Parse the complete items from a position on, or refuse one; return whether the batch is complete."""
        self.position = position
        with memoryview(data) as view:
            if self._left < 0 and self._has(view, 4):
                self._take_count(view)
            while self._left > 0 and self._take_item(view):
                self._left -= 1
        if self._left == 0:
            self.need = 0
        return self._left == 0

    def check_end(self) -> None:
        """Raise the error of a batch that is cut off."""
        if self._left < 0:
            raise RequestError("E_BAD_BODY", "MPUB failed to read message count")
        if self._left and self.need == 4:
            raise RequestError("E_BAD_MESSAGE", f"MPUB failed to read message({len(self.items)}) body size")
        if self._left:
            raise RequestError("E_BAD_MESSAGE", "MPUB failed to read message body")

    def _has(self, view: memoryview, size: int) -> bool:
        self.need = size
        return len(view) - self.position >= size

    def _take_count(self, view: memoryview) -> None:
        count: int = _I32.unpack_from(view, self.position)[0]
        self.position += 4
        if not 0 < count <= (self._limits.max_body_size - 4) // 5:
            raise RequestError("E_BAD_BODY", f"MPUB invalid message count {count}")
        self._left = count

    def _take_item(self, view: memoryview) -> bool:
        if not self._has(view, 4):
            return False
        size: int = _I32.unpack_from(view, self.position)[0]
        if not 0 < size <= self._limits.max_msg_size:
            self.position += 4
            self._refuse(size)
        # servers trust the count; the sum is bounded so that a client cannot fill the memory
        if self._taken + size > self._limits.max_body_size:
            raise RequestError("E_BAD_BODY", f"body too big {self._taken + size} > {self._limits.max_body_size}")
        if not self._has(view, 4 + size):
            return False
        start = self.position + 4
        self.position = start + size
        self._taken += 4 + size
        body = bytes(view[start : self.position])
        if self._verb == b"MPUB":
            self.items.append(PublishItem(body))
        elif self._verb == b"MPUB_EXT":
            self.items.append(_read_ext(body, self._target, batch=True))
        elif size > _TRACE_SIZE:
            self.items.append(PublishItem(body[_TRACE_SIZE:], _U64.unpack_from(body)[0]))
        else:
            text = f"MPUB invalid message({len(self.items)}) body size {size} for tracing"
            raise RequestError("E_BAD_MESSAGE", text)
        return True

    def _refuse(self, size: int) -> None:
        if size <= 0:
            raise RequestError("E_BAD_MESSAGE", f"MPUB invalid message({len(self.items)}) body size {size}")
        raise RequestError("E_BAD_MESSAGE", f"MPUB message too big {size} > {self._limits.max_msg_size}")
