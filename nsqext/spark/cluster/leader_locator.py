"""The leaders of partitions: looked up, asked, and looked up again until one answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import anyio
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from nsqext.errors import InvalidPartition, InvalidSetting, LookupFailed, NsqError, PartitionUnavailable, TopicNotFound
from nsqext.lookup.client import LookupClient, failure
from nsqext.lookup.partition_map import PartitionMapMerger
from nsqext.spark.cluster.node_http import Leader, Nodes

if TYPE_CHECKING:
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.spark.cluster.client_config import ClientConfig
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import TopicMeta

__all__ = ("FIRST_CONTACT", "LeaderLocator")

T = TypeVar("T")

FIRST_CONTACT = 5.0
"""Seconds after which a query fails whose lookup nodes have never answered, probably for wrong addresses."""
_FIRST_PAUSE = 0.02
_LAST_PAUSE = 0.5


def _is_worth_retrying(error: BaseException) -> bool:
    return isinstance(error, NsqError) and error.retryable and not isinstance(error, TopicNotFound)


class LeaderLocator:
    """Finds leaders; waits for a leader change and for nodes that do not answer.

    Every method raises `TopicNotFound` for an unknown topic, `InvalidPartition` for a partition that the topic does not
    have, and `PartitionUnavailable` or `LookupFailed` if no server answered within the timeout. Cancellation is safe
    at any time.

    Args:
        config: how the servers are reached.
        first_contact: seconds in which a lookup node must answer for the first time; None for ``config.timeout``.

    Attributes:
        connection: how connections to nodes are made.
        lookup: asks the lookup nodes.
        nodes: asks a node, once.
    """

    def __init__(self, config: ClientConfig, *, first_contact: float | None = None) -> None:
        self.connection: ConnectionOptions = config.transport()
        self._timeout = config.timeout
        self._first_contact = config.timeout if first_contact is None else min(first_contact, config.timeout)
        self._reached = False
        self.lookup: LookupClient = LookupClient(config.lookupd, config.lookup())
        self._maps: dict[str, PartitionMapMerger] = {}
        self._stale: set[str] = set()
        self.nodes: Nodes = Nodes(self.lookup.http)

    async def aclose(self) -> None:
        """Close the connections."""
        await self.lookup.aclose()

    async def partitions(self, topic: str) -> dict[int, Leader]:
        """Return the current leaders of all partitions; raises if the leader of a partition is unknown."""
        return await self.retry(lambda: self._partitions(topic))

    async def _partitions(self, topic: str) -> dict[int, Leader]:
        view = await self._look_up(topic)
        return {partition: _leader(view, partition) for partition in range(view.partition_num)}

    async def _topics(self) -> tuple[str, ...]:
        topics = await self.lookup.topics()
        self._reached = True
        return topics

    async def matching(self, pattern: re.Pattern[str]) -> list[str]:
        """Return the names of the topics that match a regular expression completely."""
        return [topic for topic in await self.retry(self._topics) if pattern.fullmatch(topic)]

    async def meta(self, topic: str) -> TopicMeta:
        """Return the current meta of a topic."""
        return (await self.retry(lambda: self._look_up(topic))).meta

    async def leader(self, topic: str, partition: int) -> tuple[Leader, TopicMeta]:
        """Return the last known leader of a partition and the meta of the topic; asks lookup at most once.

        Lookup is asked again after `distrust`.
        """
        merger = self._maps.get(topic)
        known = merger is not None and partition in merger.current.leaders and topic not in self._stale
        view = merger.current if merger is not None and known else await self._look_up(topic)
        if not 0 <= partition < view.partition_num:
            raise InvalidPartition(
                f"the topic has {view.partition_num} partitions, counted from 0", topic=topic, partition=partition
            )
        return _leader(view, partition), view.meta

    def distrust(self, topic: str, partition: int, leader: Leader | None = None) -> None:
        """Ask lookup again before the next use of a topic, because a request to this leader failed."""
        self._stale.add(topic)
        if leader is not None and topic in self._maps:
            self._maps[topic].suspect(partition, leader.tcp)

    async def _look_up(self, topic: str) -> PartitionMap:
        answers = await self.lookup.lookup(topic, "r")
        errors = [answer.error for answer in answers if answer.error is not None]
        self._reached = self._reached or not all(isinstance(answer.error, LookupFailed) for answer in answers)
        merger = self._maps.setdefault(topic, PartitionMapMerger(topic, "r"))
        merger.merge(answers)
        if not any(answer.found for answer in answers) and not merger.current.leaders:
            del self._maps[topic]
            raise failure(errors, topic)
        if merger.current.nodes and not merger.current.partition_num:
            raise InvalidSetting(
                "the original NSQ has no partitions that can be read again", hint="use readMode=channel"
            ).at(topic=topic)
        self._stale.discard(topic)
        return merger.current

    async def ask(self, topic: str, partition: int, request: Callable[[Leader], Awaitable[T]]) -> T:
        """Send a request to the leader of a partition; after an error, look the leader up and try again."""

        async def attempt() -> T:
            leader, _ = await self.leader(topic, partition)
            try:
                return await request(leader)
            except NsqError:
                self.distrust(topic, partition, leader)
                raise

        return await self.retry(attempt)

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try until it succeeds or the timeout is over.

        Raises:
            NsqError: the last error, or the first one that a retry cannot change.
        """
        retrying = AsyncRetrying(
            sleep=anyio.sleep,
            retry=retry_if_exception(_is_worth_retrying),
            stop=self._is_over,
            wait=wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LAST_PAUSE),
            reraise=True,
        )

        async def run() -> T:  # tenacity awaits coroutine functions only
            return await attempt()

        try:
            return await retrying(run)
        except LookupFailed as error:
            if not self._reached and error.hint is None:
                error.hint = "check the option lookupd: it takes the HTTP addresses of nsqlookupd, host:port"
            raise

    def _is_over(self, state: RetryCallState) -> bool:
        limit = self._timeout if self._reached else self._first_contact
        return (state.seconds_since_start or 0.0) >= limit


def _leader(view: PartitionMap, partition: int) -> Leader:
    tcp = view.leaders.get(partition)
    http = view.http.get(tcp) if tcp is not None else None
    if tcp is None or http is None:
        raise PartitionUnavailable(
            "lookup returned no leader" if tcp is None else "lookup did not return the leader's HTTP address",
            topic=view.topic,
            partition=partition,
        )
    return Leader(tcp, http)
