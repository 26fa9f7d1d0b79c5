"""Checks of an app's handlers and published topics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from nsqext.app.health import name_of
from nsqext.client.consumer.handlers.failure_policy import warn_of_drops
from nsqext.errors import InvalidSetting, NsqError, TopicNotFound, TopicNotReady

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from nsqext.app.router import HandlerSpec
    from nsqext.client.consumer.consumer import Consumer
    from nsqext.client.consumer.options import FailureOptions
    from nsqext.client.producer.producer import Producer

logger: logging.Logger = logging.getLogger("nsqext.app")

_CHECK_TIMEOUT = 2.0  # seconds


def refuse_shared(spec: HandlerSpec, other: HandlerSpec) -> None:
    """Refuse two handlers that would each receive a part of the same messages; raises InvalidSetting."""
    same = [name for name in spec.topics.names if other.topics.matches(name)]
    same += [name for name in other.topics.names if spec.topics.matches(name)]
    same += [pattern for pattern in spec.topics.patterns if pattern in other.topics.patterns]
    if same and spec.channel == other.channel:
        raise InvalidSetting(
            f"two handlers consume {same[0]}/{spec.channel}: each would receive a part of the messages",
            hint="use another channel, or different tags or partitions; concurrency= runs one handler in parallel",
        )


def overlap(partitions: Iterable[int] | None, others: Iterable[int] | None) -> bool:
    """Return whether two choices of partitions have one in common; None is the choice of all."""
    return partitions is None or others is None or not {*partitions}.isdisjoint(others)


def refuse_loops(specs: Iterable[HandlerSpec], publishers: Mapping[Callable[..., object], Iterable[str]]) -> None:
    """Refuse a handler that publishes to a topic of its own pattern; raises InvalidSetting."""
    for spec in specs:
        for topic in publishers.get(spec.function, ()):
            if spec.topics.matches(topic) and topic not in spec.topics.names:
                raise InvalidSetting(
                    f"the handler of {spec.topics} publishes to {topic}, which it consumes too",
                    hint="use a topic that the pattern does not match",
                )


def warn_of_drops_once(consumers: Iterable[Consumer], failures: Iterable[FailureOptions]) -> None:
    """Warn once of ``max_attempts`` without ``dead_letter``, in place of each consumer."""
    by_options: dict[FailureOptions, list[str]] = {}
    for consumer, options in zip(consumers, failures, strict=True):
        if consumer.warns_of_drops:
            consumer.warns_of_drops = False
            by_options.setdefault(options, []).append(name_of(consumer))
    for options, places in by_options.items():
        warn_of_drops(places, options)


def check_dead_letters_once(consumers: Iterable[Consumer], failures: Iterable[FailureOptions]) -> None:
    """Make one consumer for each topic of dead letters check that it can be published to."""
    checked: set[object] = set()
    for consumer, options in zip(consumers, failures, strict=True):
        consumer.warns_of_dead_letters = options.dead_letter not in checked
        checked.add(options.dead_letter)


async def warn_of_unwritable(producer: Producer, topics: Iterable[str]) -> None:
    """Warn about topics that cannot be published to."""
    with anyio.move_on_after(_CHECK_TIMEOUT):
        for topic in sorted(topics):
            try:
                await producer.meta(topic)
            except (TopicNotFound, TopicNotReady) as error:
                logger.warning("the app cannot publish: %s", error, extra={"topic": topic})
            except NsqError:
                return  # the consumers report that lookup does not respond
