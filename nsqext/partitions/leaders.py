"""Find the leaders of partitions, send requests to them, and repeat both until a leader answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import anyio

from nsqext.errors import InvalidPartition, InvalidSetting, LookupFailed, NsqError, TopicNotFound
from nsqext.lookup.leaders import leader_of
from nsqext.lookup.metadata import MetadataCache
from nsqext.lookup.responses import LookupHttp
from nsqext.partitions.nodes import PartitionNodes
from nsqext.waits import pause_after

if TYPE_CHECKING:
    import re

    from nsqext.lookup.leaders import Leader
    from nsqext.lookup.options import LookupOptions
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.types import TopicMeta

logger: logging.Logger = logging.getLogger("nsqext.partitions")

P = ParamSpec("P")
T = TypeVar("T")

_clock = time.monotonic

KnownLeaders = Mapping[tuple[str, int], "tuple[Leader, TopicMeta]"]
"""Leader and topic's meta by topic and partition."""

FIRST_CONTACT = 5.0
"""Seconds until a query fails whose lookup nodes have never answered, probably for wrong addresses."""
DELETED_AFTER: float = 20.0
"""Seconds of absence after which a topic is deleted, as a restarted nsqlookupd lacks topics until nodes register."""
_UNOBSERVED = 10.0  # seconds between two observations after which an absence may have ended in between
_FIRST_PAUSE = 0.02
_LAST_PAUSE = 0.5
QUIET: float = 3.0
"""Seconds without logs of retried errors, because most leader changes take less time."""
_LOG_INTERVAL = 10.0  # seconds between log records about retried errors


class _Absences:
    """When the absence of topics began, and when it was last observed."""

    def __init__(self) -> None:
        self._observed: dict[str, tuple[float, float]] = {}

    def add(self, topic: str) -> None:
        """Record that lookup does not know a topic, and that a known leader refuses it."""
        now = _clock()
        since, last = self._observed.get(topic, (now, now))
        if now - last > _UNOBSERVED and not self.is_deletion(topic):
            since = now
        self._observed[topic] = since, now

    def end(self, topic: str) -> None:
        """Record that a topic exists, or that no lookup node answered."""
        self._observed.pop(topic, None)

    def is_deletion(self, topic: str) -> bool:
        """Return whether a topic counts as deleted after its absence."""
        since, last = self._observed.get(topic, (0.0, 0.0))
        return last - since > DELETED_AFTER


class LeaderLocator:
    """Finds leaders; waits for leader changes and unresponsive nodes. Cancellation is safe at any time.

    Every method raises `TopicNotFound`, `InvalidPartition` for a partition that the topic lacks, and
    `PartitionUnavailable` or `LookupFailed` if no server answered within the timeout.

    Args:
        lookupd: HTTP addresses of nsqlookupd.
        options: the options of the lookup client.
        timeout: seconds for which a request is repeated.
        first_contact: seconds in which a lookup node must answer for the first time; ``timeout`` by default.
    """

    def __init__(
        self,
        lookupd: str | Sequence[str],
        options: LookupOptions,
        *,
        timeout: float = 30.0,
        first_contact: float | None = None,
    ) -> None:
        self._timeout = timeout
        self._first_contact = timeout if first_contact is None else min(first_contact, timeout)
        self._metadata = MetadataCache(lookupd, options=options)
        self._failed: dict[tuple[str, int], PartitionMap] = {}
        self._absences = _Absences()
        self._http = LookupHttp(options)
        self.nodes: PartitionNodes = PartitionNodes(self._http)
        self._logged_at = float("-inf")

    async def aclose(self) -> None:
        await self._metadata.aclose()
        await self._http.aclose()

    async def partitions(self, topic: str) -> dict[int, Leader]:
        """Return the current leaders of all partitions, which must have leaders."""
        return await self.retry(lambda: self._partitions(topic))

    async def _partitions(self, topic: str) -> dict[int, Leader]:
        view = await self._current(topic)
        return {partition: leader_of(view, partition) for partition in range(view.partition_num)}

    async def matching(self, pattern: re.Pattern[str]) -> list[str]:
        return [topic for topic in await self.retry(self._metadata.topics) if pattern.fullmatch(topic)]

    async def leader(self, topic: str, partition: int) -> tuple[Leader, TopicMeta]:
        """Return a partition's last known leader and the topic's meta.

        Lookup is asked for an unknown leader, and after `distrust`.
        """
        key, failed = (topic, partition), self._failed.get((topic, partition))
        view = self._metadata.cached(topic, "r")
        if failed is not None:
            await self._metadata.refresh(topic, "r", failed, partition)
            if self._failed.get(key) is failed:
                del self._failed[key]
            self._check_exists(topic, refused=True)
        elif view is not None and partition not in view.leaders:
            await self._metadata.refresh(topic, "r", view)
        view = await self._resolve(topic)
        if not 0 <= partition < view.partition_num:
            raise InvalidPartition(
                f"partitions are counted from 0, the last is {view.partition_num - 1}", topic=topic, partition=partition
            )
        return leader_of(view, partition), view.meta

    def known(self, keys: Iterable[tuple[str, int]]) -> KnownLeaders:
        """Return last known leaders without a request; partitions whose leader is not known are missing."""
        found: dict[tuple[str, int], tuple[Leader, TopicMeta]] = {}
        for topic, partition in keys:
            view = self._metadata.cached(topic, "r")
            if view is not None and partition in view.leaders and (topic, partition) not in self._failed:
                found[topic, partition] = leader_of(view, partition), view.meta
        return found

    def distrust(self, topic: str, partition: int, leader: Leader) -> None:
        """Ask lookup again before the next use of a partition: its leader failed a request."""
        view = self._metadata.cached(topic, "r")
        if view is not None and view.leaders.get(partition) == leader.tcp:
            self._failed[topic, partition] = view

    async def _current(self, topic: str) -> PartitionMap:
        """Ask lookup; return the last known map if it does not answer."""
        if self._metadata.cached(topic, "r") is not None:
            await self._metadata.refresh(topic, "r", after_error=False)
            self._check_exists(topic, refused=False)
        return await self._resolve(topic)

    def _check_exists(self, topic: str, *, refused: bool) -> None:
        """Raise `TopicNotFound` for a deleted topic, whose last map the cache keeps."""
        if not self._metadata.is_unknown(topic, "r"):
            self._absences.end(topic)
        elif refused:
            self._absences.add(topic)
        if self._absences.is_deletion(topic):
            raise TopicNotFound("the topic does not exist any more", topic=topic, hint="it was deleted")

    async def is_deleted(self, topic: str) -> bool:
        """Look a topic up; return whether it counts as deleted: a restarted lookup node lacks its topics at first."""
        try:
            await self.retry(lambda: self._current(topic))
        except TopicNotFound:
            return self._absences.is_deletion(topic)
        return False

    def exists(self, topic: str) -> None:
        """Record that a leader serves a topic, even if lookup does not know it now."""
        self._absences.end(topic)

    async def _resolve(self, topic: str) -> PartitionMap:
        try:
            view = await self._metadata.resolve(topic, "r")
        except TopicNotFound:
            self._absences.add(topic)
            raise
        except LookupFailed:
            self._absences.end(topic)
            raise
        if not self._metadata.is_unknown(topic, "r"):
            self._absences.end(topic)
        if view.nodes and not view.partition_num:
            raise InvalidSetting(
                "the original NSQ has no partitions that can be read again",
                hint="consume a channel: readMode=channel of Spark, or nsqext record",
            ).at(topic=topic)
        return view

    async def ask(
        self,
        topic: str,
        partition: int,
        request: Callable[Concatenate[Leader, str, int, P], Awaitable[T]],
        *args: P.args,
        **values: P.kwargs,
    ) -> T:
        """Send a request to a partition's leader; after an error, look the leader up and try again."""

        async def attempt() -> T:
            leader, _ = await self.leader(topic, partition)
            try:
                answer = await request(leader, topic, partition, *args, **values)
            except NsqError:
                self.distrust(topic, partition, leader)
                raise
            self.exists(topic)
            return answer

        return await self.retry(attempt)

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt until success or the timeout."""
        began, attempts = anyio.current_time(), 0
        while True:
            try:
                return await attempt()
            except NsqError as error:
                unanswered = self._metadata.answer_age is None
                waited, limit = anyio.current_time() - began, self._first_contact if unanswered else self._timeout
                if not error.retryable or isinstance(error, TopicNotFound) or waited >= limit:
                    if unanswered and isinstance(error, LookupFailed) and error.hint is None:
                        error.hint = "check the option lookupd: it takes the HTTP addresses of nsqlookupd, host:port"
                    raise
                self.log_retry(waited, limit, error)
            attempts += 1
            await anyio.sleep(pause_after(_FIRST_PAUSE, _LAST_PAUSE, attempts))

    def log_retry(self, waited: float, limit: float, error: NsqError) -> None:
        """Log an error before a repeated request: first after some seconds, then at intervals."""
        now = anyio.current_time()
        if waited >= QUIET and now - self._logged_at >= _LOG_INTERVAL:
            self._logged_at = now
            logger.warning("no success for %.0f s, trying again until %.0f s are over: %s", waited, limit, error)
