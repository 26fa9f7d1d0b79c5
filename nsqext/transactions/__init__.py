"""Messages in database transactions: an outbox for publishes; an inbox and positions that handle each message once."""

from __future__ import annotations

from nsqext.transactions.inbox import Inbox
from nsqext.transactions.outbox import Outbox
from nsqext.transactions.positions import Positions
from nsqext.transactions.relay import OutboxRelay
from nsqext.transactions.schema import create_tables, drop_tables, schema_sql
from nsqext.transactions.store import OutboxMessage, OutboxStore

__all__ = (
    "Inbox",
    "Outbox",
    "OutboxMessage",
    "OutboxRelay",
    "OutboxStore",
    "Positions",
    "create_tables",
    "drop_tables",
    "schema_sql",
)
