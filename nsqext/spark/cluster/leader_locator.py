"""The leaders of partitions: looked up, asked over HTTP, and looked up again until one answers.

The requests are about a partition that the node leads: bounds, positions of channels, single messages.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import anyio
import orjson
from attrs import frozen

from nsqext.admin.stats import read_stats
from nsqext.client.consumer.position import Position
from nsqext.errors import (
    InvalidPartition,
    InvalidSetting,
    LookupFailed,
    NsqError,
    PartitionUnavailable,
    ProtocolError,
    TopicNotFound,
)
from nsqext.lookup.metadata import MetadataCache
from nsqext.lookup.node_channels import NodeChannels, ask_node
from nsqext.lookup.responses import LookupHttp, unwrap
from nsqext.waits import pause_after

if TYPE_CHECKING:
    from nsqext.admin import PartitionStats
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.spark.cluster.client_config import ClientConfig
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import Address, TopicMeta

_SHOWN = 200
_POSITION = r"&\{\{\{\d+ \d+\} (\d+)\} (\d+)\}"
_POSITIONS = re.compile(rf"channel end : {_POSITION},current read:.*?, current confirm {_POSITION},", re.DOTALL)


@frozen
class Leader:
    """The node that leads a partition."""

    tcp: Address
    http: Address


@frozen
class ChannelPosition:
    """Position of a channel; counts are numbers of messages before a position."""

    end: int  # count at the end of the readable messages
    count: int  # count at the first unfinished message
    offset: int  # byte offset of that message


@frozen
class MessagePosition:
    """Position of a single message."""

    count: int  # number of messages before it
    id: int  # its internal id, which the server derives its message id from
    offset: int
    timestamp: int  # when it was stored, in nanoseconds since 1970


def read_position(text: str) -> ChannelPosition | None:
    """Parse the response of ``/message/stats`` for one channel; None if the channel does not exist."""
    if not text.strip():
        return None
    match = _POSITIONS.search(text)
    if match is None:
        raise ValueError("it contains no positions")
    end, offset, count = match[2], match[3], match[4]
    return ChannelPosition(int(end), int(count), int(offset))


class Nodes:
    """Sends requests to nodes; every error names topic, partition and node."""

    def __init__(self, http: LookupHttp) -> None:
        self._http = http
        self._channels = NodeChannels(http)

    async def stats(self, leader: Leader, topic: str, partition: int) -> PartitionStats:
        """Return the statistics of a partition."""
        stats = (await self.led(leader, topic, partition)).get((topic, partition))
        if stats is None:
            raise PartitionUnavailable(
                "the node does not lead the partition", topic=topic, partition=partition, node=str(leader.http)
            )
        return stats

    async def led(
        self, leader: Leader, topic: str | None, partition: int | None = None
    ) -> dict[tuple[str, int], PartitionStats]:
        """Return the statistics of all partitions that a node leads, by topic and partition, with one request.

        They are those of one topic, or with None of all topics of the node.
        """
        body = await self._ask("GET", leader, "/stats", topic, partition, format="json", needClients="false")
        try:
            found = read_stats(unwrap(200, body, leader.http), leader.tcp)
        except (LookupFailed, ProtocolError) as error:
            raise _unreadable("the statistics", body, leader, topic, partition) from error
        return {(name, part.partition or 0): part for name, parts in found.items() for part in parts}

    async def position(self, leader: Leader, topic: str, partition: int, channel: str) -> ChannelPosition | None:
        """Return the position of a channel; None if the channel does not exist."""
        body = await self._ask("GET", leader, "/message/stats", topic, partition, channel=channel)
        try:
            return read_position(body.decode("utf-8", "replace"))
        except ValueError as error:
            raise _unreadable("the channel's positions", body, leader, topic, partition) from error

    async def message(self, leader: Leader, topic: str, partition: int, mode: str, number: int) -> MessagePosition:
        """Look a message up by ``count`` (from 1) or ``virtual_offset``, or the first retained one after it.

        Raises PartitionUnavailable without a usable response, also for a number after the last message.
        """
        body = await self._ask("GET", leader, "/message/get", topic, partition, search_mode=mode, search_pos=number)
        try:
            found = orjson.loads(body)
            return MessagePosition(
                int(found["queue_cnt_index"]) - 1, int(found["id"]), int(found["offset"]), int(found["timestamp"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable("a message's position", body, leader, topic, partition) from error

    async def change_channel(self, leader: Leader, topic: str, partition: int, action: str, channel: str) -> None:
        """Do ``create``, at the end of the partition if the channel does not exist, or ``delete``."""
        await self._ask("POST", leader, f"/channel/{action}", topic, partition, channel=channel)

    async def move(self, leader: Leader, topic: str, partition: int, channel: str, count: int) -> None:
        """Move a channel behind ``count`` messages; the node does it soon after its response."""
        await self._channels.move(leader.http, topic, partition, channel, str(Position.message(count + 1)))

    async def _ask(
        self, method: str, leader: Leader, path: str, topic: str | None, partition: int | None, **params: str | int
    ) -> bytes:
        return await ask_node(self._http, method, leader.http, path, topic, partition, params)


def _unreadable(
    what: str, body: bytes, leader: Leader, topic: str | None, partition: int | None
) -> PartitionUnavailable:
    return PartitionUnavailable(
        f"{what} cannot be read: {body[:_SHOWN]!r}", topic=topic, partition=partition, node=str(leader.http)
    )


logger: logging.Logger = logging.getLogger("nsqext.spark")

P = ParamSpec("P")
T = TypeVar("T")

_clock = time.monotonic

FIRST_CONTACT = 5.0
"""Seconds after which a query fails whose lookup nodes have never answered, probably for wrong addresses."""
_DELETED_AFTER = 20.0
"""Seconds for which a topic must be absent before it counts as deleted.

A restarted nsqlookupd knows its topics only after their nodes have registered again.
"""
_UNOBSERVED = 10.0  # seconds after which an absence that was not observed again may have ended in between
_FIRST_PAUSE = 0.02
_LAST_PAUSE = 0.5
_QUIET = 3.0  # seconds for which errors that are retried are not logged: most leader changes take less time
_LOG_INTERVAL = 10.0  # seconds between two log records about errors that are retried


class _Absences:
    """Since when topics are absent without interruption, and when that was observed last."""

    def __init__(self) -> None:
        self._observed: dict[str, tuple[float, float]] = {}

    def add(self, topic: str) -> None:
        """Record that lookup does not know a topic, and that its leader refuses it, if one was known before."""
        now = _clock()
        since, last = self._observed.get(topic, (now, now))
        if now - last > _UNOBSERVED and not self.is_deletion(topic):
            since = now
        self._observed[topic] = since, now

    def end(self, topic: str) -> None:
        """Record that a topic exists, or that no lookup node answered."""
        self._observed.pop(topic, None)

    def is_deletion(self, topic: str) -> bool:
        """Return whether a topic is absent for so long that it counts as deleted."""
        since, last = self._observed.get(topic, (0.0, 0.0))
        return last - since > _DELETED_AFTER


class LeaderLocator:
    """Finds leaders; waits for a leader change and for nodes that do not answer.

    Every method raises `TopicNotFound` for an unknown topic, `InvalidPartition` for a partition that the topic does not
    have, and `PartitionUnavailable` or `LookupFailed` if no server answered within the timeout. Cancellation is safe
    at any time.
    """

    def __init__(self, config: ClientConfig, *, first_contact: float | None = None) -> None:
        options = config.consumer()
        self.connection: ConnectionOptions = options.connection
        self._timeout = config.timeout
        # seconds in which a lookup node must answer for the first time; None for `config.timeout`
        self._first_contact = config.timeout if first_contact is None else min(first_contact, config.timeout)
        self._metadata = MetadataCache(config.lookupd, options=options.lookup)
        self._failed: dict[tuple[str, int], PartitionMap] = {}
        self._absences = _Absences()
        self._http = LookupHttp(options.lookup)
        self.nodes: Nodes = Nodes(self._http)
        self._logged_at = float("-inf")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._metadata.aclose()
        await self._http.aclose()

    async def partitions(self, topic: str) -> dict[int, Leader]:
        """Return the current leaders of all partitions; raises if the leader of a partition is unknown."""
        return await self.retry(lambda: self._partitions(topic))

    async def _partitions(self, topic: str) -> dict[int, Leader]:
        view = await self._current(topic)
        return {partition: _leader(view, partition) for partition in range(view.partition_num)}

    async def matching(self, pattern: re.Pattern[str]) -> list[str]:
        """Return the names of the topics that match a regular expression completely."""
        return [topic for topic in await self.retry(self._metadata.topics) if pattern.fullmatch(topic)]

    async def leader(self, topic: str, partition: int) -> tuple[Leader, TopicMeta]:
        """Return the last known leader of a partition and the meta of the topic.

        Lookup is asked for a leader that is unknown, and after `distrust`.
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
                f"the topic has {view.partition_num} partitions, counted from 0", topic=topic, partition=partition
            )
        return _leader(view, partition), view.meta

    def distrust(self, topic: str, partition: int, leader: Leader) -> None:
        """Ask lookup again before the next use of a partition, because a request to this leader failed."""
        view = self._metadata.cached(topic, "r")
        if view is not None and view.leaders.get(partition) == leader.tcp:
            self._failed[topic, partition] = view

    async def _current(self, topic: str) -> PartitionMap:
        """Ask lookup, and return the last known map if lookup does not answer."""
        if self._metadata.cached(topic, "r") is not None:
            await self._metadata.refresh(topic, "r", after_error=False)
            self._check_exists(topic, refused=False)
        return await self._resolve(topic)

    def _check_exists(self, topic: str, *, refused: bool) -> None:
        """Raise `TopicNotFound` for a topic that was deleted after it was found: the cache keeps its last map."""
        if not self._metadata.is_unknown(topic, "r"):
            self._absences.end(topic)
        elif refused:
            self._absences.add(topic)
        if self._absences.is_deletion(topic):
            raise TopicNotFound("the topic does not exist any more", topic=topic, hint="it was deleted")

    async def is_deleted(self, topic: str) -> bool:
        """Look a topic up, and return whether it counts as deleted.

        `TopicNotFound` alone does not tell that: a restarted lookup node does not know its topics yet.
        """
        try:
            await self.retry(lambda: self._current(topic))
        except TopicNotFound:
            return self._absences.is_deletion(topic)
        return False

    def exists(self, topic: str) -> None:
        """Record that a leader serves a topic: it is not deleted, although lookup may not know it at the moment."""
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
                "the original NSQ has no partitions that can be read again", hint="use readMode=channel"
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
        """Send a request to the leader of a partition; after an error, look the leader up and try again."""

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
        """Try until it succeeds or the timeout is over."""
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
        """Log an error after which a request is repeated: the first time after some seconds, then at intervals."""
        now = anyio.current_time()
        if waited >= _QUIET and now - self._logged_at >= _LOG_INTERVAL:
            self._logged_at = now
            logger.warning("no success for %.0f s, trying again until %.0f s are over: %s", waited, limit, error)


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
