"""Create channels whose dispatch is chosen by the administrator."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from nsqext.admin.stats import topic_stats
from nsqext.errors import InvalidInput, LookupFailed, OperationNotSupported, PartitionUnavailable
from nsqext.protocol.identify import DISPATCH_TYPES, KEY_FAILOVER

if TYPE_CHECKING:
    from nsqext.admin.requests import ClusterRequests
    from nsqext.lookup.partition_map import PartitionMap

_HINT = (
    "create the channel without a dispatch: consumers with dispatch='key_failover' share the keys by the tags of "
    "producers with key_tags"
)


async def create_dispatched_channel(
    requests: ClusterRequests, topic: str, channel: str, dispatch: str | None, key_header: str | None
) -> None:
    """Create a channel with a dispatch on every partition; see `nsqext.Admin.create_channel`.

    Servers without the extension refuse the request. For topics with registered channels they ignore its argument: so
    the dispatch that they report is checked, and the channel is deleted again.
    """
    params: dict[str, str | int] = {"topic": topic, "channel": channel, **_checked(topic, dispatch, key_header)}
    where = await requests.settled(partial(requests.led, topic), topic)
    if where.nodes:
        raise _unknown(topic, dispatch)
    await _reported(requests, where, channel)  # nothing is sent while a leader cannot show afterwards what it ignores

    async def create() -> None:
        try:
            await requests.change_lookup("/channel/create", params)
        except LookupFailed as error:
            if "has no leader" in error.message:
                raise PartitionUnavailable(error.message, topic=topic) from error
            raise

    known = False
    try:
        await requests.settled(create, topic)
    except LookupFailed as error:
        if "auto create NOT disabled" in error.message:
            raise _unknown(topic, dispatch) from error
        if f"channel {channel} of topic" in error.message:
            raise InvalidInput(error.message, topic=topic, hint="stop its consumers, or delete the channel") from error
        known = "already registered" in error.message
        if not known:
            raise
    if dispatch == KEY_FAILOVER and await _reported(requests, where, channel) != {dispatch}:
        if not known:
            await requests.change_lookup("/channel/delete", {"topic": topic, "channel": channel})
        raise _unknown(topic, dispatch)


def _checked(topic: str, dispatch: str | None, key_header: str | None) -> dict[str, str]:
    """Return the arguments of the request."""
    if dispatch not in DISPATCH_TYPES:
        raise InvalidInput(f"dispatch={dispatch!r} is none of {', '.join(DISPATCH_TYPES)}", topic=topic)
    if key_header is None:
        return {"dispatch": dispatch}
    if dispatch != KEY_FAILOVER:
        raise InvalidInput(f"key_header has no effect without dispatch={KEY_FAILOVER!r}", topic=topic)
    if not key_header:
        raise InvalidInput("key_header is empty", topic=topic, hint="leave it out for the default")
    return {"dispatch": dispatch, "key_header": key_header}


async def _reported(requests: ClusterRequests, where: PartitionMap, channel: str) -> set[str]:
    """Return the dispatches that the leaders of all partitions report for a channel."""

    async def ask() -> set[str]:
        now = await requests.led(where.topic)
        parts = (await topic_stats(requests, now, channel)).partitions
        if len(parts) < now.partition_num:
            raise PartitionUnavailable("not every leader reports its partition yet", topic=where.topic)
        found = [part.channels.get(channel) for part in parts]
        return {one.dispatch if one else "" for one in found}

    return await requests.settled(ask, where.topic)


def _unknown(topic: str, dispatch: str | None) -> OperationNotSupported:
    return OperationNotSupported(f"the servers do not know dispatch={dispatch!r}", topic=topic, hint=_HINT)
