"""The topics of a consumer: names and patterns, and the subscriptions to each selected topic."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import anyio

from nsqext.client.consumer.subscriptions.subscriber import Subscriber, pause_before_lookup
from nsqext.client.tasks import first_error
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState, LookupFailed, LookupUnreachable, NsqError
from nsqext.protocol.names import check_topic, check_topic_pattern, is_topic_pattern
from nsqext.waits import Wakeup, chance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.subscriptions.assignment import SubscriberContext

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_clock = time.monotonic


class TopicSelection:
    """The topics that a consumer selects; raises InvalidName or InvalidSetting.

    Args:
        topics: a name, a pattern, or several of both. ``*`` stands for any number of characters, ``?`` for a single
            character; ``#ephemeral`` topics match only a pattern with this end.
    """

    def __init__(self, topics: str | Iterable[str], excluded: str | None = None) -> None:
        if not isinstance(topics, Iterable) or isinstance(topics, (bytes, Mapping)):
            raise InvalidSetting(f"topics={topics!r} is neither a topic nor a list of topics", hint="give text")
        self.given: tuple[str, ...] = (topics,) if isinstance(topics, str) else tuple(dict.fromkeys(topics))
        if not self.given:
            raise InvalidSetting(f"topics={topics!r} leaves nothing to consume", hint="give a name or a pattern")
        self.names: tuple[str, ...] = tuple(check_topic(name) for name in self.given if not is_topic_pattern(name))
        self.patterns: tuple[str, ...] = tuple(pattern for pattern in self.given if is_topic_pattern(pattern))
        self._expressions = tuple(check_topic_pattern(pattern) for pattern in self.patterns)
        self._excluded = excluded  # the topic of dead letters, which patterns do not match

    @property
    def single(self) -> bool:
        """Whether it is a single name."""
        return len(self.given) == 1 and not self.patterns

    def matches(self, topic: str) -> bool:
        if topic in self.names:
            return True
        return topic != self._excluded and any(one.fullmatch(topic) is not None for one in self._expressions)

    def __str__(self) -> str:
        return ",".join(self.given)


def select_topics(topics: str | Iterable[str], options: ConsumerOptions, *, has_lookup: bool) -> TopicSelection:
    """Return the topics of a consumer; raises InvalidName or InvalidSetting."""
    dead_letter = options.failure.dead_letter
    selection = TopicSelection(topics, dead_letter if isinstance(dead_letter, str) else None)
    if selection.patterns and not has_lookup:
        raise InvalidSetting(
            f"the pattern {selection.patterns[0]!r} needs a list of topics", hint="give lookupd=... instead of nsqd"
        )
    if not selection.single and (options.partitions is not None or isinstance(options.start, Mapping)):
        raise InvalidSetting(
            "partitions are chosen, and there are several topics", hint="make a consumer for each such topic"
        )
    return selection


class TopicSubscriptions:
    """The subscriptions of a consumer: a `Subscriber` for each topic, with a common distribution of RDY.

    Topics that match a pattern are found in the list of the lookup service, read every ``poll_interval``. A deleted
    topic is left when its connections have ended. A found topic that servers refuse permanently is logged, and tried
    again after the next poll; such an error of a topic given by name ends the consumer.
    """

    def __init__(self, selection: TopicSelection, context: SubscriberContext, fail: Callable[[NsqError], None]) -> None:
        self.selection: TopicSelection = selection
        #: all partitions of the first topics are subscribed, or the consumer cannot continue
        self.started: anyio.Event = anyio.Event()
        self._context = context
        self._fail = fail  # ends the consumer with an error
        self._subscribers: dict[str, Subscriber] = {}
        self._leaving: dict[Subscriber, None] = {}
        self._changed = Wakeup()
        self._listed = self._list_failed = False
        self._starting = False
        self._closing = False

    # The topics

    @property
    def blocked(self) -> tuple[str, ...]:
        """Reasons why partitions cannot be consumed until a setting is changed."""
        return tuple(text for one in tuple(self._subscribers.values()) for text in one.blocked)

    def select(self, selection: TopicSelection) -> None:
        self.selection = selection
        self._changed.wake()

    async def run(self) -> None:
        """Subscribe to the selected topics, also when they appear later; raises LookupFailed."""
        deadline = _clock() + self._context.options.lookup_timeout
        failures = 0
        while not self._closing:
            listed = await self._list(deadline)
            if self._closing:
                return
            self._update(listed)
            if not self.selection.patterns:
                pause = float("inf")
            elif listed is None and not self._listed:
                failures += 1
                pause = pause_before_lookup(self._context.options, failures)
            else:
                lookup = self._context.metadata.options
                pause = lookup.poll_interval * (1 + lookup.poll_jitter * chance.uniform(-1, 1))
            with anyio.move_on_after(pause):
                await self._changed.wait()

    async def _list(self, deadline: float) -> set[str] | None:
        """Return the topics that match a pattern; None if the lookup service does not list topics."""
        if not self.selection.patterns:
            return set()
        try:
            topics = await self._context.metadata.topics(max_age=self._context.metadata.options.poll_interval / 2)
        except LookupFailed as error:
            if not self._listed and not (isinstance(error, LookupUnreachable) and _clock() < deadline):
                raise  # a wrong address is reported at once
            if not self._list_failed:
                logger.warning("topics cannot be listed: %s", error, extra={"topic": str(self.selection)})
            self._list_failed = True
            return None
        except InvalidState:
            if self._closing:
                return None
            raise
        found = set(filter(self.selection.matches, topics))
        if not (self._listed or found):
            logger.info("no topic matches %s so far", self.selection, extra={"topic": str(self.selection)})
        self._listed, self._list_failed = True, False
        return found

    def _update(self, listed: set[str] | None) -> None:
        wanted = dict.fromkeys((*self.selection.names, *sorted(listed or ())))
        for topic, subscriber in tuple(self._subscribers.items()):
            gone = listed is not None and topic not in wanted
            if not self.selection.matches(topic) or (subscriber.idle and (gone or subscriber.vanished)):
                self._leave(topic)
            else:
                subscriber.discovered = topic not in self.selection.names
        for topic in wanted:
            if topic not in self._subscribers:
                self._join(topic)
        if not self._starting and (self._listed or not self.selection.patterns):
            self._starting = True
            self._context.tasks.start_soon(self._wait_started)

    def _join(self, topic: str) -> None:
        fail = partial(self._refused, topic)
        discovered = topic not in self.selection.names
        subscriber = self._subscribers[topic] = Subscriber(topic, self._context, fail, discovered=discovered)
        self._context.tasks.start_soon(self._run, subscriber, fail)

    def _leave(self, topic: str) -> None:
        logger.info(
            "left %s/%s", topic, self._context.channel, extra={"topic": topic, "channel": self._context.channel}
        )
        subscriber = self._subscribers.pop(topic)
        self._leaving[subscriber] = None
        self._context.tasks.start_soon(self._end, topic, subscriber)

    def _refused(self, topic: str, error: NsqError) -> None:
        """Leave a found topic until the next poll; fail for a named topic, or if no topic was ever subscribed."""
        if topic not in self._subscribers:
            return
        if topic in self.selection.names:
            self._fail(error)
            return
        extra = {"topic": topic, "channel": self._context.channel}
        logger.warning("%s/%s cannot be consumed: %s", topic, self._context.channel, error, extra=extra)
        self._leave(topic)
        if not self._subscribers and not self._context.group.opened:
            self._fail(error)

    async def _run(self, subscriber: Subscriber, fail: Callable[[NsqError], None]) -> None:
        try:
            await subscriber.run()
        except NsqError as error:
            fail(error)

    async def _end(self, topic: str, subscriber: Subscriber) -> None:
        await subscriber.leave()
        subscriber.forget()
        del self._leaving[subscriber]
        if topic not in self._subscribers:
            subscriber.forget_messages()

    async def _wait_started(self) -> None:
        for subscriber in tuple(self._subscribers.values()):
            await subscriber.started.wait()
        self.started.set()

    # Seeking and closing

    async def seek(self, position: Position, partitions: Sequence[int] | None, topic: str | None) -> None:
        """See `Consumer.seek`."""
        if topic is not None and topic not in self._subscribers:
            raise InvalidInput("the consumer does not consume this topic", topic=topic)
        if partitions is not None and topic is None and not self.selection.single:
            raise InvalidInput("partitions are given without their topic", hint="give topic= as well")
        chosen = [self._subscribers[topic]] if topic is not None else list(self._subscribers.values())
        if not chosen:
            raise InvalidInput(f"nothing was moved: no topic that matches {self.selection} was found yet")
        if len(chosen) == 1:
            await chosen[0].seeker.seek(position, partitions)
            return
        for subscriber in chosen:
            subscriber.seeker.chosen(partitions)  # or nothing is moved
        try:
            async with anyio.create_task_group() as tasks:
                for subscriber in chosen:
                    tasks.start_soon(subscriber.seeker.seek, position, partitions)
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def close(self) -> None:
        """Close all subscriptions, concurrently."""
        self._closing = True
        self._changed.wake()
        async with anyio.create_task_group() as tasks:
            for subscriber in (*self._subscribers.values(), *self._leaving):
                tasks.start_soon(subscriber.close)

    def forget(self) -> None:
        """Stop watching the topics."""
        for subscriber in (*self._subscribers.values(), *self._leaving):
            subscriber.forget()
