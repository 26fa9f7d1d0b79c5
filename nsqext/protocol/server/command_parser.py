"""The server's reading side: bytes to commands, as the servers cut them.

A command is pulled, not pushed, because how one is read depends on what the one before did (IDENTIFY may put a layer
between, an error ends the reading). Before a body is waited for, the rules may refuse the line and then the size, so
that an error comes as early as the real server's.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple, Protocol

from nsqext.protocol.server.publish_bodies import PUBLISH_VERBS, BatchReader, PublishItem
from nsqext.protocol.server.request_error import Fault

__all__ = ("BODY_VERBS", "MAX_LINE", "BodyRules", "Command", "CommandParser")

MAX_LINE = 16 * 1024
"""Longest command line, in bytes; a server that finds no newline in so many closes the connection."""

_I32 = Struct(">i")

BODY_VERBS = PUBLISH_VERBS | {b"IDENTIFY", b"AUTH"}
"""Commands with a sized body behind the line."""


class Command(NamedTuple):
    """A command.

    Attributes:
        words: the words of its line; the first is its name.
        body: its body; None for a command without one.
        items: messages of a batch that a `BatchReader` read, instead of the body.
    """

    words: list[bytes]
    body: bytes | None = None
    items: list[PublishItem] | None = None


class BodyRules(Protocol):
    """What a server checks while a command with a body is still being read; each raises `Fault` to refuse."""

    def check_line(self, words: list[bytes]) -> None:
        """Check the words of a command before its size is read."""

    def check_size(self, words: list[bytes], size: int) -> BatchReader | None:
        """Check the announced size (signed) before the body is read; bounds what has to be kept.

        Returns:
            A reader for a batch that is read item by item, as the servers do; None for a body that is taken whole.
        """

    def check_end(self, words: list[bytes], batch: BatchReader | None, *, sized: bool) -> None:
        """Hear that the peer sends no more, in front of the size of a body, or (``sized``) within the body."""


class CommandParser:
    """Cuts a stream of bytes into commands.

    Args:
        rules: checks of the server.
        raw_ids: FIN, REQ and TOUCH carry 16 raw bytes, cut by position (redesigned server); without it their line ends
            at the first newline as any other (original server).
    """

    __slots__ = ("_batch", "_buffer", "_need", "_position", "_raw_ids", "_rules", "_size", "_words")

    def __init__(self, rules: BodyRules, *, raw_ids: bool = True) -> None:
        self._rules = rules
        self._raw_ids = raw_ids
        self._buffer = bytearray()
        self._position = 0
        self._need = 0
        self._words: list[bytes] | None = None
        self._size: int | None = None
        self._batch: BatchReader | None = None

    def receive(self, data: bytes) -> None:
        """Take bytes from the peer."""
        if self._position:
            del self._buffer[: self._position]
            self._need = max(0, self._need - self._position)
            self._position = 0
        self._buffer += data

    @property
    def buffered(self) -> int:
        """Bytes that are not consumed yet."""
        return len(self._buffer) - self._position

    def take_rest(self) -> bytes:
        """Hand over the bytes behind the last command: they belong to a layer that was just negotiated."""
        rest = bytes(self._buffer[self._position :])
        self._buffer.clear()
        self._position = self._need = 0
        return rest

    def check_end(self) -> None:
        """Hear that the peer sends no more.

        Raises:
            Fault: a body is cut off.
        """
        if self._words is not None:
            self._rules.check_end(self._words, self._batch, sized=self._size is not None)

    def next_command(self) -> Command | None:
        """Return the next command, or None when more bytes are needed.

        Raises:
            Fault: the rules refuse the command; or its line is too long (without a code: the server closes silently).
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
        except Fault:
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
        newline = self._buffer.find(b"\n", start, self._position + MAX_LINE)
        if newline < 0 and len(self._buffer) - self._position >= MAX_LINE:
            raise Fault("", "command line too long")
        return newline

    def _take_touch(self) -> list[bytes] | None:
        """A line that ends before byte 23 is taken as 23 bytes, because the id may hold the newline."""
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
