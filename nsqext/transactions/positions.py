"""Handle each message of an ordered partition once: the position is committed with the effects of the handler."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from nsqext.client.consumer.message import Requeue
from nsqext.client.consumer.position import Position
from nsqext.errors import DataLoss, InvalidInput, InvalidSetting, PartitionUnavailable
from nsqext.protocol.identify import SHARED
from nsqext.transactions.handler_transaction import Begin, HandlerTransaction, S
from nsqext.transactions.schema import OF_PARTITION, ChannelPartition, Statement, execute, fetched

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.client.middleware import Client
    from nsqext.lookup.node_channels import LogBounds
    from nsqext.transactions.boundaries import OpenTransaction
    from nsqext.transactions.schema import SqlConnection

logger: logging.Logger = logging.getLogger("nsqext.transactions")

_ADVANCE = f"""
UPDATE nsqext_position SET last = :last, next = :next, identity = :identity, stored = :stored
WHERE {OF_PARTITION} AND next = :last
"""  # noqa: S608
_INSERT = """
INSERT INTO nsqext_position (topic, channel, partition, last, next, identity, stored)
VALUES (:topic, :channel, :partition, :last, :next, :identity, :stored) ON CONFLICT DO NOTHING
"""
_STEP_BACK = f"UPDATE nsqext_position SET next = last WHERE {OF_PARTITION} AND last = :last AND identity = :identity"  # noqa: S608
_SELECT = f"SELECT last, next, identity, stored FROM nsqext_position WHERE {OF_PARTITION}"  # noqa: S608
_FORGET = "DELETE FROM nsqext_position WHERE topic = :topic AND channel = :channel"
# with other values of these settings messages are left out, which look like lost messages
_ALLOWED = {
    "tag": (None,),
    "ext_filter": (None,),
    "sample_rate": (0,),
    "max_attempts": (0,),
    "dispatch": (None, SHARED),
}

_MOVES = 3  # moves of a channel to a message until that message counts as missing


class _Row(NamedTuple):
    """The position of a partition.

    Attributes:
        last: offset of the message that was handled last.
        next: offset of the message behind it.
        identity: id of the last message, in hexadecimal digits.
        stored: when it was stored, in nanoseconds since 1970.
    """

    last: int
    next: int
    identity: str
    stored: int


class Positions(HandlerTransaction[S]):
    """A middleware that opens a transaction around each call of a handler, and commits the position with it.

    The consumer begins behind that position, whatever the server remembers of its channel: each message has its effect
    once, also after a change of the leader, and after the channel was emptied, skipped or deleted. Each partition has
    one row. The consumer has to consume in order (an ordered topic, or ``ordered=True``), and be the only consumer of
    its channel at a partition. It takes the positions twice, as middleware and as start::

        positions = Positions(sessions.begin)
        consumer = Consumer("orders", "billing", lookupd, ordered=True, start=positions, middleware=[positions])

    The handler takes the session of the transaction from `session`, and must neither commit it nor finish the message;
    the middleware commits before the message is finished. A message whose handler raises is delivered again before
    later messages. A message that was published twice has its effect twice: see `Inbox`.

    Messages that the log does not contain any more, and a topic that was created again, end the consumer with
    `DataLoss`; after `forget` it begins where the channel is. To compare the log, the channel was moved to the last
    message that was handled: `nsqext.Admin.seek_channel` moves it to the first message to handle.

    The tables of `nsqext.transactions.schema_sql` have to be in the database of the effects.

    Args:
        begin: opens a transaction; see `Inbox`.

    Raises:
        InvalidSetting: ``begin`` is no function, or a coroutine function.
    """

    _tables = ("nsqext_position",)

    def __init__(self, begin: Begin[S]) -> None:
        super().__init__(begin)
        # positions of moved channels until their first message
        self._sought: dict[ChannelPartition, _Row] = {}
        # offsets of channels without a row, until the first message of their partition
        self._begins: dict[ChannelPartition, int] = {}
        # how often in succession another message was received first: servers send what they had read before the move
        self._misses: Counter[ChannelPartition] = Counter()
        self._lost: dict[ChannelPartition, DataLoss] = {}

    def attach(self, client: Client) -> None:
        """Check the settings of a consumer.

        Raises:
            InvalidSetting: a setting leaves messages out, or ``start`` is not this object.
        """
        settings = client.settings
        if "start" not in settings:
            return  # a producer
        for name, allowed in _ALLOWED.items():
            if settings[name] not in allowed:
                raise InvalidSetting(
                    f"{name}={settings[name]!r} leaves messages out, and Positions does not",
                    hint="use an Inbox, which keeps an identity for each message",
                )
        if settings["start"] is not self:
            raise InvalidSetting(
                "Positions has no effect without start", hint="give the same object as start and in middleware"
            )

    async def start_of(self, topic: str, channel: str, partition: int, log: LogBounds) -> Position | None:
        """Return the start of a partition; None for the position of the channel.

        Called before each subscription. A channel that is elsewhere is moved to the message that was handled last: its
        redelivery shows that the log is the same.

        Raises:
            DataLoss: the log does not contain the message behind the message that was handled last.
            PartitionUnavailable: the database does not respond.
        """
        key = ChannelPartition(topic, channel, partition)
        if key in self._lost:
            raise self._lost.pop(key)
        try:
            async with self._transaction() as session:
                row = await self._row(session, key)
        except Exception as error:
            raise PartitionUnavailable(
                f"its position cannot be read from the database: {error}", topic=topic, partition=partition
            ) from error
        self._sought.pop(key, None)
        if row is None:
            if log.channel is not None:
                self._begins[key] = max(log.begin, log.channel)
            return None
        if log.end < row.next:
            raise _replaced(key, row, f"it ends at byte {log.end}")
        if log.channel == row.next:
            return None
        if log.begin > row.next:
            raise DataLoss(
                f"the messages of {channel} from byte {row.next} to {log.begin} were removed before they were handled",
                topic=topic,
                partition=partition,
                hint="await positions.forget(topic, channel) to continue with what is left",
            )
        if log.begin <= row.last:
            self._sought[key] = row
        return Position.offset(max(log.begin, row.last))

    async def forget(self, topic: str, channel: str) -> None:
        """Forget the positions of a channel: its consumer, opened again, begins where the channel is.

        Raises:
            Exception: an error of the database.
        """
        async with self._transaction() as session:
            await execute(session, _FORGET, {"topic": topic, "channel": channel})
        for key in [key for key in self._lost if key[:2] == (topic, channel)]:
            del self._lost[key]

    async def _record(self, opened: OpenTransaction, channel: str, message: Message) -> Statement | None:
        if not message.in_order:
            raise InvalidInput(
                "Positions needs a consumer that receives messages in order",
                topic=message.topic,
                partition=message.partition,
                hint="set ordered=True, or use an Inbox",
            )
        key = ChannelPartition(message.topic, channel, message.partition)
        sought = self._sought.pop(key, None)
        if sought is not None:
            self._check_first(key, message, sought)
        values = {
            **key._asdict(),
            "last": message.offset,
            "next": message.offset + message.size,
            "identity": message.id.hex(),
            "stored": message.timestamp,
        }
        if await opened.begin(_ADVANCE, values):
            return _STEP_BACK, values
        row = await self._row(opened.connection, key)
        if row is None:
            self._check_begin(key, message)
            return (_STEP_BACK, values) if await opened.begin(_INSERT, values) else None
        if message.offset > row.last:  # the channel was moved: it has to be moved back
            raise _again(message, f"the channel was moved from byte {row.next} to {message.offset}")
        known = message.timestamp <= row.stored
        if not known or (message.offset == row.last and message.id.hex() != row.identity):
            raise self._give_up(key, message, _replaced(key, row, f"byte {message.offset} holds a newer message"))
        return None

    async def _write_probe(self, session: S, name: str) -> None:
        await execute(session, _INSERT, {**_probe(name)._asdict(), **_Row(0, 0, "", 0)._asdict()})

    async def _remove_probe(self, session: S, name: str) -> bool:
        key = _probe(name)
        found: Any = await execute(session, _FORGET, {"topic": key.topic, "channel": key.channel})
        return bool(found.rowcount)

    def _check_begin(self, key: ChannelPartition, message: Message) -> None:
        """Check that a partition without a row begins with the first message behind the position of the channel."""
        begin = self._begins.pop(key, message.offset)
        if message.offset <= begin:
            del self._misses[key]
            return
        self._count_miss(key, message, f"byte {message.offset} was received, and the channel is at byte {begin}")
        # other consumers of the channel have finished what is between
        logger.warning(
            "%s begins at byte %d, because no message from byte %d on was delivered",
            *(key.channel, message.offset, begin),
            extra={"topic": key.topic, "partition": key.partition, "channel": key.channel},
        )

    def _check_first(self, key: ChannelPartition, message: Message, sought: _Row) -> None:
        """Check that the first message after a move is the message that was handled last."""
        if message.offset == sought.last:
            del self._misses[key]
            return
        self._count_miss(key, message, f"byte {message.offset} was received in place of byte {sought.last}")
        raise self._give_up(key, message, _replaced(key, sought, f"byte {sought.last} begins no message"))

    def _count_miss(self, key: ChannelPartition, message: Message, reason: str) -> None:
        """Receive a partition again, by raising Requeue; return after ``_MOVES`` misses in succession."""
        self._misses[key] += 1
        if self._misses[key] < _MOVES:
            raise _again(message, reason)
        del self._misses[key]

    async def _row(self, session: SqlConnection, key: ChannelPartition) -> _Row | None:
        found: Any = await execute(session, _SELECT, key._asdict())
        rows = await fetched(found)
        return _Row(*rows[0]) if rows else None

    def _give_up(self, key: ChannelPartition, message: Message, error: DataLoss) -> Requeue:
        """End the consumer with an error, which the next `start_of` raises."""
        self._lost[key] = error
        return _again(message, error.message)


def _again(message: Message, reason: str) -> Requeue:
    """End the connection of a message, so that its partition is delivered again; return what ends the handler."""
    message.owner.reset(reason)
    return Requeue(0, backoff=False)


def _probe(name: str) -> ChannelPartition:
    """Return a key that no partition has."""
    return ChannelPartition("#probe", name, 0)


def _replaced(key: ChannelPartition, row: _Row, reason: str) -> DataLoss:
    return DataLoss(
        f"the log is not the log in which {key.channel} has handled the message at byte {row.last}: {reason}",
        topic=key.topic,
        partition=key.partition,
        hint="was the topic created again, or has its leader lost messages? await positions.forget(topic, channel), "
        "and move the channel to the first message to handle: await admin.seek_channel(topic, channel, position)",
    )
