"""Keeps a consumer subscribed: one task for each partition, which finds the leader again whenever it is lost."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING

import anyio

from nsqext.client.backoff import Backoff
from nsqext.client.flusher import Flusher
from nsqext.client.places import Key, Listener, Place, Source
from nsqext.client.plan import SubscriptionPlan
from nsqext.client.positions import Position, channel_exists, move_channel
from nsqext.client.subscription import Subscription
from nsqext.errors import (
    AuthFailed,
    AuthRequired,
    BadChannel,
    BadPartition,
    BadTopic,
    ChannelNotRegistered,
    ExtendForbidden,
    ExtendRequired,
    IdentifyFailed,
    InvalidCommand,
    InvalidInput,
    InvalidPartition,
    InvalidSetting,
    InvalidState,
    LookupFailed,
    NotLeader,
    NsqError,
    OrderRequired,
    PartitionUnavailable,
    ProtocolError,
    TopicNotExist,
    Unauthorized,
)
from nsqext.types import Address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anyio.abc import TaskGroup

    from nsqext.client.flow import ReadyFlow
    from nsqext.client.message import Message
    from nsqext.lookup.directory import Directory
    from nsqext.lookup.table import TopicView

__all__ = ("Keeper",)

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_TICK = 0.25
_SETTLED = 5.0
"""Seconds after which a subscription counts as working, so that the next failure starts with a short pause."""

_FATAL = (AuthRequired, BadChannel, BadTopic, ChannelNotRegistered, InvalidInput, Unauthorized)
_FATAL_AT_FIRST = (AuthFailed, BadPartition, IdentifyFailed, InvalidCommand)
"""Settings that the server does not take; once they were taken, the server is to blame, and it is tried again."""
_REFUSED = (NotLeader, TopicNotExist)
_SELF_HEALING = (ExtendForbidden, ExtendRequired, OrderRequired)

_clock = time.monotonic


class Keeper:
    """The subscriptions of one consumer.

    Args:
        source: what is consumed.
        flow: shares the messages in flight out.
        backoff: of the consumer.
        directory: where the partitions' leaders are found.
        listener: told what happens.
    """

    def __init__(
        self,
        source: Source,
        flow: ReadyFlow[Subscription],
        backoff: Backoff,
        directory: Directory,
        listener: Listener,
    ) -> None:
        self._source = source
        self._options = source.options
        self._topic = source.topic
        self._flow = flow
        self._backoff = backoff
        self._directory = directory
        self._listener = listener
        self._live: dict[Key, Subscription] = {}
        self._places: dict[Key, Place] = {}
        self._flusher = Flusher()
        self._wake_upkeep = anyio.Event()
        self._changed = anyio.Event()
        self._unwatch: Callable[[], None] | None = None
        self._wanted: int | None = None
        self._strangers: set[Key] | None = set()
        self.started: anyio.Event = anyio.Event()
        """All partitions of the first view are subscribed, or nothing will be."""
        self.closing: bool = False

    @property
    def subscriptions(self) -> list[Subscription]:
        """Those that work at the moment."""
        return [subscription for subscription in self._live.values() if subscription.live]

    # Places

    async def run(self, tasks: TaskGroup) -> None:
        """Start a task for every partition that lookup lists, now and whenever one comes up.

        Raises:
            LookupFailed: no lookup address gave a usable answer the first time.
            InvalidPartition: the topic has no partition that is wanted.
        """
        self._unwatch = self._directory.watch(self._topic, "r", self._view_changed)
        tasks.start_soon(self._flusher.run)
        tasks.start_soon(self._run_upkeep)
        while not self.closing:
            changed = self._changed
            view = await self._find()
            self._check_choice(view)
            keys: list[Key] = [*view.leaders, *view.nodes]
            for key in keys:
                if key not in self._places and self._source.wants(key):
                    place = self._places[key] = Place(key)
                    tasks.start_soon(self._keep, place)
            if self._wanted is None:
                self._wanted = len(self._places)
            await changed.wait()

    def _check_choice(self, view: TopicView) -> None:
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
        for key, subscription in list(self._live.items()):
            if not subscription.live:
                continue
            address = _address(view, key)
            if address is not None and address != subscription.plan.address:
                reason = f"the leader has moved to {address}"
            elif view.meta.partition_num and not subscription.plan.fits(view.meta):
                # an upgraded topic goes silent for who did not ask for headers (captured: upgrade_ext)
                reason = "the topic was changed"
            else:
                continue
            logger.info("%s", reason, extra={"topic": self._topic, "partition": subscription.partition})
            subscription.stopped = True
            subscription.end()

    async def _keep(self, place: Place) -> None:
        failures = 0
        while not self.closing:
            view = self._directory.peek(self._topic, "r")
            address = _address(view, place.key) if view is not None else None
            if address is None or view is None:
                del self._places[place.key]  # it comes back with a view that lists it
                return
            started = _clock()
            error = await self._subscribe(place, address, view)
            fatal = _FATAL if place.opened else _FATAL + _FATAL_AT_FIRST
            if error is not None and (isinstance(error, fatal) or self._nobody_is_nsqd(place, error)):
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

    def _nobody_is_nsqd(self, place: Place, error: NsqError) -> bool:
        """Return whether every address turned out to be of something else, a wrong setting, which time does not heal.

        Once one of them was an nsqd, this is never said: what was right once may become right again.
        """
        if self._strangers is None or not isinstance(error, ProtocolError):
            return False
        self._strangers.add(place.key)
        return self._strangers >= self._places.keys()

    async def _find_again(self, place: Place, view: TopicView, failures: int, error: NsqError | None) -> None:
        options = self._options
        longest = min(options.max_reconnect_wait, options.reconnect_wait * 2 ** min(failures, 20))
        if failures > 1 or not isinstance(error, _SELF_HEALING):
            await anyio.sleep(random.uniform(0, longest))
        suspect = place.key if isinstance(place.key, int) and isinstance(error, _REFUSED) else None
        try:
            await self._directory.refresh(self._topic, "r", view, suspect)
        except NsqError as failure:
            logger.warning("lookup did not help: %s", failure, extra={"topic": self._topic})

    async def _subscribe(self, place: Place, address: Address, view: TopicView) -> NsqError | None:
        """Subscribe and read until it ends; returns why."""
        source = self._source
        plan = SubscriptionPlan(
            source.topic, source.channel, place.partition, address, view.meta, source.tag, self._options
        )
        if source.tag is not None and not view.meta.extend_support:
            logger.warning("the topic has no tags, all messages come", extra={"topic": self._topic, "tag": source.tag})
        backoff = self._backoff
        if self._options.backoff.mode == "connection":
            backoff = Backoff(self._options.backoff)
        subscription = Subscription(plan, self, backoff)
        try:
            await self._see_to_start(place, view, address)
            await subscription.open()
            place.opened = True
            await self._move(place, subscription, view)
            self._live[place.key] = subscription
            self._strangers = None
            self._flow.add(subscription, subscription.max_rdy, backoff, _clock())
            self.level()
            if self._wanted is not None and len(self._live) >= self._wanted:
                self.flush()
                self.started.set()
            await subscription.read()
        except NsqError as error:
            return None if subscription.stopped else error
        finally:
            subscription.end()
            if self._live.get(place.key) is subscription:
                del self._live[place.key]
            self._flow.remove(subscription)
            self.level()
        return None

    # Positions

    async def _see_to_start(self, place: Place, view: TopicView, address: Address) -> None:
        start = self._options.start_of(place.partition)
        if not place.fresh or start is None:
            return
        http = _http(view, place.partition, address)
        if self._options.start_existing or not await channel_exists(
            http, self._topic, place.partition, self._source.channel
        ):
            place.pending = start
        place.fresh = False

    async def _move(self, place: Place, subscription: Subscription, view: TopicView) -> None:
        if place.pending is None:
            return
        http = _http(view, place.partition, subscription.plan.address)
        subscription.start = position = place.pending
        await move_channel(http, self._topic, place.partition, self._source.channel, position)
        if place.pending is position:
            place.pending = None
            place.moved.set()

    async def seek(self, position: Position, partitions: Sequence[int] | None) -> None:
        """Let the channel read on from a place; returns when it does at all partitions.

        Raises:
            InvalidPartition: a partition that is not consumed here.
            InvalidState: the consumer ended meanwhile.
        """
        keys: Iterable[Key] = self._places if partitions is None else partitions
        places = []
        for key in keys:
            if key not in self._places:
                raise InvalidPartition(f"partition {key} is not consumed here", topic=self._topic)
            places.append(self._places[key])
        if any(isinstance(place.key, Address) for place in places):
            raise InvalidSetting("the original NSQ cannot seek", topic=self._topic)
        for place in places:
            place.pending, place.moved = position, anyio.Event()
        for place in places:
            subscription = self._live.get(place.key)
            if subscription is not None:
                await subscription.close()
        for place in places:
            await place.moved.wait()
            if place.pending is position:
                raise InvalidState(
                    "the consumer ended before it could seek", topic=self._topic, partition=place.partition
                )

    # RDY and answers

    def arrived(self, subscription: Subscription, messages: list[Message], now: float) -> None:
        """Pass the messages of one read on."""
        self._listener.arrived(messages)
        if self._flow.delivered(subscription, now):
            self.level()

    def level(self) -> None:
        """Tell every connection its share."""
        now = _clock()
        for subscription, share in self._flow.shares(now).items():
            subscription.set_ready(share)
        if self._next_tick(now) < _TICK:
            self._wake_upkeep.set()

    def mark(self, subscription: Subscription) -> None:
        """Note that a subscription has something to send."""
        self._flusher.mark(subscription)

    def flush(self) -> None:
        """Send all answers that were given."""
        self._flusher.flush()

    def _backoffs(self) -> list[Backoff]:
        return [self._backoff, *(subscription.backoff for subscription in self._live.values())]

    def _next_tick(self, now: float) -> float:
        return min((max(0.0, backoff.until - now) for backoff in self._backoffs() if backoff.until), default=_TICK)

    async def _run_upkeep(self) -> None:
        while True:
            started = _clock()
            pause = min(_TICK, self._next_tick(started))
            self._wake_upkeep = anyio.Event()
            with anyio.move_on_after(pause) as scope:
                await self._wake_upkeep.wait()
            now = _clock()
            for subscription in self.subscriptions:
                subscription.tick(now)
            for backoff in self._backoffs():
                backoff.tick(now)
            self.level()
            self._listener.ticked(now, now - started - pause if scope.cancelled_caught else 0.0)

    async def close(self) -> None:
        """Take leave of every node, all at the same time."""
        self.closing = True
        if self._unwatch is not None:
            self._unwatch()
        for place in self._places.values():
            place.moved.set()
        self.flush()
        async with anyio.create_task_group() as tasks:
            for subscription in self.subscriptions:
                tasks.start_soon(subscription.close)


def _address(view: TopicView, key: Key) -> Address | None:
    if isinstance(key, Address):
        return key if key in view.nodes else None
    return view.leaders.get(key)


def _http(view: TopicView, partition: int, address: Address) -> Address:
    if partition < 0:
        raise InvalidSetting("the original NSQ has no start positions", topic=view.topic)
    http = view.http.get(address)
    if http is None:
        raise PartitionUnavailable(
            "lookup does not tell the HTTP address of the leader",
            topic=view.topic,
            partition=partition,
            node=str(address),
        )
    return http
