"""The route of a topic: the node and the command lines for each of its partitions."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Sequence
from struct import Struct
from typing import TYPE_CHECKING

from nsqext.errors import InvalidPartition, InvalidSetting, PartitionUnavailable
from nsqext.protocol.client.commands import LARGE, LargeCommand, publish_line
from nsqext.types import Receipt, TopicMeta

if TYPE_CHECKING:
    from nsqext.client.producer.connection_pool import ConnectionPool, PooledNode
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.protocol.client.commands import Command
    from nsqext.protocol.hashing import KeyHash

_REST = 0.5  # seconds for which a target that refused a publish is avoided
_pack = Struct(">I").pack
_clock = time.monotonic


class Target:
    """A partition and the node that leads it, with the command lines for it."""

    __slots__ = ("_lines", "_pub", "meta", "node", "partition", "receipt", "rest_until", "topic")

    def __init__(self, topic: str, partition: int, node: PooledNode, meta: TopicMeta) -> None:
        self.topic: str = topic
        self.meta: TopicMeta = meta  # metadata of the topic
        self.partition: int = partition
        self.node: PooledNode = node
        self.receipt: Receipt = Receipt(topic, partition, node.node)  # receipt of an untraced publish
        # a target that refused a publish is avoided until then, in seconds of the monotonic clock; 0 for never
        self.rest_until: float = 0.0
        self._lines: dict[str, bytes] = {}
        self._pub = self.line("PUB")

    def line(self, verb: str) -> bytes:
        """Return the line of a publish command to this partition."""
        line = self._lines.get(verb)
        if line is None:
            line = self._lines[verb] = publish_line(verb, self.topic, self.partition)
        return line

    def pub(self, body: bytes) -> Command:
        """Return the command that publishes one message without headers and trace id."""
        if len(body) >= LARGE:
            return LargeCommand(self._pub + _pack(len(body)), body)
        return b"%b%b%b" % (self._pub, _pack(len(body)), body)

    def refused(self) -> None:
        """Avoid the target for a while, because the node refused a publish."""
        self.rest_until = _clock() + _REST


class Route:
    """Targets of one topic, made from one partition map.

    The round robin of the previous route continues. The first one starts at random: partitions get the same load from
    many producers that each publish a single message.
    """

    __slots__ = ("_key_partitions", "_least_pending", "_next", "meta", "partitions", "targets", "topic", "used", "view")

    def __init__(
        self,
        topic: str,
        view: PartitionMap,
        pool: ConnectionPool,
        previous: Route | None = None,
        *,
        least_pending: bool = False,
    ) -> None:
        self.topic: str = topic
        self.view: PartitionMap = view
        self.meta: TopicMeta = view.meta
        self.partitions: dict[int, Target] = {
            partition: Target(topic, partition, pool.node(address, view.http.get(address)), view.meta)
            for partition, address in view.leaders.items()
        }
        offered = [target for partition, target in self.partitions.items() if partition not in view.unlisted]
        nodes = [Target(topic, -1, pool.node(address, view.http.get(address)), view.meta) for address in view.nodes]
        # targets of messages without key; without partitions that lookup does not list at the moment, unless there are
        # no others
        self.targets: Sequence[Target] = (offered + nodes) or list(self.partitions.values())
        self.used: bool = True  # something was published since this was last set to False
        # messages without key are sent to that one of the next two targets with fewer pending requests
        self._least_pending = least_pending
        self._next: int = previous._next if previous is not None else random.getrandbits(20)
        before = previous._key_partitions if previous is not None else 0
        # lookup counts added partitions up to two minutes before they have leaders: keys stay until then
        placed = before <= 0 or view.led.issuperset(range(before, view.partition_num))
        self._key_partitions: int = view.partition_num if placed else before

    def next(self) -> Target:
        """Return the next target of the round robin, usable or not; raises InvalidSetting or PartitionUnavailable."""
        targets = self.targets
        count = len(targets)
        if not count:
            if self.view.filtered:
                left_out = ", ".join(sorted({str(node) for _, node in self.view.filtered}))
                raise InvalidSetting(
                    f"node_filter leaves out every node of the topic: {left_out}",
                    topic=self.topic,
                    hint="let node_filter keep one of them",
                )
            raise PartitionUnavailable("no partition has a leader at the moment", topic=self.topic)
        self.used = True
        self._next = number = self._next + 1
        target = targets[number % count]
        if self._least_pending and count > 1:
            other = targets[(number + 1) % count]
            if other.node.in_flight < target.node.in_flight:
                return other
        return target

    def give_back(self) -> None:
        """Undo the last `next`, whose target was not used."""
        self._next -= 1

    def any(self, tried: Collection[Target] = ()) -> Target:
        """Return the best of the next targets of the round robin; raises InvalidSetting or PartitionUnavailable.

        In order of importance, it was not tried, it is not avoided, its node is reachable, its node was not tried.
        """
        first = self.next()
        if not tried and not first.rest_until and not first.node.rest_until:
            return first
        now = _clock()
        used = {target.partition for target in tried if target.partition >= 0}
        nodes = {target.node for target in tried}

        def badness(target: Target) -> tuple[bool, bool, bool, bool]:
            again = target.partition in used if target.partition >= 0 else target.node in nodes
            return again, target.rest_until > now, target.node.rest_until > now, target.node in nodes

        start = self._next % len(self.targets)
        best = min((*self.targets[start:], *self.targets[:start]), key=badness)
        if best.rest_until <= now:
            best.rest_until = 0.0
        return best

    def all_targets(self) -> Sequence[Target]:
        """Return all targets, including those that lookup does not list at the moment."""
        return (*self.targets, *self.partitions.values())

    def untried(self, tried: Collection[Target]) -> bool:
        """Return whether a partition (a node, where there are no partitions) is not among these."""
        return len(self.targets) > len({(target.partition, target.node) for target in tried})

    def partition_of(self, key: bytes, key_hash: KeyHash) -> int:
        """Return the partition of a key; added ones are used when each has had a leader. Raises InvalidPartition."""
        count = self._key_partitions
        if count <= 0:
            raise InvalidPartition(
                "a key needs a topic whose number of partitions is known",
                topic=self.topic,
                hint="the original NSQ and nsqd= without lookup do not tell it; publish without a key",
            )
        partition = key_hash(key, count)
        if not 0 <= partition < count:
            raise InvalidPartition(f"the key hash gave partition {partition} of {count}", topic=self.topic)
        return partition

    def at(self, partition: int) -> Target:
        """Return the target of a partition; raises InvalidPartition, InvalidSetting or PartitionUnavailable."""
        self.used = True
        target = self.partitions.get(partition)
        if target is not None:
            if target.rest_until and target.rest_until <= _clock():
                target.rest_until = 0.0  # publishes with a key take the fast path again
            return target
        self._check_filter(partition)
        count = self.view.partition_num
        if count <= 0:
            raise InvalidPartition(
                f"partition {partition} cannot be chosen: the topic's partitions are not known",
                topic=self.topic,
                hint="publish without partition=",
            )
        if partition >= count:
            raise InvalidPartition(
                f"the topic has {count} partitions, 0 to {count - 1}", topic=self.topic, partition=partition
            )
        raise PartitionUnavailable("the partition has no leader at the moment", topic=self.topic, partition=partition)

    def _check_filter(self, partition: int) -> None:
        for number, node in self.view.filtered:
            if number == partition:
                raise InvalidSetting(
                    "node_filter leaves out the leader of the partition",
                    topic=self.topic,
                    partition=partition,
                    node=str(node),
                    hint="let node_filter keep the node, or publish without key and partition",
                )
