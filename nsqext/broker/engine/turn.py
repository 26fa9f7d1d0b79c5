"""The turn of a client's commands, during which nothing is delivered."""

from __future__ import annotations

from typing import Protocol


class Pumped(Protocol):
    """A channel."""

    def pump(self) -> None:
        """Deliver messages while clients can take them."""


class Turn:
    """Commands that were received together are run before the messages that they let through are delivered.

    At the real servers another goroutine delivers, which in most cases runs only when all these commands have been
    answered: after SUB, RDY and PUB in one segment, OK came twice before the message in 97 of 100 (redesigned).
    """

    __slots__ = ("_channels", "_open")

    def __init__(self) -> None:
        self._open = False
        self._channels: dict[Pumped, None] = {}

    def begin(self) -> None:
        """Defer deliveries."""
        self._open = True

    def defers(self, channel: Pumped) -> bool:
        """Return whether a channel has to wait; it is pumped at the end of the turn then."""
        if self._open:
            self._channels[channel] = None
        return self._open

    def end(self) -> None:
        """Deliver."""
        self._open = False
        if self._channels:
            waiting, self._channels = self._channels, {}
            for channel in waiting:
                channel.pump()
