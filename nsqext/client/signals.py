"""Stop clients and programs on SIGTERM and SIGINT."""

from __future__ import annotations

import logging
import signal
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
from anyio.lowlevel import current_token

from nsqext.transport.event_loop import call_soon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEATED: Final = 1.0
"""Seconds after the first signal in which further signals are ignored."""


class _Signals:
    """Calls functions on the first SIGTERM or SIGINT, until the last function is removed.

    Further signals are ignored for a second: ``timeout`` and some init programs send a signal to the process and again
    to its group. A later signal has its former effect.
    """

    def __init__(self) -> None:
        self.stops: list[Callable[[], None]] = []
        self.received: int = 0  #: number of the first signal
        self._ignored_until = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def add(self, stop: Callable[[], None]) -> None:
        """Call a function on a signal, from the signal's handler."""
        if not self.stops:
            self.received = 0
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        self.stops.append(stop)

    def remove(self, stop: Callable[[], None]) -> None:
        self.stops.remove(stop)
        if not self.stops:
            self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._ignored_until = number, time.monotonic() + REPEATED
            for stop in tuple(self.stops):
                stop()
        elif time.monotonic() > self._ignored_until:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, action in self._before.items():
            signal.signal(number, action)
        self._before = {}


_signals = _Signals()


def takes_signals(wanted: bool | None) -> bool:
    """Return whether to react to SIGTERM and SIGINT.

    None leaves SIGTERM to a program with its own handler, such as a web server.
    """
    if wanted is not None:
        return wanted
    return _in_main_thread() and (bool(_signals.stops) or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def last_signal() -> int:
    """Return the number of the signal that called the last functions; 0 if there was none."""
    return _signals.received


async def stop_on_signals(stop: Callable[[], None], log: logging.Logger) -> None:
    """Wait for SIGTERM or SIGINT, log it in ``log``, and call a function; return at once outside the main thread.

    A second after the first signal both have their former effect again. Several such tasks may wait.
    """
    if not _in_main_thread():
        log.debug("signals are received in the main thread only")
        return
    received = anyio.Event()
    wake = partial(call_soon, current_token().native_token, received.set)
    with stopping_on_signals(wake):
        await received.wait()
        if _signals.stops[0] is wake:
            log.info("stopping on %s", signal.Signals(_signals.received).name)
        stop()
        await anyio.sleep(REPEATED)


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call a function on SIGTERM or SIGINT, in a program whose main thread waits without an event loop.

    Further signals are handled as by `stop_on_signals`. The function must not wait or take a lock that the main thread
    may hold.
    """
    if not _in_main_thread():
        yield
        return
    _signals.add(stop)
    try:
        yield
    finally:
        _signals.remove(stop)
