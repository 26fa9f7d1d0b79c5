"""Batches of plain bodies: the fast path of `BatchPublisher`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsqext.client.producer.request import OutgoingMessage, PublishRequest
from nsqext.client.trace_log import trace_log
from nsqext.errors import ProtocolError
from nsqext.protocol.client.commands import multi

if TYPE_CHECKING:
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.routing import Route, Target
    from nsqext.protocol.identify import Negotiated
    from nsqext.types import Receipt, TopicMeta

__all__ = ("COUNT_WORD", "ITEM_WORD", "PlainBatch", "compresses", "logs_traces", "plain_batches")

COUNT_WORD = 4
"""Bytes before the first message of a batch."""
ITEM_WORD = 4
"""Bytes before each message of a batch."""


class PlainBatch(PublishRequest):
    """Several messages without headers and trace ids, for one partition, all or nothing.

    Args:
        route: where the topic's messages go.
        partition: where these have to go.
        bodies: of the messages; they were checked.
        sizes: their lengths in bytes, or the one length of them all.
        first: which message of the call the first one is.
    """

    __slots__ = ("_bodies", "_first", "_sizes")

    def __init__(
        self, route: Route, partition: int | None, bodies: Sequence[bytes], sizes: Sequence[int] | int, first: int = 0
    ) -> None:
        self.topic: str = route.topic
        self.key: bytes | None = None
        self.partition: int | None = partition
        self.in_doubt = False
        self._bodies = bodies
        self._sizes = sizes
        self._first = first

    @property
    def indexes(self) -> Sequence[int]:
        """Which messages of the call these are."""
        return range(self._first, self._first + len(self._bodies))

    def command(self, target: Target, meta: TopicMeta, negotiated: Negotiated) -> bytes:
        return multi(target.line("MPUB"), self._bodies, self._sizes)

    def receipts(self, target: Target, meta: TopicMeta, reply: bytes) -> list[Receipt]:
        if reply != b"OK":
            raise ProtocolError(f"the reply to a batch is {reply[:80]!r}")
        return [target.receipt] * len(self._bodies)


def plain_batches(
    route: Route, partition: int | None, messages: Sequence[bytes | OutgoingMessage], options: ProducerOptions
) -> list[PlainBatch] | None:
    """Return batches of all messages of a call, where they are nothing but bodies of acceptable size.

    Args:
        route: where the topic's messages go.
        partition: where these have to go.
        messages: at least one.
        options: limits.

    Returns:
        One batch, or more where the limits ask for it, in the order of the messages; None where these have to be looked
        at one by one.
    """
    if list(map(type, messages)).count(bytes) != len(messages) or logs_traces(route):
        return None
    largest = options.max_message_size
    if compresses(route, options):
        largest = min(largest, options.compression_min - 1)
    batches: list[PlainBatch] = []
    left: list[tuple[int, list[bytes]]] = [(0, list(messages))]  # type: ignore[arg-type]
    while left:
        first, bodies = left.pop()
        count = len(bodies)
        sizes: Sequence[int] | int
        distinct = set(map(len, bodies))
        if len(distinct) == 1:
            sizes = smallest = biggest = distinct.pop()
            total = count * biggest
        else:
            sizes = list(map(len, bodies))
            smallest, biggest, total = min(distinct), max(distinct), sum(sizes)
        if not smallest or biggest > largest:
            return None
        if count <= options.max_batch_count and COUNT_WORD + ITEM_WORD * count + total <= options.max_batch_size:
            batches.append(PlainBatch(route, partition, bodies, sizes, first))
        elif count > 1:
            cut = options.max_batch_count if count > options.max_batch_count else count // 2
            left += ((first + cut, bodies[cut:]), (first, bodies[:cut]))
        else:
            return None
    return batches


def compresses(route: Route, options: ProducerOptions) -> bool:
    """Return whether bodies of ``options.compression_min`` bytes and more are to be compressed, which takes headers."""
    return options.compression != "none" and route.meta.extend_support


def logs_traces(route: Route) -> bool:
    """Return whether a topic's messages get trace ids of their own, because the trace log wants them."""
    return trace_log.active and trace_log.wants(route.topic) and route.meta.partition_num > 0
