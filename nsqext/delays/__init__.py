"""The relay of delayed messages: stores what ``publish(delay=…, via="relay")`` publishes, and publishes it when due."""

from __future__ import annotations

from nsqext.delays.relay import DelayRelay, DelayStore, WaitingMessage

__all__ = ("DelayRelay", "DelayStore", "WaitingMessage")
