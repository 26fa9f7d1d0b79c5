"""A distributor of RDY counts for tests, whose connections have open windows."""

from __future__ import annotations

from collections.abc import Mapping

from nsqext.client.consumer.options import BackoffOptions
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.rdy_distributor import SETTLED, RdyDistributor


def make(total: int, *limits: int) -> RdyDistributor[int]:
    """Return a distributor with connections 0, 1, … whose windows are open, without backoff."""
    flow = RdyDistributor[int](total, Backoff(BackoffOptions()))
    for number, limit in enumerate(limits):
        add(flow, number, limit)
    return flow


def add(flow: RdyDistributor[int], number: int, limit: int, backoff: Backoff | None = None, now: float = 0.0) -> None:
    """Add a connection whose window is open."""
    flow.add(number, limit, backoff or Backoff(BackoffOptions()), now)
    widen(flow, number)


def widen(flow: RdyDistributor[int], number: int, times: int = 12) -> None:
    """Double the window of a connection, up to its limit."""
    for _ in range(times):
        flow.widen_window(number)


def settled(flow: RdyDistributor[int], now: float) -> Mapping[int, int]:
    """Return the counts at a time at which servers have read all that was sent before."""
    for steps in (3, 2, 1):
        flow.shares(now - steps * SETTLED)
    return flow.shares(now)


def receive(flow: RdyDistributor[int], number: int, now: float, count: int = 1, size: int = 1) -> bool:
    """Receive messages that are finished immediately."""
    return flow.received(number, count, size * count, 0, now)
