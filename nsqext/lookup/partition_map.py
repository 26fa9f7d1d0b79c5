"""The partitions of a topic and their leaders: merge answers of lookup nodes into a map or an error, without I/O.

A failed or empty answer removes no partition from the map: the lookup node only does not offer it at the moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from attrs import astuple, define, field, frozen

from nsqext.errors import LookupFailed, LookupUnreachable, NotLookupd, NsqError, TopicNotFound, TopicNotReady
from nsqext.types import Address, TopicMeta

if TYPE_CHECKING:
    from nsqext.lookup.responses import LookupAnswer, NodeInfo

T = TypeVar("T")

MAX_SOURCES: int = 256
"""Lookup nodes whose last answers are kept."""
_REASONS = 5  # errors of lookup nodes that an error quotes


@frozen
class PartitionMap:
    """Partitions, leaders and meta of a topic at a moment. Equality ignores the version."""

    topic: str
    access: str = "w"  #: ``w`` to publish, ``r`` to consume
    #: all zero if no lookup node sends it (the original NSQ)
    meta: TopicMeta = field(factory=TopicMeta)
    #: TCP addresses by partition, in the order of partitions
    leaders: Mapping[int, Address] = field(factory=dict)
    nodes: tuple[Address, ...] = ()  #: nodes with the topic without partitions (the original NSQ)
    http: Mapping[Address, Address] = field(factory=dict)  #: HTTP address by TCP address
    #: partitions and leaders (None and the node without partitions) that ``node_filter`` excludes from ``leaders`` and
    #: ``nodes``
    filtered: tuple[tuple[int | None, Address], ...] = ()
    #: partitions not offered in the last round; their last known leaders may be down or not writable
    unlisted: frozenset[int] = frozenset()
    given: bool = False  #: whether ``nodes`` are ``nsqd=``, without lookup; partitions are never known then
    version: int = field(default=0, eq=False)  #: increases with each change

    @property
    def partition_num(self) -> int:
        """0 if unknown."""
        return self.meta.partition_num

    @property
    def complete(self) -> bool:
        """Whether every partition has a leader; without partitions, whether any node exists."""
        return len(self.led) >= self.partition_num if self.partition_num else self.known

    @property
    def led(self) -> frozenset[int]:
        """The partitions with a leader, also those that ``node_filter`` excludes."""
        return frozenset(self.leaders) | {partition for partition, _ in self.filtered if partition is not None}

    @property
    def known(self) -> bool:
        """Whether lookup returned any node, even if ``node_filter`` excludes it."""
        return bool(self.leaders or self.nodes or self.filtered)


@frozen
class Claim(Generic[T]):
    """What a lookup node says about a topic: the leader of a partition, or the meta."""

    value: T
    epoch: int = 0  #: of the lookup node
    since: int = 0  #: first of the consecutive rounds with this value
    confirmed: int = 0  #: last round with this value

    def yields_to(self, best: Claim[T], *, repeated: bool) -> bool:
        """Return whether a round's best claim replaces this one, which it has ``repeated``, or which is older."""
        return repeated or best.epoch > self.epoch or best.since > self.confirmed


@define
class _Source:
    """Last answer of a lookup node."""

    leaders: dict[int, Claim[NodeInfo]] = field(factory=dict)
    meta: Claim[TopicMeta] | None = None
    nodes: tuple[NodeInfo, ...] = ()
    answered: int = 0


class PartitionMapMerger:
    """Merges the answers of many rounds into the map of a topic.

    Lookup nodes may disagree temporarily. Preferred are, in this order: a leader that has not refused, the highest
    epoch, the latest change, the leader of most lookup nodes; of metas the one with most partitions. What silent lookup
    nodes said last stays until another changes its answer: keys would move to other partitions and back.
    """

    def __init__(
        self, topic: str, access: str = "w", version: int = 0, admits: Callable[[Address], bool] | None = None
    ) -> None:
        self.current: PartitionMap = PartitionMap(topic, access, version=version)
        self._leaders: dict[int, Claim[NodeInfo]] = {}
        self._meta: Claim[TopicMeta] | None = None
        self._sources: dict[Address, _Source] = {}
        self._suspects: dict[int, set[Address]] = {}
        self._round = 0
        self._admits = admits  # whether a node is used; None for all

    def suspect(self, partition: int, leader: Address) -> None:
        """Record that a node is not the leader: any other returned leader is preferred."""
        self._suspects.setdefault(partition, set()).add(leader)

    def merge(self, answers: Iterable[LookupAnswer]) -> None:
        """Merge the answers of a round, in any order."""
        found = sorted((answer for answer in answers if answer.found), key=lambda answer: str(answer.source))
        self._round += 1
        if not found:
            return
        for answer in found:
            self._update_claims(answer)
        self._update_nodes(found)
        self._forget_sources()
        listed = {partition for answer in found for partition in answer.partitions}
        for partition in listed:
            self._elect(partition, found)
        meta = self._elect_meta(found)
        if meta is not None:
            for partition in [key for key in self._leaders if key >= meta.partition_num and key not in listed]:
                del self._leaders[partition]
        new = self._make_map(meta or self.current.meta, frozenset(self._leaders.keys() - listed))
        if new != self.current:
            self.current = new

    def _forget_sources(self) -> None:
        """Bound the number of lookup nodes: remove the nodes that answered longest ago."""
        if len(self._sources) > MAX_SOURCES:
            oldest = sorted(self._sources, key=lambda address: self._sources[address].answered)
            for address in oldest[: len(self._sources) - MAX_SOURCES]:
                del self._sources[address]

    def _update_claims(self, answer: LookupAnswer) -> None:
        source = self._sources.setdefault(answer.source, _Source())
        source.answered = self._round
        for partition, node in answer.partitions.items():
            before = source.leaders.get(partition)
            same = before is not None and before.value.tcp == node.tcp
            source.leaders[partition] = self._claim(node, answer, before if same else None)
            if not same:
                self._suspects.pop(partition, None)
        if answer.meta and answer.meta.partition_num:
            known = source.meta
            source.meta = self._claim(answer.meta, answer, known if known and known.value == answer.meta else None)

    def _claim(self, value: T, answer: LookupAnswer, same: Claim[T] | None) -> Claim[T]:
        return Claim(value, answer.epoch, self._round if same is None else same.since, self._round)

    def _update_nodes(self, found: Sequence[LookupAnswer]) -> None:
        """Update the nodes by lookup node: a node that a lookup node removed is removed even if another failed."""
        listing = [answer for answer in found if answer.nodes or answer.partitions]
        dropped: set[Address] = set()
        for answer in listing:
            source = self._sources[answer.source]
            if source.nodes != answer.nodes:
                dropped |= {node.tcp for node in source.nodes} - {node.tcp for node in answer.nodes}
                # most lookup nodes list the same nodes: they share a tuple
                source.nodes = next((known for known in self._node_lists() if known == answer.nodes), answer.nodes)
        answered = {answer.source for answer in listing}
        for address, source in self._sources.items():
            if dropped and address not in answered:
                source.nodes = tuple(node for node in source.nodes if node.tcp not in dropped)

    def _node_lists(self) -> list[tuple[NodeInfo, ...]]:
        return list({id(source.nodes): source.nodes for source in self._sources.values()}.values())

    def _elect(self, partition: int, found: Sequence[LookupAnswer]) -> None:
        candidates = [
            self._sources[answer.source].leaders[partition] for answer in found if partition in answer.partitions
        ]
        named = Counter(candidate.value.tcp for candidate in candidates)
        suspects = self._suspects.get(partition, set())
        if suspects >= named.keys():
            # no lookup node returned another leader
            self._suspects.pop(partition, None)
            suspects = set()

        def rank(candidate: Claim[NodeInfo]) -> tuple[bool, int, int, int, Address]:
            address = candidate.value.tcp
            return address not in suspects, candidate.epoch, candidate.since, named[address], address

        best = max(candidates, key=rank)
        last = self._leaders.get(partition)
        if last is None or last.yields_to(best, repeated=last.value.tcp in (named.keys() | suspects)):
            self._leaders[partition] = best

    def _elect_meta(self, found: Sequence[LookupAnswer]) -> TopicMeta | None:
        """Return the preferred meta; None if no lookup node of this round sends it."""
        sending = [answer for answer in found if answer.meta and answer.meta.partition_num]
        claims = [claim for answer in sending if (claim := self._sources[answer.source].meta)]
        if not claims:
            return None
        best = max(claims, key=lambda claim: (claim.epoch, claim.since, astuple(claim.value)))
        last = self._meta
        if last is None or last.yields_to(best, repeated=last.value in [claim.value for claim in claims]):
            self._meta = last = best
        return last.value

    def _make_map(self, meta: TopicMeta, unlisted: frozenset[int]) -> PartitionMap:
        leaders = {partition: self._leaders[partition].value for partition in sorted(self._leaders)}
        led = {node.tcp for node in leaders.values()}
        nodes = {node.tcp: node for listed in self._node_lists() for node in listed if node.tcp not in led}
        filtered: list[tuple[int | None, Address]] = []
        if self._admits is not None:
            refused = {tcp for tcp in (*led, *nodes) if not self._admits(tcp)}
            filtered += [(partition, node.tcp) for partition, node in leaders.items() if node.tcp in refused]
            filtered += [(None, tcp) for tcp in sorted(refused & nodes.keys())]
            leaders = {partition: node for partition, node in leaders.items() if node.tcp not in refused}
            nodes = {tcp: node for tcp, node in nodes.items() if tcp not in refused}
        everyone = (*leaders.values(), *nodes.values())
        return PartitionMap(
            topic=self.current.topic,
            access=self.current.access,
            meta=meta,
            leaders={partition: node.tcp for partition, node in leaders.items()},
            nodes=tuple(sorted(nodes)),
            http={node.tcp: node.http for node in everyone if node.http is not None},
            filtered=tuple(filtered),
            unlisted=unlisted,
            version=self.current.version + 1,
        )


def failure(errors: Sequence[NsqError], topic: str | None = None) -> NsqError:
    """Return an error for the errors of all lookup nodes.

    `TopicNotReady` or `TopicNotFound` if a lookup node returned it, `NotLookupd` if no address is a trusted lookup
    node, `LookupUnreachable` if no node responds, else `LookupFailed`.
    """
    for kind in (TopicNotReady, TopicNotFound):
        for error in errors:
            if isinstance(error, kind):
                return kind(error.message, topic=topic, node=error.node, hint=error.hint)
    summary: type[LookupFailed] = LookupFailed
    for common in (NotLookupd, LookupUnreachable):
        if errors and all(isinstance(error, common) for error in errors):
            summary = common
    # without "no response" after "no usable response"
    texts = [str(error) for error in errors[:_REASONS]]
    reasons = "; ".join(
        text.removeprefix("no response: ").replace("no response within", "not within") for text in texts
    )
    if len(errors) > _REASONS:
        reasons += f"; and {len(errors) - _REASONS} more"
    failed = summary(f"no lookup node returned a usable response: {reasons}", topic=topic)
    failed.__cause__ = errors[0] if errors else None
    return failed


def merged(topic: str, access: str, answers: Sequence[LookupAnswer]) -> PartitionMap:
    """Merge the answers of a round into a map; raises TopicNotFound, TopicNotReady or LookupFailed."""
    if not any(answer.found for answer in answers):
        raise failure([answer.error for answer in answers if answer.error is not None], topic)
    merger = PartitionMapMerger(topic, access)
    merger.merge(answers)
    return merger.current
