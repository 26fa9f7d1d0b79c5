"""Handle each message once: its identity and the effects of its handler are committed together."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from nsqext.arguments import check_time
from nsqext.protocol.headers import IDENTITY_HEADER
from nsqext.transactions.handler_transaction import HandlerTransaction, S
from nsqext.transactions.statements import prepared

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message

__all__ = ("Inbox", "identity_of")

_INSERT = """
INSERT INTO nsqext_inbox (channel, identity, handled) VALUES (:channel, :identity, :handled) ON CONFLICT DO NOTHING
"""
_FORGET = "DELETE FROM nsqext_inbox WHERE handled < :before"
_FORGET_EVERY = 600.0
"""Seconds between two removals of old identities."""


class Inbox(HandlerTransaction[S]):
    """A middleware that opens a transaction around each call of a handler, and skips messages that were handled before.

    The identity of the message is written in the transaction of the handler: both are committed, or neither is. A
    message whose identity is there is finished without a call. The handler takes the session of the transaction from
    `session`, and must neither commit it nor finish the message; the middleware commits before the message is finished.

    The identity is the header ``nsqext_id`` (that of an outbox, of a relay of delayed messages, or of the Spark sink).
    Without it, it is topic, partition, offset and time of storage where the consumer receives offsets
    (``queue_position``, or an ordered topic), and otherwise the id of the message; a message that was published twice
    has two of these.

    The table is `nsqext.transactions.schema_sql`'s. It is in the database of the effects: an effect elsewhere is not
    undone by a rollback.

    Args:
        begin: opens a transaction, and commits it at the end or rolls it back after an exception:
            ``async_sessionmaker(engine).begin`` of SQLAlchemy, or ``pool.connection`` of psycopg's pools.
        keep: seconds for which identities are kept; longer than any message is delivered again after it was handled.

    Raises:
        InvalidSetting: a time that is not valid.
    """

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[S]], *, keep: float = 14 * 86_400.0) -> None:
        super().__init__(begin)
        check_time("keep", keep, zero=False)
        self._keep = keep
        self._forgotten = float("-inf")

    async def _is_new(self, session: S, channel: str, message: Message) -> bool:
        now = time.time()
        if now - self._forgotten > _FORGET_EVERY:
            self._forgotten = now
            await session.execute(*prepared(session, _FORGET, {"before": now - self._keep}))
        values = {"channel": channel, "identity": identity_of(message), "handled": now}
        found: Any = await session.execute(*prepared(session, _INSERT, values))
        return bool(found.rowcount)


def identity_of(message: Message) -> str:
    """Return what identifies a message among all deliveries."""
    given = message.header_value(IDENTITY_HEADER)
    if given is not None:
        return f"{message.topic}/{given}"
    if message.offset >= 0:
        return f"{message.topic}/{message.partition}/{message.offset}/{message.timestamp}"
    return f"{message.topic}/{message.id.hex()}"
