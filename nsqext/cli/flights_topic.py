"""The demo's topic on a cluster that runs already: made, waited for, and deleted at the end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from secrets import token_hex

import anyio
from attrs import frozen

from nsqext import LookupOptions, NsqError, Producer, ProducerOptions
from nsqext.errors import PartitionUnavailable, PublishFailed
from nsqext.lookup.admin import LookupAdmin
from nsqext.lookup.client import LookupClient

__all__ = ("TopicPlan", "fresh_name", "make_writable", "temporary_topic")

logger: logging.Logger = logging.getLogger("nsqext.demo")

_SLOW = LookupOptions(request_timeout=15.0)  # the real lookup service asks the nodes before it answers a change
_PROBE = "ready"
_PAUSE = 0.5


@frozen
class TopicPlan:
    """A topic to be made.

    Attributes:
        name: its name.
        partitions: number of its partitions.
        extend: messages may carry extend headers.
        ordered: it is an ordered topic.
        channels: its channels.
    """

    name: str
    partitions: int = 1
    extend: bool = False
    ordered: bool = False
    channels: tuple[str, ...] = ()


def fresh_name(word: str) -> str:
    """Return a topic name that nobody has used."""
    return f"{word}_{token_hex(4)}"


@asynccontextmanager
async def temporary_topic(
    lookupd: str | Sequence[str], plan: TopicPlan, told: Callable[[int], None], *, timeout: float = 150.0
) -> AsyncIterator[str]:
    """Make a topic, give its name once every partition takes messages, and delete it in the end.

    Args:
        lookupd: lookup addresses.
        plan: the topic.
        told: called with the number of each partition that has become writable.
        timeout: seconds until it has to be writable.

    Raises:
        PartitionUnavailable: it did not become writable in time.
        LookupFailed: the cluster refuses the topic, or does not answer.
    """
    async with LookupClient(lookupd, _SLOW) as client:
        admin = LookupAdmin(client)
        await admin.create_topic(
            plan.name,
            partitions=plan.partitions,
            extend=plan.extend,
            ordered=plan.ordered,
            multipart=not plan.ordered,
        )
        try:
            await make_writable(lookupd, admin, plan, told, timeout=timeout)
            yield plan.name
        finally:
            with anyio.CancelScope(shield=True):
                await _delete(admin, plan.name)


async def _delete(admin: LookupAdmin, topic: str) -> None:
    try:
        await admin.delete_topic(topic)
    except NsqError as error:
        logger.warning("the topic %s is left behind: %s", topic, error, extra={"topic": topic})


async def make_writable(
    lookupd: str | Sequence[str],
    admin: LookupAdmin,
    plan: TopicPlan,
    told: Callable[[int], None],
    *,
    timeout: float = 150.0,
) -> None:
    """Wait until every partition of a new topic takes messages, then make its channels.

    The real cluster attends to a new topic within about a minute; until then its nodes refuse to lead it. To know, a
    message is published to each partition while only a channel exists that nobody consumes: lookup offers no topic
    without channels to producers, and channels that are made afterwards begin behind that message.

    Raises:
        PartitionUnavailable: it did not happen in time.
    """
    ready: set[int] = set()
    last: NsqError | None = None
    options = ProducerOptions(timeout=3.0, lookup=LookupOptions(poll_interval=1.0))
    with anyio.move_on_after(timeout):
        async with Producer(lookupd, options=options) as producer:
            while len(ready) < plan.partitions:
                try:
                    await admin.create_channel(plan.name, _PROBE)
                    for partition in sorted(set(range(plan.partitions)) - ready):
                        await producer.publish(plan.name, b"ready?", partition=partition)
                        ready.add(partition)
                        told(partition)
                except NsqError as error:
                    if not _worth_waiting(error):
                        raise
                    last = error
                    await anyio.sleep(_PAUSE)
        for channel in plan.channels:
            await admin.create_channel(plan.name, channel)
        return
    raise PartitionUnavailable(
        f"{len(ready)} of {plan.partitions} partitions take messages after {timeout:g} s, at last: {last}",
        topic=plan.name,
        hint="are enough nodes up?",
    )


def _worth_waiting(error: NsqError) -> bool:
    """Return whether a new topic may cause the error for a while."""
    return error.retryable or error.maybe_stored or isinstance(error, PublishFailed)
