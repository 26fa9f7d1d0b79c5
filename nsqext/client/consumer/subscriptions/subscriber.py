"""Keep the partitions of a topic subscribed, by a task each, which finds the new leader after a connection's end."""

from __future__ import annotations

import logging
import os
import time
from socket import gethostname
from typing import TYPE_CHECKING

import anyio

from nsqext.client.consumer.message import KeySharing
from nsqext.client.consumer.subscriptions.assignment import STABLE, Assignment, Key, SubscriberContext
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest
from nsqext.client.consumer.subscriptions.refusals import NOT_LEADER, STALE_META, Refusals, is_fatal
from nsqext.client.consumer.subscriptions.subscription import Subscription
from nsqext.errors import (
    FrameTooLarge,
    InvalidPartition,
    InvalidSetting,
    InvalidState,
    LookupFailed,
    LookupUnreachable,
    NsqError,
    PartitionUnavailable,
)
from nsqext.types import Address
from nsqext.waits import Wakeup, pause_after

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.client.consumer.subscriptions.channel_seeker import ChannelSeeker
    from nsqext.client.consumer.subscriptions.key_buckets import BucketWatch, KeyBuckets
    from nsqext.lookup.partition_map import PartitionMap

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_WARNING_INTERVAL = 60.0  # seconds between two warnings about failures of a partition
_LEAVE_POLL = 0.02  # seconds between two checks for answers of a topic that is left
_LONGEST_POLL = 1.0  # longest pause in seconds while lookup lists no topic or no partition
_clock = time.monotonic


def pause_before_lookup(options: ConsumerOptions, failures: int) -> float:
    """Return the seconds until lookup is asked again about a topic or partition that it did not list."""
    return pause_after(options.reconnect_wait, min(_LONGEST_POLL, options.max_reconnect_wait), failures)


class Subscriber:
    """The subscriptions of a consumer to the partitions of a topic."""

    def __init__(
        self, topic: str, context: SubscriberContext, fail: Callable[[NsqError], None], *, discovered: bool = False
    ) -> None:
        self._topic = topic
        self._context = context
        self._options = context.options
        self._group = context.group
        self._metadata = context.metadata
        self._fail = fail  # ends the topic with an error
        #: whether a pattern found it; then partitions are given up when lookup does not know the topic, which a
        #: subscription would create again on the original NSQ
        self.discovered: bool = discovered
        self._assignments: dict[Key, Assignment] = {}
        self._live: dict[Key, Subscription] = {}
        self._buckets: dict[Key, KeyBuckets] = {}
        self._changed = Wakeup()
        self._unwatch: Callable[[], None] | None = None
        self._expected: int | None = None
        self._ordered_warned = self._all_warned = self._shared_checked = False
        self._key_tags = self._options.bucket_count if self._options.key_tags else 0  # chosen, whatever servers support
        self._tag = self._options.tag
        if self._key_tags:
            from nsqext.key_ranges import shared_tag

            self._tag = shared_tag(self._key_tags)
        name = self._options.connection.client_id or gethostname().partition(".")[0]
        self._client_id = f"{name}-{os.urandom(4).hex()}"
        self._bucket_watch: BucketWatch | None = None
        self._key_sharing = KeySharing.NONE
        self._refusals = Refusals(context.options)
        self._seeker: ChannelSeeker | None = None
        #: all partitions of the first lookup are subscribed, or the topic is left
        self.started: anyio.Event = anyio.Event()
        self.closing: bool = False
        self.vanished: bool = False  #: partitions of a discovered topic were given up

    @property
    def seeker(self) -> ChannelSeeker:
        if self._seeker is None:
            from nsqext.client.consumer.subscriptions.channel_seeker import ChannelSeeker

            self._seeker = ChannelSeeker(self._topic, self._context, self._assignments, self._live)
        return self._seeker

    @property
    def idle(self) -> bool:
        """Whether no partition is subscribed or being subscribed."""
        return not self._assignments

    @property
    def blocked(self) -> list[str]:
        """Why partitions cannot be consumed until a setting is changed."""
        found = [one for one in tuple(self._assignments.values()) if one.blocked is not None]
        return [str(one.blocked) for one in found if not one.is_stable(_clock())]

    async def run(self) -> None:
        """Start a task for every partition of the lookup service; raises LookupFailed or InvalidPartition."""
        if self.closing:
            return
        self._unwatch = self._metadata.watch(self._topic, "r", self._view_changed)
        while not self.closing:
            view = await self._first_view()
            if view is None:
                return
            self._check_partitions(view)
            keys: list[Key] = [*view.leaders, *view.nodes]
            for key in keys:
                if key not in self._assignments and self._context.wants(key):
                    assignment = self._assignments[key] = Assignment(key)
                    self._context.tasks.start_soon(self._keep, assignment)
            if self._expected is None:
                self._expected = len(self._assignments)
                if not self._expected:
                    self._warn_of_wait(f"none of partitions={self._options.partitions} has a leader")
            await self._changed.wait()

    def _check_partitions(self, view: PartitionMap) -> None:
        chosen = self._options.partitions
        if chosen is None:
            return
        if view.nodes and not view.leaders:
            raise InvalidSetting("the original NSQ has no partitions to choose from", topic=self._topic)
        wrong = [partition for partition in chosen if partition >= view.partition_num > 0]
        if wrong:
            raise InvalidPartition(
                f"partition {wrong[0]} does not exist: the last is {view.partition_num - 1}", topic=self._topic
            )

    async def _first_view(self) -> PartitionMap | None:
        """Wait for a partition map with a leader or a node; None if the topic is left before."""
        options, failures = self._options, 0
        deadline = _clock() + options.lookup_timeout
        answered = warned = False
        while not self.closing:
            view = self._metadata.cached(self._topic, "r")
            if view is not None and (view.leaders or view.nodes):
                return view
            reason: object = "no partition has a leader"
            try:
                view = await self._metadata.resolve(self._topic, "r")
                answered = True
                if view.leaders or view.nodes:
                    return view
                if view.filtered:
                    reason = "node_filter leaves out every node"
            except LookupFailed as error:
                waits = isinstance(error, LookupUnreachable) and _clock() < deadline
                if not answered and not waits:
                    raise  # a wrong address is reported at once
                reason = error
            except NsqError as error:
                if self.closing:
                    return None  # the metadata was closed
                answered, reason = True, error
            if not warned:
                self._warn_of_wait(reason)
                warned = True
            failures += 1
            await anyio.sleep(pause_before_lookup(options, failures))
        return None

    def _warn_of_wait(self, reason: object) -> None:
        logger.warning("waiting for a partition to subscribe to: %s", reason, extra={"topic": self._topic})

    def _view_changed(self, view: PartitionMap) -> None:
        self._changed.wake()
        if self.closing:
            return
        for key, subscription in list(self._live.items()):
            if not subscription.live:
                continue
            address = _address(view, key)
            if address is not None and address != subscription.request.address:
                self._log(logging.INFO, self._assignments.get(key), f"leader moved to {address}", subscription.node)
                self._context.events.emit(
                    "leader_moved", self._topic, subscription.partition, str(address), f"was {subscription.node}"
                )
            elif view.meta.partition_num and not subscription.request.fits(self._refusals.corrected(view.meta)):
                # an upgraded topic sends nothing to a connection without extend support (captured: upgrade_ext)
                self._log(logging.INFO, self._assignments.get(key), "the topic was changed", subscription.node)
            else:
                continue
            subscription.stopped = True
            subscription.end()

    def _log(self, level: int, assignment: Assignment | None, text: str, node: str) -> None:
        logger.log(
            level,
            "%s/%s %s at %s: %s",
            self._topic,
            self._context.channel,
            assignment,
            node,
            text,
            extra={"topic": self._topic, "channel": self._context.channel, "node": node},
        )

    # A partition

    async def _keep(self, assignment: Assignment) -> None:
        """Keep a partition subscribed until the consumer closes or the topic loses the partition."""
        failures = waits = 0
        again = False
        while not self.closing:
            view = self._metadata.cached(self._topic, "r")
            address = _address(view, assignment.key) if view is not None else None
            gone = self.discovered and self._metadata.is_unknown(self._topic, "r")
            self.vanished = self.vanished or gone
            if address is None or view is None or gone:
                del self._assignments[assignment.key]  # a view that lists it again makes a new assignment
                assignment.moved.set()  # wakes a seek
                if gone:
                    self._context.forget(assignment)
                if self._expected is not None:
                    self._expected = max(1, min(self._expected, len(self._assignments)))
                self._check_started()
                return
            if again and not await self._may_subscribe(assignment, view, address, waits):
                waits += 1
                continue
            again, waits = True, 0
            started = _clock()
            error = await self._subscribe(assignment, address, view)
            if error is not None and (
                is_fatal(error, opened=assignment.opened > 0)
                or self._refusals.all_misconfigured(assignment.key, error, self._assignments)
            ):
                assignment.moved.set()
                self._fail(error)
                return
            if self.closing:
                return
            failures = 0 if _clock() - started > STABLE else failures + 1
            if error is not None:
                self._warn(assignment, error, str(address))
            elif assignment.pending is not None:
                continue  # seek ended it
            await self._refresh(assignment, view, failures, error)

    async def _may_subscribe(self, assignment: Assignment, view: PartitionMap, address: Address, waits: int) -> bool:
        """Return whether a node still has the topic; otherwise pause: the original NSQ would create it again."""
        if isinstance(assignment.key, int):
            return True
        try:
            if await self._metadata.may_subscribe(self._topic, view, address):
                return True
        except InvalidState:
            if not self.closing:  # otherwise the metadata was closed
                raise
            return False
        if not waits:
            text = "waiting until lookup lists the node and the node has the topic, which may have been deleted"
            self._log(logging.INFO, assignment, text, str(address))
        await anyio.sleep(pause_before_lookup(self._options, waits + 1))
        return False

    def _warn(self, assignment: Assignment, error: NsqError, node: str) -> None:
        """Log a failure, once per partition within ``_WARNING_INTERVAL``; a refusal after an outage at once."""
        now, refused = _clock(), not error.retryable
        if now - assignment.warned_at < _WARNING_INTERVAL and (assignment.refused or not refused):
            assignment.unreported += 1
            return
        more = f" (and {assignment.unreported} earlier failures)" if assignment.unreported else ""
        assignment.warned_at, assignment.refused, assignment.unreported = now, refused, 0
        self._log(logging.WARNING, assignment, f"subscription ended: {error}{more}", node)

    async def _refresh(self, assignment: Assignment, view: PartitionMap, failures: int, error: NsqError | None) -> None:
        """Pause with full jitter, then ask the lookup service for a newer partition map."""
        options = self._options
        if failures > 1 or not isinstance(error, STALE_META):
            await anyio.sleep(pause_after(options.reconnect_wait, options.max_reconnect_wait, failures + 1, error))
        if self.closing or isinstance(assignment.key, Address):
            return  # a node of the original NSQ: `_may_subscribe` asks
        suspect = assignment.key if isinstance(error, (*NOT_LEADER, PartitionUnavailable)) else None
        try:
            await self._metadata.refresh(self._topic, "r", view, suspect)
        except NsqError as failure:
            if not self.closing:  # otherwise the metadata was closed
                logger.warning("lookup failed: %s", failure, extra={"topic": self._topic})

    async def _subscribe(self, assignment: Assignment, address: Address, view: PartitionMap) -> NsqError | None:
        """Subscribe and read until the connection ends; return why."""
        options, group = self._options, self._group
        meta = self._refusals.corrected(view.meta)
        place = self._topic, self._context.channel, assignment.partition, address
        request = SubscribeRequest(
            *place, meta, options=options, tag=self._tag, client_id=self._client_id, key_tags=self._key_tags
        )
        if meta.extend_support:
            self._all_warned = False  # it may be created again without
        elif not self._all_warned and (options.tag is not None or options.ext_filter is not None):
            from nsqext.client.consumer.subscriptions.topic_warnings import warn_of_all_messages

            self._all_warned = True
            warn_of_all_messages(self._topic, options)
        failure = self._options.failure
        if failure.max_attempts and not failure.reject_ordered and meta.ordered and not self._ordered_warned:
            from nsqext.client.consumer.subscriptions.topic_warnings import warn_of_order

            self._ordered_warned = True
            warn_of_order(self._topic, failure)
        backoff = Backoff(self._options.backoff) if self._options.backoff.mode == "connection" else group.backoff
        subscription: Subscription | None = None
        reason: NsqError | None = None
        try:
            if options.start is not None:
                await self.seeker.apply_start(assignment, view, address)
            subscription = await Subscription.open(
                request, deliver=self._context.receiver.receive, monitor=group, backoff=backoff
            )
            assignment.opened += 1
            subscription.number = assignment.opened
            if (last := assignment.last) is not None and last.moved and (last.start is not None or not last.received):
                subscription.moved = True  # no message was delivered since
            if assignment.pending is not None:
                await self.seeker.move(assignment, subscription, view)
            if self.closing:
                await subscription.close()  # the topic was left meanwhile
                return None
            self._refusals.subscribed()
            self._connected(assignment, subscription)
            if self._options.keeps_keys_alone and not request.ordered and not self._shared_checked:
                from nsqext.client.consumer.subscriptions.topic_warnings import warn_of_others

                self._shared_checked = True
                if (http := view.http.get(address)) is not None:
                    self._context.tasks.start_soon(warn_of_others, self._metadata, http, subscription)
            self._note_sharing(assignment, subscription)
            if subscription.key_sharing is KeySharing.TAGS:
                await self._share_keys(assignment, subscription, view)
            else:
                await subscription.receive()
        except NsqError as error:
            stopped = subscription is not None and subscription.stopped
            reason = None if stopped else self._refusals.heed(error, request)
        finally:
            if subscription is not None:
                self._disconnected(assignment, subscription, reason)
        return reason

    async def _share_keys(self, assignment: Assignment, subscription: Subscription, view: PartitionMap) -> None:
        from nsqext.client.consumer.subscriptions.key_buckets import BucketWatch, KeyBuckets

        if self._bucket_watch is None:
            self._bucket_watch = BucketWatch()
        http = view.http.get(subscription.request.address)
        self._buckets[assignment.key] = buckets = KeyBuckets(subscription, http, self._context, self._bucket_watch)
        try:
            await buckets.read()
        finally:
            del self._buckets[assignment.key]
            self._context.receiver.forget(subscription)

    def _note_sharing(self, assignment: Assignment, subscription: Subscription) -> None:
        """Log how keys are shared; forget a partition's messages if its last leader shared keys in another way."""
        sharing, before = subscription.key_sharing, assignment.last
        assignment.last = subscription
        if before is not None and before.key_sharing is not sharing:
            self._context.receiver.forget(before)
        if sharing is not self._key_sharing:
            self._key_sharing = sharing
            count = subscription.request.key_tags
            how = f"by their tags, with key_tags={count}" if count else "by the server"
            self._log(logging.INFO, assignment, f"consumers share the keys {how}", subscription.node)

    def _connected(self, assignment: Assignment, subscription: Subscription) -> None:
        self._live[assignment.key] = subscription
        assignment.opened_at = _clock()
        self._group.add(subscription)
        self._context.events.emit("connected", self._topic, assignment.partition, subscription.node)
        if assignment.ended_at:
            self._group.reconnects += 1
            assignment.warned_at = float("-inf")
            self._log(logging.INFO, assignment, f"back after {_clock() - assignment.ended_at:.1f} s", subscription.node)
        elif self.started.is_set():
            self._log(logging.INFO, assignment, "subscribed", subscription.node)
        self._check_started()

    def _check_started(self) -> None:
        """Note that all partitions of the first lookup are subscribed, without those that lookup removed meanwhile."""
        if self._expected is not None and len(self._live) >= self._expected and not self.started.is_set():
            self._group.flush()
            self.log_subscribed()
            self.started.set()

    def log_subscribed(self) -> None:
        by_node: dict[str, list[str]] = {}
        for subscription in self._open():
            partitions = by_node.setdefault(subscription.node, [])
            if subscription.partition is not None:
                partitions.append(str(subscription.partition))
        text = ", ".join(
            f"{node} (partitions {', '.join(partitions)})" if partitions else node
            for node, partitions in by_node.items()
        )
        extra = {"topic": self._topic, "channel": self._context.channel}
        logger.info("subscribed to %s/%s at %s", self._topic, self._context.channel, text or "no node", extra=extra)

    def _disconnected(self, assignment: Assignment, subscription: Subscription, reason: NsqError | None) -> None:
        subscription.end()
        if self._group.remove(subscription):
            del self._live[assignment.key]
            assignment.ended_at = _clock()
            if isinstance(reason, FrameTooLarge) or assignment.ended_at - assignment.opened_at > STABLE:
                assignment.blocked = reason if isinstance(reason, FrameTooLarge) else None
            self._context.events.emit(
                "disconnected", self._topic, assignment.partition, subscription.node, str(reason or "closed")
            )

    # The end

    async def leave(self) -> None:
        """Request no further messages; close all subscriptions when messages in flight are answered.

        After ``close_timeout`` seconds, unanswered messages are redelivered.
        """
        self._begin_close()
        self._group.retire(self._open())
        for buckets in self._buckets.values():
            buckets.leave()
        with anyio.move_on_after(self._options.close_timeout):
            while any(one.in_flight for one in self._open()):  # noqa: ASYNC110 - answers are not reported, to keep them cheap
                await anyio.sleep(_LEAVE_POLL)
        await self.close()

    async def close(self) -> None:
        """Close all subscriptions concurrently, and open no others."""
        self._begin_close()
        self._group.flush()
        async with anyio.create_task_group() as tasks:
            for subscription in self._open():
                tasks.start_soon(subscription.close)

    def _begin_close(self) -> None:
        self.closing = True
        self.started.set()
        self._changed.wake()
        for assignment in self._assignments.values():
            assignment.moved.set()

    def _open(self) -> list[Subscription]:
        shared = [one for buckets in self._buckets.values() for one in buckets.subscriptions]
        return [subscription for subscription in (*self._live.values(), *shared) if subscription.live]

    def forget(self) -> None:
        """Stop watching the topic."""
        if self._unwatch is not None:
            self._unwatch()

    def forget_messages(self) -> None:
        """Forget the lost messages of the left topic."""
        for assignment in self._assignments.values():
            self._context.forget(assignment)


def _address(view: PartitionMap, key: Key) -> Address | None:
    if isinstance(key, Address):
        return key if key in view.nodes else None
    return view.leaders.get(key)
