"""Methods of the administration client that change channels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from nsqext.admin.requests import AdminBase, ClusterRequests, generation_of
from nsqext.admin.stats import topic_stats
from nsqext.arguments import check_number
from nsqext.errors import InvalidInput, LookupFailed, OperationNotSupported, PartitionUnavailable
from nsqext.protocol.identify import DISPATCH_TYPES, KEY_FAILOVER
from nsqext.protocol.names import check_channel

if TYPE_CHECKING:
    from nsqext.client.consumer.position import Position
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.types import Address

_MAX_RATE = 100 * 1024 * 1024  # KiB per second
_MAX_HOURS = 365 * 24
_MAX_READY = 50_000  # the servers' own limit
_ID_BYTES = 16
_UNKNOWN_CHANNEL = "CHANNEL_NOT_FOUND"
_LARGEST_ID = 2**63 - 1
_WITHOUT_DISPATCH = (
    "create the channel without a dispatch: consumers with dispatch='key_failover' share the keys by the tags of "
    "producers with key_tags"
)


class ChannelAdmin(AdminBase):
    """Methods of `nsqext.Admin` for channels."""

    async def create_channel(
        self, topic: str, channel: str, *, dispatch: str | None = None, key_header: str | None = None
    ) -> None:
        """Create a channel on every partition, starting after the stored messages. An existing channel stays unchanged.

        Args:
            dispatch: how messages are distributed to the channel's consumers, ``shared`` or ``key_failover``; an
                existing channel without consumers is changed. By default the first consumer chooses. Needs servers with
                the Key_Failover extension, such as the embedded cluster.
            key_header: extend header that carries the key of a ``key_failover`` channel.

        Raises:
            InvalidInput: ``dispatch`` is unknown, ``key_header`` would be ignored, or the channel has consumers with
                another dispatch.
            OperationNotSupported: the servers do not know ``dispatch``.
            InvalidName, TopicNotFound, PartitionUnavailable: see `Admin`.
        """
        check_channel(channel)
        requests = self._open()
        if dispatch is not None or key_header is not None:
            await _create_dispatched(requests, topic, channel, dispatch, key_header)
            return
        where = await requests.find(topic)
        if where.meta.disable_channel_auto_create or generation_of(where) == "original":
            await _register(requests, topic, channel)
        if not where.meta.disable_channel_auto_create:
            await requests.change_channel("create", topic, channel)

    async def set_channel(
        self, topic: str, channel: str, *, ordered: bool | None = None, rate_limit_kib: int | None = None
    ) -> None:
        """Change settings of a channel of the redesigned NSQ; None leaves a setting unchanged.

        Args:
            ordered: deliver one message of a partition at a time. False disconnects an ordered channel's consumers; a
                consumer that requests order makes it ordered again.
            rate_limit_kib: KiB per second and partition in bodies above 1 KiB; smaller messages are not limited. The
                servers' default is 102,400; the limit ends only with a restart or another leader.

        Raises:
            InvalidInput: invalid name or number, unknown channel, or no setting given.
            OperationNotSupported, TopicNotFound, PartitionUnavailable: see `Admin`.
        """
        changes: list[tuple[str, dict[str, str | int]]] = []
        if ordered is not None:
            changes.append(("setorder", {"order": "true" if ordered else "false"}))
        if rate_limit_kib is not None:
            rate = check_number("rate_limit_kib", rate_limit_kib, 1, _MAX_RATE, InvalidInput)
            changes.append(("ratelimit", {"ratekilobytes": rate}))
        if not changes:
            raise InvalidInput("no setting to change is given", topic=topic)
        requests = self._open()
        for action, extra in changes:
            await requests.change_channel(action, topic, channel, operation="set_channel", extra=extra)

    async def limit_consumers(self, topic: str, channel: str, ready: int, *, address_prefix: str = "") -> None:
        """Limit the messages in flight at connected consumers of a channel of the redesigned NSQ, whatever their RDY.

        Consumers that connect later are not limited.

        Args:
            ready: most messages in flight at each connection; 0 stops delivery, 50,000 is the default.
            address_prefix: start of the consumers' ``host:port``; by default all are limited.

        Raises:
            InvalidInput: invalid name or number, or unknown channel.
            OperationNotSupported, TopicNotFound, PartitionUnavailable: see `set_channel`.
        """
        number = check_number("ready", ready, 0, _MAX_READY, InvalidInput)
        extra: dict[str, str | int] = {"ready": number, "client_prefix": address_prefix}
        await self._open().change_channel("setclientlimit", topic, channel, operation="limit_consumers", extra=extra)

    async def finish_message(self, topic: str, channel: str, message: bytes | int) -> None:
        """Finish a message that is in flight or deferred in a channel of the redesigned NSQ, for any consumer.

        Args:
            message: its id: 16 bytes, as in `nsqext.Message`, or the number in a traced publish's receipt.

        Raises:
            InvalidInput: invalid id, unknown channel, or no such message in flight.
            OperationNotSupported, TopicNotFound, PartitionUnavailable: see `set_channel`.
        """
        from nsqext.protocol.record import COUNTER_BITS  # with msgspec: a tenth of a command's start

        number = _internal_id(message)

        async def finish(node: Address, params: dict[str, str | int]) -> None:
            await requests.post(node, "/message/finish", {**params, "msgid": number})

        requests = self._open()
        partition = number >> COUNTER_BITS
        await requests.at_leaders(topic, channel, finish, partitions=[partition], operation="finish_message")

    async def redeliver_unfinished(self, topic: str, channel: str) -> None:
        """Make a stuck channel of the redesigned NSQ read again from its confirmed position.

        Finished messages behind this position are not delivered again; messages in flight may be delivered twice.
        Without effect on a channel that `set_channel` made ordered, which servers do not report.

        Raises:
            InvalidInput: unknown channel; the topic is ordered (nothing was sent); or the channel is paused or skipped
                on a partition, which then does not read again; other partitions do.
            OperationNotSupported, TopicNotFound, PartitionUnavailable: see `set_channel`.
        """
        requests = self._open()
        where = await requests.find(topic)
        if where.meta.ordered:
            raise InvalidInput("channels of an ordered topic cannot read again", topic=topic)
        await requests.change_channel("fixconfirmed", topic, channel, operation="redeliver_unfinished")
        for part in (await topic_stats(requests, where, channel)).partitions:
            for one in part.channels.values():
                if one.paused or one.skipped:
                    state = "paused" if one.paused else "skipped"
                    raise InvalidInput(
                        f"the channel {channel} is {state}: it does not read again",
                        topic=topic,
                        partition=part.partition,
                        hint="unpause or unskip it first",
                    )

    async def empty_delayed(self, topic: str, channel: str) -> None:
        """Discard the delayed messages of a channel of the redesigned NSQ, in memory and in the delayed queue.

        Raises:
            InvalidInput, OperationNotSupported, TopicNotFound, PartitionUnavailable: see `set_channel`.
        """
        requests = self._open()
        for action in ("finishmemdelayed", "emptydelayed"):
            await requests.change_channel(action, topic, channel, operation="empty_delayed")

    async def deliver_delayed(self, topic: str, channel: str, *, within_hours: int = 1) -> None:
        """Deliver messages of a channel's delayed queue (redesigned NSQ) before they are due.

        Messages with short delays wait in memory and stay. Consumers return messages whose due time they know: delayed
        publishes, and messages that they requeued for more than 15 minutes.

        Args:
            within_hours: deliver messages due within these hours, 0 to 8,760.

        Raises:
            InvalidInput, OperationNotSupported, TopicNotFound, PartitionUnavailable: see `set_channel`.
        """
        hours = check_number("within_hours", within_hours, 0, _MAX_HOURS, InvalidInput)
        extra: dict[str, str | int] = {"offset": hours}
        await self._open().change_channel("requeuedelayed", topic, channel, operation="deliver_delayed", extra=extra)

    async def delete_channel(self, topic: str, channel: str, *, missing_ok: bool = False) -> bool:
        """Delete a channel with its position and waiting messages; return whether it existed.

        Args:
            missing_ok: a missing channel is not an error.

        Raises:
            InvalidInput: unknown channel.
            TopicNotFound, PartitionUnavailable: see `Admin`.
        """
        check_channel(channel)
        requests = self._open()
        where = await requests.find(topic)
        if await self._lacks_channel(topic, channel):  # the redesigned nsqd accepts an unknown channel
            if missing_ok:
                return False
            raise InvalidInput(f"the topic has no channel {channel}", topic=topic, hint="check its name")
        registered = where.meta.disable_channel_auto_create or bool(where.nodes)
        try:
            await requests.change_channel("delete", topic, channel)
        except InvalidInput as error:
            if not registered or _UNKNOWN_CHANNEL not in error.message:  # lookup alone may have it
                raise
        if registered:
            try:
                await requests.change_lookup("/channel/delete", {"topic": topic, "channel": channel})
            except LookupFailed as error:
                if _UNKNOWN_CHANNEL not in error.message:  # an ephemeral channel ends with the last node's
                    raise
        return True

    async def _lacks_channel(self, topic: str, channel: str) -> bool:
        """Return whether neither lookup nor any node knows a channel.

        False if a node does not respond, or a partition has no leader.
        """
        requests = self._open()
        where, channels = await requests.find_with_channels(topic)
        if channel in channels:
            return False
        stats = await topic_stats(requests, where, None)
        return not (stats.unreachable or stats.missing) and channel not in stats.channels

    async def pause_channel(self, topic: str, channel: str) -> None:
        """Stop delivery from a channel; published messages wait.

        Raises:
            InvalidInput: invalid name, or unknown channel.
            TopicNotFound, PartitionUnavailable: see `Admin`.
        """
        await self._open().change_channel("pause", topic, channel)

    async def unpause_channel(self, topic: str, channel: str) -> None:
        """Resume delivery from a channel; raises the errors of `pause_channel`."""
        await self._open().change_channel("unpause", topic, channel)

    async def empty_channel(self, topic: str, channel: str) -> None:
        """Discard the messages that wait in a channel; raises the errors of `pause_channel`."""
        await self._open().change_channel("empty", topic, channel)

    async def skip_channel(self, topic: str, channel: str) -> None:
        """Make a channel of the redesigned NSQ finish all messages without delivery, until `unskip_channel`.

        Raises:
            OperationNotSupported: the topic is on the original generation.
            InvalidInput, TopicNotFound, PartitionUnavailable: see `pause_channel`.
        """
        await self._open().change_channel("skip", topic, channel, operation="skip_channel")

    async def unskip_channel(self, topic: str, channel: str) -> None:
        """Make a channel deliver messages again; raises the errors of `skip_channel`."""
        await self._open().change_channel("unskip", topic, channel, operation="unskip_channel")

    async def seek_channel(
        self, topic: str, channel: str, position: Position, *, partitions: Sequence[int] | None = None
    ) -> None:
        """Move a channel of the redesigned NSQ; the server drops messages in flight.

        Args:
            channel: an existing channel.
            position: where to continue.
            partitions: partitions on which it moves; None for all.

        Raises:
            OperationNotSupported: the topic is on the original generation.
            InvalidInput: the channel or a partition does not exist, or no position.
            PartitionUnavailable: a partition has no leader in time, or refused the position.
        """
        from nsqext.client.consumer.position import check_position
        from nsqext.lookup.node_channels import NodeChannels

        check_position(position)
        requests = self._open()
        channels = NodeChannels(requests.client.http)

        async def move(node: Address, params: dict[str, str | int]) -> None:
            try:
                await channels.move(node, topic, int(params["partition"]), channel, str(position))
            except PartitionUnavailable as error:
                if _UNKNOWN_CHANNEL not in error.message:
                    raise
                raise InvalidInput(
                    error.message,
                    topic=topic,
                    partition=int(params["partition"]),
                    node=str(node),
                    hint="check the name of the channel, or create it",
                ) from error

        await requests.at_leaders(topic, channel, move, partitions=partitions, operation="seek_channel")


async def _register(requests: ClusterRequests, topic: str, channel: str) -> None:
    try:
        await requests.change_lookup("/channel/create", {"topic": topic, "channel": channel})
    except LookupFailed as error:
        if "already registered" not in error.message:
            raise


def _internal_id(message: bytes | int) -> int:
    """Return the number of a message; its upper bits are the partition."""
    if isinstance(message, int):
        return check_number("message", message, 1, _LARGEST_ID, InvalidInput)
    if not isinstance(message, bytes) or len(message) != _ID_BYTES:
        raise InvalidInput(f"message={message!r} is no message id", hint="give its 16 bytes, or its number")
    return check_number("message", int.from_bytes(message[:8], "big"), 1, _LARGEST_ID, InvalidInput)


async def _create_dispatched(
    requests: ClusterRequests, topic: str, channel: str, dispatch: str | None, key_header: str | None
) -> None:
    """Create a channel with a dispatch; see `nsqext.Admin.create_channel`.

    Servers without the extension refuse the request, but ignore its argument for topics with registered channels: the
    reported dispatch is checked, and the channel deleted again.
    """
    params: dict[str, str | int] = {"topic": topic, "channel": channel, **_dispatch_params(topic, dispatch, key_header)}
    where = await requests.settled(partial(requests.led, topic), topic)
    if where.nodes:
        raise _unknown(topic, dispatch)
    await _reported(requests, where, channel)  # nothing is sent while a leader cannot show afterwards what it ignored

    known = False
    try:
        await requests.change_settled("/channel/create", params, topic)
    except LookupFailed as error:
        if "auto create NOT disabled" in error.message:
            raise _unknown(topic, dispatch) from error
        if f"channel {channel} of topic" in error.message:
            raise InvalidInput(error.message, topic=topic, hint="stop its consumers, or delete the channel") from error
        known = "already registered" in error.message
        if not known:
            raise
    if dispatch == KEY_FAILOVER and await _reported(requests, where, channel) != {dispatch}:
        if not known:
            await requests.change_lookup("/channel/delete", {"topic": topic, "channel": channel})
        raise _unknown(topic, dispatch)


def _dispatch_params(topic: str, dispatch: str | None, key_header: str | None) -> dict[str, str]:
    if dispatch not in DISPATCH_TYPES:
        raise InvalidInput(f"dispatch={dispatch!r} is none of {', '.join(DISPATCH_TYPES)}", topic=topic)
    if key_header is None:
        return {"dispatch": dispatch}
    if dispatch != KEY_FAILOVER:
        raise InvalidInput(f"key_header has no effect without dispatch={KEY_FAILOVER!r}", topic=topic)
    if not key_header:
        raise InvalidInput("key_header is empty", topic=topic, hint="leave it out for the default")
    return {"dispatch": dispatch, "key_header": key_header}


async def _reported(requests: ClusterRequests, where: PartitionMap, channel: str) -> set[str]:
    """Return the dispatches that leaders report for a channel."""

    async def ask() -> set[str]:
        now = await requests.led(where.topic)
        parts = (await topic_stats(requests, now, channel)).partitions
        if len(parts) < now.partition_num:
            raise PartitionUnavailable("not every leader reports its partition yet", topic=where.topic)
        found = [part.channels.get(channel) for part in parts]
        return {one.dispatch if one else "" for one in found}

    return await requests.settled(ask, where.topic)


def _unknown(topic: str, dispatch: str | None) -> OperationNotSupported:
    return OperationNotSupported(f"the servers do not know dispatch={dispatch!r}", topic=topic, hint=_WITHOUT_DISPATCH)
