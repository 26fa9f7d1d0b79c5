"""The relay of delayed messages: stores messages of ``publish(delay=…, via="relay")``, and publishes them when due."""

from __future__ import annotations

from nsqext.app.relay import Cancellation
from nsqext.delays.relay import DelayRelay, DelayStatistics
from nsqext.delays.store import DelayStore, DelaySummary, RefusedRecord, WaitingMessage

__all__ = (
    "Cancellation",
    "DelayRelay",
    "DelayStatistics",
    "DelayStore",
    "DelaySummary",
    "RefusedRecord",
    "WaitingMessage",
)
