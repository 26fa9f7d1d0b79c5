"""The leaders of partitions: looked up, asked over HTTP, and looked up again until an answer.

Requests concern a partition that the node leads: bounds, positions of channels, single messages.
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
    """Position of a channel; counts are messages before a position."""

    end: int  # at the end of the readable messages
    count: int  # at the first unfinished message
    offset: int  # byte offset of this message


@frozen
class MessagePosition:
    """Position of a single message."""

    count: int  # messages before it
    id: int  # internal id, the base of the server's message id
    offset: int
    timestamp: int  # when stored, in nanoseconds since 1970


def read_position(text: str) -> ChannelPosition | None:
    """Parse the response of ``/message/stats`` for one channel; None if it does not exist."""
    if not text.strip():
        return None
    match = _POSITIONS.search(text)
    if match is None:
        raise ValueError("it contains no positions")
    end, offset, count = match[2], match[3], match[4]
    return ChannelPosition(int(end), int(count), int(offset))


class Nodes:
    """Sends requests to nodes; errors name topic, partition and node."""

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
        """Return the statistics of all partitions led by a node, by topic and partition, with one request.

        Of one topic, or with None of all topics.
        """
        body = await self._ask("GET", leader, "/stats", topic, partition, format="json", needClients="false")
        try:
            found = read_stats(unwrap(200, body, leader.http), leader.tcp)
        except (LookupFailed, ProtocolError) as error:
            raise _unreadable("the statistics", body, leader, topic, partition) from error
        return {(name, part.partition or 0): part for name, parts in found.items() for part in parts}

    async def position(self, leader: Leader, topic: str, partition: int, channel: str) -> ChannelPosition | None:
        """Return a channel's position; None if it does not exist."""
        body = await self._ask("GET", leader, "/message/stats", topic, partition, channel=channel)
        try:
            return read_position(body.decode("utf-8", "replace"))
        except ValueError as error:
            raise _unreadable("the channel's positions", body, leader, topic, partition) from error

    async def message(self, leader: Leader, topic: str, partition: int, mode: str, number: int) -> MessagePosition:
        """Look a message up by ``count`` (from 1) or ``virtual_offset``, or the first retained message after it.

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
        """``create`` a channel at the end of the partition if it is missing, or ``delete`` it."""
        await self._ask("POST", leader, f"/channel/{action}", topic, partition, channel=channel)

    async def move(self, leader: Leader, topic: str, partition: int, channel: str, count: int) -> None:
        """Move a channel behind ``count`` messages, soon after the node's response."""
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
"""Seconds until a query fails whose lookup nodes have never answered, probably for wrong addresses."""
_DELETED_AFTER = 20.0
"""Seconds of absence after which a topic counts as deleted.

A restarted nsqlookupd knows its topics only after their nodes registered again.
"""
_UNOBSERVED = 10.0  # seconds after which an absence not observed again may have ended in between
_FIRST_PAUSE = 0.02
_LAST_PAUSE = 0.5
_QUIET = 3.0  # seconds without logs of retried errors: most leader changes take less time
_LOG_INTERVAL = 10.0  # seconds between log records about retried errors


class _Absences:
    """Since when topics are absent without interruption, and the last observation."""

    def __init__(self) -> None:
        self._observed: dict[str, tuple[float, float]] = {}

    def add(self, topic: str) -> None:
        """Record that lookup does not know a topic, and that its leader, if known, refuses it."""
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
        return last - since > _DELETED_AFTER


class LeaderLocator:
    """Finds leaders; waits for leader changes and unresponsive nodes.

    Every method raises `TopicNotFound` for an unknown topic, `InvalidPartition` for an unknown partition, and
    `PartitionUnavailable` or `LookupFailed` without an answer within the timeout. Cancellation is safe at any time.
    """

    def __init__(self, config: ClientConfig, *, first_contact: float | None = None) -> None:
        options = config.consumer()
        self.connection: ConnectionOptions = options.connection
        self._timeout = config.timeout
        # seconds for a lookup node's first answer; None for `config.timeout`
        self._first_contact = config.timeout if first_contact is None else min(first_contact, config.timeout)
        self._metadata = MetadataCache(config.lookupd, options=options.lookup)
        self._failed: dict[tuple[str, int], PartitionMap] = {}
        self._absences = _Absences()
        self._http = LookupHttp(options.lookup)
        self.nodes: Nodes = Nodes(self._http)
        self._logged_at = float("-inf")

    async def aclose(self) -> None:
        await self._metadata.aclose()
        await self._http.aclose()

    async def partitions(self, topic: str) -> dict[int, Leader]:
        """Return the current leaders of all partitions; raises if any is unknown."""
        return await self.retry(lambda: self._partitions(topic))

    async def _partitions(self, topic: str) -> dict[int, Leader]:
        view = await self._current(topic)
        return {partition: _leader(view, partition) for partition in range(view.partition_num)}

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
                f"the topic has {view.partition_num} partitions, counted from 0", topic=topic, partition=partition
            )
        return _leader(view, partition), view.meta

    def distrust(self, topic: str, partition: int, leader: Leader) -> None:
        """Ask lookup again before the next use of a partition: a request to this leader failed."""
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
        """Raise `TopicNotFound` for a topic deleted after it was found: the cache keeps its last map."""
        if not self._metadata.is_unknown(topic, "r"):
            self._absences.end(topic)
        elif refused:
            self._absences.add(topic)
        if self._absences.is_deletion(topic):
            raise TopicNotFound("the topic does not exist any more", topic=topic, hint="it was deleted")

    async def is_deleted(self, topic: str) -> bool:
        """Look a topic up; return whether it counts as deleted.

        `TopicNotFound` is not sufficient: a restarted lookup node does not know its topics yet.
        """
        try:
            await self.retry(lambda: self._current(topic))
        except TopicNotFound:
            return self._absences.is_deletion(topic)
        return False

    def exists(self, topic: str) -> None:
        """Record that a leader serves a topic: it is not deleted, even if lookup does not know it at the moment."""
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
