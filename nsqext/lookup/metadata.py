"""Where every topic is: the views that producers and consumers route by, kept fresh by polling and by their errors.

Several of them may use one directory at the same time: what one has found, the others need not ask for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING

from anyio import current_time, from_thread
from anyio.lowlevel import EventLoopToken, checkpoint, current_token

from nsqext.errors import InvalidSetting, InvalidState, LookupFailed
from nsqext.lookup.addresses import parse_addresses
from nsqext.lookup.client import LookupClient
from nsqext.lookup.options import LookupOptions
from nsqext.lookup.partition_map import PartitionMap
from nsqext.lookup.poller import Poller
from nsqext.lookup.refresher import Refresher
from nsqext.protocol.names import check_topic

if TYPE_CHECKING:
    import httpx

    from nsqext.lookup.responses import LookupAnswer, NodeInfo
    from nsqext.types import Address

__all__ = ("MetadataCache",)

_MANY = 1024  # topics, from which on those that were never found are forgotten

Callback = Callable[[PartitionMap], None]
Key = tuple[str, str]


class MetadataCache:
    """Views of topics, from the lookup service or from fixed nodes.

    Args:
        lookupd: nsqlookupd's HTTP addresses, a list or text with commas.
        nsqd: TCP addresses of nodes to use without lookup; then nothing is known of partitions.
        options: how lookup is asked.
        client: an HTTP client to use instead of one of its own; it is not closed.

    Raises:
        InvalidSetting: an address that is none; no address; or both kinds.
    """

    def __init__(
        self,
        lookupd: Sequence[str] | str = (),
        nsqd: Sequence[str] | str = (),
        options: LookupOptions | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self._nsqd = parse_addresses(nsqd, "nsqd")
        if bool(lookupd) == bool(self._nsqd):
            raise InvalidSetting(
                "both lookupd and nsqd are given" if lookupd else "neither lookupd nor nsqd is given",
                hint="give lookupd=... with nsqlookupd's HTTP addresses, or nsqd=... to do without lookup",
            )
        self._options = options or LookupOptions()
        self._given = client
        self._client = None if self._nsqd else LookupClient(lookupd, self._options, client)
        self._views: dict[Key, PartitionMap] = {}
        self._refreshers: dict[Key, Refresher] = {}
        self._callbacks: dict[Key, list[Callback]] = {}
        self._poller = Poller(self._polled)
        self._users = 0
        self._loop: EventLoopToken | None = None
        self._closed = False
        self._answered_at: float | None = None
        self.failures: int = 0
        """Rounds of questions in a row in which no lookup address gave a usable answer."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The lookup addresses; those of the nodes without lookup."""
        return self._nsqd if self._client is None else self._client.addresses

    @property
    def answer_age(self) -> float | None:
        """Seconds since a lookup address last gave a usable answer; None where none ever did, or there is no lookup."""
        return None if self._answered_at is None else max(0.0, time.monotonic() - self._answered_at)

    @property
    def asks(self) -> bool:
        """Whether there is a lookup service to be asked."""
        return self._client is not None

    def peek(self, topic: str, access: str = "w") -> PartitionMap | None:
        """Return what is known of a topic at the moment, without asking; None where it was never found."""
        view = self._views.get((topic, access))
        if view is None and self._nsqd:
            view = self._views[topic, access] = PartitionMap(check_topic(topic), access, nodes=self._nsqd, version=1)
        return view

    def freshness(self, topic: str, access: str = "w") -> tuple[float | None, int]:
        """Return the seconds since a lookup node answered for a topic, and the failed rounds since then.

        None if no lookup node has answered, or no lookup service is used.
        """
        refresher = self._refreshers.get((topic, access))
        if refresher is None or refresher.answered_at is None:
            return None, 0 if refresher is None else refresher.failures
        return current_time() - refresher.answered_at, refresher.failures

    async def resolve(self, topic: str, access: str = "w") -> PartitionMap:
        """Return what is known of a topic; asks when that is nothing, or when nobody leads any of its partitions.

        Raises:
            TopicNotFound: lookup works and does not know the topic.
            LookupFailed: no lookup address gave a usable answer.
            InvalidName: no topic can be called so.
            InvalidState: the directory was closed.
        """
        view = self.peek(topic, access)
        if view is not None and (view.leaders or view.nodes):
            return view
        refresher = self._refresher(topic, access)
        await refresher.refresh()
        if refresher.view is not None:
            return refresher.view
        # everyone who waited gets an exception with a traceback of its own
        raise copy(refresher.error) from refresher.error.__cause__

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """Return all nodes that lookup knows, whatever topics they hold; none without lookup.

        Raises:
            LookupFailed: no lookup address gave a usable answer.
        """
        if self._client is None:
            await checkpoint()
            return ()
        return await self._client.nodes()

    async def refresh(
        self, topic: str, access: str = "w", failed: PartitionMap | None = None, partition: int | None = None
    ) -> None:
        """Ask again because of an error; returns when a round of questions newer than ``failed`` has ended.

        All who ask at the same time wait for the same round. While rounds change nothing, pauses grow between them. A
        round that fails leaves everything as it is. Cancellation is safe at any time.

        Args:
            topic: name of the topic.
            access: ``w`` or ``r``.
            failed: the view that led to the error; when there is a newer one already, nothing is asked.
            partition: the partition whose leader in ``failed`` refused to be it; where lookup nodes disagree, another
                leader is believed then.

        Raises:
            InvalidName: no topic can be called so.
            InvalidState: the directory was closed.
        """
        if self._client is None:
            await checkpoint()
            return
        await self._refresher(topic, access).refresh(failed, partition)

    def watch(self, topic: str, access: str, callback: Callback) -> Callable[[], None]:
        """Call back with every new view of a topic, which is polled from now on; returns a function that ends this.

        Callbacks run in the task that received the answer and must not block.

        Raises:
            InvalidName: no topic can be called so.
            InvalidState: the directory was closed.
        """
        callbacks = self._callbacks.setdefault((topic, access), [])
        if self._client is not None:
            refresher = self._refresher(topic, access)
            if refresher.view is None:
                refresher.poll_at = float("-inf")
                self._poller.wake()
        callbacks.append(callback)
        return partial(self._unwatch, (topic, access), callback)

    def _unwatch(self, key: Key, callback: Callback) -> None:
        callbacks = self._callbacks.get(key, [])
        if callback not in callbacks:
            return
        callbacks.remove(callback)
        if not callbacks:
            del self._callbacks[key]
            # nobody would notice that it has grown old
            self._refreshers.pop(key, None)
            self._views.pop(key, None)

    def switch(self, addresses: Sequence[str] | str) -> None:
        """Ask other lookup nodes from now on; every topic is polled at once, and stays where it was until it is found.

        May be called from any thread.

        Raises:
            InvalidSetting: an address that is none, or no address; or there is no lookup to be switched.
        """
        if self._users and self._loop is not None and self._loop != _current_loop():
            from_thread.run_sync(self._switch, addresses, token=self._loop)
        else:
            self._switch(addresses)

    def _switch(self, addresses: Sequence[str] | str) -> None:
        if self._client is None:
            raise InvalidSetting("there is no lookup to switch", hint="nsqd=... does without")
        self._client = client = self._client.elsewhere(addresses)
        for (topic, access), refresher in self._refreshers.items():
            refresher.start_over(partial(self._lookup, client, topic, access))
        self._poller.wake()

    # Life

    def join(self) -> None:
        """Count one user more; the first one opens the directory, again if need be.

        Raises:
            InvalidState: it is used in another event loop at the moment.
        """
        loop = current_token()
        if self._users and self._loop != loop:
            raise InvalidState(
                "the lookup is in use in another event loop", hint="make one for each event loop, they share nothing"
            )
        if self._closed and self._client is not None:
            self._client = LookupClient(tuple(map(str, self._client.addresses)), self._options, self._given)
            self._views.clear()
            self._refreshers.clear()
            self._poller = Poller(self._polled)
        self._closed = False
        self._loop = loop
        self._users += 1

    async def leave(self) -> None:
        """Count one user less; the last one closes the directory. Cancellation does not keep it open."""
        self._users -= 1
        if not self._users:
            await self.aclose()

    async def run(self) -> None:
        """Poll the topics that are known or watched, until the directory is closed; returns at once without lookup.

        Every user has this running, and one of them does the work.
        """
        if self._client is not None:
            await self._poller.run()

    def _polled(self) -> list[Refresher]:
        return [one for key, one in self._refreshers.items() if one.view is not None or key in self._callbacks]

    async def aclose(self) -> None:
        """Close the connections to lookup nodes; who waits for an answer gets an error. Closing twice does nothing."""
        self._closed = True
        self._poller.stop()
        if self._client is not None:
            await self._client.aclose()

    # Inside

    def _refresher(self, topic: str, access: str) -> Refresher:
        key = (topic, access)
        if self._closed or self._client is None:
            raise InvalidState("the directory is closed", topic=topic)
        refresher = self._refreshers.get(key)
        if refresher is None:
            check_topic(topic)
            if len(self._refreshers) >= _MANY:
                self._forget_unknown()
            refresher = self._refreshers[key] = Refresher(
                topic, access, partial(self._lookup, self._client, topic, access), self._options, self._view_changed
            )
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
            if refresher.view is None and key not in self._callbacks:
                del self._refreshers[key]

    def _view_changed(self, view: PartitionMap) -> None:
        key = (view.topic, view.access)
        refresher = self._refreshers.get(key)
        if refresher is None or refresher.view is not view:
            return  # forgotten while it was asked for
        self._views[key] = view
        self._poller.wake()
        for callback in tuple(self._callbacks.get(key, ())):
            callback(view)


def _current_loop() -> EventLoopToken | None:
    try:
        return current_token()
    except RuntimeError:  # this thread has none
        return None
