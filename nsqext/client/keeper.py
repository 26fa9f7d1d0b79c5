"""Keeps a consumer subscribed: one task for each partition, which finds the leader again whenever it is lost."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Hashable

import anyio
from anyio.abc import TaskGroup

from nsqext.client.flow import ReadyFlow
from nsqext.client.message import Message
from nsqext.client.options import ConsumerOptions
from nsqext.client.subscription import Subscription, SubscriptionPlan
from nsqext.errors import (
    BadChannel,
    BadTopic,
    ChannelNotRegistered,
    ExtendForbidden,
    ExtendRequired,
    InvalidInput,
    LookupFailed,
    NsqError,
    OrderRequired,
    Unauthorized,
)
from nsqext.lookup.directory import Directory
from nsqext.lookup.table import TopicView
from nsqext.types import Address

__all__ = ("Keeper",)

logger = logging.getLogger("nsqext.consumer")

_TICK = 0.25
_ROTATE = 5.0
_SETTLED = 5.0
"""Seconds after which a subscription counts as working, so that the next failure starts with a short pause."""

_FATAL = (BadChannel, BadTopic, ChannelNotRegistered, InvalidInput, Unauthorized)
_SELF_HEALING = (ExtendForbidden, ExtendRequired, OrderRequired)

Place = Hashable


class Keeper:
    """The subscriptions of one consumer.

    Args:
        topic: name of the topic.
        channel: name of the channel.
        tag: tag that is wanted.
        flow: shares the messages in flight out.
        directory: where the partitions' leaders are found.
        options: the consumer's options.
        arrived: takes messages.
        failed: told when nothing further makes sense.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        tag: str | None,
        flow: ReadyFlow[Subscription],
        directory: Directory,
        options: ConsumerOptions,
        arrived: Callable[[list[Message]], None],
        failed: Callable[[NsqError], None],
    ) -> None:
        self._topic = topic
        self._channel = channel
        self._tag = tag
        self._flow = flow
        self._directory = directory
        self._options = options
        self._arrived = arrived
        self._failed = failed
        self._live: dict[Place, Subscription] = {}
        self._kept: set[Place] = set()
        self._dirty: list[Subscription] = []
        self._wake_flusher = anyio.Event()
        self._changed = anyio.Event()
        self._wanted: int | None = None
        self.started = anyio.Event()
        """All partitions of the first view are subscribed, or nothing will be."""
        self.closing = False

    @property
    def subscriptions(self) -> list[Subscription]:
        """Those that work at the moment."""
        return [subscription for subscription in self._live.values() if subscription.live]

    async def run(self, tasks: TaskGroup) -> None:
        """Start a task for every partition that lookup lists, now and whenever one comes up.

        Raises:
            LookupFailed: no lookup address gave a usable answer the first time.
        """
        self._directory.watch(self._topic, "r", self._view_changed)
        tasks.start_soon(self._run_flusher)
        tasks.start_soon(self._run_upkeep)
        while not self.closing:
            changed = self._changed
            view = await self._find()
            for place in (*view.leaders, *view.nodes):
                if place not in self._kept:
                    self._kept.add(place)
                    tasks.start_soon(self._keep, place)
            if self._wanted is None:
                self._wanted = len(self._kept)
            await changed.wait()

    async def _find(self) -> TopicView:
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
            except LookupFailed:
                raise
            except NsqError as error:
                view, reason = None, error
            if view is not None and (view.leaders or view.nodes):
                return view
            if not told:
                logger.warning("nothing to subscribe to yet: %s", reason, extra={"topic": self._topic})
                told = True
            await anyio.sleep(pause)
            pause = min(pause * 2, 1.0, max(self._options.max_reconnect_wait, self._options.reconnect_wait))

    def _view_changed(self, view: TopicView) -> None:
        self._changed.set()
        self._changed = anyio.Event()
        for place, subscription in self._live.items():
            address = self._address(view, place)
            if address is not None and address != subscription.plan.address and subscription.live:
                logger.info(
                    "the leader has moved to %s", address, extra={"topic": self._topic, "partition": subscription.partition}
                )
                subscription.stopped = True
                subscription.end()

    def _address(self, view: TopicView, place: Place) -> Address | None:
        if isinstance(place, Address):
            return place if place in view.nodes else None
        return view.leaders.get(place) if isinstance(place, int) else None

    async def _keep(self, place: Place) -> None:
        failures = 0
        while not self.closing:
            view = self._directory.peek(self._topic, "r")
            address = self._address(view, place) if view is not None else None
            started = time.monotonic()
            error: NsqError | None = None
            if address is not None and view is not None:
                error = await self._subscribe(place, address, view)
                if isinstance(error, _FATAL):
                    self._failed(error)
                    return
                if self.closing:
                    return
            failures = 0 if time.monotonic() - started > _SETTLED else failures + 1
            if error is not None:
                logger.warning(
                    "subscription ended: %s", error, extra={"topic": self._topic, "channel": self._channel, "place": place}
                )
            await self._find_again(view, failures, quick=isinstance(error, _SELF_HEALING))

    async def _find_again(self, view: TopicView | None, failures: int, *, quick: bool) -> None:
        options = self._options
        longest = min(options.max_reconnect_wait, options.reconnect_wait * 2 ** min(failures, 20))
        if not quick or failures > 1:
            await anyio.sleep(random.uniform(0, longest))
        try:
            await self._directory.refresh(self._topic, "r", failed=view)
        except NsqError as error:
            logger.warning("lookup did not help: %s", error, extra={"topic": self._topic})

    async def _subscribe(self, place: Place, address: Address, view: TopicView) -> NsqError | None:
        """Subscribe and read until it ends; returns why."""
        plan = SubscriptionPlan(
            topic=self._topic,
            channel=self._channel,
            partition=place if isinstance(place, int) else -1,
            address=address,
            meta=view.meta,
            tag=self._tag,
            options=self._options,
        )
        if self._tag is not None and not view.meta.extend_support:
            logger.warning("the topic has no tags, all messages come", extra={"topic": self._topic, "tag": self._tag})
        subscription = Subscription(plan, self._arrived, self._mark)
        try:
            await subscription.open()
            self._live[place] = subscription
            self._flow.add(subscription, subscription.max_rdy)
            self.level()
            if len(self._live) == self._wanted:
                self.flush()
                self.started.set()
            await subscription.read()
        except NsqError as error:
            return None if subscription.stopped else error
        finally:
            subscription.end()
            self._live.pop(place, None)
            self._flow.remove(subscription)
            self.level()
        return None

    # RDY and answers

    def level(self) -> None:
        """Tell every connection its share."""
        for subscription, share in self._flow.shares().items():
            subscription.set_ready(share)

    def _mark(self, subscription: Subscription) -> None:
        self._dirty.append(subscription)
        self._wake_flusher.set()

    def flush(self) -> None:
        """Send all answers that were given."""
        dirty, self._dirty = self._dirty, []
        for subscription in dirty:
            subscription.flush()

    async def _run_flusher(self) -> None:
        """Send answers as soon as the event loop has a moment, many together."""
        while True:
            await self._wake_flusher.wait()
            self._wake_flusher = anyio.Event()
            self.flush()

    async def _run_upkeep(self) -> None:
        rotated = time.monotonic()
        while True:
            await anyio.sleep(_TICK)
            for subscription in self.subscriptions:
                subscription.tick()
            if self._flow.scarce and time.monotonic() - rotated > _ROTATE:
                rotated = time.monotonic()
                self._flow.rotate()
                self.level()

    async def close(self) -> None:
        """Take leave of every node, all at the same time."""
        self.closing = True
        self.flush()
        async with anyio.create_task_group() as tasks:
            for subscription in self.subscriptions:
                tasks.start_soon(subscription.close)
