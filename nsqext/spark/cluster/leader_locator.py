"""Who leads the partitions of topics: asked from lookup, and from the leaders themselves until one answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from nsqext.errors import InvalidPartition, InvalidSetting, NsqError, PartitionUnavailable, TopicNotFound
from nsqext.lookup.client import LookupClient, failure
from nsqext.lookup.partition_map import PartitionMapMerger
from nsqext.spark.cluster.node_http import Leader, Nodes

if TYPE_CHECKING:
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.spark.cluster.client_config import Access
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import TopicMeta

__all__ = ("LeaderLocator",)

T = TypeVar("T")

_FIRST_PAUSE = 0.02
_LAST_PAUSE = 0.5


def _worth_retrying(error: BaseException) -> bool:
    return isinstance(error, NsqError) and error.retryable and not isinstance(error, TopicNotFound)


async def _persist(timeout: float, attempt: Callable[[], Awaitable[T]]) -> T:
    """Try until it works, for so many seconds.

    Raises:
        NsqError: the last error, or the first that another try would not change.
    """
    retrying = AsyncRetrying(
        sleep=anyio.sleep,
        retry=retry_if_exception(_worth_retrying),
        stop=stop_after_delay(timeout),
        wait=wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LAST_PAUSE),
        reraise=True,
    )

    async def run() -> T:  # tenacity awaits coroutine functions only
        return await attempt()

    return await retrying(run)


class LeaderLocator:
    """Finds leaders; a change of leader, or a node that is silent, is waited for.

    What all methods raise: `TopicNotFound` for a topic that there is not, `InvalidPartition` for a partition that the
    topic does not have, `PartitionUnavailable` or `LookupFailed` where nobody answered within the access's timeout.
    Cancellation is safe at any time.

    Args:
        access: how the servers are reached.

    Attributes:
        options: how connections to nodes are made.
        nodes: asks a node, once.
    """

    def __init__(self, access: Access) -> None:
        self.options: ConnectionOptions = access.transport()
        self._timeout = access.timeout
        self._lookup = LookupClient(access.lookupd, access.lookup())
        self._tables: dict[str, PartitionMapMerger] = {}
        self._stale: set[str] = set()
        self.nodes: Nodes = Nodes(self._lookup.http)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._lookup.aclose()

    async def partitions(self, topic: str) -> dict[int, Leader]:
        """Return the leaders of all partitions, as lookup knows them now; never of some of them only."""
        return await _persist(self._timeout, lambda: self._partitions(topic))

    async def _partitions(self, topic: str) -> dict[int, Leader]:
        view = await self._look(topic)
        return {partition: _leader(view, partition) for partition in range(view.partition_num)}

    async def meta(self, topic: str) -> TopicMeta:
        """Return the meta of a topic, as lookup knows it now."""
        return (await _persist(self._timeout, lambda: self._look(topic))).meta

    async def leader(self, topic: str, partition: int) -> tuple[Leader, TopicMeta]:
        """Return the leader of a partition, and the meta of the topic, as they were known last; asks once.

        After `distrust` lookup is asked again.
        """
        table = self._tables.get(topic)
        known = table is not None and partition in table.current.leaders and topic not in self._stale
        view = table.current if table is not None and known else await self._look(topic)
        if not 0 <= partition < view.partition_num:
            raise InvalidPartition(
                f"the topic has {view.partition_num} partitions, counted from 0", topic=topic, partition=partition
            )
        return _leader(view, partition), view.meta

    def distrust(self, topic: str, partition: int, leader: Leader | None = None) -> None:
        """Note that what is known of a topic led to an error: the next who needs it asks lookup."""
        self._stale.add(topic)
        if leader is not None and topic in self._tables:
            self._tables[topic].suspect(partition, leader.tcp)

    async def _look(self, topic: str) -> PartitionMap:
        answers = await self._lookup.lookup(topic, "r")
        table = self._tables.setdefault(topic, PartitionMapMerger(topic, "r"))
        table.merge(answers)
        if not any(answer.found for answer in answers) and not table.current.leaders:
            del self._tables[topic]
            raise failure([answer.error for answer in answers if answer.error is not None], topic)
        if table.current.nodes and not table.current.partition_num:
            raise InvalidSetting(
                "this is the original NSQ, which has no partitions to read again", hint="give readMode=channel"
            ).at(topic=topic)
        self._stale.discard(topic)
        return table.current

    async def on_leader(self, topic: str, partition: int, ask: Callable[[Leader], Awaitable[T]]) -> T:
        """Ask a partition's leader until it answers, whoever that is by then."""

        async def attempt() -> T:
            leader, _ = await self.leader(topic, partition)
            try:
                return await ask(leader)
            except NsqError:
                self.distrust(topic, partition, leader)
                raise

        return await _persist(self._timeout, attempt)


def _leader(view: PartitionMap, partition: int) -> Leader:
    tcp = view.leaders.get(partition)
    http = view.http.get(tcp) if tcp is not None else None
    if tcp is None or http is None:
        raise PartitionUnavailable(
            "lookup names no leader" if tcp is None else "lookup does not tell the leader's HTTP address",
            topic=view.topic,
            partition=partition,
        )
    return Leader(tcp, http)
