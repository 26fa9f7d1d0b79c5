"""Share the buckets of a partition's keys among the consumers of a channel: one owner for each at a time.

The owner of a bucket is the channel's only connection with the bucket's tag. A consumer connects with the tag without
requesting messages, then reads the server's statistics, which contain every connection subscribed before. Only if no
other connection has the tag does it request messages; otherwise it leaves. So of two concurrent claims at least one
sees the other. An owner that gives a bucket away disconnects when its messages in flight are answered. The server ends
the connections of an owner that died or hangs.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

import anyio
from attrs import define, evolve, field, frozen

from nsqext.client.consumer.subscriptions.subscription import Subscription
from nsqext.errors import InvalidSetting, NsqError, outside_text
from nsqext.key_ranges import bucket_tags, count_of_tag, plan_moves, shared_tag
from nsqext.waits import chance

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from nsqext.client.consumer.subscriptions.assignment import SubscriberContext
    from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest
    from nsqext.lookup.node_stats import ClientStats, PartitionChannelStats
    from nsqext.types import Address

logger: logging.Logger = logging.getLogger("nsqext.consumer")

POLL: float = 1.0
"""Mean seconds between two reads of the statistics."""
# reads of the statistics with deliveries after which a new owner has the last owner's messages in flight, and sorts
# them
_TAKEOVER_LOOKS = 5
TAKEOVER_POLL: float = 0.2
"""Seconds between two reads during a takeover."""
LONGEST_TAKEOVER: float = 60.0
"""Seconds after which a takeover ends without deliveries."""
ANSWER_POLL: float = 0.02
"""Seconds between two checks for unanswered messages of a bucket."""
_BLOCKED = 5  # reads in a row without delivery of a partition before an error or a log message
_BLOCKED_AGAIN = 60  # reads until it is logged again

_clock = time.monotonic


@define(eq=False)
class BucketWatch:
    """What a consumer knows about the tags of a topic."""

    worked: bool = False  #: whether any consumer received a message of a bucket
    others: set[int] = field(factory=set)  #: logged buckets of other consumers, by number


@define(eq=False)
class DeliveryWatch:
    """Counts reads of the statistics with deliveries: the server reads on only after it has redelivered requeued
    messages.

    It delivers nothing behind a message whose bucket has no owner that may receive more. So it delivers if it has read
    on since the last look, or if each bucket has such an owner.
    """

    tags: set[str]
    looks: int = 0  #: with deliveries
    last: PartitionChannelStats | None = None

    def note(self, found: PartitionChannelStats) -> None:
        """Count a look if the server delivered."""
        able = {client.tag or "" for client in found.clients if client.in_flight < client.ready}
        reads = self.last is not None and bool(self.last.clients) and found.read > self.last.read
        self.looks += not found.paused and (reads or able >= self.tags)
        self.last = found


@frozen(eq=False)
class _Bucket:
    """A bucket that this consumer owns."""

    subscription: Subscription
    release: anyio.Event = field(factory=lambda: anyio.Event())  #: set to give it away


class KeyBuckets:
    """The buckets of a partition that this consumer owns, while the connection of its member lasts."""

    def __init__(
        self, member: Subscription, node: Address | None, context: SubscriberContext, watch: BucketWatch
    ) -> None:
        # subscribed for messages without a key; shows this consumer to the others
        self._member = member
        self._request: SubscribeRequest = member.request
        self._context = context
        count = member.request.key_tags
        self._tags = bucket_tags(count)
        self._owned: dict[str, _Bucket] = {}
        self._claiming: set[str] = set()
        self._looked = 0.0
        self._me = outside_text(self._request.client_id)  # as the statistics show it
        self._last_owners: dict[str | None, ClientStats] = {}  # other consumers, by tag
        self._delivery = DeliveryWatch({*self._tags, shared_tag(count)})
        self._blocked = 0
        self._refusal: InvalidSetting | None = None
        self._tags_watch = watch
        self._leaving = False
        if node is None:  # lookup does not report the HTTP address of the leader
            raise InvalidSetting(
                "key_tags needs the HTTP addresses of nodes, to see the other consumers",
                topic=member.topic,
                hint="give lookupd instead of nsqd",
            )
        self._node: Address = node

    @property
    def subscriptions(self) -> list[Subscription]:
        """The open subscriptions of owned buckets."""
        return [bucket.subscription for bucket in self._owned.values()]

    async def read(self) -> None:
        """Share buckets until the member's connection ends; raises its error.

        Raises InvalidSetting if the messages of the topic have no tags of these buckets.
        """
        try:
            await self._member.receive_beside(self._share)
        except NsqError:
            if self._refusal is None:
                raise
        if self._refusal is not None:
            raise self._refusal

    def leave(self) -> None:
        """Give all buckets away, each when its messages in flight are answered, and claim no others."""
        self._leaving = True
        for bucket in self._owned.values():
            bucket.release.set()

    async def _share(self, tasks: TaskGroup) -> None:
        """Read the statistics repeatedly; claim and release buckets."""
        while not self._leaving:
            found = await self._look()
            if found is not None and not self._leaving:
                self._move(tasks, found)
                self._watch(found)
            if self._refusal is not None:
                tasks.cancel_scope.cancel()
            await anyio.sleep(POLL * chance.uniform(0.5, 1.5))

    async def _look(self) -> PartitionChannelStats | None:
        """Return the connections of the channel; None if the node does not respond or has no such channel."""
        request = self._request
        self._looked = _clock()
        try:
            found = await self._context.metadata.channels.channel(
                self._node, request.topic, request.partition, request.channel
            )
        except NsqError as error:
            self._log(f"the other consumers are not known: {error}")
            return None
        if found is None:  # the channel was deleted
            return None
        self._last_owners |= {client.tag: client for client in found.clients if client.client_id != self._me}
        self._delivery.note(found)
        return found

    def _move(self, tasks: TaskGroup, found: PartitionChannelStats) -> None:
        owners = {tag: {one.client_id for one in found.clients if one.tag == tag} for tag in self._tags}
        members = {one.client_id for one in found.clients if one.tag in self._delivery.tags}
        releasing = sum(bucket.release.is_set() for bucket in self._owned.values())
        moves = plan_moves(self._me, self._tags, owners, members, releasing)
        for tag in moves.release:
            if tag in self._owned:
                self._owned[tag].release.set()
        for tag in moves.claim:
            if tag not in self._owned and tag not in self._claiming:
                self._claiming.add(tag)
                tasks.start_soon(self._claim, tag)

    def _watch(self, found: PartitionChannelStats) -> None:
        """Notice a message without a tag of these buckets: the server delivers nothing behind it.

        If no message of a bucket was ever delivered, producers lack the setting, and the consumer ends. Otherwise it
        continues with other partitions.
        """
        watch, count = self._tags_watch, len(self._tags)
        buckets = [client for client in found.clients if client.tag in self._tags]
        watch.worked = watch.worked or any(client.messages for client in buckets)
        all_ready = {client.tag for client in buckets if client.ready} >= set(self._tags)
        in_memory = found.in_flight + found.deferred - found.on_disk
        idle = all_ready and found.depth > 0 and not in_memory and not found.paused
        self._blocked = self._blocked + 1 if idle else 0
        if self._blocked == _BLOCKED and not watch.worked:
            self._refusal = InvalidSetting(
                f"no message was ever delivered, and {found.depth} wait: the next message has no tag of "
                f"key_tags={count}",
                topic=self._request.topic,
                partition=self._request.partition,
                node=str(self._request.address),
                hint=f"give all producers of the topic key_tags={count}, and consume what they published before with a "
                "consumer without dispatch",
            )
        elif self._blocked % _BLOCKED_AGAIN == _BLOCKED:
            self._log(
                f"no message is delivered, and {found.depth} wait: the next message has no tag of key_tags={count}; "
                "give all producers of the topic this setting, and consume messages that were published without it by "
                "a consumer without dispatch"
            )
        others = {count_of_tag(client.tag or "") for client in found.clients} - {0, count} - watch.others
        for other in others:
            watch.others.add(other)
            self._log(
                f"other consumers have key_tags={other}, and this consumer {count}: it receives what producers with "
                f"key_tags={count} publish; give all producers and consumers the same number"
            )

    def _log(self, text: str) -> None:
        request = self._request
        logger.warning(
            "%s/%s partition %d: %s",
            request.topic,
            request.channel,
            request.partition,
            text,
            extra={"topic": request.topic, "channel": request.channel, "node": str(request.address)},
        )

    # A bucket

    async def _claim(self, tag: str) -> None:
        """Own a bucket until its connection ends or it is released; return at once if another consumer has it."""
        request = evolve(self._request, tag=tag)
        group = self._context.group
        subscription: Subscription | None = None
        try:
            subscription = await Subscription.open(
                request, deliver=self._context.receiver.receive, monitor=group, backoff=group.backoff
            )
            if await self._is_alone(tag) and not self._leaving:
                self._claiming.discard(tag)
                self._owned[tag] = bucket = _Bucket(subscription)
                await self._own(bucket)
            else:
                await subscription.close()
        except NsqError as error:
            logger.debug("bucket %s cannot be claimed: %s", tag, error, extra={"topic": request.topic})
        finally:
            self._claiming.discard(tag)
            self._owned.pop(tag, None)
            if subscription is not None:
                subscription.end()
                group.remove(subscription)
                self._context.receiver.forget(subscription)

    async def _is_alone(self, tag: str) -> bool:
        """Return whether no other connection has the tag."""
        found = await self._look()
        return found is not None and [one.client_id for one in found.clients if one.tag == tag] == [self._me]

    async def _own(self, bucket: _Bucket) -> None:
        """Receive the messages of a bucket; raises why the connection ended."""
        try:
            await bucket.subscription.receive_beside(partial(self._request_messages, bucket))
        except NsqError:
            if not bucket.subscription.stopped:
                raise
        self._context.group.flush()

    async def _request_messages(self, bucket: _Bucket, tasks: TaskGroup) -> None:
        """Take over a bucket, request its messages, and give it away on release."""
        subscription, group = bucket.subscription, self._context.group
        last, found = self._last_owners.get(subscription.request.tag), self._delivery.last
        self._raise_ready(subscription, 0 if last is None or found is None else min(last.ready, found.unconfirmed))
        await self._take_over(bucket)
        if subscription.taking_over:  # released unhandled: the next owner sorts the messages
            await subscription.close()
            return
        group.add(subscription)
        group.flush()
        await bucket.release.wait()
        group.retire([subscription])
        group.flush()
        await subscription.stop()  # all sent messages have arrived
        await self._wait_answered(subscription)
        group.flush()
        await subscription.close()

    async def _take_over(self, bucket: _Bucket) -> None:
        """Wait until the bucket is released, or the server has redelivered what the last owner had in flight.

        If the last owner died, this is in any order.
        """
        subscription = bucket.subscription
        subscription.taking_over = True
        delivery = self._delivery
        seen, until = delivery.looks, delivery.looks + _TAKEOVER_LOOKS
        with anyio.move_on_after(LONGEST_TAKEOVER) as limit:
            while delivery.looks < until:
                with anyio.move_on_after(TAKEOVER_POLL):
                    await bucket.release.wait()
                    return
                if _clock() - self._looked >= TAKEOVER_POLL:  # one bucket looks for all
                    await self._look()
                if delivery.looks == seen and subscription.in_flight >= subscription.ready:
                    self._raise_ready(subscription, 0)
                seen = delivery.looks
        if limit.cancelled_caught:
            self._log(
                f"for {LONGEST_TAKEOVER:g} s, messages of other buckets have held back those of "
                f"{subscription.request.tag}: its keys may be handled out of order"
            )
        subscription.taking_over = False

    def _raise_ready(self, subscription: Subscription, least: int) -> None:
        """Request more messages of a bucket, whose first messages are kept until they can be sorted."""
        group = self._context.group
        if subscription.ready or not (group.flow.paused or subscription.topic in group.paused_topics):
            more = subscription.ready + max(2, group.flow.max_in_flight // len(self._tags))
            subscription.set_ready(min(subscription.max_ready, max(more, least)))
            group.flush()

    async def _wait_answered(self, subscription: Subscription) -> None:
        while subscription.in_flight:  # noqa: ASYNC110 - answers are not reported, to keep them cheap
            await anyio.sleep(ANSWER_POLL)
