"""Handle each message once: its identity is committed with the effects of its handler."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from nsqext.arguments import check_plain_function, check_time
from nsqext.errors import InvalidInput
from nsqext.protocol.messages import IDENTITY_HEADER
from nsqext.protocol.names import MAX_IDENTITY, is_storable
from nsqext.transactions.handled_ranges import HandledRanges
from nsqext.transactions.handler_transaction import Begin, HandlerTransaction, S
from nsqext.transactions.schema import ChannelPartition, execute

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.client.middleware import CallNext, Handling
    from nsqext.transactions.boundaries import OpenTransaction
    from nsqext.transactions.schema import Statement


logger: logging.Logger = logging.getLogger("nsqext.transactions")

_INSERT = """
INSERT INTO nsqext_inbox (channel, identity, handled) VALUES (:channel, :identity, :handled) ON CONFLICT DO NOTHING
"""
_DIGEST = "sha256:"  # begins the digest of an identity that a database cannot store
_REMOVE = "DELETE FROM nsqext_inbox WHERE channel = :channel AND identity = :identity AND handled = :handled"
_FORGET = "DELETE FROM nsqext_inbox WHERE handled < :before"
_PROBE = "#probe"  # in place of a channel: no channel has this name
_REMOVE_PROBE = "DELETE FROM nsqext_inbox WHERE channel = :channel AND identity = :identity"
_KEEP_PROBE = 3600.0  # seconds for which other processes keep it
_FORGET_EVERY = 600.0  # seconds between two removals of old identities
MERGE_EVERY: int = 200
"""Messages of a partition between two merges of its ranges, in one process."""


class Inbox(HandlerTransaction[S]):
    """A middleware that opens a transaction around each call of a handler, and skips messages that were handled before.

    The transaction of the handler contains the identity of the message: both are committed, or neither is. A message
    whose identity is known is finished without a call. The handler takes the session of the transaction from `session`,
    and must neither commit it nor finish the message; the middleware commits before the message is finished.

    The identity is the header ``nsqext_id``, which outbox, relay of delayed messages and Spark sink send. On topics
    without headers, ``identity`` reads it from the body. Otherwise it is the offset in the log where the consumer
    receives offsets (``queue_position``, or an ordered topic), or else the id and time of the message; both differ for
    a message that was published twice.

    Identities are kept for a time. Offsets are joined to ranges: the rows of a partition depend on the messages in
    flight or not handled by the channel, not on the number of handled messages.

    The tables of `nsqext.transactions.schema_sql` have to be in the database of the effects: a rollback does not undo
    effects elsewhere.

    Args:
        begin: opens a transaction, and commits it at the end or rolls it back after an exception:
            ``async_sessionmaker(engine).begin`` or ``sessionmaker(engine).begin`` of SQLAlchemy, ``pool.connection`` of
            psycopg's pools, or another function that returns a context manager. Blocking connections are used in
            threads.
        keep: seconds for which identities are kept: longer than a handled message may be redelivered.
        identity: returns the identity of a message within its topic, for example the number of an order in its body;
            None for the identity above. A message whose identity is no text, or empty, fails.

    Raises:
        InvalidSetting: ``keep`` is not valid, or ``begin`` or ``identity`` is no function, or a coroutine function.
    """

    _tables = ("nsqext_inbox", "nsqext_inbox_range")

    def __init__(
        self, begin: Begin[S], *, keep: float = 14 * 86_400.0, identity: Callable[[Message], str | None] | None = None
    ) -> None:
        super().__init__(begin)
        check_time("keep", keep, zero=False)
        if identity is not None:
            check_plain_function("identity", identity)
        self._keep = keep
        self._identity = identity
        self._forgotten = float("-inf")
        self._ranges = HandledRanges()
        self._unmerged: Counter[ChannelPartition] = Counter()

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the handler as `HandlerTransaction.handle`; merge ranges now and then."""
        try:
            return await super().handle(handling, call_next)
        finally:
            first = handling.messages[0]
            key = ChannelPartition(first.topic, handling.channel, first.partition)
            if self._unmerged[key] >= MERGE_EVERY:
                self._unmerged[key] = 0
                await self._merge(key)

    async def _merge(self, key: ChannelPartition) -> None:
        try:
            async with self._transaction() as session:
                await self._ranges.merge(session, key)
        except Exception as error:  # the message that was handled is committed
            logger.warning(
                "what was handled is not merged: %s", error, extra={"topic": key.topic, "channel": key.channel}
            )

    async def _record(self, opened: OpenTransaction, channel: str, message: Message) -> Statement | None:
        now = time.time()
        if now - self._forgotten > _FORGET_EVERY:
            self._forgotten = now
            await execute(opened.connection, _FORGET, {"before": now - self._keep})
            await self._ranges.forget(opened.connection, now - self._keep)
        given = None if self._identity is None else _given(self._identity(message), message.topic)
        if given is None:
            given = message.header_value(IDENTITY_HEADER) or None
        if given is None and message.offset >= 0:
            self._unmerged[ChannelPartition(message.topic, channel, message.partition)] += 1
            return await self._ranges.add(opened, channel, message, now)
        identity = f"{message.topic}/{_id_and_time(message) if given is None else _storable(given)}"
        values = {"channel": channel, "identity": identity, "handled": now}
        return (_REMOVE, values) if await opened.begin(_INSERT, values) else None

    async def _write_probe(self, session: S, name: str) -> None:
        await execute(session, _INSERT, {"channel": _PROBE, "identity": name, "handled": time.time() + _KEEP_PROBE})

    async def _remove_probe(self, session: S, name: str) -> bool:
        found: Any = await execute(session, _REMOVE_PROBE, {"channel": _PROBE, "identity": name})
        return bool(found.rowcount)


def _given(identity: object, topic: str) -> str | None:
    """Return the identity that the program's function has returned: messages must not share an empty one."""
    if identity is None or (isinstance(identity, str) and identity):
        return identity
    raise InvalidInput(
        f"the function identity returned {identity!r}, which is no identity of a message",
        topic=topic,
        hint="return text that is not empty, or None for the header nsqext_id or the id of the message",
    )


def _id_and_time(message: Message) -> str:
    """Return what no other message has: the ids of a topic that was created again begin at the first one."""
    return f"{message.id.hex()}@{message.timestamp}"


def _storable(identity: str) -> str:
    """Return an identity, or its digest where it is too long for an index, or has characters that are not stored.

    An identity that begins like a digest is replaced too, so that no identity equals the digest of another.
    """
    if len(identity) <= MAX_IDENTITY and is_storable(identity) and not identity.startswith(_DIGEST):
        return identity
    return _DIGEST + sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()
