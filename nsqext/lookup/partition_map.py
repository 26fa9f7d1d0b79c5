"""Where the partitions of one topic are: the answers of several lookup nodes merged into one table, without I/O.

What is merged stays until something better is known: a failed or an empty answer removes nothing, and an answer that
lacks a partition says only that the partition is not offered at the moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import astuple, define, field, frozen

from nsqext.types import Address, TopicMeta

if TYPE_CHECKING:
    from nsqext.lookup.responses import LookupAnswer, NodeInfo

__all__ = ("PartitionLeader", "PartitionMap", "PartitionMapDiff", "PartitionMapMerger", "diff")


@frozen
class PartitionMap:
    """What is known about a topic at one time. Equal views say the same, whatever their versions.

    Attributes:
        topic: its name.
        access: ``w`` for where to publish, ``r`` for where to consume.
        meta: its meta; all zero where no lookup node tells (the original NSQ).
        leaders: TCP address of the leader by partition, in the order of the partitions.
        nodes: nodes that hold the topic without partitions (the original NSQ).
        http: HTTP address by TCP address.
        unlisted: partitions that no answer offered in the last round; their leaders here are the last ones known, and
            may be gone or not writable.
        version: grows with each change.
    """

    topic: str
    access: str = "w"
    meta: TopicMeta = field(factory=TopicMeta)
    leaders: Mapping[int, Address] = field(factory=dict)
    nodes: tuple[Address, ...] = ()
    http: Mapping[Address, Address] = field(factory=dict)
    unlisted: frozenset[int] = frozenset()
    version: int = field(default=0, eq=False)

    @property
    def partition_num(self) -> int:
        """Number of the topic's partitions; 0 where it is not known."""
        return self.meta.partition_num

    @property
    def complete(self) -> bool:
        """Whether every partition has a leader, or any node where there are no partitions."""
        if self.partition_num:
            return len(self.leaders) >= self.partition_num
        return bool(self.leaders or self.nodes)


@frozen
class PartitionMapDiff:
    """What changed from one view to the next.

    Attributes:
        added: partitions that have a leader now and had none.
        moved: partitions whose leader is another one.
        gone: partitions that are no more.
        joined: nodes without partitions that are new.
        left: nodes without partitions that are gone.
        meta_changed: the topic's meta is another one.
    """

    added: frozenset[int]
    moved: frozenset[int]
    gone: frozenset[int]
    joined: frozenset[Address]
    left: frozenset[Address]
    meta_changed: bool

    def __bool__(self) -> bool:
        return any(astuple(self, recurse=False))


def diff(old: PartitionMap | None, new: PartitionMap) -> PartitionMapDiff:
    """Return what changed from ``old``, where None is a view of nothing, to ``new``."""
    old = old or PartitionMap(new.topic, new.access)
    return PartitionMapDiff(
        added=frozenset(new.leaders.keys() - old.leaders.keys()),
        moved=frozenset(key for key in new.leaders.keys() & old.leaders.keys() if new.leaders[key] != old.leaders[key]),
        gone=frozenset(old.leaders.keys() - new.leaders.keys()),
        joined=frozenset(new.nodes) - frozenset(old.nodes),
        left=frozenset(old.nodes) - frozenset(new.nodes),
        meta_changed=old.meta != new.meta,
    )


@frozen
class PartitionLeader:
    """A leader and how good the word for it is.

    Attributes:
        node: the leader.
        epoch: epoch of the lookup node that named it.
        since: the round in which that lookup node began to name it.
        confirmed: the last round in which it was named.
    """

    node: NodeInfo
    epoch: int = 0
    since: int = 0
    confirmed: int = 0


@define
class _Source:
    """What one lookup node said at last."""

    leaders: dict[int, PartitionLeader] = field(factory=dict)
    nodes: dict[Address, NodeInfo] = field(factory=dict)


class PartitionMapMerger:
    """The partitions of one topic, kept over many rounds of answers.

    Lookup nodes may disagree for a while. For each partition that answer counts which, in this order, names no leader
    that was found to be none, has the highest epoch, has changed most recently, and is given by most nodes.

    Args:
        topic: name of the topic.
        access: ``w`` or ``r``.
        version: that of its first, empty view.
    """

    def __init__(self, topic: str, access: str = "w", version: int = 0) -> None:
        self.view: PartitionMap = PartitionMap(topic, access, version=version)
        """The table as it is now."""
        self._leaders: dict[int, PartitionLeader] = {}
        self._sources: dict[Address, _Source] = {}
        self._suspects: dict[int, set[Address]] = {}
        self._round = 0

    def suspect(self, partition: int, leader: Address) -> None:
        """Note that a node was found not to lead a partition: word of another one is preferred to it."""
        self._suspects.setdefault(partition, set()).add(leader)

    def merge(self, answers: Iterable[LookupAnswer]) -> PartitionMapDiff:
        """Take the answers of one round, in any order; returns what they changed."""
        found = sorted((answer for answer in answers if answer.found), key=lambda answer: answer.source)
        self._round += 1
        old = self.view
        if not found:
            return diff(old, old)
        for answer in found:
            self._remember_leaders(answer)
        self._remember_nodes(found)
        listed = {partition for answer in found for partition in answer.partitions}
        for partition in listed:
            self._elect(partition, found)
        told = _merge_meta(found)
        if told is not None:
            for partition in [key for key in self._leaders if key >= told.partition_num and key not in listed]:
                del self._leaders[partition]
        new = self._make_view(told or old.meta, frozenset(self._leaders.keys() - listed))
        if new != old:
            self.view = new
        return diff(old, self.view)

    def _remember_leaders(self, answer: LookupAnswer) -> None:
        source = self._sources.setdefault(answer.source, _Source())
        for partition, node in answer.partitions.items():
            before = source.leaders.get(partition)
            same = before is not None and before.node.tcp == node.tcp
            since = before.since if before is not None and same else self._round
            source.leaders[partition] = PartitionLeader(node, answer.epoch, since, self._round)
            if not same:
                self._suspects.pop(partition, None)

    def _remember_nodes(self, found: Sequence[LookupAnswer]) -> None:
        """Keep what each lookup node named; what one stopped naming is not kept on the word of one that is silent."""
        telling = [answer for answer in found if answer.nodes or answer.partitions]
        dropped: set[Address] = set()
        for answer in telling:
            source = self._sources[answer.source]
            before, source.nodes = source.nodes, {node.tcp: node for node in answer.nodes}
            dropped |= before.keys() - source.nodes.keys()
        spoken = {answer.source for answer in telling}
        for address, source in self._sources.items():
            if address not in spoken:
                source.nodes = {key: node for key, node in source.nodes.items() if key not in dropped}

    def _elect(self, partition: int, found: Sequence[LookupAnswer]) -> None:
        words = [self._sources[answer.source].leaders[partition] for answer in found if partition in answer.partitions]
        named = Counter(word.node.tcp for word in words)
        suspects = self._suspects.get(partition, set())
        if suspects >= named.keys():
            # nothing else is known: believe lookup again
            self._suspects.pop(partition, None)
            suspects = set()

        def rank(word: PartitionLeader) -> tuple[bool, int, int, int, Address]:
            address = word.node.tcp
            return address not in suspects, word.epoch, word.since, named[address], address

        best = max(words, key=rank)
        last = self._leaders.get(partition)
        if (
            last is None
            or last.node.tcp in named
            or last.node.tcp in suspects
            or best.epoch > last.epoch
            or best.since > last.confirmed
        ):
            self._leaders[partition] = best

    def _make_view(self, meta: TopicMeta, unlisted: frozenset[int]) -> PartitionMap:
        leaders = {partition: self._leaders[partition].node for partition in sorted(self._leaders)}
        led = {node.tcp for node in leaders.values()}
        nodes = {
            address: node
            for source in self._sources.values()
            for address, node in source.nodes.items()
            if address not in led
        }
        everyone = (*leaders.values(), *nodes.values())
        return PartitionMap(
            topic=self.view.topic,
            access=self.view.access,
            meta=meta,
            leaders={partition: node.tcp for partition, node in leaders.items()},
            nodes=tuple(sorted(nodes)),
            http={node.tcp: node.http for node in everyone if node.http is not None},
            unlisted=unlisted,
            version=self.view.version + 1,
        )


def _merge_meta(found: Sequence[LookupAnswer]) -> TopicMeta | None:
    """Return the meta of the highest epoch; of those the one with most partitions, and extended where they disagree."""
    told = [
        (answer.epoch, astuple(answer.meta), answer.meta)
        for answer in found
        if answer.meta and answer.meta.partition_num
    ]
    return max(told, key=lambda entry: entry[:2])[2] if told else None
