"""Copy a topic to another topic or cluster, in order, through restarts of both."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated
from zlib import crc32

import anyio
from attrs import define, field, frozen

from nsqext.cli.answers import answer_of
from nsqext.cli.connection import ServerAccess, is_redesigned
from nsqext.cli.parameters import Option
from nsqext.cli.waiting import waits
from nsqext.client.consumer.handlers.republish import as_stored
from nsqext.client.consumer.message import Requeue
from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.errors import (
    BatchFailed,
    InvalidInput,
    InvalidSetting,
    MessageNotInFlight,
    NsqError,
    PartitionUnavailable,
    ServerError,
    TopicNotFound,
)
from nsqext.lookup.options import parse_addresses
from nsqext.protocol.messages import KEY_HEADER
from nsqext.protocol.names import DEFAULT_CHANNEL, is_ephemeral
from nsqext.types import TopicMeta

if TYPE_CHECKING:
    from nsqext import Message, MessageBatch, Producer
    from nsqext.admin import Admin, TopicInfo
    from nsqext.cli.messages.relay_run import RelayRun
    from nsqext.types import Address, Receipt

logger: logging.Logger = logging.getLogger("nsqext.relay")

_RETRY = 1.0  # seconds until messages are sent again that the target did not store
_MOST_READ = 10_000  # keys that are remembered
_Place = tuple[str, int | None, bytes]


@frozen
class Kept:
    """What the messages keep."""

    without_headers: Annotated[bool, Option("--without-headers", help="Send no headers, tags, keys and trace ids.")] = (
        False
    )
    without_order: Annotated[
        bool, Option("--without-order", help="Keep the order of keys alone, not of messages without key.")
    ] = False
    key_member: Annotated[
        str | None, Option(help="Member of JSON bodies that is the key of messages without key: customer.id.")
    ] = None

    def __attrs_post_init__(self) -> None:
        if self.without_headers and self.key_member is not None:
            raise InvalidSetting("--key-member sends keys, and --without-headers does not", hint="give one of them")

    def key(self, message: Message) -> str | None:
        """Return the key of a message, from its header or body; an empty key or null is no key."""
        found = message.header_value(KEY_HEADER) or None
        if found is None and self.key_member is not None:
            import orjson

            with suppress(ValueError, LookupError, TypeError):
                value = orjson.loads(message.body)
                for name in self.key_member.split("."):
                    value = value[name]
                if value is not None and value != "":
                    return value if isinstance(value, str) else orjson.dumps(value).decode()
        return found


def _place(message: Message) -> _Place:
    return message.node, message.partition, message.id


@frozen
class Placement:
    """Chooses partitions: what is in order at the source is in order at the target."""

    source: TopicMeta
    target: TopicMeta
    kept: Kept
    _read: dict[_Place, str | None] = field(factory=dict, init=False)  # keys from bodies of messages in flight

    def __attrs_post_init__(self) -> None:
        if self.target.partition_num == 0 and self.kept.key_member is not None:
            raise InvalidSetting("--key-member needs a target of the redesigned NSQ: the original NSQ has no keys")

    def check(self, target: str) -> None:
        """Raise InvalidSetting if the target cannot store what the source has."""
        generation = "" if self.target.partition_num else ": the original NSQ has no such topics"
        if self.source.extend_support and not self.target.extend_support and not self.kept.without_headers:
            raise InvalidSetting(
                f"messages have headers, tags and keys, which {target} cannot store{generation}",
                hint="upgrade it (nsqext topic upgrade), or give --without-headers",
            )
        if self.source.ordered and not self.target.ordered and not self.kept.without_order:
            raise InvalidSetting(
                f"the topic is consumed in order, and {target} is not an ordered topic{generation}",
                hint="create it with --ordered, or give --without-order",
            )

    def key(self, message: Message) -> str | None:
        """Return the key of a message; its body is read once until `forget`."""
        if self.kept.key_member is None:
            return self.kept.key(message)
        place = _place(message)
        if place not in self._read:
            if len(self._read) == _MOST_READ:  # of messages that were lost before they were copied
                del self._read[next(iter(self._read))]
            self._read[place] = self.kept.key(message)
        return self._read[place]

    def forget(self, message: Message) -> None:
        """Forget the key of a message that is copied."""
        self._read.pop(_place(message), None)

    def lane(self, message: Message) -> str | None:
        """Return what a message shares with the messages whose order it keeps; None for no order."""
        key = self.key(message)
        if key is not None or self.kept.without_order:
            return key
        if self.source.extend_support and not self.source.ordered:
            return None  # its publisher asked for no order
        return message.node if message.partition is None else str(message.partition)

    def partition(self, message: Message, key: str | None) -> int | None:
        """Return the target's partition; None for the partition of the key, or any node of the original NSQ."""
        count, kept = self.target.partition_num, self.kept
        moved = count != self.source.partition_num or kept.key_member is not None
        if not count or (key is not None and moved and not kept.without_headers):
            return None
        if message.partition is not None:
            return message.partition % count
        return None if kept.without_order else crc32(message.node.encode()) % count


@define(eq=False)
class Mirror:
    """Publishes batches of a consumer to a topic, and finishes what the topic has stored."""

    run: RelayRun
    producer: Producer
    placement: Placement

    async def copy(self, batch: MessageBatch) -> None:
        """Publish a batch of one lane; raise Requeue if the target did not store all of it."""
        groups: dict[int | None, list[tuple[Message, OutgoingMessage]]] = defaultdict(list)
        try:
            for message in batch:
                key = self.placement.key(message)
                partition = self.placement.partition(message, key)
                outgoing = self._outgoing(message, key if partition is None else None)
                groups[partition].append((message, outgoing))
        except InvalidInput as error:
            self.run.give_up(error)
            raise Requeue from error
        failures: list[NsqError] = []

        async def store(partition: int | None, pairs: Sequence[tuple[Message, OutgoingMessage]]) -> None:
            outcomes = await self._publish(partition, [outgoing for _, outgoing in pairs])
            for (message, _), outcome in zip(pairs, outcomes, strict=True):
                if isinstance(outcome, NsqError):
                    failures.append(outcome)
                else:
                    self.run.relayed += 1
                    self.placement.forget(message)
                    await _finish(message)

        async with anyio.create_task_group() as tasks:
            for partition, pairs in groups.items():
                tasks.start_soon(store, partition, pairs)
        self._note(failures)
        if failures:
            raise Requeue(_RETRY)

    def _outgoing(self, message: Message, key: str | None) -> OutgoingMessage:
        """Return what is published for a message."""
        if self.placement.kept.without_headers:
            return OutgoingMessage(message.body)
        stored = as_stored(message)
        trace_id = stored.trace_id if self.placement.target.partition_num else None
        bare = trace_id is not None and key is None  # empty bytes: its trace id does not become a header
        header = stored.header if bare else stored.header or None
        return OutgoingMessage(stored.body, trace_id=trace_id, key=key, header=header)

    async def _publish(
        self, partition: int | None, messages: Sequence[OutgoingMessage]
    ) -> Sequence[Receipt | NsqError]:
        try:
            return await self.producer.publish_many(self.run.target, messages, partition=partition)
        except BatchFailed as error:
            return error.outcomes
        except NsqError as error:
            return [error] * len(messages)

    def _note(self, failures: Sequence[NsqError]) -> None:
        """Give up after an error that remains; log the first failure of an outage."""
        for error in failures:
            if isinstance(error, (InvalidInput, ServerError)) and not (error.retryable or error.maybe_stored):
                self.run.give_up(error)
                return
        if failures and self.run.outage is None:
            logger.warning("%s stores no messages, they wait in the source: %s", self.run.target, failures[0])
        self.run.outage = failures[0] if failures else None


async def _finish(message: Message) -> None:
    try:
        await message.finish()
    except MessageNotInFlight:
        message.mark_answered()  # its redelivery is finished without the handler


# The target topic


async def prepare(run: RelayRun, target: ServerAccess, kept: Kept) -> Placement:
    """Create the target topic as the source topic is, unless it exists; wait for clusters that do not respond.

    Raises:
        InvalidSetting: the target cannot store what the source has.
        NsqError: the cluster of the source or target refuses.
    """
    source = await answer_of(run.connection, lambda admin: _source(admin, run.topic))
    if run.running.start is not None and (source is None or source.generation == "original"):
        raise InvalidSetting("the original NSQ has no start positions", topic=run.topic, hint="leave out --start")
    origin = source.meta if source is not None and source.meta is not None else TopicMeta()
    run.sorts = origin.partition_num > 0 and not origin.ordered
    existing = await answer_of(target, lambda admin: _topic(admin, run.target))
    if existing is not None:
        if source is not None and run.topic == run.target:
            _check_apart(source, existing.nodes)
        placement = Placement(origin, existing.meta or TopicMeta(), kept)
        placement.check(run.target)
        await _create_channel(run, source)
        return placement
    if not target.load().lookupd:
        if source is not None and run.topic == run.target:
            _check_apart(source, parse_addresses(target.load().nsqd, "nsqd"))
        return Placement(origin, TopicMeta(), kept)
    redesigned = await answer_of(target, is_redesigned)
    placement = Placement(origin, _shape(origin) if redesigned else TopicMeta(), kept)
    placement.check(run.target)
    await _create_channel(run, source)
    channels = [name for name in (source.channels if source is not None else ()) if name != run.channel]
    channels = [name for name in channels if not is_ephemeral(name)] or ([DEFAULT_CHANNEL] if redesigned else [])
    await answer_of(target, lambda admin: _create(admin, run.target, placement.target, channels))
    meta = placement.target
    record = {
        **{"topic": run.target, "created": True, "partitions": meta.partition_num, "extend": meta.extend_support},
        **{"ordered": meta.ordered, "channels": channels},
    }
    run.connection.show(record, f"{run.target} is created, with channels {', '.join(channels) or 'of its consumers'}")
    return placement


def _check_apart(source: TopicInfo, target: Iterable[Address]) -> None:
    """Refuse to relay a topic to the nodes that it is received from."""
    if {*source.nodes} & {*target}:
        raise InvalidSetting(
            "the topic would be relayed to itself: both clusters have the same nodes", hint="give another topic"
        )


async def _create_channel(run: RelayRun, source: TopicInfo | None) -> None:
    """Create a missing channel at the source: what is published from now on is copied. A position moves it later."""
    if source is not None and run.channel not in source.channels and run.running.start is None:
        await answer_of(run.connection, lambda admin: admin.create_channel(run.topic, run.channel))


def _shape(origin: TopicMeta) -> TopicMeta:
    """Return what a new topic is like; a topic of the original NSQ has one partition."""
    return origin if origin.partition_num else TopicMeta(partition_num=1, replica=1)


async def _source(admin: Admin, name: str) -> TopicInfo:
    info = await admin.topic(name)
    if info.leaderless and not info.channels:
        raise PartitionUnavailable("no partition has a leader that reports the channels", topic=name)
    return info


async def _topic(admin: Admin, name: str) -> TopicInfo | None:
    try:
        return await admin.topic(name)
    except TopicNotFound:
        return None


async def _create(admin: Admin, name: str, meta: TopicMeta, channels: Sequence[str]) -> None:
    nodes = len(await admin.nodes())
    replicas = max(1, min(meta.replica, nodes))
    with waits.waiting(f"all partitions of {name} to accept publishes"):
        await admin.create_topic(
            name,
            partitions=max(1, meta.partition_num),
            replicas=replicas,
            extend=meta.extend_support,
            ordered=meta.ordered,
            multipart=not meta.ordered and (meta.multi_part or meta.partition_num * replicas > nodes),
            registered_channels_only=meta.disable_channel_auto_create,
            channels=channels,
            exist_ok=True,
        )
