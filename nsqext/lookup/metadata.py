"""Cache of partition maps, refreshed by polling and after errors."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import anyio
from anyio.lowlevel import EventLoopToken, checkpoint, current_token
from attrs import fields

from nsqext.errors import InvalidSetting, InvalidState, LookupFailed, PartitionUnavailable, outside_text
from nsqext.lookup.options import NODE_PORT, LookupOptions, LookupUrl, parse_addresses
from nsqext.lookup.partition_map import PartitionMap
from nsqext.lookup.poller import ExtendedTopics, Polled, Poller, RefreshBudget, Refresher
from nsqext.protocol.names import check_topic
from nsqext.settings import setting_name
from nsqext.transport.event_loop import call_in_loop, current_loop
from nsqext.types import ProcessBound

if TYPE_CHECKING:
    import httpx

    from nsqext.lookup.client import LookupClient
    from nsqext.lookup.node_channels import NodeChannels
    from nsqext.lookup.responses import LookupAnswer, NodeInfo
    from nsqext.settings import Given
    from nsqext.types import Address

logger: logging.Logger = logging.getLogger("nsqext.lookup")

_MAX_FAILED = 1024  # nodes whose logged error is remembered
MANY: int = 1024
"""Topics above which topics that were never found are removed."""

_in_use: WeakSet[MetadataCache] = WeakSet()  # caches of this process with users
_in_use_lock = threading.Lock()

Callback = Callable[[PartitionMap], None]
Key = tuple[str, str]


def topic_changed(topic: str) -> None:
    """Look a topic up again soon in all clients of this process, in any event loop. Thread-safe."""
    with _in_use_lock:
        caches = list(_in_use)
    for cache in caches:
        cache.poll_soon(topic)


class NodeFilter:
    """Calls the ``node_filter``; a node for which it raises is used."""

    def __init__(self, function: Callable[[str], bool]) -> None:
        self._function = function
        self._failed: set[Address] = set()

    def __call__(self, node: Address) -> bool:
        try:
            return bool(self._function(str(node)))
        except Exception:
            if node not in self._failed and len(self._failed) < _MAX_FAILED:
                self._failed.add(node)
                logger.exception("node_filter raised for %s; the node is used", node)
            return True


class MetadataCache:
    """Partition maps of topics, from the lookup service or for fixed nodes.

    Clients may share a cache; `acquire` and `release` count them.

    Args:
        lookupd: nsqlookupd's HTTP addresses, a list or a text with commas.
        nsqd: TCP addresses of nodes without lookup, whose partitions are unknown.
        transport: httpx transport to use, closed by the caller; None to create a transport.
        over_http: ``nsqd`` are HTTP addresses.

    Raises InvalidSetting.
    """

    def __init__(
        self,
        lookupd: Sequence[str] | str = (),
        nsqd: Sequence[str] | str = (),
        options: LookupOptions | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        over_http: bool = False,
    ) -> None:
        self._nsqd = parse_addresses(nsqd, "nsqd", NODE_PORT if over_http else None)
        if bool(lookupd) == bool(self._nsqd):
            raise InvalidSetting(
                "both lookupd and nsqd are given" if lookupd else "neither lookupd nor nsqd is given",
                hint="give lookupd=... with nsqlookupd's HTTP addresses, or nsqd=... to use nodes without lookup",
            )
        self.options: LookupOptions = options or LookupOptions()
        self._transport = transport
        given = [one.name for one in fields(LookupOptions) if getattr(self.options, one.name) != one.default]
        if self._nsqd and given:
            reason = f"{setting_name('lookup', given[0])} has no effect with nsqd="
            raise InvalidSetting(reason, hint="leave it out, or give lookupd=")
        self._filter = None if self.options.node_filter is None else NodeFilter(self.options.node_filter)
        self._client = None if self._nsqd else self._new_client(lookupd)
        self.service: frozenset[Address] = frozenset(self.addresses)  #: identifies the service
        self._maps: dict[Key, PartitionMap] = {}
        self._refreshers: dict[Key, Refresher] = {}
        self._callbacks: dict[Key, list[Callback]] = {}
        self._poller = Poller(self._polled)
        self._budget = RefreshBudget()
        self._extended = ExtendedTopics(self._extend_support, partial(self._poll_soon, accesses="r"))
        self.users: int = 0  #: open clients; the last one closes the cache
        self._loop: EventLoopToken | None = None
        self._closed = False
        self._answered_at: float | None = None
        self._topics: tuple[str, ...] = ()
        self._listed_at = float("-inf")
        self._listing = anyio.Lock()
        self.failures: int = 0  #: consecutive rounds without a usable response

    def _new_client(self, lookupd: Sequence[str] | str) -> LookupClient:
        from nsqext.lookup.client import LookupClient  # clients of fixed nodes need no HTTP

        return LookupClient(lookupd, self.options, self._transport)

    @property
    def answer_age(self) -> float | None:
        """Seconds since the last usable response of a lookup node; None before any."""
        return None if self._answered_at is None else max(0.0, time.monotonic() - self._answered_at)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self._nsqd if self._client is None else self._client.addresses

    @property
    def place(self) -> str:
        """The addresses as an argument, for people."""
        return f"{'lookupd' if self.has_lookup else 'nsqd'}={','.join(map(str, self.addresses))!r}"

    @property
    def has_lookup(self) -> bool:
        return self._client is not None

    @property
    def has_https(self) -> bool:
        return any(isinstance(node, LookupUrl) and node.scheme == "https" for node in self._nsqd)

    @property
    def channels(self) -> NodeChannels:
        """Requests about channels; raises InvalidState without lookup."""
        from nsqext.lookup.node_channels import NodeChannels

        if self._client is None:
            raise InvalidState("nodes without lookup have no HTTP addresses", hint="give lookupd=... instead of nsqd")
        return NodeChannels(self._client.http)

    def cached(self, topic: str, access: str = "w") -> PartitionMap | None:
        """Return a topic's map without a request; None if the topic was never found."""
        found = self._maps.get((topic, access))
        if found is None and self._nsqd:
            found = PartitionMap(check_topic(topic), access, nodes=self._nsqd, given=True, version=1)
            self._maps[topic, access] = found
        return found

    async def resolve(self, topic: str, access: str = "w") -> PartitionMap:
        """Return a topic's map; query the lookup service if no node is known.

        Raises TopicNotFound, TopicNotReady, LookupFailed, InvalidName or InvalidState.
        """
        found = self.cached(topic, access)
        if found is not None and found.known:
            return found
        refresher = self._refresher(topic, access)
        await refresher.refresh()
        if refresher.map is not None:
            return refresher.map
        # each waiting task raises a copy with its own traceback
        raise copy(refresher.error) from refresher.error.__cause__

    def is_unknown(self, topic: str, access: str = "w") -> bool:
        """See `Refresher.unknown`."""
        refresher = self._refreshers.get((topic, access))
        return refresher is not None and refresher.unknown

    async def may_subscribe(self, topic: str, view: PartitionMap, node: Address) -> bool:
        """Return False if a subscription to a node of the original NSQ would create a deleted topic again.

        A new lookup has to list the node, without a tombstone, and the node itself has to know the topic: both may lag
        behind a deletion. A server without response does not count; without lookup, nothing is asked.

        Raises InvalidName or InvalidState.
        """
        if self._client is None:
            return True
        refresher = self._refresher(topic, view.access)
        await refresher.refresh()
        if refresher.listed is not None and node not in refresher.listed:
            return False
        http = view.http.get(node)
        try:
            return http is None or await self.channels.has_topic(http, topic)
        except PartitionUnavailable as error:
            logger.debug("topics of the node: %s", error, extra={"topic": topic, "node": str(node)})
            return True

    async def topics(self, *, max_age: float = 0.0) -> tuple[str, ...]:
        """Return the sorted names of all topics, at most ``max_age`` seconds old; empty without lookup.

        Raises LookupFailed.
        """
        if self._client is None:
            await checkpoint()
            return ()
        async with self._listing:
            if time.monotonic() - self._listed_at >= max_age:
                self._topics = await self._client.lists.topics()
                self._listed_at = self._answered_at = time.monotonic()
        return self._topics

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """Return all listed nodes; empty without lookup. Raises LookupFailed."""
        if self._client is None:
            await checkpoint()
            return ()
        return await self._client.lists.nodes()

    def of_nodes(self, topic: str, nodes: Sequence[NodeInfo]) -> PartitionMap:
        """Return the map of a topic unknown to lookup, on nodes without partitions."""
        addresses = [node.tcp for node in nodes]
        kept = addresses if self._filter is None else [node for node in addresses if self._filter(node)]
        filtered = tuple((None, node) for node in addresses if node not in kept)
        http = {node.tcp: node.http for node in nodes if node.http is not None}
        return PartitionMap(topic, "w", nodes=tuple(kept), http=http, filtered=filtered)

    async def refresh(
        self,
        topic: str,
        access: str = "w",
        failed: PartitionMap | None = None,
        partition: int | None = None,
        *,
        after_error: bool = True,
    ) -> None:
        """Query the lookup service again; return when a round newer than ``failed`` has ended.

        Concurrent refreshes of a topic share a round. The pauses between rounds without a change grow. A failed round
        keeps the map. Cancellation is safe.

        Args:
            failed: the map that led to the error; if the cache has a newer map, no request is sent.
            partition: its leader in ``failed`` refused: if lookup nodes disagree, another leader is preferred.
            after_error: False without an error: the pauses do not grow.

        Raises InvalidName or InvalidState.
        """
        if self._client is None:
            await checkpoint()
            return
        await self._refresher(topic, access).refresh(failed, partition, after_error=after_error)

    async def lacks_channel(self, topic: str, partition: int) -> bool:
        """See `LookupClient.lacks_channel`."""
        return self._client is not None and await self._client.lacks_channel(topic, partition)

    def poll_soon(self, topic: str, accesses: str = "rw") -> None:
        """Look a known topic up again soon, for ``r``, ``w`` or both. Thread-safe."""
        loop = self._loop
        if loop is not None:
            call_in_loop(loop.native_token, partial(self._poll_soon, topic, accesses))

    def _poll_soon(self, topic: str, accesses: str) -> None:
        for access in accesses:
            if refresher := self._refreshers.get((topic, access)):
                refresher.poll_soon()
        self._poller.wake()

    def lists_cheaply(self, count: int) -> bool:
        """Return whether a list of all topics costs less than ``count`` lookups."""
        return self._extended.cheap_for(count)

    def poll_extended(self, topics: Iterable[str]) -> None:
        """Look up soon, with a single list, which of these topics have extend support. Not thread-safe."""
        self._extended.request(topics)
        self._poller.wake()

    async def _extend_support(self) -> dict[str, bool]:
        if self._client is None:
            raise InvalidState("the metadata cache uses no lookup")
        return await self._client.lists.extend_support()

    def watch(self, topic: str, access: str, callback: Callback) -> Callable[[], None]:
        """Poll a topic; call ``callback`` with each new map; return a function that ends this.

        Callbacks run in the task that received the response and must not block. Raises InvalidName or InvalidState.
        """
        if self._client is not None:
            refresher = self._refresher(topic, access)
            if refresher.map is None:
                refresher.poll_at = float("-inf")
                self._poller.wake()
        self._callbacks.setdefault((topic, access), []).append(callback)
        return partial(self._unwatch, (topic, access), callback)

    def _unwatch(self, key: Key, callback: Callback) -> None:
        callbacks = self._callbacks.get(key, [])
        if callback not in callbacks:
            return
        callbacks.remove(callback)
        if not callbacks:
            del self._callbacks[key]
            # without polling it would become stale
            self._refreshers.pop(key, None)
            self._maps.pop(key, None)

    def switch(self, addresses: Sequence[str] | str) -> None:
        """Use other lookup nodes; each topic keeps its map until they find it. Thread-safe. Raises InvalidSetting."""
        if self.users and self._loop is not None and self._loop != current_loop():
            from anyio import from_thread  # it loads concurrent.futures

            from_thread.run_sync(self._switch, addresses, token=self._loop)
        else:
            self._switch(addresses)

    def _switch(self, addresses: Sequence[str] | str) -> None:
        if self._client is None:
            raise InvalidSetting(
                "cannot switch: no lookup service is used", hint="give lookupd=... instead of nsqd=..."
            )
        self._client = client = self._client.elsewhere(addresses)
        self._listed_at = float("-inf")
        for (topic, access), refresher in self._refreshers.items():
            refresher.start_over(partial(self._lookup, client, topic, access))
        self._poller.wake()

    # Opening, polling and closing

    def acquire(self) -> None:
        """Add a user; the first user opens or reopens the cache. Raises InvalidState."""
        loop = current_token()
        if self.users and self._loop != loop:
            raise InvalidState("the lookup is in use in another event loop", hint="create a Lookup for each event loop")
        if self._closed and self._client is not None:
            self._client = self._new_client(tuple(map(str, self._client.addresses)))
            self._maps.clear()
            self._refreshers.clear()
            self._poller = Poller(self._polled)
            self._listing, self._listed_at = anyio.Lock(), float("-inf")
        self._closed = False
        self._loop = loop
        self.users += 1
        with _in_use_lock:
            _in_use.add(self)

    async def release(self) -> None:
        """Remove a user; the last user closes the cache, even when cancelled."""
        self.users -= 1
        if not self.users:
            await self.aclose()

    async def run(self) -> None:
        """Poll found and watched topics until the cache is closed; return immediately without lookup.

        Each user runs this, and a single task polls.
        """
        if self._client is not None:
            await self._poller.run()

    def _polled(self) -> list[Polled]:
        topics = [one for key, one in self._refreshers.items() if one.map is not None or key in self._callbacks]
        return [self._extended, *topics]

    async def aclose(self) -> None:
        """Close the connections to lookup nodes; pending calls raise. Idempotent."""
        self._closed = True
        with _in_use_lock:
            _in_use.discard(self)
        self._poller.stop()
        if self._client is not None:
            await self._client.aclose()

    def _refresher(self, topic: str, access: str) -> Refresher:
        key = (topic, access)
        if self._closed or self._client is None:
            raise InvalidState("the metadata cache is closed", topic=topic)
        refresher = self._refreshers.get(key)
        if refresher is None:
            check_topic(topic)
            if len(self._refreshers) >= MANY:
                self._forget_unknown()
            refresher = self._refreshers[key] = Refresher(
                topic,
                access,
                partial(self._lookup, self._client, topic, access),
                self.options,
                self._map_changed,
                self._budget,
                self._filter,
            )
            self._budget.topics = len(self._refreshers)
        return refresher

    async def _lookup(self, client: LookupClient, topic: str, access: str) -> tuple[LookupAnswer, ...]:
        answers = await client.lookup(topic, access)
        if all(isinstance(answer.error, LookupFailed) for answer in answers):
            self.failures += 1
        else:
            self.failures = 0
            self._answered_at = time.monotonic()
        return answers

    def _forget_unknown(self) -> None:
        for key, refresher in list(self._refreshers.items()):
            if refresher.map is None and key not in self._callbacks:
                del self._refreshers[key]

    def _map_changed(self, changed: PartitionMap) -> None:
        key = (changed.topic, changed.access)
        refresher = self._refreshers.get(key)
        if refresher is None or refresher.map is not changed:
            return  # removed during the round
        before, self._maps[key] = self._maps.get(key), changed
        self._poller.wake()
        if changed.filtered and (before is None or before.filtered != changed.filtered):
            log_filtered(changed)
        if before is not None and before.meta != changed.meta:
            topic_changed(changed.topic)  # for other clients of this process, and the other access
        for callback in tuple(self._callbacks.get(key, ())):
            callback(changed)


def log_filtered(view: PartitionMap) -> None:
    """Log the nodes of a topic that ``node_filter`` excludes."""
    left_out = [str(node) if number is None else f"partition {number} at {node}" for number, node in view.filtered]
    use = "published to" if view.access == "w" else "consumed from"
    logger.warning("%s: not %s because of node_filter: %s", view.topic, use, outside_text(", ".join(left_out)))


class SharedMetadata(ProcessBound):
    """What clients use of `nsqext.Lookup`."""

    def __init__(self, metadata: MetadataCache, own: Collection[str], given: Mapping[str, Any]) -> None:
        self.metadata: MetadataCache = metadata
        self.own: Collection[str] = own  #: names of its settings
        self.given: Mapping[str, Any] = given  #: values of given settings


def values_of(given: Given) -> Mapping[str, Any]:
    """Return the values that a client runs with, including a shared `nsqext.Lookup`'s."""
    return {**given.values, **given.lookupd.given} if isinstance(given.lookupd, SharedMetadata) else given.values


def metadata_cache(given: Given, options: LookupOptions, *, over_http: bool = False) -> MetadataCache:
    """Return the cache of a shared `nsqext.Lookup`, or a new cache; raises InvalidSetting."""
    if not isinstance(given.lookupd, SharedMetadata):
        return MetadataCache(given.lookupd, given.nsqd, options, over_http=over_http)
    for name in given.values.keys() & given.lookupd.own:
        raise InvalidSetting(
            f"{name} is given for a client that shares a Lookup", hint=f"give it to the Lookup: Lookup(..., {name}=...)"
        )
    return given.lookupd.metadata
