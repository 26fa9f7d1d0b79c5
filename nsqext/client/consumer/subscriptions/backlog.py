"""Whether messages wait at a server, by the times at which they were published and read: arithmetic without I/O."""

from __future__ import annotations

import time
from collections import deque
from math import inf

from attrs import define, field

TOLERANCE = 0.002
"""Seconds by which messages may be late without a backlog."""
LATE = 0.05
"""Seconds of a wait that shows a backlog, even if the client was late."""
_PERIOD = 5.0  # seconds of a minimum; the latest two are references, so that clocks may drift
_STALE = 60.0  # seconds after which an earlier period is no reference
_TREND = 0.1  # seconds between two lags whose difference shows that a backlog shrinks
_READS = 8  # least reads of a comparable trend
_RATED = 6  # reads that show how fast messages are published
_SOON = 0.001  # seconds for which a server may collect messages
_OLD = 1.0  # age in seconds of a first message that shows a backlog, by the clocks of both machines


@define(eq=False)
class Backlog:
    """Compares when messages were published with when they were read.

    Without a backlog this lag is constant: the difference of the two clocks, and the time on the way. It grows while
    messages wait, and falls while a backlog shrinks. The clocks need not agree.
    """

    # smallest lags of the present and the former period, and of the present and the former trend
    _least: float = field(default=inf, init=False)
    _least_before: float = field(default=inf, init=False)
    _began: float = field(default=-inf, init=False)
    _trend: float = field(default=inf, init=False)
    _trend_before: float = field(default=inf, init=False)
    _trend_began: float = field(default=-inf, init=False)
    _reads: int = field(default=0, init=False)  # of this trend
    # smallest lags before the present and the former trend
    _known: float = field(default=inf, init=False)
    _known_before: float = field(default=inf, init=False)
    # timestamps and messages of the latest reads
    _published: deque[float] = field(factory=lambda: deque(maxlen=_RATED), init=False)
    _counts: deque[int] = field(factory=lambda: deque(maxlen=_RATED), init=False)
    _shrinks: bool = field(default=False, init=False)

    def excess(self, published: float, now: float) -> float:
        """Return for how many seconds the newest message of a read has waited; infinity while a backlog shrinks.

        Args:
            published: its timestamp in seconds, by the server's clock.
        """
        lag = now - published
        first = self._least == self._least_before == inf
        if now - self._began > _PERIOD:
            self._least_before = self._least if now - self._began < _STALE else inf
            self._least, self._began = inf, now
        if now - self._trend_began > _TREND:
            # a lag that was reached before falls because a delay ends
            falls = self._trend < min(self._trend_before, self._known_before) - TOLERANCE
            self._shrinks = self._reads >= _READS and (falls if self._trend_before < inf else self._shrinks)
            self._trend_before = self._trend if self._reads >= _READS else inf
            self._trend, self._trend_began, self._reads = inf, now, 0
            self._known_before, self._known = self._known, min(self._least, self._least_before)
        self._trend = min(self._trend, lag)
        self._reads += 1
        reference = min(self._least, self._least_before)
        if first:
            self._shrinks = time.time() - published > _OLD
        elif (TOLERANCE if self._known == inf else LATE) < reference - lag < inf:
            self._shrinks = True  # too fast for a trend
        self._least = min(self._least, lag)
        return inf if self._shrinks else max(0.0, lag - reference)

    def width(self, published: float, count: int, excess: float) -> float:
        """Return how many messages a server has or receives soon: it collects a wider window's messages for too long.

        Args:
            published: as for `excess`.
            count: messages of the read.
            excess: seconds for which the newest message had waited.
        """
        self._published.append(published)
        self._counts.append(count)
        took = published - self._published[0]
        return (sum(self._counts) - self._counts[0]) * (excess + _SOON) / took if took > 0 else inf
