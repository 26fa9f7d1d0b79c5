"""Move a channel to the start position of the options, and to positions that the program seeks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from nsqext.errors import InvalidPartition, InvalidSetting, InvalidState, PartitionUnavailable
from nsqext.types import Address

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.subscriptions.assignment import Assignment, Key, SubscriberContext
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.lookup.partition_map import PartitionMap


class ChannelSeeker:
    """Records where to move the channel at each partition, and moves it before RDY is sent."""

    def __init__(
        self,
        topic: str,
        context: SubscriberContext,
        assignments: Mapping[Key, Assignment],
        live: Mapping[Key, Subscription],
    ) -> None:
        self._topic = topic
        self._context = context
        self._channel = context.channel
        self._options = context.options
        self._metadata = context.metadata
        self._assignments = assignments  # by key; maintained by the subscriber
        self._live = live  # open subscriptions by key; maintained by the subscriber

    async def apply_start(self, assignment: Assignment, view: PartitionMap, address: Address) -> None:
        """Record the start position of the options before a subscription that creates the channel.

        This is the first one, or a later one to a topic or channel that was deleted and created again.
        `StartPositions` are asked before each subscription.

        Raises DataLoss, InvalidSetting or PartitionUnavailable.
        """
        positions = self._options.start_positions
        if positions is not None:
            http, partition = _leader(view, assignment, address)
            log = await self._metadata.channels.log_bounds(http, self._topic, partition, self._channel)
            found = await positions.start_of(self._topic, self._channel, partition, log)
            if found is not None and assignment.pending is None:
                assignment.pending = found
            return
        start = self._options.start_of(assignment.partition)
        if start is None:
            return
        if assignment.started_at == assignment.opened:  # nothing was subscribed: another leader may have the channel
            assignment.pending = assignment.started_at = None
        http, partition = _leader(view, assignment, address)
        wanted = (self._options.start_existing and not assignment.opened) or not await self._metadata.channels.exists(
            http, self._topic, partition, self._channel
        )
        if wanted and assignment.pending is None:  # the user may have called seek meanwhile
            assignment.pending, assignment.started_at = start, assignment.opened

    async def move(self, assignment: Assignment, subscription: Subscription, view: PartitionMap) -> None:
        """Move the channel to a pending position before the subscription sends RDY; raises PartitionUnavailable."""
        while assignment.pending is not None:
            http, partition = _leader(view, assignment, subscription.request.address)
            position = assignment.pending
            subscription.skip_to(position)
            await self._metadata.channels.move(http, self._topic, partition, self._channel, str(position))
            if assignment.pending is position:  # otherwise the user called seek meanwhile
                assignment.pending = assignment.started_at = None
                assignment.moved.set()

    async def seek(self, position: Position, partitions: Sequence[int] | None) -> None:
        """Move the channel to a position; return when all partitions have moved.

        The last of concurrent calls wins. Cancellation does not revoke the move.

        Raises InvalidPartition, InvalidSetting, InvalidState or PartitionUnavailable.
        """
        assignments = self.chosen(partitions)
        for assignment in assignments:
            assignment.pending, assignment.started_at = position, None
            if assignment.moved.is_set():
                assignment.moved = anyio.Event()
        subscriptions = [self._live[assignment.key] for assignment in assignments if assignment.key in self._live]
        try:
            for subscription in subscriptions:
                await subscription.close()
        finally:
            # also after a cancellation: a pending move needs the next subscription soon
            for subscription in subscriptions:
                subscription.stopped = True
                subscription.end()
        for assignment in assignments:
            moved = assignment.moved
            await moved.wait()
            if assignment.pending is not None and assignment.moved is moved:
                raise InvalidState(
                    "the consumer was closed, or the topic lost the partition, before the channel could be moved",
                    topic=self._topic,
                    partition=assignment.partition,
                )

    def chosen(self, partitions: Sequence[int] | None) -> list[Assignment]:
        """Return what a seek moves: some partitions, or all. Raises as `seek`, except InvalidState."""
        view = self._metadata.cached(self._topic, "r")
        filtered = () if view is None else [partition for partition, _ in view.filtered]
        known = range(0 if view is None else view.partition_num)
        wanted = [key for key in known if self._context.wants(key) and key not in filtered]
        chosen = list(dict.fromkeys((*wanted, *self._assignments))) if partitions is None else partitions
        missing = [key for key in chosen if key not in self._assignments]
        for key in missing:
            if key not in wanted:
                raise InvalidPartition(f"partition {key} is not consumed by this consumer", topic=self._topic)
        if missing or not chosen:
            what = f"of partitions {missing}" if missing else "of any partition"
            raise PartitionUnavailable(
                f"lookup has returned no leader {what} so far; the channel was not moved",
                topic=self._topic,
                hint="seek again when consumer.connections has them",
            )
        assignments = [self._assignments[key] for key in chosen]
        if any(isinstance(assignment.key, Address) for assignment in assignments):
            raise InvalidSetting("the original NSQ cannot seek", topic=self._topic)
        return assignments


def _leader(view: PartitionMap, assignment: Assignment, address: Address) -> tuple[Address, int]:
    """Return the HTTP address of a partition's leader, and the partition."""
    partition = assignment.partition
    if partition is None:
        raise InvalidSetting("the original NSQ has no start positions", topic=view.topic)
    http = view.http.get(address)
    if http is None:
        raise PartitionUnavailable(
            "the lookup service does not name the HTTP address of the leader",
            topic=view.topic,
            partition=partition,
            node=str(address),
        )
    return http, partition
