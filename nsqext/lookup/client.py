"""Query all lookup nodes of a cluster concurrently, and discover further lookup nodes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import anyio
from attrs import evolve

from nsqext.errors import InvalidInput, InvalidSetting, InvalidState, LookupFailed, NsqError, TopicNotReady
from nsqext.lookup.options import LookupOptions, LookupUrl, parse_lookup_addresses
from nsqext.lookup.responses import LookupAnswer, LookupHttp, LookupNode, read_lookup, read_lookup_nodes, unwrap
from nsqext.protocol.names import check_topic
from nsqext.waits import gather

if TYPE_CHECKING:
    import httpx

    from nsqext.lookup.lists import LookupLists
    from nsqext.lookup.responses import MapAddress
    from nsqext.types import Address

logger: logging.Logger = logging.getLogger("nsqext.lookup")

T = TypeVar("T")

RELIST_SOON: float = 5.0
"""Seconds to the next ``/listlookup`` after all lookup nodes failed."""
MAX_PARSED: int = 4096
"""Cached parsed responses, by their digest."""
_AT_ONCE = 32  # lookup nodes queried concurrently; a failing connection costs milliseconds of CPU


class LookupClient:
    """Client of all lookup nodes of a cluster, of any generation or mixed.

    The given addresses return the list of all lookup nodes. An address without a list (the original NSQ), without a
    response, or with a path prefix (a gateway) is used itself. A node that fails repeatedly is queried only if others
    do not find the topic.

    Args:
        transport: httpx transport to use, closed by the caller; None to create a transport.

    Raises InvalidSetting.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str,
        options: LookupOptions | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.addresses: tuple[Address, ...] = parse_lookup_addresses(addresses)
        if not self.addresses:
            raise InvalidSetting("lookupd has no address", hint="give nsqlookupd's HTTP address, host:port")
        self.options: LookupOptions = options or LookupOptions()
        self.options.check_auth(self.addresses)
        self.http: LookupHttp = LookupHttp(self.options, transport)
        self.mapped: MapAddress | None = None if self.options.address_map is None else self.options.reached_at
        self._nodes: dict[Address, LookupNode] = {}
        self._relist_at = float("-inf")
        self._listing = anyio.Lock()
        self._lists = 0
        self._failures: dict[Address, tuple[int, float]] = {}  # consecutive failures, and the time of the last
        self._limiter = anyio.Semaphore(self.options.max_concurrent)
        #: limits parsing to a response per turn of the event loop, so that other tasks run
        self.reading: anyio.Lock = anyio.Lock()
        self._parsed: dict[tuple[str, str, Address], tuple[bytes, Mapping[Address, Address], LookupAnswer]] = {}

    async def __aenter__(self) -> LookupClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self.http.aclose()

    def elsewhere(self, addresses: Sequence[str] | str) -> LookupClient:
        """Return a client of other lookup nodes with the same connections; closing either closes them.

        Raises InvalidSetting.
        """
        other = LookupClient(addresses, self.options)
        other.http = self.http
        return other

    async def lookup(self, topic: str, access: str = "w") -> tuple[LookupAnswer, ...]:
        """Look up a topic to publish (``w``) or consume (``r``); return each queried lookup node's answer or error.

        The wait for other topics' lookups (``max_concurrent``) does not count for timeouts. Raises InvalidInput or
        InvalidState.
        """
        check_topic(topic)
        if access not in ("r", "w"):
            raise InvalidInput(f"access={access!r} is neither 'r' nor 'w'", topic=topic)
        async with self._limiter:
            await self.lookup_nodes()
            answers: list[LookupAnswer] = []
            for tier in self.tiers():
                results = await self.ask_all(tier, partial(self._lookup_one, topic, access))
                for address, result in results.items():
                    self._note_health(address, isinstance(result, LookupFailed))
                    answers.append(LookupAnswer(address, error=result) if isinstance(result, NsqError) else result)
                if any(answer.found for answer in answers):
                    break
        if all(isinstance(answer.error, LookupFailed) for answer in answers):
            self.relist()
        return tuple(answers)

    async def lacks_channel(self, topic: str, partition: int) -> bool:
        """Return whether lookup nodes hide a partition from producers for lack of a channel; raises InvalidState."""
        params: dict[str, str | int] = {"topic": topic, "access": "w", "partition": partition}

        async def ask(address: Address) -> bool:
            status, body = await self.http.fetch(address, "/lookup", params)
            try:
                unwrap(status, body, address)
            except TopicNotReady:
                return True
            return False

        return any(answer is True for answer in (await self.ask_all(self.addresses, ask)).values())

    async def _lookup_one(self, topic: str, access: str, address: Address) -> LookupAnswer:
        from hashlib import blake2b  # lazy: it loads OpenSSL

        status, body = await self.http.fetch(address, "/lookup", {"topic": topic, "access": access, "metainfo": "true"})
        epoch = self._nodes[address].epoch if address in self._nodes else 0
        key = (topic, access, address)
        known = self._parsed.get(key)
        digest = blake2b(body, digest_size=16).digest()
        reached_at = self.options.reached_at
        if known is not None and status == 200 and known[0] == digest:
            _, reached, answer = known
            if all(reached_at(listed) == there for listed, there in reached.items()):
                return answer if answer.epoch == epoch else evolve(answer, epoch=epoch)
        reached = {}

        def mapped(listed: Address) -> Address:
            reached[listed] = there = reached_at(listed)
            return there

        async with self.reading:
            answer = read_lookup(
                unwrap(status, body, address), address, epoch, self.options.max_nodes, self.mapped and mapped
            )
        if status == 200:
            if len(self._parsed) >= MAX_PARSED:
                self._parsed.clear()
            self._parsed[key] = (digest, reached, answer)
        return answer

    @cached_property
    def lists(self) -> LookupLists:
        from nsqext.lookup.lists import LookupLists

        return LookupLists(self)

    async def lookup_nodes(self) -> tuple[LookupNode, ...]:
        """Return the lookup nodes of ``/listlookup``, at most ``poll_interval`` old; raises InvalidState."""
        if anyio.current_time() >= self._relist_at:
            before = self._lists
            async with self._listing:
                if self._lists == before:
                    await self._list()
                    self._lists += 1
        return tuple(self._nodes.values())

    def relist(self) -> None:
        """Ask for the list of lookup nodes with the next request, because it is outdated."""
        self._relist_at = float("-inf")

    async def _list(self) -> None:
        results = await self.ask_all(self.addresses, self._list_one)
        if all(isinstance(result, NsqError) for result in results.values()):
            others = [address for address in self._nodes if address not in results]
            results |= await self.ask_all(others, self._list_one)
        lists = [result for result in results.values() if not isinstance(result, NsqError)]
        nodes: dict[Address, LookupNode] = {}
        for node in (node for listed in lists for node in listed):
            known = nodes.get(node.address)
            if known is not None:
                if node.epoch > known.epoch:
                    nodes[node.address] = node
            elif len(nodes) < self.options.max_lookup_nodes:
                nodes[node.address] = node
        if not lists:
            nodes |= self._nodes
        for address in self.addresses:
            if not results[address] or isinstance(results[address], NsqError):
                nodes.setdefault(address, LookupNode(address))
        self._nodes = nodes
        known_nodes = {*nodes, *self.addresses}
        self._failures = {address: failed for address, failed in self._failures.items() if address in known_nodes}
        interval = self.options.poll_interval
        self._relist_at = anyio.current_time() + (interval if lists else min(interval, RELIST_SOON))

    async def _list_one(self, address: Address) -> tuple[LookupNode, ...]:
        if isinstance(address, LookupUrl) and address.path:
            return ()  # a gateway: the nodes behind it may be unreachable
        status, body = await self.http.fetch(address, "/listlookup", {})
        if status == 404:
            return ()  # the original NSQ
        async with self.reading:
            nodes = read_lookup_nodes(
                unwrap(status, body, address), address, self.options.max_lookup_nodes, self.mapped
            )
        if not isinstance(address, LookupUrl):
            return nodes
        # all lookup nodes of a cluster share the scheme, which the list lacks
        return tuple(
            evolve(node, address=LookupUrl(node.address.host, node.address.port, address.scheme)) for node in nodes
        )

    # Order of the lookup nodes

    def tiers(self) -> list[list[Address]]:
        """Group the lookup nodes: listed nodes, further given addresses, nodes that failed repeatedly."""
        known_nodes = dict.fromkeys((*self._nodes, *self.addresses))
        failing = {address for address in known_nodes if self._is_failing(address)}
        first = [address for address in self._nodes if address not in failing]
        second = [address for address in self.addresses if address not in self._nodes and address not in failing]
        return [tier for tier in (first, second, [address for address in known_nodes if address in failing]) if tier]

    def _is_failing(self, address: Address) -> bool:
        failures, last = self._failures.get(address, (0, 0.0))
        return failures >= self.options.max_failures and anyio.current_time() < last + self.options.retry_failed

    def _note_health(self, address: Address, failed: bool) -> None:
        if failed:
            failures, _ = self._failures.get(address, (0, 0.0))
            self._failures[address] = failures + 1, anyio.current_time()
        else:
            self._failures.pop(address, None)

    async def ask_all(
        self, addresses: Iterable[Address], ask: Callable[[Address], Awaitable[T]]
    ) -> dict[Address, T | NsqError]:
        """Query nodes concurrently; after the first response, the others have ``straggler_timeout`` seconds left."""
        text = "no response within straggler_timeout after the response of another lookup node"
        results: dict[Address, T | NsqError] = {address: LookupFailed(text, node=str(address)) for address in addresses}

        async def ask_one(address: Address) -> None:
            try:
                results[address] = await ask(address)
            except NsqError as error:
                results[address] = _without_traceback(error)
            else:
                scope.deadline = min(scope.deadline, anyio.current_time() + self.options.straggler_timeout)

        with anyio.CancelScope() as scope:
            await gather(results, ask_one, at_once=_AT_ONCE)
        for result in results.values():
            if isinstance(result, InvalidState):
                raise result
        return results


def _without_traceback(error: NsqError) -> NsqError:
    """Remove the tracebacks of an error, whose frames would keep the response in memory."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:  # causes may form a cycle
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    for cause in causes:
        cause.__traceback__ = None
    return error
