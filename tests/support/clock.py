"""A clock of the test, which the package reads instead of the machine's."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

import trio
from trio.testing import MockClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import ModuleType

    import pytest

__all__ = ("Clock", "replace_clock", "run_in_virtual_time")

_monotonic = time.monotonic
_readers: dict[int, list[tuple[ModuleType, str]]] = {}


class Clock:
    """Seconds that a test sets."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def replace_clock(patch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Replace `time.monotonic` in this thread, wherever the package took it by name; event loops keep the machine's.

    A later call replaces the earlier clock.
    """
    thread = threading.get_ident()

    def chosen() -> float:
        return clock() if threading.get_ident() == thread else _monotonic()

    for module, name in _find_readers():
        patch.setattr(module, name, chosen)


def run_in_virtual_time(patch: pytest.MonkeyPatch, main: Callable[[], Awaitable[None]]) -> None:
    """Run on trio, without servers and threads; while all tasks wait, its clock goes to the next deadline at once."""
    replace_clock(patch, trio.current_time)
    trio.run(main, clock=MockClock(autojump_threshold=0))


def _find_readers() -> list[tuple[ModuleType, str]]:
    """Return the modules of the package that took the function, and their names for it."""
    loaded = len(sys.modules)
    if loaded not in _readers:
        known = [reader for readers in _readers.values() for reader in readers]
        found = [
            (module, name)
            for path, module in sorted(sys.modules.items())
            if path.startswith("nsqext.")
            for name, value in vars(module).items()
            if value is _monotonic
        ]
        _readers.clear()
        _readers[loaded] = [*known, *(reader for reader in found if reader not in known)]
    return _readers[loaded]
