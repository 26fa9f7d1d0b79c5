"""Checks of an app's handlers and published topics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from nsqext.errors import InvalidSetting, NsqError, TopicNotFound, TopicNotReady

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from nsqext.app.router import HandlerSpec
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


def refuse_loops(specs: Iterable[HandlerSpec], publishers: Mapping[Callable[..., object], Iterable[str]]) -> None:
    """Refuse a handler that publishes to a topic of its own pattern; raises InvalidSetting."""
    for spec in specs:
        for topic in publishers.get(spec.function, ()):
            if spec.topics.matches(topic) and topic not in spec.topics.names:
                raise InvalidSetting(
                    f"the handler of {spec.topics} publishes to {topic}, which it consumes too",
                    hint="use a topic that the pattern does not match",
                )


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
