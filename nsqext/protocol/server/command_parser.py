"""Split received bytes into commands as the real servers do; commands accepted in each connection state.

A command decides how the next command is read (IDENTIFY may start a layer, an error ends reading). Line and size are
checked before the body is received: errors are sent as early as by the real server.

A batch (MPUB, MPUB_TRACE, MPUB_EXT) is parsed item by item: an invalid item is refused before later items are received,
and their bytes remain in the stream (captured: pub_ext_on_plain).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from nsqext.protocol.extjson import UnreadableHeader, read_header
from nsqext.protocol.messages import EXT_JSON, EXT_NONE, RESERVED_PREFIX, TRACE_ID_HEADER
from nsqext.protocol.server.go_format import parse_unsigned
from nsqext.protocol.server.request_error import RequestError

if TYPE_CHECKING:
    from nsqext.protocol.server.negotiate import ServerLimits

BATCH_VERBS = frozenset((b"MPUB", b"MPUB_TRACE", b"MPUB_EXT"))
PUBLISH_VERBS = BATCH_VERBS | {b"PUB", b"PUB_TRACE", b"PUB_EXT", b"DPUB"}
_I32 = Struct(">i")
_U64 = Struct(">Q")
_U16 = Struct(">H")
_TRACE_SIZE = 8
_LENGTH_SIZE = 2


class CommandTarget(NamedTuple):
    """The topic of a publish."""

    topic: str  #: for error texts
    extend: bool = False  #: accepts JSON headers
    #: a topic without extend support drops headers with only internal names (server option allow-ext-compatible)
    lenient: bool = False


class PublishItem(msgspec.Struct, gc=False):
    """A message of a publish."""

    body: bytes
    trace_id: int = 0  #: of PUB_TRACE, or the header's ``##trace_id``
    header: bytes = b""  #: JSON, unchanged
    version: int = EXT_NONE  #: of the stored extend part
    traced: bool = False  #: the response has a trace


def check_publish_size(verb: bytes, size: int, limits: ServerLimits) -> None:
    """Check the announced size of a publish (captured: pub_errors)."""
    batch = verb in BATCH_VERBS
    largest = limits.max_body_size if batch else limits.max_msg_size
    if 0 < size <= largest:
        return
    if limits.generation == "redesigned":
        name, what = "", "body"
        code = "E_BAD_BODY" if batch or size <= 0 else "E_BAD_MESSAGE"
    else:
        name, what = f"{verb.decode()} ", "body" if batch else "message body"
        code = "E_BAD_BODY" if batch else "E_BAD_MESSAGE"
    if size <= 0:
        raise RequestError(code, f"{name}invalid {what} size {size}")
    raise RequestError(code, f"{name}{'body' if batch else 'message'} too big {size} > {largest}")


def check_room(verb: bytes, size: int) -> None:
    """Check that a body has room for a message behind its trace id or header length.

    The server checks it between topic and body (captured: pub_trace, pub_ext_errors).
    """
    if verb == b"PUB_TRACE" and size <= _TRACE_SIZE:
        raise RequestError("E_BAD_BODY", f"invalid body size {size} with trace id enabled")
    if verb == b"PUB_EXT" and size <= _LENGTH_SIZE:
        raise RequestError("E_BAD_BODY", f"invalid body size {size} with ext json header enabled")


def parse_publish(verb: bytes, body: bytes, limits: ServerLimits, target: CommandTarget) -> list[PublishItem]:
    """Return the messages of a complete body."""
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
    stop = _LENGTH_SIZE + _U16.unpack_from(body)[0] if len(body) >= _LENGTH_SIZE else _LENGTH_SIZE
    if len(body) <= stop:
        raise RequestError("E_BAD_BODY", f"invalid body size {len(body)} in ext json header content length")
    return body[_LENGTH_SIZE:stop]


def _read(header: bytes) -> tuple[int | None, bool]:
    """Return a header's trace id, if any, and whether all its names are internal."""
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


def _not_supported(target: CommandTarget) -> RequestError:
    return RequestError("E_EXT_NOT_SUPPORT", f"ext content not supported in topic {target.topic}", fatal=False)


def _read_ext(body: bytes, target: CommandTarget, *, batch: bool) -> PublishItem:
    """Return a message of PUB_EXT, or of MPUB_EXT, whose header may be empty and requests no trace."""
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
    """Parse a batch while it is received: the count, then the items."""

    __slots__ = ("_left", "_limits", "_taken", "_target", "_verb", "items", "need", "position")

    def __init__(self, verb: bytes, limits: ServerLimits, target: CommandTarget) -> None:
        self._verb = verb
        self._limits = limits
        self._target = target
        self._left = -1
        self._taken = 0
        self.items: list[PublishItem] = []
        self.position: int = 0  #: where parsing stopped in the last buffer; after a refusal, behind the refused item
        self.need: int = 4  #: bytes required from ``position`` on; 0 for a complete batch

    def read(self, data: bytes | bytearray, position: int) -> bool:
        """Parse complete items from a position on; return whether the batch is complete."""
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
        """Refuse a truncated batch."""
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
        # servers trust the count, by which a client could fill the memory
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


MAX_LINE = 4 * 1024
"""Longest command line of the redesigned server, in bytes with newline."""

MAX_LINE_ORIGINAL = 16 * 1024
"""Longest command line of the original server."""


BODY_VERBS = PUBLISH_VERBS | {b"IDENTIFY", b"AUTH"}
"""Commands with a sized body behind their line."""


class Command(NamedTuple):
    words: list[bytes]  #: of its line; the first is its name
    body: bytes | None = None
    items: list[PublishItem] | None = None  #: messages of a batch read by a `BatchReader`, instead of the body


class BodyRules(Protocol):
    """Checks of a command with a body; each raises `RequestError` to refuse it."""

    def check_line(self, words: list[bytes]) -> None:
        """Check the words before the size is read."""

    def check_size(self, words: list[bytes], size: int) -> BatchReader | None:
        """Check the announced, signed size before the body is received; return a reader for a batch."""

    def check_end(self, words: list[bytes], batch: BatchReader | None, *, sized: bool) -> None:
        """Handle the end of the stream before a body's size, or (``sized``) within the body."""


class CommandParser:
    """Split received bytes into commands."""

    __slots__ = ("_batch", "_buffer", "_max_line", "_need", "_position", "_raw_ids", "_rules", "_size", "_words")

    def __init__(self, rules: BodyRules, *, raw_ids: bool = True) -> None:
        self._rules = rules
        # FIN, REQ and TOUCH have 16 raw bytes at a fixed position (redesigned server), not a word (original server)
        self._raw_ids = raw_ids
        self._max_line = MAX_LINE if raw_ids else MAX_LINE_ORIGINAL
        self._buffer = bytearray()
        self._position = 0
        self._need = 0
        self._words: list[bytes] | None = None
        self._size: int | None = None
        self._batch: BatchReader | None = None

    def receive(self, data: bytes) -> None:
        if self._position:
            del self._buffer[: self._position]
            self._need = max(0, self._need - self._position)
            self._position = 0
        self._buffer += data

    @property
    def buffered(self) -> int:
        return len(self._buffer) - self._position

    def take_rest(self) -> bytes:
        """Remove and return the bytes behind the last command, for a new layer."""
        rest = bytes(self._buffer[self._position :])
        self._buffer.clear()
        self._position = self._need = 0
        return rest

    def check_end(self) -> None:
        """Refuse a body that the end of the stream truncates."""
        if self._words is not None:
            self._rules.check_end(self._words, self._batch, sized=self._size is not None)

    def next_command(self) -> Command | None:
        """Return the next command; None when more bytes are needed.

        Raises the `RequestError` of the rules, or without code for a line that is too long: the server closes the
        connection without an error frame.
        """
        if len(self._buffer) < self._need:
            return None
        if self._words is None:
            words = self._take_line()
            if words is None:
                return None
            if words[0] not in BODY_VERBS:
                return Command(words)
            self._rules.check_line(words)
            self._words = words
        return self._take_body(self._words)

    def _take_body(self, words: list[bytes]) -> Command | None:
        buffer, position = self._buffer, self._position
        if self._size is None:
            if len(buffer) - position < 4:
                self._need = position + 4
                return None
            size: int = _I32.unpack_from(buffer, position)[0]
            self._batch = self._rules.check_size(words, size)
            self._size = max(size, 0)
            self._position = position = position + 4
        if self._batch is not None:
            return self._take_batch(words, self._batch)
        stop = position + self._size
        if stop > len(buffer):
            self._need = stop
            return None
        with memoryview(buffer) as view:
            body = bytes(view[position:stop])
        self._position = stop
        self._words = self._size = None
        return Command(words, body)

    def _take_batch(self, words: list[bytes], batch: BatchReader) -> Command | None:
        try:
            complete = batch.read(self._buffer, self._position)
        except RequestError:
            self._words = self._size = self._batch = None
            raise
        finally:
            self._position = batch.position
        if not complete:
            self._need = batch.position + batch.need
            return None
        self._words = self._size = self._batch = None
        return Command(words, None, batch.items)

    def _take_line(self) -> list[bytes] | None:
        buffer, position = self._buffer, self._position
        start = position
        if self._raw_ids:
            head = bytes(buffer[position : position + 5])
            if head[:3] in (b"FIN", b"REQ"):
                start = position + 20
            elif head == b"TOUCH":
                return self._take_touch()
        newline = self._find_newline(start)
        if newline < 0:
            return None
        line = bytes(buffer[position:newline])
        self._position = newline + 1
        if start != position:
            return _cut_raw(line)
        return (line[:-1] if line.endswith(b"\r") else line).split(b" ")

    def _find_newline(self, start: int) -> int:
        newline = self._buffer.find(b"\n", start, self._position + self._max_line)
        if newline < 0 and len(self._buffer) - self._position >= self._max_line:
            raise RequestError("", "command line too long")
        return newline

    def _take_touch(self) -> list[bytes] | None:
        """Parse TOUCH: at least 23 bytes, because the id may contain a newline."""
        position = self._position
        newline = self._find_newline(position)
        if newline < 0:
            return None
        stop = max(newline + 1, position + 23)
        if len(self._buffer) < stop:
            self._need = stop
            return None
        self._position = stop
        return [b"TOUCH", bytes(self._buffer[position + 6 : position + 22])]


def _cut_raw(line: bytes) -> list[bytes]:
    words = [line[:3], line[4:20]]
    if line.startswith(b"REQ") and len(line) > 20:
        words.append(line[21:])
    return words


class State(Enum):
    """State of a connection, in both roles."""

    INIT = auto()
    SUBSCRIBED = auto()
    CLOSING = auto()


_SUBS = ("SUB", "SUB_ADVANCED", "SUB_ORDERED")
_ACKS = ("FIN", "REQ", "TOUCH")

ACCEPTED_IN: Mapping[str, frozenset[State]] = {
    "IDENTIFY": frozenset({State.INIT}),
    "AUTH": frozenset({State.INIT}),
    **dict.fromkeys(_SUBS, frozenset({State.INIT})),
    **dict.fromkeys(_ACKS, frozenset({State.SUBSCRIBED, State.CLOSING})),
    "RDY": frozenset({State.SUBSCRIBED, State.CLOSING}),
    "CLS": frozenset({State.SUBSCRIBED}),
}
"""Unlisted commands are accepted in every state."""


def check_state(verb: str, state: State) -> None:
    """Refuse a command in a wrong state (captured: wrong_state)."""
    accepted = ACCEPTED_IN.get(verb)
    if accepted is not None and state not in accepted:
        name = "SUB" if verb in _SUBS else verb
        raise RequestError("E_INVALID", f"cannot {name} in current state")
