"""Publishes flights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import anyio

import nsqext
from examples.flights_pipeline.flights import Flight, closing_message

__all__ = ("publish_closing_message", "publish_flights")

_AT_ONCE = 5000
"""Flights of one call, which publishes a batch to each partition."""
_PER_SECOND = 10
"""Calls a second where flights are spread over a time. A micro-batch may contain a part of a call, so a call must span
less time than the watermark allows."""


async def publish_flights(
    lookupd: str | Sequence[str],
    topic: str,
    flights: Sequence[Flight],
    advance: Callable[[int], None],
    seconds: float = 0.0,
) -> float:
    """Publish flights in their order, each keyed by its aircraft; returns seconds.

    Args:
        lookupd: lookup addresses.
        topic: a topic that supports extend headers.
        flights: the flights.
        advance: called with the number of flights that have been stored since the last call.
        seconds: time over which the flights are spread evenly; 0 publishes as fast as possible.

    Raises:
        BatchFailed: not all flights were stored.
    """
    async with nsqext.Producer(lookupd=lookupd) as producer:
        began = time.perf_counter()
        at_once = max(1, min(_AT_ONCE, int(len(flights) / seconds / _PER_SECOND))) if seconds else _AT_ONCE
        for first in range(0, len(flights), at_once):
            if seconds:
                await anyio.sleep(max(0.0, began + seconds * first / len(flights) - time.perf_counter()))
            some = flights[first : first + at_once]
            receipts = await producer.publish_many(topic, [flight.message for flight in some])
            advance(len(receipts))
        return time.perf_counter() - began


async def publish_closing_message(lookupd: str | Sequence[str], topic: str, last: Flight) -> None:
    """Publish a message after the last flight, which ends the last windows.

    Raises:
        PublishFailed: the message was not stored.
    """
    message = closing_message(last)
    async with nsqext.Producer(lookupd=lookupd) as producer:
        await producer.publish(topic, message.body, headers=message.headers)
