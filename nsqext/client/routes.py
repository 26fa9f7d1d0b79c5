"""Where a topic's messages go at the moment: the partition table, turned into what a publish needs."""

from __future__ import annotations

from collections.abc import Sequence

from nsqext.client.pool import NodePool, PooledNode
from nsqext.errors import InvalidPartition, PartitionUnavailable
from nsqext.lookup.table import TopicView
from nsqext.protocol.commands import publish_line
from nsqext.protocol.hashing import KeyHash
from nsqext.types import Receipt, TopicMeta

__all__ = ("Route", "Target")


class Target:
    """A partition and the node that leads it, with the command lines for it."""

    __slots__ = ("_lines", "node", "partition", "topic")

    def __init__(self, topic: str, partition: int, node: PooledNode) -> None:
        self.topic = topic
        self.partition = partition
        self.node = node
        self._lines: dict[str, bytes] = {}

    def line(self, verb: str) -> bytes:
        """Return the line of a publish command to this partition."""
        line = self._lines.get(verb)
        if line is None:
            line = self._lines[verb] = publish_line(verb, self.topic, self.partition)
        return line

    def receipt(self) -> Receipt:
        """Return a receipt that tells only where the message went."""
        return Receipt(self.topic, self.partition, self.node.node)


class Route:
    """Targets of one topic, made from one view of its partitions.

    Args:
        topic: name of the topic.
        view: what lookup told.
        pool: connections by node.
        previous: the route before, which goes on in its round.
    """

    __slots__ = ("_next", "meta", "partitions", "targets", "topic", "view")

    def __init__(self, topic: str, view: TopicView, pool: NodePool, previous: Route | None = None) -> None:
        self.topic = topic
        self.view = view
        self.meta: TopicMeta = view.meta
        self.partitions = {
            partition: Target(topic, partition, pool.node(address)) for partition, address in view.leaders.items()
        }
        self.targets: Sequence[Target] = (
            *self.partitions.values(),
            *(Target(topic, -1, pool.node(address)) for address in view.nodes),
        )
        self._next = previous._next if previous is not None else 0

    def any(self, avoid: Target | None = None) -> Target:
        """Return the next target in turn, another partition than ``avoid`` where there is one.

        Raises:
            PartitionUnavailable: no partition has a leader at the moment.
        """
        targets = self.targets
        if not targets:
            raise PartitionUnavailable("no partition has a leader at the moment", topic=self.topic)
        self._next += 1
        target = targets[self._next % len(targets)]
        if avoid is not None and target.partition == avoid.partition and target.node is avoid.node and len(targets) > 1:
            self._next += 1
            target = targets[self._next % len(targets)]
        return target

    def keyed(self, key: bytes, key_hash: KeyHash) -> int:
        """Return the partition of a key.

        Raises:
            InvalidPartition: the number of partitions is not known.
        """
        count = self.view.partition_num
        if count <= 0:
            raise InvalidPartition(
                "a key needs a topic whose number of partitions is known",
                topic=self.topic,
                hint="the lookup service does not tell it (original NSQ, or nsqd= without lookup); publish without a key",
            )
        partition = key_hash(key, count)
        if not 0 <= partition < count:
            raise InvalidPartition(f"the key hash gave partition {partition} of {count}", topic=self.topic)
        return partition

    def at(self, partition: int) -> Target:
        """Return the target of a partition.

        Raises:
            InvalidPartition: the topic has no such partition.
            PartitionUnavailable: the partition has no leader at the moment.
        """
        target = self.partitions.get(partition)
        if target is not None:
            return target
        count = self.view.partition_num
        if count <= 0:
            raise InvalidPartition(
                f"partition {partition} cannot be chosen: the topic's partitions are not known",
                topic=self.topic,
                hint="publish without partition=",
            )
        if partition >= count:
            raise InvalidPartition(f"the topic has {count} partitions, 0 to {count - 1}", topic=self.topic, partition=partition)
        raise PartitionUnavailable("the partition has no leader at the moment", topic=self.topic, partition=partition)
