"""Send administration requests to lookup and nodes; repeat them while leaders are elected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import anyio
from anyio.lowlevel import current_token

from nsqext.admin.options import AdminOptions, AdminSettings, admin_schema
from nsqext.errors import (
    ConnectionFailed,
    InvalidInput,
    InvalidState,
    LookupFailed,
    LookupUnreachable,
    NsqError,
    OperationNotSupported,
    PartitionUnavailable,
    TopicNotFound,
    outside_text,
)
from nsqext.lookup.client import LookupClient
from nsqext.lookup.partition_map import PartitionMap, failure, merged
from nsqext.lookup.responses import NodeInfo, unwrap
from nsqext.protocol.names import check_channel, check_topic
from nsqext.settings import build
from nsqext.types import Address, ProcessBound
from nsqext.waits import Doubling, gather

if TYPE_CHECKING:
    from nsqext.admin.results import Generation
    from nsqext.lookup.responses import LookupNode

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_PAUSE = 0.25  # seconds between two attempts
_LONGEST_PAUSE = 2.0  # seconds; the pause doubles until then
# seconds between repeats of the request for partitions while they lack leaders. A real cluster assigns these in its
# check of all topics: once a minute, and after such a request if the last check is 6 s old
_AGAIN = 6.0
_NOT_LEADER = "E_FAILED_ON_NOT_LEADER"
_PASSING = ("cluster is unstable", "another balance is running", "has no leader")  # temporary refusals of lookup

# error codes of a node that is not the partition's leader, or not yet
_UNSETTLED = (_NOT_LEADER, "E_FAILED_ON_NOT_WRITABLE", "E_TOPIC_NOT_EXIST", "TOPIC_NOT_FOUND")

_NOT_IN_FLIGHT = "not in flight"  # status 500 for a message that is not in flight


class ClusterRequests:
    """Requests to lookup and nodes over HTTP."""

    def __init__(self, client: LookupClient, timeout: float) -> None:
        self.client: LookupClient = client
        self._timeout = timeout  # seconds for a change, including the wait for leaders

    async def find(self, topic: str) -> PartitionMap:
        return (await self.find_with_channels(topic))[0]

    async def find_with_channels(self, topic: str) -> tuple[PartitionMap, tuple[str, ...]]:
        """Return a topic's partition map and sorted channels."""
        answers = await self.client.lookup(topic, "r")
        channels = {name for answer in answers for name in answer.channels}
        return merged(topic, "r", answers), tuple(sorted(channels))

    async def find_redesigned(
        self, topic: str, operation: str, reason: str = "the original NSQ cannot do this"
    ) -> tuple[PartitionMap, tuple[str, ...]]:
        """Return partition map and channels of a redesigned topic; raise OperationNotSupported for others."""
        where, channels = await self.find_with_channels(topic)
        if generation_of(where) == "original":
            raise unsupported(operation, reason, topic)
        return where, channels

    async def change_lookup(self, path: str, params: Mapping[str, str | int]) -> None:
        """Send a change to the leader of the lookup nodes, or to all original lookup nodes."""

        async def change(address: Address) -> None:
            await self.client.http.ask(address, path, params, method="POST")

        nodes = await self.client.lookup_nodes()
        leader = _leader_of(nodes)
        if leader is not None:
            try:
                await change(leader)
            except LookupFailed as error:
                if not (isinstance(error, LookupUnreachable) or _NOT_LEADER in error.message):
                    raise
                self.client.relist()  # the list may be a minute old
                other = _leader_of(await self.client.lookup_nodes())
                if other in (None, leader):
                    raise
                await change(other)
            return
        _, failed = await ask_all([node.address for node in nodes], change)
        errors = [failed[node.address] for node in nodes if node.address in failed]
        for one in errors:
            if not isinstance(one, (LookupFailed, TopicNotFound)):
                raise one
        if len(errors) == len(nodes):
            raise failure(errors, str(params.get("topic", "")) or None)

    async def change_settled(
        self, path: str, params: Mapping[str, str | int], topic: str, *, bounded: bool = True
    ) -> None:
        """Send a change as `change_lookup`; repeat it while lookup refuses it because of elections."""

        async def change() -> None:
            try:
                await self.change_lookup(path, params)
            except LookupFailed as error:
                if any(text in error.message for text in _PASSING):
                    raise PartitionUnavailable(error.message, topic=topic) from error
                raise

        await self.settled(change, topic, bounded=bounded)

    async def get(self, address: Address, path: str, params: Mapping[str, str | int]) -> Any:
        """Return the data of a node's response."""
        status, body = await self.fetch(address, path, params, "GET")
        if status != 200:
            raise ConnectionFailed(f"{path} returned {status}: {body[:200]!r}", node=str(address))
        try:
            return unwrap(status, body, address)
        except NsqError as error:
            raise ConnectionFailed(f"invalid response to {path}: {error.message}", node=str(address)) from error

    async def post(self, address: Address, path: str, params: Mapping[str, str | int], body: bytes = b"") -> None:
        """Send a change to a node."""
        status, answer = await self.fetch(address, path, params, "POST", body)
        if status == 200:
            return
        text = _refusal(answer)
        topic, partition = params.get("topic"), params.get("partition")
        where: dict[str, Any] = {
            "topic": None if topic is None else str(topic),
            "partition": None if partition is None else int(partition),
            "node": str(address),
        }
        if text.startswith(_UNSETTLED) or (status >= 500 and _NOT_IN_FLIGHT not in text):
            raise PartitionUnavailable(f"{path} was refused with {status} {text}", **where)
        hint = "check the name of the channel, or create it" if text.startswith("CHANNEL_NOT_FOUND") else None
        raise InvalidInput(f"{path} was refused with {status} {text}", **where, hint=hint)

    async def post_to_nodes(self, where: PartitionMap, path: str) -> None:
        """Send a change to all nodes of an original topic; raise a node's error after all are asked."""

        async def change(node: Address) -> None:
            await self.post(http_of(where, node), path, {"topic": where.topic})

        await ask_each(where.nodes, change)

    async def fetch(
        self, address: Address, path: str, params: Mapping[str, str | int], method: str = "GET", body: bytes = b""
    ) -> tuple[int, bytes]:
        return await self.client.http.fetch_node(address, path, params, method, body, failure=ConnectionFailed)

    async def settled(
        self,
        attempt: Callable[[], Awaitable[T]],
        topic: str,
        *,
        passing: type[NsqError] = PartitionUnavailable,
        again: Callable[[], Awaitable[object]] | None = None,
        bounded: bool = True,
    ) -> T:
        """Return the result of ``attempt``; repeat it while the topic's leaders are elected.

        Args:
            passing: error that leads to a repeat.
            again: called every 6 s, to make the cluster check its topics.
            bounded: raise PartitionUnavailable after the time for a change; otherwise the caller bounds it.
        """
        pauses = Doubling(_PAUSE, _LONGEST_PAUSE)
        again_at = inf if again is None else anyio.current_time() + _AGAIN
        last: NsqError | None = None
        with anyio.move_on_after(self._timeout if bounded else inf):
            while True:
                try:
                    return await attempt()
                except (PartitionUnavailable, ConnectionFailed, passing) as error:
                    last = error
                if again is not None and anyio.current_time() >= again_at:
                    await again()
                    again_at = anyio.current_time() + _AGAIN
                    pauses = Doubling(_PAUSE, _LONGEST_PAUSE)
                await anyio.sleep(min(pauses.next(), max(again_at - anyio.current_time(), 0.0)))
        raise PartitionUnavailable(
            f"the change was not completed within {self._timeout:g} s"
            + (f", last error: {last}" if last is not None else ""),
            topic=topic,
            hint="check that the leader of every partition runs",
        ) from last

    async def at_leaders(
        self,
        topic: str,
        channel: str,
        change: Callable[[Address, dict[str, str | int]], Awaitable[None]],
        *,
        partitions: Sequence[int] | None = None,
        operation: str | None = None,
    ) -> None:
        """Make a change once at the leader of each partition, or at each node of an original topic.

        All are asked, also if some do not respond or have no leader; then an error is raised.

        Args:
            change: called with a node's HTTP address and the names of topic, channel and partition as parameters.
            partitions: numbers of the partitions; None for all.
            operation: name of an operation that the original NSQ lacks, for its error.
        """
        check_topic(topic)
        check_channel(channel)
        done: set[int | Address] = set()

        async def attempt() -> None:
            where = await self.find(topic)
            if operation is not None and where.nodes:
                raise unsupported(operation, "the original NSQ cannot do this", topic)
            created = {*range(where.meta.partition_num), *where.leaders}
            if not created and not where.nodes:
                raise _no_holder(topic)
            chosen = sorted(created) if partitions is None else partitions
            for number in chosen:
                if number not in created:
                    raise no_partition(topic, number)

            async def ask(holder: int | Address) -> None:
                params: dict[str, str | int] = {"topic": topic, "channel": channel}
                if isinstance(holder, Address):
                    node = holder
                elif holder in where.leaders:
                    node = where.leaders[holder]
                    params["partition"] = holder
                else:
                    raise PartitionUnavailable.without_leader(topic, holder)
                await change(http_of(where, node), params)
                done.add(holder)

            _, failed = await ask_all([one for one in (*chosen, *where.nodes) if one not in done], ask)
            for error in sorted(failed.values(), key=_may_pass):
                raise error

        await self.settled(attempt, topic)

    async def change_channel(
        self,
        action: str,
        topic: str,
        channel: str,
        *,
        operation: str | None = None,
        extra: Mapping[str, str | int] = MappingProxyType({}),
    ) -> None:
        """Change a channel at the leader of each partition, or at each node of an original topic.

        Args:
            action: last part of the path of the request.
            operation: see `at_leaders`.
        """
        changed, missing = 0, None

        async def change(node: Address, params: dict[str, str | int]) -> None:
            nonlocal changed, missing
            try:
                await self.post(node, f"/channel/{action}", {**params, **extra})
            except InvalidInput as error:
                # partitions added later lack the channel until a consumer subscribes
                if action not in ("empty", "delete") or "CHANNEL_NOT_FOUND" not in error.message:
                    raise
                missing = error
            else:
                changed += 1

        await self.at_leaders(topic, channel, change, operation=operation)
        if missing is not None and not changed:
            raise missing

    async def led(self, topic: str) -> PartitionMap:
        """Return a topic's partition map; raise `PartitionUnavailable` unless every partition has a leader."""
        where = await self.find(topic)
        missing = [number for number in range(where.meta.partition_num) if number not in where.leaders]
        if missing:
            raise PartitionUnavailable.without_leader(topic, missing[0])
        if not where.leaders and not where.nodes:
            raise _no_holder(topic)
        return where


async def ask_all(items: Iterable[K], ask: Callable[[K], Awaitable[T]]) -> tuple[dict[K, T], dict[K, NsqError]]:
    """Send requests about nodes, topics or positions concurrently; return results and errors by item."""
    failed: dict[K, NsqError] = {}

    async def ask_one(item: K) -> tuple[T] | None:
        try:
            return (await ask(item),)
        except NsqError as error:
            failed[item] = error
            return None

    found = await gather(items, ask_one)
    return {item: result[0] for item, result in found.items() if result is not None}, failed


async def ask_each(items: Iterable[K], ask: Callable[[K], Awaitable[T]]) -> dict[K, T]:
    """Return the results of `ask_all`; raise the first error after all items were asked."""
    found, failed = await ask_all(items, ask)
    for error in failed.values():
        raise error
    return found


def _leader_of(nodes: Iterable[LookupNode]) -> Address | None:
    """Return the address of the leader of the lookup nodes; None for the original generation."""
    return next((node.address for node in nodes if node.leader), None)


def _no_holder(topic: str) -> PartitionUnavailable:
    return PartitionUnavailable("no node holds the topic", topic=topic)


def _may_pass(error: NsqError) -> bool:
    """Return whether `ClusterRequests.settled` repeats what this error ended."""
    return isinstance(error, (PartitionUnavailable, ConnectionFailed))


def _refusal(body: bytes) -> str:
    text = body[:200].decode("utf-8", "backslashreplace")
    for member in ('"message":"', '"status_txt":"'):
        _head, found, rest = text.partition(member)
        if found:
            text = rest.partition('"')[0]
            break
    return outside_text(text)


def http_of(where: PartitionMap, node: Address) -> Address:
    """Return a node's HTTP address; raise `LookupFailed` if lookup does not report it."""
    address = where.http.get(node)
    if address is None:
        raise LookupFailed("lookup does not report the node's HTTP address", topic=where.topic, node=str(node))
    return address


def generation_of(where: PartitionMap) -> Generation:
    """Return a topic's generation: only the redesigned NSQ reports a number of partitions."""
    return "redesigned" if where.leaders or where.meta.partition_num else "original"


def http_address(info: NodeInfo) -> Address:
    """Return a node's HTTP address; raise `ConnectionFailed` if lookup does not report it."""
    if info.http is None:
        raise ConnectionFailed("lookup does not report the node's HTTP address", node=str(info.tcp))
    return info.http


def cluster_generation(infos: Iterable[NodeInfo]) -> Generation:
    """Return the generation of a cluster by its nodes."""
    return "redesigned" if any(info.redesigned for info in infos) else "original"


def no_partition(topic: str, partition: int) -> InvalidInput:
    """Return the error of a partition that a topic lacks."""
    return InvalidInput(f"the topic has no partition {partition}", topic=topic, partition=partition)


def unsupported(operation: str, reason: str, topic: str) -> NsqError:
    """Return the error of an operation that the topic's generation lacks."""
    return OperationNotSupported(f"{operation} is not supported: {reason}", topic=topic)


_REQUEST_TIMEOUT = 15.0  # seconds, default of `lookup_request_timeout`


class AdminBase(ProcessBound):
    """Shared base of `nsqext.Admin`'s method groups; see there for arguments."""

    def __init__(
        self, lookupd: str | Sequence[str] = (), *, env: str | None = None, **settings: Unpack[AdminSettings]
    ) -> None:
        schema = admin_schema()
        given = schema.collect(lookupd, (), env, settings)
        # nsqlookupd forwards a change to the nodes before it responds
        values = {"lookup_request_timeout": _REQUEST_TIMEOUT, **given.values}
        self._options = build(AdminOptions, schema.own, values)
        self._requests = ClusterRequests(LookupClient(given.lookupd, self._options.lookup), self._options.timeout)
        self._closed = False
        self._loop: object = None  # of the first call, which has the connections

    def __repr__(self) -> str:
        return f"{type(self).__name__}({','.join(map(str, self._requests.client.addresses))!r})"

    @property
    def settings(self) -> Mapping[str, object]:
        """All settings by name, with defaults; secrets are ``***``."""
        return admin_schema().effective(self._options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self._closed = True
        await self._requests.client.aclose()

    def _open(self) -> ClusterRequests:
        if self._closed:
            raise InvalidState("the admin client is closed", hint="create a new client")
        loop = current_token().native_token
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise InvalidState(
                "the admin client is used from another event loop than before",
                hint="create a client for each event loop; nsqext.sync.Admin serves threads",
            )
        return self._requests
