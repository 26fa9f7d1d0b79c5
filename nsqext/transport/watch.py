"""A standing wait for sockets, where the event loop has one.

anyio waits for a socket once: it registers, waits, and unregisters, which on asyncio costs more than everything else in
a lone publish (measured: 39 µs with, 17 µs without, of 62 µs that the quickest other Python client takes). The loop
itself can keep a socket registered, and anyio hands the loop out as its native token. The loop's own futures are the
cheapest thing to wait for there: with them a publish of 64 in flight costs 5.8 µs, with an `anyio.Event` each 8.8. trio
has no such thing and needs none: there the one who waits for an answer reads it, at less cost.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, runtime_checkable

from anyio.lowlevel import current_token

__all__ = ("Waiter", "Watch", "watch_readable")


class Waiter(Awaitable[None], Protocol):
    """What one task waits for; a future of the event loop."""

    def done(self) -> bool:
        """Whether it was set, or the task that waits was cancelled."""

    def set_result(self, result: None, /) -> None:
        """Let the task go on."""


@runtime_checkable
class _WatchingLoop(Protocol):
    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None: ...

    def remove_reader(self, fd: int) -> bool: ...

    def add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> None: ...

    def remove_writer(self, fd: int) -> bool: ...

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any: ...

    def create_future(self) -> Any: ...


class Watch:
    """A socket that the event loop keeps registered; made by `watch_readable`.

    Attributes:
        waiter: makes something to wait for.
        call_soon: calls back in the next turn of the event loop.
    """

    __slots__ = ("_fd", "_loop", "_writing", "call_soon", "waiter")

    def __init__(self, loop: _WatchingLoop, fd: int) -> None:
        self.waiter: Callable[[], Waiter] = loop.create_future
        self.call_soon: Callable[[Callable[[], None]], object] = loop.call_soon
        self._loop = loop
        self._fd = fd
        self._writing = False

    def start_writing(self, callback: Callable[[], None]) -> None:
        """Call back whenever the kernel takes more, until `stop_writing`."""
        if not self._writing:
            self._loop.add_writer(self._fd, callback)
            self._writing = True

    def stop_writing(self) -> None:
        """Call back no more."""
        if self._writing:
            self._loop.remove_writer(self._fd)
            self._writing = False

    def end(self) -> None:
        """End it, before the socket is closed."""
        self._loop.remove_reader(self._fd)
        self.stop_writing()


def watch_readable(sock: socket.socket, callback: Callable[[], None]) -> Watch | None:
    """Let the running event loop call back whenever a socket can be read.

    Returns:
        What ends it, and the rest that such a loop offers; None where the event loop cannot do this.
    """
    loop = current_token().native_token
    if not isinstance(loop, _WatchingLoop):
        return None
    fd = sock.fileno()
    try:
        loop.add_reader(fd, callback)
    except NotImplementedError:
        return None
    return Watch(loop, fd)
