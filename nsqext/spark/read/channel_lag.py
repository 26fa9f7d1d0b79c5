"""Number of unfinished messages of a consumed channel, from the HTTP statistics of both generations of servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nsqext.errors import LookupFailed
from nsqext.lookup.client import LookupClient

if TYPE_CHECKING:
    from nsqext.spark.options import ClientConfig
    from nsqext.types import Address

__all__ = ("ChannelLag",)

_WAITING = ("depth", "in_flight_count", "deferred_count")
_WAITING_REDESIGNED = ("depth", "delayed_queue_count")  # the depth includes messages in flight


class ChannelLag:
    """Counts unfinished messages of a channel of several topics."""

    def __init__(self, config: ClientConfig, topics: Iterable[str], channel: str) -> None:
        self._lookup = LookupClient(config.lookupd, config.consumer().lookup)
        self._topics = tuple(topics)
        self._channel = channel

    async def count(self) -> int:
        """Return the number of unfinished messages, including those in flight."""
        return sum([await self._count(topic) for topic in self._topics])

    async def _count(self, topic: str) -> int:
        total = 0
        for node in await self._nodes(topic):
            params = {"format": "json", "topic": topic, "channel": self._channel}
            data = await self._lookup.http.ask(node, "/stats", params)
            try:
                total += sum(_waiting(found, self._channel) for found in data["topics"] or ())
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise LookupFailed("the statistics cannot be read", topic=topic, node=str(node)) from error
        return total

    async def _nodes(self, topic: str) -> set[Address]:
        nodes: set[Address] = set()
        for answer in await self._lookup.lookup(topic, "r"):
            if answer.error is not None:
                raise answer.error
            nodes |= {node.http for node in (*answer.partitions.values(), *answer.nodes) if node.http is not None}
        return nodes

    async def aclose(self) -> None:
        """Close the connections."""
        await self._lookup.aclose()


def _waiting(topic: Any, channel: str) -> int:
    leads = topic.get("is_leader")  # the original NSQ has no leaders
    if leads is False:
        return 0
    names = _WAITING if leads is None else _WAITING_REDESIGNED
    found = [one for one in topic["channels"] or () if one["channel_name"] == channel]
    return sum(int(one.get(name) or 0) for one in found for name in names)
