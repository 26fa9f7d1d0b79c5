"""Asks the lookup nodes: which of them there are, and what they know, all at the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from attrs import define

from nsqext.errors import (
    InvalidInput,
    InvalidSetting,
    InvalidState,
    LookupFailed,
    LookupUnreachable,
    NotLookupd,
    NsqError,
    TopicNotFound,
)
from nsqext.lookup.addresses import parse_addresses
from nsqext.lookup.http import LookupHttp
from nsqext.lookup.options import LookupOptions
from nsqext.lookup.responses import (
    LookupAnswer,
    LookupNode,
    NodeInfo,
    read_lookup,
    read_lookup_nodes,
    read_node,
    unwrap,
)
from nsqext.protocol.names import check_topic

if TYPE_CHECKING:
    import httpx

    from nsqext.types import Address

__all__ = ("LookupClient", "failure")

T = TypeVar("T")

_RELIST_SOON = 5.0  # seconds to the next listlookup after one that nobody answered


@define(eq=False)
class _Health:
    failures: int = 0
    last: float = 0.0


class LookupClient:
    """Asks all lookup nodes of a cluster, old and new ones mixed as it may be.

    The given addresses are asked for the list of all lookup nodes; one that has no list (the original NSQ) or does not
    answer stands for itself. A node that fails again and again gets its turn only when the others know nothing.

    Args:
        addresses: nsqlookupd's HTTP addresses, a list or text with commas.
        options: time limits and the like.
        client: an HTTP client to use instead of one of its own; it is not closed.

    Raises:
        InvalidSetting: an address that is none, or no address.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str,
        options: LookupOptions | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self.addresses: tuple[Address, ...] = parse_addresses(addresses, "lookupd")
        if not self.addresses:
            raise InvalidSetting("lookupd names no address", hint="give nsqlookupd's HTTP address, host:port")
        self.options: LookupOptions = options or LookupOptions()
        self.http: LookupHttp = LookupHttp(self.options, client)
        self._nodes: dict[Address, LookupNode] = {}
        self._relist_at = float("-inf")
        self._listing: anyio.Event | None = None
        self._lists = 0
        self._health: dict[Address, _Health] = {}

    async def __aenter__(self) -> LookupClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    def elsewhere(self, addresses: Sequence[str] | str) -> LookupClient:
        """Return a client that asks other lookup nodes over the same pool of connections, which either one closes.

        Raises:
            InvalidSetting: an address that is none, or no address.
        """
        other = LookupClient(addresses, self.options)
        other.http = self.http
        return other

    async def lookup(self, topic: str, access: str = "w") -> tuple[LookupAnswer, ...]:
        """Ask where a topic is; returns one answer for each lookup node that was asked, failed ones too.

        Args:
            topic: name of the topic.
            access: ``w`` for where to publish, ``r`` for where to consume.

        Raises:
            InvalidInput: the name or ``access`` is not valid.
            InvalidState: the client was closed.
        """
        check_topic(topic)
        if access not in ("r", "w"):
            raise InvalidInput(f"access={access!r} is neither 'r' nor 'w'", topic=topic)
        await self.lookup_nodes()
        answers: list[LookupAnswer] = []
        for tier in self._tiers():
            results = await self._ask_all(tier, partial(self._lookup_one, topic, access))
            for address, result in results.items():
                self._note_health(address, isinstance(result, LookupFailed))
                answers.append(LookupAnswer(address, error=result) if isinstance(result, NsqError) else result)
            if any(answer.found for answer in answers):
                break
        if all(isinstance(answer.error, LookupFailed) for answer in answers):
            self._relist_at = float("-inf")
        return tuple(answers)

    async def _lookup_one(self, topic: str, access: str, address: Address) -> LookupAnswer:
        data = await self.http.ask(address, "/lookup", {"topic": topic, "access": access, "metainfo": "true"})
        epoch = self._nodes[address].epoch if address in self._nodes else 0
        return read_lookup(data, address, epoch)

    async def lookup_nodes(self) -> tuple[LookupNode, ...]:
        """Return all lookup nodes, as listlookup told at last; asks again when that is too long ago.

        Raises:
            InvalidState: the client was closed.
        """
        before = self._lists
        while self._lists == before and anyio.current_time() >= self._relist_at:
            if self._listing is not None:
                await self._listing.wait()
                continue
            self._listing = done = anyio.Event()
            try:
                await self._list()
                self._lists += 1
            finally:
                self._listing = None
                done.set()
        return tuple(self._nodes.values())

    async def _list(self) -> None:
        results = await self._ask_all(self.addresses, self._list_one)
        if all(isinstance(result, NsqError) for result in results.values()):
            others = [address for address in self._nodes if address not in results]
            results |= await self._ask_all(others, self._list_one)
        lists = [result for result in results.values() if not isinstance(result, NsqError)]
        nodes: dict[Address, LookupNode] = {}
        for node in (node for told in lists for node in told):
            known = nodes.get(node.address)
            if known is None or node.epoch > known.epoch:
                nodes[node.address] = node
        if not lists:
            nodes |= self._nodes
        for address in self.addresses:
            if not results[address] or isinstance(results[address], NsqError):
                nodes.setdefault(address, LookupNode(address))
        self._nodes = nodes
        interval = self.options.poll_interval
        self._relist_at = anyio.current_time() + (interval if lists else min(interval, _RELIST_SOON))

    async def _list_one(self, address: Address) -> tuple[LookupNode, ...]:
        status, body = await self.http.fetch(address, "/listlookup", {})
        if status == 404:
            return ()  # the original NSQ
        return read_lookup_nodes(unwrap(status, body, address), address)

    # Who is asked when

    def _tiers(self) -> list[list[Address]]:
        """Group the lookup nodes: those of the list, given ones beside it, those that failed too often."""
        everyone = dict.fromkeys((*self._nodes, *self.addresses))
        last = [address for address in everyone if self._comes_last(address)]
        first = [address for address in self._nodes if address not in last]
        second = [address for address in self.addresses if address not in self._nodes and address not in last]
        return [tier for tier in (first, second, last) if tier]

    def _comes_last(self, address: Address) -> bool:
        health = self._health.get(address)
        return (
            health is not None
            and health.failures >= self.options.max_failures
            and anyio.current_time() < health.last + self.options.retry_failed
        )

    def _note_health(self, address: Address, failed: bool) -> None:
        if failed:
            health = self._health.setdefault(address, _Health())
            health.failures += 1
            health.last = anyio.current_time()
        else:
            self._health.pop(address, None)

    async def _ask_all(
        self, addresses: Iterable[Address], ask: Callable[[Address], Awaitable[T]]
    ) -> dict[Address, T | NsqError]:
        """Ask all at the same time; once one has answered, the others have only ``straggler_timeout`` left."""
        results: dict[Address, T | NsqError] = {
            address: LookupFailed("it took much longer to answer than another lookup node", node=str(address))
            for address in addresses
        }

        async def ask_one(address: Address) -> None:
            try:
                results[address] = await ask(address)
            except NsqError as error:
                results[address] = error
            else:
                scope = tasks.cancel_scope
                scope.deadline = min(scope.deadline, anyio.current_time() + self.options.straggler_timeout)

        async with anyio.create_task_group() as tasks:
            for address in results:
                tasks.start_soon(ask_one, address)
        for result in results.values():
            if isinstance(result, InvalidState):
                raise result
        return results

    # What there is

    async def topics(self) -> tuple[str, ...]:
        """Return the names of all topics that any lookup node knows, sorted.

        Raises:
            LookupFailed: none gave a usable answer.
        """
        answers = await self._collect("/topics", {}, _read_topics)
        return tuple(sorted({topic for topics in answers for topic in topics}))

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """Return all nsqd nodes that any lookup node knows, sorted by TCP address.

        Raises:
            LookupFailed: none gave a usable answer.
        """
        answers = await self._collect("/nodes", {}, _read_nodes)
        found = {node.tcp: node for nodes in answers for node in nodes}
        return tuple(found[address] for address in sorted(found))

    async def _collect(self, path: str, params: Mapping[str, str], read: Callable[[Any], T]) -> list[T]:
        async def ask(address: Address) -> T:
            data = await self.http.ask(address, path, params)
            try:
                return read(data)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise LookupFailed(f"the answer to {path} cannot be read", node=str(address)) from error

        await self.lookup_nodes()
        errors: list[NsqError] = []
        for tier in self._tiers():
            results = (await self._ask_all(tier, ask)).values()
            usable = [result for result in results if not isinstance(result, NsqError)]
            if usable:
                return usable
            errors += [result for result in results if isinstance(result, NsqError)]
        raise failure(errors)


def _read_topics(data: Any) -> tuple[str, ...]:
    return tuple(map(str, data["topics"] or ()))


def _read_nodes(data: Any) -> tuple[NodeInfo, ...]:
    return tuple(read_node(node) for node in data["producers"] or ())


def failure(errors: Sequence[NsqError], topic: str | None = None) -> NsqError:
    """Return one error for those of all lookup nodes: `TopicNotFound` if one that works does not know the topic."""
    for error in errors:
        if isinstance(error, TopicNotFound):
            return TopicNotFound(error.message, topic=topic, node=error.node, hint=error.hint)
    told = "; ".join(str(error) for error in errors)
    kind: type[LookupFailed] = LookupFailed
    for one in (NotLookupd, LookupUnreachable):
        if errors and all(isinstance(error, one) for error in errors):
            kind = one
    failed = kind(f"no lookup node gave a usable answer: {told}", topic=topic)
    failed.__cause__ = errors[0] if errors else None
    return failed
