"""The routes of topics: node and command lines for each partition, kept up to date with lookup."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from struct import Struct
from typing import TYPE_CHECKING

import anyio

from nsqext.client.producer.options import TopicOptions
from nsqext.errors import (
    InvalidPartition,
    InvalidSetting,
    InvalidState,
    LookupFailed,
    NsqError,
    PartitionUnavailable,
    TopicNotFound,
    TopicNotReady,
)
from nsqext.protocol.client.commands import LARGE, LargeCommand, publish_line
from nsqext.types import Receipt, TopicMeta
from nsqext.waits import chance

if TYPE_CHECKING:
    from nsqext.client.events import ClientEvents
    from nsqext.client.producer.connection_pool import ConnectionPool, PooledNode
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.lookup.metadata import MetadataCache
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.lookup.responses import NodeInfo
    from nsqext.protocol.client.commands import Command
    from nsqext.protocol.hashing import KeyHash
    from nsqext.types import Address

_REST = 0.5  # seconds for which a target is avoided after it refused a publish
_pack = Struct(">I").pack
_clock = time.monotonic


class Target:
    """A partition with its leader and command lines."""

    __slots__ = ("_lines", "_pub", "meta", "node", "partition", "receipt", "rest_until", "topic")

    def __init__(self, topic: str, partition: int | None, node: PooledNode, meta: TopicMeta) -> None:
        self.topic: str = topic
        self.meta: TopicMeta = meta
        self.partition: int | None = partition  #: None on the original NSQ
        self.node: PooledNode = node
        self.receipt: Receipt = Receipt(topic, partition, node.node)  #: of an untraced publish
        #: end of the avoidance after a refusal, in seconds of the monotonic clock; 0 for none
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
        """Return the command for a message without headers and trace id."""
        if len(body) >= LARGE:
            return LargeCommand(self._pub + _pack(len(body)), body)
        return b"%b%b%b" % (self._pub, _pack(len(body)), body)

    def refused(self) -> None:
        """Avoid the target for a while."""
        self.rest_until = _clock() + _REST


class Route:
    """Targets of a topic, made from one partition map.

    The round robin of the previous route continues. The first route starts at random: many producers with a single
    message each load all partitions equally.
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
        nodes = [Target(topic, None, pool.node(address, view.http.get(address)), view.meta) for address in view.nodes]
        #: targets of messages without key, partitions that lookup lists at the moment, if there are any
        self.targets: Sequence[Target] = (offered + nodes) or list(self.partitions.values())
        self.used: bool = True  #: since this was set to False
        # a message without key goes to the target with fewer pending requests of the next two
        self._least_pending = least_pending
        self._next: int = previous._next if previous is not None else chance.getrandbits(20)
        before = previous._key_partitions if previous is not None else 0
        # lookup counts added partitions up to two minutes before they have leaders: keys stay until then
        placed = before <= 0 or view.led.issuperset(range(before, view.partition_num))
        self._key_partitions: int = view.partition_num if placed else before

    def next(self) -> Target:
        """Return the round robin's next target, usable or not; raises InvalidSetting or PartitionUnavailable."""
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
        """Return the best of the round robin's next targets; raises as `next`.

        Preferred, in this order: not tried, not avoided, with a reachable node, with an untried node.
        """
        first = self.next()
        if not tried and not first.rest_until and not first.node.rest_until:
            return first
        now = _clock()
        used = {target.partition for target in tried if target.partition is not None}
        nodes = {target.node for target in tried}

        def badness(target: Target) -> tuple[bool, bool, bool, bool]:
            again = target.node in nodes if target.partition is None else target.partition in used
            return again, target.rest_until > now, target.node.rest_until > now, target.node in nodes

        start = self._next % len(self.targets)
        best = min((*self.targets[start:], *self.targets[:start]), key=badness)
        if best.rest_until <= now:
            best.rest_until = 0.0
        return best

    def all_targets(self) -> Sequence[Target]:
        """Return all targets, also those that lookup does not list at the moment."""
        return (*self.targets, *self.partitions.values())

    def untried(self, tried: Collection[Target]) -> bool:
        """Return whether any partition (any node, without partitions) is untried."""
        return len(self.targets) > len({(target.partition, target.node) for target in tried})

    def partition_of(self, key: bytes, key_hash: KeyHash) -> int:
        """Return the partition of a key; added partitions count once each has had a leader.

        Raises InvalidPartition, or InvalidSetting without lookup.
        """
        count = self._key_partitions
        if count <= 0:
            raise self._unknown("a key needs a topic whose number of partitions is known", "a key")
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
                target.rest_until = 0.0  # the fast path checks only for 0
            return target
        self.check(partition)
        raise PartitionUnavailable.without_leader(self.topic, partition)

    def check(self, partition: int) -> None:
        """Raise InvalidPartition or InvalidSetting for a partition that the topic or this producer lacks."""
        if partition in self.partitions:
            return
        self._check_filter(partition)
        count = self.view.partition_num
        if count <= 0:
            raise self._unknown(
                f"partition {partition} cannot be chosen: the topic's partitions are not known", "partition="
            )
        if partition >= count:
            raise InvalidPartition(
                f"the partition does not exist: the last is {count - 1}", topic=self.topic, partition=partition
            )

    def _unknown(self, message: str, choice: str) -> InvalidPartition | InvalidSetting:
        """Return the error of a choice among unknown partitions, which without lookup is about a setting."""
        if self.view.given:
            hint = f"only lookup knows the number: give lookupd=..., or publish without {choice}"
            return InvalidSetting(message, topic=self.topic, hint=hint)
        return InvalidPartition(
            message, topic=self.topic, hint=f"the original NSQ has no partitions; publish without {choice}"
        )

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


logger: logging.Logger = logging.getLogger("nsqext.producer")

_PROVISIONAL = 0.5  # seconds for which any nodes serve a topic unknown to lookup
_CHANGE_CHECK = 1.0  # seconds after lookup reported no change of a topic, in which it is not asked again


def no_node(topic: str | None = None) -> PartitionUnavailable:
    """Return the error of a lookup service without nodes."""
    hint = "start an nsqd that registers with it"
    return PartitionUnavailable("the lookup service knows no node", topic=topic, hint=hint)


class RouteTable:
    """Find the routes of topics, and keep them up to date."""

    def __init__(
        self, options: ProducerOptions, metadata: MetadataCache, pool: ConnectionPool, events: ClientEvents
    ) -> None:
        self.by_topic: dict[str, Route] = {}
        #: for background refreshes; None before the producer is open
        self.tasks: BackgroundTasks | None = None
        self.topic_options: TopicOptions = TopicOptions(options)
        self.asks_lookup: bool = metadata.has_lookup
        self._options = options
        self._metadata = metadata
        self._pool = pool
        self._provisional: dict[str, tuple[PartitionMap, float]] = {}
        self._listing = anyio.Lock()
        self._nodes: tuple[NodeInfo, ...] = ()
        self._nodes_until = 0.0
        self._events = events
        self._unwatch: dict[str, Callable[[], None]] = {}
        self._leaders: dict[str, Mapping[int, Address]] = {}
        self._refreshing: set[str] = set()
        self._unchanged: dict[tuple[str, str], float] = {}
        self._answered = False
        self._waiting_since: float | None = None

    @cached_property
    def key_hash(self) -> KeyHash:
        return self._options.key_function()

    def current(self, topic: str) -> Route | None:
        """Return a topic's route if it is up to date."""
        route = self.by_topic.get(topic)
        return route if route is not None and route.view is self._metadata.cached(topic, "w") else None

    async def find(self, topic: str) -> Route:
        """Return a topic's route; ask lookup if it is unknown.

        Raises TopicNotFound, TopicNotReady, LookupFailed, PartitionUnavailable, or ExtendNotSupported if
        ``compression`` names a topic without support.
        """
        view = self._metadata.cached(topic, "w")
        if view is None or not view.known:
            view = await self._ask(topic)
        route = self.by_topic.get(topic)
        if route is None or route.view is not view:
            self.topic_options.check(topic, view.meta)
            previous, least_pending = route, self._options.balance == "least_pending"
            route = self.by_topic[topic] = Route(topic, view, self._pool, previous, least_pending=least_pending)
            if previous is None:
                for target in route.all_targets():
                    target.node.wanted = True
            else:
                self._keep_nodes()
            if topic not in self._unwatch and self._metadata.cached(topic, "w") is view:
                # until `forget_idle` forgets the topic
                self._leaders[topic] = view.leaders
                self._unwatch[topic] = self._metadata.watch(topic, "w", self._view_changed)
        return route

    async def _ask(self, topic: str) -> PartitionMap:
        view, until = self._provisional.get(topic, (None, 0.0))
        if view is not None and _clock() < until:
            return view
        try:
            found = await self._metadata.resolve(topic, "w")
        except TopicNotReady:
            self._answered = True
            raise
        except TopicNotFound:
            self._answered = True
            provisional = await self._any_nodes(topic)
            if provisional is None:
                raise
        else:
            self._answered = True
            if found.known or found.partition_num:
                return found
            # the original nsqlookupd still lists a topic that all nodes have deleted
            provisional = await self._any_nodes(topic)
            if provisional is None:
                return found
        self._provisional[topic] = (provisional, _clock() + _PROVISIONAL)
        return provisional

    async def _any_nodes(self, topic: str) -> PartitionMap | None:
        """Return all nodes of the original NSQ, which creates topics at their first publish; None if any is redesigned.

        Raises PartitionUnavailable or LookupFailed.
        """
        async with self._listing:  # a burst of unknown topics shares a request
            if _clock() >= self._nodes_until:
                try:
                    self._nodes = await self._metadata.nodes()
                except LookupFailed as error:
                    if error.retryable:
                        raise
                    return None
                self._nodes_until = _clock() + _PROVISIONAL if self._nodes else 0.0
            nodes = self._nodes
        if not nodes:
            raise no_node(topic)
        if any(node.redesigned for node in nodes):
            return None
        return self._metadata.of_nodes(topic, nodes)

    def waits_for_lookup(self, error: LookupFailed) -> bool:
        """Return whether a publish waits for lookup: for ``lookup_timeout`` while it has never answered."""
        if not error.retryable:
            return False
        if self._answered:
            return True
        now = _clock()
        if self._waiting_since is None:
            self._waiting_since = now
            logger.warning(
                "no lookup service answers yet; waiting up to %g s for one of %s",
                self._options.lookup_timeout,
                ", ".join(map(str, self._metadata.addresses)),
            )
        return now < self._waiting_since + self._options.lookup_timeout

    async def upgraded(self, topic: str, partitions: int = 0) -> bool:
        """Ask lookup whether a topic got extend support, or a number of partitions; False in the next second."""

        def done(view: PartitionMap) -> bool:
            return view.partition_num >= partitions if partitions else view.meta.extend_support

        return await self._changed(topic, "upgraded", done)

    async def downgraded(self, topic: str) -> bool:
        """Ask lookup whether a topic was created again without extend support; False in the next second."""
        return await self._changed(topic, "downgraded", lambda view: not view.meta.extend_support)

    async def _changed(self, topic: str, change: str, done: Callable[[PartitionMap], bool]) -> bool:
        if not self.asks_lookup or _clock() < self._unchanged.get((topic, change), 0.0):
            return False
        view = self._metadata.cached(topic, "w")
        if view is not None and not done(view):
            await self._metadata.refresh(topic, "w", failed=view)
            view = self._metadata.cached(topic, "w")
        if view is not None and done(view):
            return True
        self._unchanged[topic, change] = _clock() + _CHANGE_CHECK
        return False

    async def lacks_channel(self, topic: str, partition: int | None) -> bool:
        """Return whether lookup hides a partition from producers for lack of a channel."""
        try:
            return partition is not None and await self._metadata.lacks_channel(topic, partition)
        except NsqError:
            return False

    async def refresh(self, topic: str, view: PartitionMap | None, partition: int | None) -> None:
        """See `MetadataCache.refresh`."""
        await self._metadata.refresh(topic, "w", failed=view, partition=partition)

    def refresh_soon(self, topic: str, view: PartitionMap, partition: int | None) -> None:
        """Look a topic up in the background, unless a lookup is running."""
        if topic not in self._refreshing and self.tasks is not None:
            self._refreshing.add(topic)
            with suppress(InvalidState):  # the producer has closed: the caller reports its own outcome
                self.tasks.start_soon(self._refresh, topic, view, partition)

    async def _refresh(self, topic: str, view: PartitionMap, partition: int | None) -> None:
        try:
            await self.refresh(topic, view, partition)
        except NsqError:
            return  # the metadata was closed
        finally:
            self._refreshing.discard(topic)

    async def run(self) -> None:
        while True:
            await anyio.sleep(self._options.forget_after)
            self.forget_idle()

    def forget_idle(self) -> None:
        """Forget topics without a publish since the last call, and their connections."""
        for topic, route in list(self.by_topic.items()):
            if route.used:
                route.used = False
                continue
            del self.by_topic[topic]
            if topic in self._unwatch:
                self._unwatch.pop(topic)()
            self._leaders.pop(topic, None)
        now = _clock()
        self._provisional = {topic: entry for topic, entry in self._provisional.items() if entry[1] > now}
        self._unchanged = {asked: until for asked, until in self._unchanged.items() if until > now}
        self._keep_nodes()

    def _view_changed(self, view: PartitionMap) -> None:
        """Report moved leaders; the next publish compares the partition map."""
        before, self._leaders[view.topic] = self._leaders.get(view.topic, {}), view.leaders
        for partition, node in view.leaders.items():
            known = before.get(partition, node)
            if known != node:
                where = {"topic": view.topic, "partition": partition, "node": str(node)}
                logger.info("%s partition %d: leader moved to %s", view.topic, partition, node, extra=where)
                self._events.emit("leader_moved", view.topic, partition, str(node), f"was {known}")

    def _keep_nodes(self) -> None:
        self._pool.keep_only(
            {target.node.address for route in self.by_topic.values() for target in route.all_targets()}
        )

    def close(self) -> None:
        for unwatch in self._unwatch.values():
            unwatch()
        self._unwatch.clear()
