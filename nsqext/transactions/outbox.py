"""The outbox for programs, which add messages in the transactions of their effects."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Never
from zlib import crc32

import orjson

from nsqext.arguments import refuse_unknown
from nsqext.client.producer.request import key_bytes
from nsqext.errors import InvalidBody, InvalidHeader, InvalidInput
from nsqext.protocol.headers import add_key, encode_headers
from nsqext.protocol.messages import IDENTITY_HEADER
from nsqext.protocol.names import check_identity, check_topic
from nsqext.transactions.schema import (
    CHANNEL,
    SHARDS,
    execute_in_core,
    is_asynchronous,
    is_postgresql,
    package_of,
    prepared,
)
from nsqext.transactions.trace_context import active_context

if TYPE_CHECKING:
    from nsqext.transactions.schema import SqlConnection

_INSERT = """
INSERT INTO nsqext_outbox (identity, topic, key, tag, headers, trace_context, body, shard, added)
VALUES (:identity, :topic, :key, :tag, :headers, :trace_context, :body, :shard, :added)
"""
_INSERT_AND_NOTIFY = f"WITH added AS ({_INSERT.strip()} RETURNING 1) SELECT pg_notify('{CHANNEL}', '') FROM added"  # noqa: S608


class Outbox:
    """Messages that are published if, and only if, a database transaction is committed.

    `add` writes a message to a table of `schema_sql` in the user's database; an `OutboxRelay` publishes it after the
    commit. The trace context of OpenTelemetry's active span is stored with the message, and sent where the topic
    supports extend headers.
    """

    def add(
        self,
        connection: SqlConnection,
        topic: str,
        value: object,
        *,
        headers: Mapping[str, str] | None = None,
        key: str | bytes | int | None = None,
        tag: str | None = None,
        identity: str | None = None,
        **unknown: Never,
    ) -> str:
        """Add a message in the transaction of a blocking connection.

        Messages of one key are published in the order in which they were added, if each transaction began after the
        previous commit.

        Args:
            connection: a session or connection of SQLAlchemy, or a connection of psycopg or sqlite3.
            topic: name of the topic.
            value: the body, as for `nsqext.App.publish`: bytes, str, JSON values, a dataclass, or an attrs, msgspec or
                pydantic object; not empty.
            headers: extend headers; the topic has to support them.
            key: see `nsqext.Producer.publish`.
            tag: tag for dispatch; the topic has to support extend headers.
            identity: identity of the message within the topic, such as the number of an order, 200 characters at most;
                random if None.

        Returns:
            The identity of the message. On topics with extend support the header ``nsqext_id`` carries it, by which an
            `Inbox` recognizes a message that was published twice. On other topics, put an identity into the body, and
            let ``Inbox(identity=…)`` read it.

        Raises:
            InvalidInput: an argument is not valid, or the connection is asynchronous; nothing was added.
            Exception: an error of the database.
        """
        if unknown:
            refuse_unknown(Outbox.add, unknown)
        identity, values = _row(topic, value, headers, key, tag, identity)
        if is_asynchronous(connection):
            raise InvalidInput("the connection is asynchronous", topic=topic, hint="await add_async(...)")
        if package_of(connection) == "sqlalchemy":
            execute_in_core(connection, _statement(connection), values)
        else:
            connection.execute(*prepared(connection, _statement(connection), values))
        return identity

    async def add_async(
        self,
        connection: SqlConnection,
        topic: str,
        value: object,
        *,
        headers: Mapping[str, str] | None = None,
        key: str | bytes | int | None = None,
        tag: str | None = None,
        identity: str | None = None,
        **unknown: Never,
    ) -> str:
        """Add a message in the transaction of an asynchronous session or connection; otherwise as `add`."""
        if unknown:
            refuse_unknown(Outbox.add_async, unknown)
        identity, values = _row(topic, value, headers, key, tag, identity)
        if not is_asynchronous(connection):
            raise InvalidInput("the connection is not asynchronous", topic=topic, hint="call add(...)")
        if hasattr(connection, "run_sync"):
            await connection.run_sync(execute_in_core, _statement(connection), values)
        else:
            await connection.execute(*prepared(connection, _statement(connection), values))
        return identity


def _statement(connection: SqlConnection) -> str:
    """Return the statement that adds a row, and notifies relays in the same round trip."""
    return _INSERT_AND_NOTIFY if is_postgresql(connection) else _INSERT


def _row(
    topic: str,
    value: object,
    headers: Mapping[str, str] | None,
    key: str | bytes | int | None,
    tag: str | None,
    identity: str | None,
) -> tuple[str, dict[str, object]]:
    """Return the identity of a message and the values of its row."""
    check_topic(topic)
    body = _body(topic, value)
    identity = os.urandom(16).hex() if identity is None else check_identity(identity)
    if headers and IDENTITY_HEADER in headers:
        raise InvalidHeader(f"the outbox sets the header {IDENTITY_HEADER}", topic=topic, hint="give identity=")
    data = None if key is None else key_bytes(key)
    _check_headers(headers, identity, tag, data)
    trace_context = active_context()
    if trace_context:
        try:
            _check_headers({**trace_context, **(headers or {})}, identity, tag, data)
        except InvalidHeader:  # a message is not lost for its trace
            trace_context = {}
    spread = crc32(topic.encode() + b"\0" + (identity.encode() if data is None else data))
    return identity, {
        "identity": identity,
        "topic": topic,
        "key": data,
        "tag": tag,
        "headers": _json(headers),
        "trace_context": _json(trace_context),
        "body": body,
        "shard": spread % SHARDS,
        "added": time.time(),
    }


def _body(topic: str, value: object) -> bytes:
    if not isinstance(value, bytes):
        from nsqext.client.consumer.typed.body import encode_body

        value = encode_body(value)
    if not value:
        raise InvalidBody("the body is empty", topic=topic)
    return value


def _check_headers(headers: Mapping[str, str] | None, identity: str, tag: str | None, key: bytes | None) -> None:
    """Check the headers that a relay will send."""
    header = encode_headers({**(headers or {}), IDENTITY_HEADER: identity}, tag=tag)
    if key is not None:
        add_key(header, key)


def _json(headers: Mapping[str, str] | None) -> str | None:
    return orjson.dumps(dict(headers)).decode() if headers else None
