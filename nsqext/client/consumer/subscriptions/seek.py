"""Moves the channel of a consumer: to its start position when it is new, and wherever the user seeks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from nsqext.client.consumer.position import Position, channel_exists
from nsqext.errors import InvalidPartition, InvalidSetting, InvalidState, PartitionUnavailable
from nsqext.types import Address

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nsqext.client.consumer.subscriptions.assignment import Assignment, Key, SubscriptionSpec
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.lookup.partition_map import PartitionMap

__all__ = ("ChannelSeeker",)


class ChannelSeeker:
    """Knows where the channel has to be moved to at each place, and moves it while a subscription is new.

    Args:
        source: what is consumed.
        places: the places by their keys, which somebody else adds and takes away.
        live: the subscriptions that work, likewise.
    """

    def __init__(
        self, source: SubscriptionSpec, places: Mapping[Key, Assignment], live: Mapping[Key, Subscription]
    ) -> None:
        self._topic = source.topic
        self._channel = source.channel
        self._options = source.options
        self._places = places
        self._live = live

    async def see_to_start(self, place: Assignment, view: PartitionMap, address: Address) -> None:
        """Note before the first subscription to a place where the channel is to begin.

        Raises:
            InvalidSetting: the original NSQ has no start positions.
            PartitionUnavailable: the node cannot be asked whether it has the channel.
        """
        start = self._options.start_of(place.partition)
        if not place.fresh or start is None:
            return
        http = _http(view, place.partition, address)
        wanted = self._options.start_existing or not await channel_exists(
            http, self._topic, place.partition, self._channel
        )
        if wanted and place.pending is None:  # somebody may have sought elsewhere meanwhile
            place.pending = start
        place.fresh = False

    async def move(self, place: Assignment, subscription: Subscription, view: PartitionMap) -> None:
        """Move the channel where that is pending, before the subscription asks for messages.

        Raises:
            PartitionUnavailable: the node cannot be reached, or refuses.
        """
        while place.pending is not None:
            http = _http(view, place.partition, subscription.request.address)
            position = place.pending
            await subscription.move(http, position)
            if place.pending is position:  # otherwise somebody sought elsewhere meanwhile
                place.pending = None
                place.moved.set()

    async def seek(self, position: Position, partitions: Sequence[int] | None) -> None:
        """Let the channel read on from a place; returns when it does at all partitions.

        Of several at the same time the last one counts, and all return then. When it is cancelled, it does so all the
        same, as soon as it can.

        Raises:
            InvalidPartition: a partition that is not consumed here.
            InvalidSetting: the original NSQ cannot seek.
            InvalidState: the consumer ended meanwhile, or the topic lost the partition.
        """
        places = self._chosen(self._places if partitions is None else partitions)
        for place in places:
            place.pending = position
            if place.moved.is_set():
                place.moved = anyio.Event()
        subscriptions = [self._live[place.key] for place in places if place.key in self._live]
        try:
            for subscription in subscriptions:
                await subscription.close()
        finally:
            # where this was cut off: a place that waits for the next subscription must not wait for days
            for subscription in subscriptions:
                subscription.stopped = True
                subscription.flush()
                subscription.end()
        for place in places:
            moved = place.moved
            await moved.wait()
            if place.pending is not None and place.moved is moved:
                raise InvalidState(
                    "the consumer ended, or the topic lost the partition, before it could seek",
                    topic=self._topic,
                    partition=place.partition,
                )

    def _chosen(self, keys: Iterable[Key]) -> list[Assignment]:
        places = []
        for key in keys:
            if key not in self._places:
                raise InvalidPartition(f"partition {key} is not consumed here", topic=self._topic)
            places.append(self._places[key])
        if any(isinstance(place.key, Address) for place in places):
            raise InvalidSetting("the original NSQ cannot seek", topic=self._topic)
        return places


def _http(view: PartitionMap, partition: int, address: Address) -> Address:
    if partition < 0:
        raise InvalidSetting("the original NSQ has no start positions", topic=view.topic)
    http = view.http.get(address)
    if http is None:
        raise PartitionUnavailable(
            "lookup does not tell the HTTP address of the leader",
            topic=view.topic,
            partition=partition,
            node=str(address),
        )
    return http
