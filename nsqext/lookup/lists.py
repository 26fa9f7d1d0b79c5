"""Lists of all topics and nodes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nsqext.errors import LookupFailed, NsqError, outside_text
from nsqext.lookup.partition_map import failure
from nsqext.lookup.responses import NodeInfo, read_node, unwrap

if TYPE_CHECKING:
    import anyio

    from nsqext.lookup.options import LookupOptions
    from nsqext.lookup.responses import LookupHttp, LookupNode, MapAddress
    from nsqext.types import Address

logger: logging.Logger = logging.getLogger("nsqext.lookup")

T = TypeVar("T")


class LookupNodes(Protocol):
    """What lists need of `nsqext.lookup.client.LookupClient`."""

    http: LookupHttp
    options: LookupOptions
    mapped: MapAddress | None
    reading: anyio.Lock

    async def lookup_nodes(self) -> tuple[LookupNode, ...]: ...

    def tiers(self) -> list[list[Address]]: ...

    async def ask_all(
        self, addresses: Iterable[Address], ask: Callable[[Address], Awaitable[T]]
    ) -> dict[Address, T | NsqError]: ...


class LookupLists:
    """Requests for lists."""

    def __init__(self, client: LookupNodes) -> None:
        self._client = client

    async def topics(self) -> tuple[str, ...]:
        """Return the sorted names of all topics that any lookup node knows; raises LookupFailed."""
        answers = await self._collect("/topics", {}, self._read_topics)
        return tuple(sorted({topic for topics in answers for topic in topics}))

    async def extend_support(self) -> dict[str, bool]:
        """Return whether topics have extend support, for all topics of the redesigned NSQ; raises LookupFailed."""
        answers = await self._collect("/topics", {"metaInfo": "true"}, self._read_extend_support)
        found: dict[str, bool] = {}
        for answer in answers:
            for topic, extend in answer.items():
                found[topic] = extend or found.get(topic, False)
        return found

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """Return all nsqd that any lookup node knows, sorted, at most ``max_nodes`` each; raises LookupFailed."""
        answers = await self._collect("/nodes", {}, self._read_nodes)
        found = {node.tcp: node for nodes in answers for node in nodes}
        return tuple(found[address] for address in sorted(found))

    async def _collect(self, path: str, params: Mapping[str, str], read: Callable[[Any, Address], T]) -> list[T]:
        client = self._client

        async def ask(address: Address) -> T:
            status, body = await client.http.fetch(address, path, params)
            try:
                async with client.reading:
                    return read(unwrap(status, body, address), address)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise LookupFailed(f"invalid response to {path}", node=str(address)) from error

        await client.lookup_nodes()
        errors: list[NsqError] = []
        for tier in client.tiers():
            results = (await client.ask_all(tier, ask)).values()
            usable = [result for result in results if not isinstance(result, NsqError)]
            if usable:
                return usable
            errors += [result for result in results if isinstance(result, NsqError)]
        raise failure(errors)

    def _read_topics(self, data: Any, address: Address) -> tuple[str, ...]:
        topics = data["topics"] or ()
        if len(topics) > self._client.options.max_topics:
            raise LookupFailed(
                f"the lookup node lists {len(topics)} topics, more than max_topics={self._client.options.max_topics}",
                node=str(address),
                hint="raise max_topics if the cluster has more",
            )
        return tuple(outside_text(str(topic)) for topic in topics)

    def _read_extend_support(self, data: Any, address: Address) -> dict[str, bool]:
        self._read_topics(data, address)
        return {
            outside_text(str(one["topic_name"])): one["extend_support"] is True for one in data.get("meta_info") or ()
        }

    def _read_nodes(self, data: Any, address: Address) -> tuple[NodeInfo, ...]:
        listed = data["producers"] or ()
        most = self._client.options.max_nodes
        if len(listed) > most:
            logger.warning("lookup node %s lists %d nodes; max_nodes=%d of them are read", address, len(listed), most)
        return tuple(read_node(node, address, self._client.mapped) for node in islice(listed, most))
