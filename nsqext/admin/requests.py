"""Send administration requests to the lookup service and to nodes, and wait while leadership settles."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from nsqext.errors import ConnectionFailed, InvalidInput, LookupFailed, NsqError, PartitionUnavailable, TopicNotFound
from nsqext.lookup.client import LookupClient, failure, merged
from nsqext.lookup.responses import unwrap

if TYPE_CHECKING:
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.types import Address

__all__ = ("ClusterRequests",)

T = TypeVar("T")

_PAUSE = 0.25  # seconds between two attempts while leadership settles
_LONGEST_PAUSE = 2.0
_AT_ONCE = 16  # nodes that are asked at the same time

# codes of a node that does not lead the partition, or not yet
_UNSETTLED = ("E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE", "E_TOPIC_NOT_EXIST", "TOPIC_NOT_FOUND")


class ClusterRequests:
    """Requests to lookup and nodes over HTTP.

    Args:
        client: the lookup client; this object closes it.
        timeout: seconds that a change may take, waiting for leaders included.
    """

    def __init__(self, client: LookupClient, timeout: float) -> None:
        self._client = client
        self._timeout = timeout

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    @property
    def client(self) -> LookupClient:
        """The lookup client."""
        return self._client

    async def find(self, topic: str) -> PartitionMap:
        """Return where a topic is, as consumers see it.

        Raises:
            TopicNotFound: lookup does not know the topic.
            LookupFailed: no lookup node returned a usable response.
        """
        return (await self.find_with_channels(topic))[0]

    async def find_with_channels(self, topic: str) -> tuple[PartitionMap, tuple[str, ...]]:
        """Return where a topic is, and the names of its channels, sorted; raises what `find` raises."""
        answers = await self._client.lookup(topic, "r")
        channels = {name for answer in answers for name in answer.channels}
        return merged(topic, "r", answers), tuple(sorted(channels))

    async def change_lookup(self, path: str, params: Mapping[str, str | int]) -> None:
        """Send a change to the leading lookup node; to all of them on the classic generation, where no node leads.

        Raises:
            LookupFailed: no lookup node accepted the change.
        """
        nodes = await self._client.lookup_nodes()
        leaders = [node.address for node in nodes if node.leader]
        if leaders:
            await self._client.http.ask(leaders[0], path, params, method="POST")
            return
        errors: list[NsqError] = []
        for node in nodes:
            try:
                await self._client.http.ask(node.address, path, params, method="POST")
            except (LookupFailed, TopicNotFound) as error:
                errors.append(error)
        if len(errors) == len(nodes):
            raise failure(errors, str(params.get("topic", "")) or None)

    async def get(self, address: Address, path: str, params: Mapping[str, str | int]) -> Any:
        """Return the data of a node's answer.

        Raises:
            ConnectionFailed: the node does not answer, or refuses.
        """
        status, body = await self.fetch(address, path, params, "GET")
        if status != 200:
            raise ConnectionFailed(f"{path} was answered with {status}: {body[:200]!r}", node=str(address))
        try:
            return unwrap(status, body, address)
        except NsqError as error:
            raise ConnectionFailed(f"{path} cannot be read: {error.message}", node=str(address)) from error

    async def post(self, address: Address, path: str, params: Mapping[str, str | int], body: bytes = b"") -> None:
        """Send a change to a node.

        Raises:
            PartitionUnavailable: the node does not lead the partition, or not yet.
            ConnectionFailed: the node does not answer.
            InvalidInput: the node refuses the change.
        """
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
        if text.startswith(_UNSETTLED) or status >= 500:
            raise PartitionUnavailable(f"{path} was refused with {status} {text}", **where)
        raise InvalidInput(f"{path} was refused with {status} {text}", **where)

    async def fetch(
        self, address: Address, path: str, params: Mapping[str, str | int], method: str = "GET", body: bytes = b""
    ) -> tuple[int, bytes]:
        """Return status and body of a node's answer, whatever the status is.

        Raises:
            ConnectionFailed: the node does not answer.
        """
        try:
            return await self._client.http.fetch(address, path, params, method, body)
        except LookupFailed as error:
            raise ConnectionFailed(
                f"{path} was not answered: {error.message}", node=str(address), hint="is the node's HTTP side up?"
            ) from error

    async def settled(self, attempt: Callable[[], Awaitable[T]], topic: str) -> T:
        """Return the result of ``attempt``, repeated while leaders of the topic are being elected.

        Raises:
            PartitionUnavailable: the time is up.
            NsqError: any error that time does not cure.
        """
        pause = _PAUSE
        last: NsqError | None = None
        with anyio.move_on_after(self._timeout):
            while True:
                try:
                    return await attempt()
                except (PartitionUnavailable, ConnectionFailed) as error:
                    last = error
                await anyio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
        raise PartitionUnavailable(
            f"not done within {self._timeout:g} s" + (f", last error: {last}" if last is not None else ""),
            topic=topic,
            hint="is every partition's leader up?",
        ) from last

    async def ask_all(
        self, addresses: Iterable[Address], ask: Callable[[Address], Awaitable[T]]
    ) -> tuple[dict[Address, T], dict[Address, NsqError]]:
        """Ask nodes at the same time; return results and errors by address."""
        found: dict[Address, T] = {}
        failed: dict[Address, NsqError] = {}
        limit = anyio.Semaphore(_AT_ONCE)

        async def ask_one(address: Address) -> None:
            async with limit:
                try:
                    found[address] = await ask(address)
                except NsqError as error:
                    failed[address] = error

        async with anyio.create_task_group() as tasks:
            for address in dict.fromkeys(addresses):
                tasks.start_soon(ask_one, address)
        return found, failed


def _refusal(body: bytes) -> str:
    text = body[:200].decode("utf-8", "backslashreplace")
    for member in ('"message":"', '"status_txt":"'):
        _head, found, rest = text.partition(member)
        if found:
            return rest.partition('"')[0]
    return text
