"""What a process under attack uses: memory, descriptors, log lines, and the longest turn of its event loop."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import anyio
from attrs import define

__all__ = ("Meter", "Usage")

_TICK = 0.01
_MIB = 1024


@define
class Usage:
    """What a process used during an attack.

    Attributes:
        rss: growth of its memory at the highest point, in MiB.
        block: longest turn of the event loop, in seconds of CPU; the load of the machine does not count.
        descriptors: descriptors that are open after the attack and were not before.
        log_lines: lines logged at INFO and above.
        wait: longest wait of an honest peer for a message that it published, in seconds.
        served: messages of the honest peer.
        recovered: honest peers were served after the attack.
    """

    rss: float = 0.0
    block: float = 0.0
    descriptors: int = 0
    log_lines: int = 0
    wait: float = 0.0
    served: int = 0
    recovered: bool = False


class Meter(logging.Handler):
    """Measures the process that it is made in, from `start` on."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.usage: Usage = Usage()
        self._rss = 0
        self._descriptors = 0

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()
        self.usage.log_lines += 1

    def start(self) -> None:
        """Take the current state for the one before the attack."""
        root = logging.getLogger()
        root.addHandler(self)
        root.setLevel(logging.INFO)
        for quiet in ("asyncio", "httpcore", "httpx"):
            logging.getLogger(quiet).setLevel(logging.INFO)
        Path("/proc/self/clear_refs").write_text("5")  # resets the highest point
        self._rss = _memory("VmRSS")
        self._descriptors = _descriptors()

    async def watch(self) -> None:
        """Measure turns of the event loop that runs this, until cancelled."""
        await anyio.sleep(_TICK)
        last = time.thread_time()
        while True:
            await anyio.sleep(_TICK)
            now = time.thread_time()
            self.usage.block = max(self.usage.block, now - last)
            last = now

    def stop(self) -> Usage:
        """Return what was used since `start`."""
        self.usage.rss = max(0, _memory("VmHWM") - self._rss) / _MIB
        self.usage.descriptors = max(0, _descriptors() - self._descriptors)
        return self.usage


def _memory(field: str) -> int:
    """Return a field of the process status, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise KeyError(field)


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
