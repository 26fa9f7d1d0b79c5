"""Split received bytes into commands, as the real servers do, and tell which of them a state of a connection accepts.

The caller pulls one command at a time, because the previous one decides how the next is read (IDENTIFY may start a
layer, an error ends reading). Line and size are checked before the body is received, so that an error is sent as early
as by the real server.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from struct import Struct
from typing import NamedTuple, Protocol

from nsqext.protocol.frames import RequestError
from nsqext.protocol.server.publish_bodies import PUBLISH_VERBS, BatchReader, PublishItem

MAX_LINE = 4 * 1024
"""Longest command line of the redesigned server, in bytes with its newline.

A server closes the connection without an error frame after as many bytes without a newline.
"""

MAX_LINE_CLASSIC = 16 * 1024
"""Longest command line of the original server."""

_I32 = Struct(">i")

BODY_VERBS = PUBLISH_VERBS | {b"IDENTIFY", b"AUTH"}
"""Commands whose line is followed by a sized body."""


class Command(NamedTuple):
    """A command."""

    words: list[bytes]  # the words of its line; the first is its name
    body: bytes | None = None  # its body; None for a command without one
    items: list[PublishItem] | None = None  # messages of a batch that a `BatchReader` read, instead of the body


class BodyRules(Protocol):
    """Checks of a command with a body while it is being received; each raises `RequestError` to refuse it."""

    def check_line(self, words: list[bytes]) -> None:
        """Check the words of a command before its size is read."""

    def check_size(self, words: list[bytes], size: int) -> BatchReader | None:
        """Check the announced size (signed) before the body is received; return a reader if the body is a batch."""

    def check_end(self, words: list[bytes], batch: BatchReader | None, *, sized: bool) -> None:
        """Handle the end of the stream before the size of a body, or (``sized``) within the body."""


class CommandParser:
    """Split received bytes into commands."""

    __slots__ = ("_batch", "_buffer", "_max_line", "_need", "_position", "_raw_ids", "_rules", "_size", "_words")

    def __init__(self, rules: BodyRules, *, raw_ids: bool = True) -> None:
        self._rules = rules  # checks of the server
        # FIN, REQ and TOUCH have 16 raw bytes, found by position (redesigned server); otherwise their line ends at the
        # first newline like any other (original server)
        self._raw_ids = raw_ids
        self._max_line = MAX_LINE if raw_ids else MAX_LINE_CLASSIC
        self._buffer = bytearray()
        self._position = 0
        self._need = 0
        self._words: list[bytes] | None = None
        self._size: int | None = None
        self._batch: BatchReader | None = None

    def receive(self, data: bytes) -> None:
        """Add received bytes."""
        if self._position:
            del self._buffer[: self._position]
            self._need = max(0, self._need - self._position)
            self._position = 0
        self._buffer += data

    @property
    def buffered(self) -> int:
        """Received bytes that are not consumed yet."""
        return len(self._buffer) - self._position

    def take_rest(self) -> bytes:
        """Return and forget the bytes after the last command: they belong to a layer that was just negotiated."""
        rest = bytes(self._buffer[self._position :])
        self._buffer.clear()
        self._position = self._need = 0
        return rest

    def check_end(self) -> None:
        """Refuse a body that is cut off by the end of the stream."""
        if self._words is not None:
            self._rules.check_end(self._words, self._batch, sized=self._size is not None)

    def next_command(self) -> Command | None:
        """Return the next command, or None when more bytes are needed.

        Raises the `RequestError` of the rules. That of a line that is too long has no code: the server closes the
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
        """Read TOUCH; a line that ends before byte 23 has 23 bytes, because the id may contain the newline."""
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


# States of a connection, those of the original server's notes (init, subscribed, closing)


class State(Enum):
    """State of a connection, the same for both roles."""

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
"""States in which a command is accepted; a command that is not listed is accepted in every state."""


def check_state(verb: str, state: State) -> None:
    """Raise the error of a command that is not accepted in this state (captured: wrong_state)."""
    accepted = ACCEPTED_IN.get(verb)
    if accepted is not None and state not in accepted:
        name = "SUB" if verb in _SUBS else verb
        raise RequestError("E_INVALID", f"cannot {name} in current state")
