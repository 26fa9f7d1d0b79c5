"""Keeps a consumer subscribed: one task for each partition, which finds the leader again whenever it is lost."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING

import anyio

from nsqext.client.consumer.subscriptions.assignment import Assignment, Key, Listener, SubscriptionSpec
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.refusals import heals_itself, is_fatal, is_refused
from nsqext.client.consumer.subscriptions.seek import ChannelSeeker
from nsqext.client.consumer.subscriptions.subscribe_request import SubscribeRequest
from nsqext.client.consumer.subscriptions.subscription import Subscription
from nsqext.errors import InvalidPartition, InvalidSetting, LookupFailed, NsqError, ProtocolError
from nsqext.types import Address

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskGroup

    from nsqext.client.consumer.subscriptions.coordinator import SubscriptionGroup
    from nsqext.lookup.metadata import MetadataCache
    from nsqext.lookup.partition_map import PartitionMap

__all__ = ("Subscriber",)

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_SETTLED = 5.0
"""Seconds after which a subscription counts as working, so that the next failure starts with a short pause."""

_clock = time.monotonic


class Subscriber:
    """The subscriptions of one consumer.

    Args:
        source: what is consumed.
        upkeep: keeps those going that work.
        directory: where the partitions' leaders are found.
        listener: told what makes no further sense.

    Attributes:
        seeker: moves the channel.
        started: all partitions of the first view are subscribed, or nothing will be.
        closing: nothing is subscribed any more.
    """

    def __init__(
        self, source: SubscriptionSpec, upkeep: SubscriptionGroup, directory: MetadataCache, listener: Listener
    ) -> None:
        self._source = source
        self._options = source.options
        self._topic = source.topic
        self._upkeep = upkeep
        self._directory = directory
        self._listener = listener
        self._places: dict[Key, Assignment] = {}
        self._changed = anyio.Event()
        self._unwatch: Callable[[], None] | None = None
        self._wanted: int | None = None
        self._strangers: set[Key] | None = set()
        self.seeker: ChannelSeeker = ChannelSeeker(source, self._places, upkeep.live)
        self.started: anyio.Event = anyio.Event()
        self.closing: bool = False

    async def run(self, tasks: TaskGroup) -> None:
        """Start a task for every partition that lookup lists, now and whenever one comes up.

        Raises:
            LookupFailed: no lookup address gave a usable answer the first time.
            InvalidPartition: the topic has no partition that is wanted.
        """
        self._unwatch = self._directory.watch(self._topic, "r", self._view_changed)
        self._upkeep.start(tasks)
        while not self.closing:
            changed = self._changed
            view = await self._find()
            self._check_choice(view)
            keys: list[Key] = [*view.leaders, *view.nodes]
            for key in keys:
                if key not in self._places and self._source.wants(key):
                    place = self._places[key] = Assignment(key)
                    tasks.start_soon(self._keep, place)
            if self._wanted is None:
                self._wanted = len(self._places)
            await changed.wait()

    def _check_choice(self, view: PartitionMap) -> None:
        chosen = self._options.partitions
        if chosen is None:
            return
        if view.nodes and not view.leaders:
            raise InvalidSetting("the original NSQ has no partitions to choose from", topic=self._topic)
        wrong = [partition for partition in chosen if partition >= view.partition_num > 0]
        if wrong:
            raise InvalidPartition(
                f"the topic has {view.partition_num} partitions, not number {wrong[0]}", topic=self._topic
            )

    async def _find(self) -> PartitionMap:
        """Return the first view that has something to subscribe to, however long it takes."""
        pause = self._options.reconnect_wait
        told = False
        while True:
            view = self._directory.peek(self._topic, "r")
            if view is not None and (view.leaders or view.nodes):
                return view
            try:
                view = await self._directory.resolve(self._topic, "r")
                reason: object = "no partition has a leader"
            except NsqError as error:
                if isinstance(error, LookupFailed) and not told:
                    raise  # an address that was never right is told at once
                view, reason = None, error
            if view is not None and (view.leaders or view.nodes):
                return view
            if not told:
                logger.warning("nothing to subscribe to yet: %s", reason, extra={"topic": self._topic})
                told = True
            await anyio.sleep(pause)
            pause = min(pause * 2, 1.0, max(self._options.max_reconnect_wait, self._options.reconnect_wait))

    def _view_changed(self, view: PartitionMap) -> None:
        self._changed.set()
        self._changed = anyio.Event()
        if self.closing:
            return
        for key, subscription in list(self._upkeep.live.items()):
            if not subscription.live:
                continue
            address = _address(view, key)
            if address is not None and address != subscription.request.address:
                reason = f"the leader has moved to {address}"
            elif view.meta.partition_num and not subscription.request.fits(view.meta):
                # an upgraded topic goes silent for who did not ask for headers (captured: upgrade_ext)
                reason = "the topic was changed"
            else:
                continue
            logger.info("%s", reason, extra={"topic": self._topic, "partition": subscription.partition})
            subscription.stopped = True
            subscription.end()

    async def _keep(self, place: Assignment) -> None:
        failures = 0
        while not self.closing:
            view = self._directory.peek(self._topic, "r")
            address = _address(view, place.key) if view is not None else None
            if address is None or view is None:
                del self._places[place.key]  # it comes back with a view that lists it
                place.moved.set()  # nobody else will tell who waits for this one
                return
            started = _clock()
            error = await self._subscribe(place, address, view)
            if error is not None and (is_fatal(error, opened=place.opened) or self._nobody_is_nsqd(place, error)):
                place.moved.set()
                self._listener.failed(error)
                return
            if self.closing:
                return
            failures = 0 if _clock() - started > _SETTLED else failures + 1
            if error is not None:
                logger.warning(
                    "subscription ended: %s",
                    error,
                    extra={"topic": self._topic, "channel": self._source.channel, "place": str(place.key)},
                )
            elif place.pending is not None:
                continue  # it ended because it is to begin somewhere else
            await self._find_again(place, view, failures, error)

    def _nobody_is_nsqd(self, place: Assignment, error: NsqError) -> bool:
        """Return whether every address turned out to be of something else, a wrong setting, which time does not heal.

        Once one of them was an nsqd, this is never said: what was right once may become right again.
        """
        if self._strangers is None or not isinstance(error, ProtocolError):
            return False
        self._strangers.add(place.key)
        return self._strangers >= self._places.keys()

    async def _find_again(self, place: Assignment, view: PartitionMap, failures: int, error: NsqError | None) -> None:
        options = self._options
        longest = min(options.max_reconnect_wait, options.reconnect_wait * 2 ** min(failures, 20))
        if failures > 1 or not heals_itself(error):
            await anyio.sleep(random.uniform(0, longest))
        suspect = place.key if isinstance(place.key, int) and is_refused(error) else None
        try:
            await self._directory.refresh(self._topic, "r", view, suspect)
        except NsqError as failure:
            logger.warning("lookup did not help: %s", failure, extra={"topic": self._topic})

    async def _subscribe(self, place: Assignment, address: Address, view: PartitionMap) -> NsqError | None:
        """Subscribe and read until it ends; returns why."""
        source = self._source
        plan = SubscribeRequest(
            source.topic, source.channel, place.partition, address, view.meta, source.tag, self._options
        )
        if source.tag is not None and not view.meta.extend_support:
            logger.warning("the topic has no tags, all messages come", extra={"topic": self._topic, "tag": source.tag})
        upkeep = self._upkeep
        backoff = Backoff(self._options.backoff) if self._options.backoff.mode == "connection" else upkeep.backoff
        subscription = Subscription(plan, self._listener.arrived, upkeep, backoff)
        try:
            await self.seeker.see_to_start(place, view, address)
            await subscription.open()
            place.opened = True
            await self.seeker.move(place, subscription, view)
            self._strangers = None
            upkeep.add(place.key, subscription)
            if self._wanted is not None and len(upkeep.live) >= self._wanted:
                upkeep.flush()
                self.started.set()
            await subscription.read()
        except NsqError as error:
            return None if subscription.stopped else error
        finally:
            subscription.end()
            upkeep.remove(place.key, subscription)
        return None

    async def close(self) -> None:
        """Take leave of every node, all at the same time."""
        self.closing = True
        for place in self._places.values():
            place.moved.set()
        self._upkeep.flush()
        async with anyio.create_task_group() as tasks:
            for subscription in self._upkeep.subscriptions:
                tasks.start_soon(subscription.close)

    def forget(self) -> None:
        """Have the topic not kept fresh any more, once all tasks have ended."""
        if self._unwatch is not None:
            self._unwatch()


def _address(view: PartitionMap, key: Key) -> Address | None:
    if isinstance(key, Address):
        return key if key in view.nodes else None
    return view.leaders.get(key)
