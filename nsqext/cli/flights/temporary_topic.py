"""A topic for one run of the demo, an example or a benchmark: created, and deleted at the end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from secrets import token_hex

import anyio
from attrs import frozen

from nsqext import Admin, NsqError

__all__ = ("TopicPlan", "fresh_name", "temporary_topic")

logger: logging.Logger = logging.getLogger("nsqext.demo")


@frozen
class TopicPlan:
    """A topic to create.

    Attributes:
        name: topic name.
        partitions: number of partitions.
        extend: whether messages may have extend headers.
        ordered: whether the topic is ordered.
        channels: channels to create.
    """

    name: str
    partitions: int = 1
    extend: bool = False
    ordered: bool = False
    channels: tuple[str, ...] = ()

    async def create(self, admin: Admin, *, wait: float = 150.0) -> None:
        """Create the topic with its channels; see `nsqext.Admin.create_topic`."""
        await admin.create_topic(
            self.name,
            partitions=self.partitions,
            extend=self.extend,
            ordered=self.ordered,
            multipart=not self.ordered,
            channels=self.channels,
            wait=wait,
        )


def fresh_name(word: str) -> str:
    """Return a topic name with a random suffix."""
    return f"{word}_{token_hex(4)}"


@asynccontextmanager
async def temporary_topic(lookupd: str | Sequence[str], plan: TopicPlan, *, wait: float = 150.0) -> AsyncIterator[str]:
    """Create a topic, yield its name once every partition accepts publishes, and delete it at the end.

    Args:
        lookupd: lookup addresses.
        plan: the topic.
        wait: seconds to wait until every partition accepts publishes; a real cluster may take two minutes.

    Raises:
        PartitionUnavailable: a partition did not accept publishes in time.
        LookupFailed: the cluster refused to create the topic, or did not respond.
    """
    async with Admin(lookupd) as admin:
        try:
            await plan.create(admin, wait=wait)
            yield plan.name
        finally:
            with anyio.CancelScope(shield=True):
                await _delete(admin, plan.name)


async def _delete(admin: Admin, topic: str) -> None:
    try:
        await admin.delete_topic(topic, missing_ok=True)
    except NsqError as error:
        logger.warning("topic %s could not be deleted: %s", topic, error, extra={"topic": topic})
