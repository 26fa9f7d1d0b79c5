"""Asks the leaders of a topic how a key_failover channel shares its keys out."""

from __future__ import annotations

from typing import Any

import httpx
from attrs import field, frozen

from nsqext.errors import InvalidSetting, ProtocolError
from nsqext.errors.server import BadChannel
from nsqext.lookup.metadata import MetadataCache
from nsqext.lookup.partition_map import PartitionMap

__all__ = ("PartitionKeys", "RangeLine", "RangeWatch")

_MISSING = "no such channel"


@frozen
class RangeLine:
    """One range of the keys of a partition.

    Attributes:
        low: where it begins, 0 to 1.
        high: where it ends.
        tag: dispatch tag of the consumer.
        consumer: its ``host:port``.
        rate: messages a second that it was given of late.
        waiting: messages of the replay set that wait for it.
    """

    low: float
    high: float
    tag: str
    consumer: str
    rate: float
    waiting: int


@frozen
class PartitionKeys:
    """A channel in one partition.

    Attributes:
        partition: the partition.
        node: ``host:port`` of the leader's HTTP; empty while there is no leader.
        error: why nothing is known; empty when something is.
        depth: messages that are not finished.
        replay: messages that wait for the consumer of their key.
        held: keys that a consumer has messages of.
        ranges: the ranges in order.
    """

    partition: int
    node: str = ""
    error: str = ""
    depth: int = 0
    replay: int = 0
    held: int = 0
    ranges: tuple[RangeLine, ...] = field(factory=tuple)


class RangeWatch:
    """Watches a channel.

    Args:
        directory: finds the leaders.
        web: an HTTP client.
        topic: name of the topic.
        channel: name of the channel.
    """

    def __init__(self, directory: MetadataCache, web: httpx.AsyncClient, topic: str, channel: str) -> None:
        self._directory = directory
        self._web = web
        self._topic = topic
        self._channel = channel

    async def look(self) -> list[PartitionKeys]:
        """Return how it stands in every partition; one that does not answer is looked up again for the next time.

        Raises:
            TopicNotFound: there is no such topic.
            LookupFailed: no lookup address gives a usable answer.
            InvalidSetting: the channel is of another type.
            BadChannel: no partition has it.
        """
        view = await self._directory.resolve(self._topic, "r")
        found = []
        for number in range(max(view.partition_num, len(view.leaders))):
            try:
                found.append(await self._ask(view, number))
            except (httpx.HTTPError, ProtocolError) as error:
                found.append(PartitionKeys(number, error=str(error) or type(error).__name__))
                await self._directory.refresh(self._topic, "r", failed=view)
        if all(one.error == _MISSING for one in found):
            raise BadChannel(f"no partition has the channel {self._channel}", topic=self._topic)
        return found

    async def _ask(self, view: PartitionMap, number: int) -> PartitionKeys:
        leader = view.leaders.get(number)
        http = view.http.get(leader) if leader is not None else None
        if http is None:
            return PartitionKeys(number, error="no leader")
        params = {"format": "json", "topic": self._topic, "partition": str(number), "channel": self._channel}
        answer = await self._web.get(f"http://{http}/stats", params=params)
        try:
            data: dict[str, Any] = answer.raise_for_status().json()
            topics = data.get("data", data)["topics"]
            channels = {channel["channel_name"]: channel for topic in topics for channel in topic["channels"]}
            channel = channels.get(self._channel)
            if channel is None:
                return PartitionKeys(number, str(http), _MISSING)
            if "key_ranges" in channel:
                return _read(number, str(http), channel)
            consumers, depth = channel["client_num"], channel["depth"]
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"the statistics of {http} cannot be read: {error!r}", node=str(http)) from error
        if not consumers:
            return PartitionKeys(number, str(http), "no consumer, and no type yet", depth)
        raise InvalidSetting(
            f"the channel {self._channel} is not of type key_failover",
            topic=self._topic,
            partition=number,
            hint="create it with dispatch=key_failover, or let Consumer(dispatch='key_failover') come first",
        )


def _read(number: int, node: str, channel: dict[str, Any]) -> PartitionKeys:
    ranges = tuple(
        RangeLine(one["low"], one["high"], one["tag"], one["remote_address"], one["rate"], one["waiting"])
        for one in channel["key_ranges"]
    )
    return PartitionKeys(number, node, "", channel["depth"], channel["replay_count"], channel["held_keys"], ranges)
