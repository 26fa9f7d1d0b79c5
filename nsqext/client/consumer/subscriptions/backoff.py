"""Pauses while handlers fail: a state machine without I/O and clock.

::

    running ──failure──▶ waiting (RDY 0) ──time is over──▶ probing (RDY 1)
       ▲                     ▲                                │
       └──── success at level 1 ◀─────────────────────────────┤
                             └── failure: one level up, or success: one level down

The pause of level n is ``base * 2**n``, as in the Go clients. Outcomes during a pause change nothing: many messages
that fail together count once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import define

from nsqext.waits import chance

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.client.consumer.options import BackoffOptions


@define(eq=False)
class Backoff:
    """The state of a consumer, or of a connection."""

    _options: BackoffOptions
    _chance: Callable[[], float] = lambda: chance.random()  # share of a pause, 0 to 1, with jitter
    level: int = 0  #: 0 while handlers succeed
    until: float = 0.0  #: end of the pause on the caller's clock

    @property
    def state(self) -> Literal["running", "waiting", "probing"]:
        """Whether messages are received at full speed, not at all, or one at a time."""
        if not self.level:
            return "running"
        return "waiting" if self.until else "probing"

    def failed(self, now: float) -> bool:
        """Record a failed message; return whether the state changed."""
        if self.until or self._options.mode == "off":
            return False
        if self._pause(self.level + 1) <= self._options.max_wait:
            self.level += 1
        self._wait(now)
        return True

    def succeeded(self, now: float) -> bool:
        """Record a handled message; return whether the state changed."""
        if self.until or not self.level:
            return False
        self.level -= 1
        if self.level:
            self._wait(now)
        return True

    def passed(self, now: float) -> bool:
        """Record a requeue without backoff; return whether the state changed."""
        if self.until or not self.level:
            return False
        self._wait(now)
        return True

    def tick(self, now: float) -> bool:
        """End the pause if its time has passed; return whether it ended."""
        if not self.until or now < self.until:
            return False
        self.until = 0.0
        return True

    def _pause(self, level: int) -> float:
        return self._options.base * 2.0**level

    def _wait(self, now: float) -> None:
        pause = self._pause(self.level)
        self.until = now + (pause * self._chance() if self._options.jitter else pause)

    def __repr__(self) -> str:
        return f"<Backoff {self.state} level={self.level}>"
