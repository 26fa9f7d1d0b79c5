"""Batches of messages that are nothing but their bodies: the short way of `nsqext.client.many.ManyPublisher`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsqext.client.publication import Draft, Publication
from nsqext.client.tracelog import trace_log
from nsqext.errors import ProtocolError
from nsqext.protocol.commands import multi

if TYPE_CHECKING:
    from nsqext.client.options import ProducerOptions
    from nsqext.client.routes import Route, Target
    from nsqext.protocol.identify import Negotiated
    from nsqext.types import Receipt, TopicMeta

__all__ = ("COUNT_WORD", "ITEM_WORD", "PlainBatch", "compresses", "logs_traces", "plain_batch")

COUNT_WORD = 4
"""Bytes before the first message of a batch."""
ITEM_WORD = 4
"""Bytes before each message of a batch."""


class PlainBatch(Publication):
    """Several messages without headers and trace ids, for one partition, all or nothing.

    Args:
        topic: name of the topic.
        partition: where it has to go.
        bodies: of the messages; they were checked.
        sizes: their lengths in bytes, or the one length of them all.
    """

    __slots__ = ("_bodies", "_sizes")

    def __init__(self, topic: str, partition: int | None, bodies: list[bytes], sizes: Sequence[int] | int) -> None:
        self.topic: str = topic
        self.key: bytes | None = None
        self.partition: int | None = partition
        self.in_doubt = False
        self._bodies = bodies
        self._sizes = sizes

    @property
    def indexes(self) -> Sequence[int]:
        """Which messages of the call these are."""
        return range(len(self._bodies))

    def command(self, target: Target, meta: TopicMeta, negotiated: Negotiated) -> bytes:
        return multi(target.line("MPUB"), self._bodies, self._sizes)

    def receipts(self, target: Target, meta: TopicMeta, reply: bytes) -> list[Receipt]:
        if reply != b"OK":
            raise ProtocolError(f"the reply to a batch is {reply[:80]!r}")
        return [target.receipt] * len(self._bodies)


def plain_batch(
    route: Route, partition: int | None, messages: Sequence[bytes | Draft], options: ProducerOptions
) -> PlainBatch | None:
    """Return a batch of all messages of a call, where they are bodies of acceptable size that fit one batch.

    Args:
        route: where the topic's messages go.
        partition: where these have to go.
        messages: at least one.
        options: limits.

    Returns:
        The batch; None where the messages have to be looked at one by one.
    """
    count = len(messages)
    if count > options.max_batch_count or list(map(type, messages)).count(bytes) != count or logs_traces(route):
        return None
    bodies: list[bytes] = list(messages)  # type: ignore[arg-type]
    sizes: Sequence[int] | int
    distinct = set(map(len, bodies))
    if len(distinct) == 1:
        sizes = smallest = largest = distinct.pop()
        total = count * largest
    else:
        sizes = list(map(len, bodies))
        smallest, largest, total = min(distinct), max(distinct), sum(sizes)
    if (
        not smallest
        or largest > options.max_message_size
        or COUNT_WORD + ITEM_WORD * count + total > options.max_batch_size
        or (compresses(route, options) and largest >= options.compression_min)
    ):
        return None
    return PlainBatch(route.topic, partition, bodies, sizes)


def compresses(route: Route, options: ProducerOptions) -> bool:
    """Return whether bodies of ``options.compression_min`` bytes and more are to be compressed, which takes headers."""
    return options.compression != "none" and route.meta.extend_support


def logs_traces(route: Route) -> bool:
    """Return whether a topic's messages get trace ids of their own, because the trace log wants them."""
    return trace_log.active and trace_log.wants(route.topic) and route.meta.partition_num > 0
