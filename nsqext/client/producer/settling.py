"""Settle publishes whose outcome is unknown: look for the messages in the log of the partition.

With ``on_unknown="settle"`` every message has a trace id of its own, so that receipts tell offsets and the log tells
messages. A publish of unknown outcome is looked for from the last offset that was acknowledged before it was sent.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from typing import TYPE_CHECKING

import anyio
from attrs import field, mutable

from nsqext.client.producer.request import Known, SentTo
from nsqext.errors import ConnectionLost, DataLoss, DeliveryUnknown, RequestTimeout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nsqext.client.producer.connection_pool import PooledConnection
    from nsqext.client.producer.log_search import LogSearch
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.request import PublishRequest
    from nsqext.client.producer.route import Target
    from nsqext.lookup.metadata import MetadataCache
    from nsqext.types import Receipt

_PAUSE = 0.5  # seconds until the log is searched again for a publish whose connection is still open


@mutable
class _Searches:
    """Searches of one partition, one at a time."""

    lock: anyio.Lock = field(factory=anyio.Lock)  # held by the task that searches
    # by publish, the trace ids that are looked for, and since which record
    waiting: dict[PublishRequest, tuple[Sequence[int], Known | None]] = field(factory=dict)
    latest: LogSearch | None = None  # the last search that ended
    searched: frozenset[PublishRequest] = frozenset()  # the publishes that it looked for


class Settler:
    """Finds out whether publishes of unknown outcome were stored."""

    def __init__(self, options: ProducerOptions, metadata: MetadataCache) -> None:
        self._options = options
        self._metadata = metadata  # finds leaders; released after the last call
        self._acknowledged: dict[tuple[str, int], Known] = {}
        self._count = count()
        self._searches: defaultdict[tuple[str, int], _Searches] = defaultdict(_Searches)

    def sending(self, request: PublishRequest, target: Target, connection: PooledConnection) -> None:
        """Remember where a request is sent to."""
        since = self._acknowledged.get((request.topic, target.partition))
        request.sent_to = SentTo(target.partition, target.node.node, connection, since)

    def stored(self, receipts: Iterable[Receipt]) -> None:
        """Remember the last message of each partition that was acknowledged.

        Not the one with the largest offset: a topic that is deleted and created again begins with offset 0.
        """
        for receipt in receipts:
            if receipt.offset is not None:
                self._acknowledged[receipt.topic, receipt.partition] = Known(next(self._count), receipt)

    async def settle(self, request: PublishRequest, unknown: DeliveryUnknown) -> list[Receipt] | None:
        """Look for the messages of a request in the log; return their receipts, None if they never will be stored.

        Cancellation ends the search. Raises DeliveryUnknown.
        """
        sent, ids = request.sent_to, [trace for trace in request.trace_ids if trace]
        if sent is None or len(ids) < request.count:
            raise unknown
        searches = self._searches[request.topic, sent.partition]
        searches.waiting[request] = ids, sent.since
        reason = f"still unknown after {self._options.settle_timeout:g} s"
        try:
            with anyio.move_on_after(self._options.settle_timeout):
                while True:
                    ended = not sent.connection.usable or _ended(unknown)
                    search = await self._search(searches, request, sent.partition)
                    receipts = [search.found[trace] for trace in ids if trace in search.found]
                    if len(receipts) == len(ids):
                        return receipts
                    if not receipts and ended:
                        return None
                    if search.node != sent.node:
                        # the kernel may still transmit the command, and the former leader may lead again until then
                        sent.connection.fail(ConnectionLost("the leader has changed, and a response is missing"))
                    await anyio.sleep(_PAUSE)
        except DataLoss as error:
            reason = error.message
        finally:
            searches.waiting.pop(request, None)
        raise _still_unknown(unknown, reason, searches.latest) from unknown

    async def _search(self, searches: _Searches, request: PublishRequest, partition: int) -> LogSearch:
        """Return a search that began after this call, and looked for a request; publishes that wait share one."""
        from nsqext.client.producer.log_search import LogSearch  # few publishes need the parts of a consumer

        searches.searched -= {request}
        async with searches.lock:
            if searches.latest is not None and request in searches.searched:
                return searches.latest
            waiting = dict(searches.waiting)
            starts = [since for _, since in waiting.values()]
            since = None if None in starts else min(filter(None, starts)).receipt
            connection = self._options.connection
            search = searches.latest = LogSearch(self._metadata, connection, request.topic, partition, since)
            searches.searched = frozenset()
            await search.run([trace for ids, _ in waiting.values() for trace in ids])
            searches.searched = frozenset(waiting)
            return search


def _ended(unknown: DeliveryUnknown) -> bool:
    """Return whether no server can still execute the publish: its connection has ended, or it was refused."""
    cause = unknown.__cause__
    return cause is not None and not isinstance(cause, RequestTimeout)


def _still_unknown(unknown: DeliveryUnknown, reason: str, search: LogSearch | None) -> DeliveryUnknown:
    error = None if search is None else search.error
    detail = "" if error is None else f"; last error of the search: {error.message}"
    still = DeliveryUnknown(f"{unknown.message}; {reason}{detail}", hint=unknown.hint, **unknown.where)
    still.attempts = unknown.attempts
    return still
