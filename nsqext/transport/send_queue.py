"""Commands that the kernel has not accepted, in parts, so that each byte is copied at most once."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from nsqext.protocol.client.commands import LARGE, Command, LargeCommand

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nsqext.protocol.layers import Layer

_JOINED = 262144  # bytes of small commands in one part


class SendQueue:
    """Parts of commands, in the order in which they are sent.

    Small commands are joined with their neighbours, large bodies are separate parts. Each system call gets a bounded
    number of parts: copies and calls are linear in bytes and commands, whatever their mix, and however few bytes the
    kernel accepts at a time.
    """

    __slots__ = ("_encoded", "_parts", "begun")

    def __init__(self) -> None:
        self._parts: deque[tuple[bytes | memoryview, int]] = deque()
        """Bytes, and the number of commands that begin in them."""
        self._encoded = False
        self.begun: int = 0  #: commands of a partly sent first part, otherwise 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def put(self, commands: Iterable[Command]) -> None:
        """Append commands."""
        small: list[bytes] = []
        size = begin = 0
        for command in commands:
            begins = 1
            for part in command.parts if isinstance(command, LargeCommand) else (command,):
                if len(part) >= LARGE:
                    self._join(small, begin)
                    self._parts.append((part, begins))
                    size = begin = 0
                else:
                    small.append(part)
                    size += len(part)
                    begin += begins
                    if size >= _JOINED:
                        self._join(small, begin)
                        size = begin = 0
                begins = 0
        self._join(small, begin)

    def append(self, data: bytes, commands: int) -> None:
        self._parts.append((data, commands))

    def _join(self, small: list[bytes], begin: int) -> None:
        if small:
            self._parts.append((b"".join(small), begin))
            small.clear()

    def encode(self, layers: Sequence[Layer]) -> None:
        """Encode the first part by the layers, once."""
        if not self._encoded:
            part, count = self._parts[0]
            data = bytes(part)
            for layer in reversed(layers):
                data = layer.encode(data)
            self._parts[0] = (data, count)
            self._encoded = True

    def first(self, count: int) -> list[bytes | memoryview]:
        return [part for part, _ in islice(self._parts, count)]

    def sent(self, size: int) -> int:
        """Remove the first, sent bytes; return the number of commands in the parts that end with them."""
        parts = self._parts
        commands = 0
        while parts:
            part, count = parts[0]
            if size < len(part):
                if size:
                    parts[0] = (memoryview(part)[size:], count)
                    self.begun = count
                break
            parts.popleft()
            size -= len(part)
            commands += count
            self.begun = 0
            self._encoded = False
        return commands
