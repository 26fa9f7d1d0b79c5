"""``nsqext topic``: create and delete topics, and create channels."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from nsqext.cli.common import Lookupd, Url, lookup_client, perform, show
from nsqext.errors import InvalidSetting, LookupFailed, TopicNotFound
from nsqext.lookup.admin import DEFAULT_CHANNEL, LookupAdmin

if TYPE_CHECKING:
    from nsqext.lookup.client import LookupClient

__all__ = ("Action", "run")

_LEADER_TIMEOUT = 5.0


class Action(StrEnum):
    """What to do."""

    CREATE = "create"
    DELETE = "delete"
    CHANNEL = "channel"


def run(
    action: Annotated[Action, typer.Argument(help="What to do.")],
    name: Annotated[str, typer.Argument(help="The topic.")],
    channel: Annotated[list[str] | None, typer.Option(help="A channel to create; repeat for more.")] = None,
    partitions: Annotated[int, typer.Option(help="create: number of partitions.")] = 1,
    replicas: Annotated[int, typer.Option(help="create: replicas of each.")] = 1,
    extend: Annotated[bool, typer.Option("--extend", help="create: messages may carry headers and tags.")] = False,
    ordered: Annotated[bool, typer.Option("--ordered", help="create: for ordered consumption.")] = False,
    multipart: Annotated[bool, typer.Option("--multipart", help="create: partitions may share nodes.")] = False,
    lookupd: Lookupd = None,
    url: Url = None,
) -> None:
    """Create a topic (with channels), delete one, or create channels of one.

    A redesigned cluster refuses publishes to a topic without channels: create without --channel creates the channel
    "default". Nodes of a real cluster may need a minute until they accept messages for a new topic.
    """
    channels = channel or []
    if action is Action.CHANNEL and not channels:
        raise InvalidSetting("no channel is given", hint="give --channel NAME")
    if action is Action.DELETE and channels:
        raise InvalidSetting("--channel is for create and channel")
    client = lookup_client(url, lookupd)

    async def act() -> None:
        async with client:
            admin = LookupAdmin(client)
            if action is Action.DELETE:
                await admin.delete_topic(name)
                show({"topic": name, "deleted": True}, f"{name} is deleted")
                return
            if action is Action.CREATE:
                await admin.create_topic(
                    name, partitions=partitions, replicas=replicas, extend=extend, ordered=ordered, multipart=multipart
                )
                show({"topic": name, "created": True}, f"{name} is created")
                if not channels:
                    await _create_default_channel(client, name)
            for one in channels:
                await admin.create_channel(name, one)
                show({"topic": name, "channel": one, "created": True}, f"channel {one} of {name} is created")

    perform(act)


async def _create_default_channel(client: LookupClient, name: str) -> None:
    """Create the default channel as soon as the topic has leaders; nothing on the original NSQ, which needs none."""
    if not any(node.leader for node in await client.lookup_nodes()):
        return
    with anyio.move_on_after(_LEADER_TIMEOUT):
        while True:
            try:
                await LookupAdmin(client).create_channel(name, DEFAULT_CHANNEL)
            except (LookupFailed, TopicNotFound):  # the nodes have not opened the partitions yet
                await anyio.sleep(0.1)
                continue
            show(
                {"topic": name, "channel": DEFAULT_CHANNEL, "created": True},
                f"channel {DEFAULT_CHANNEL} of {name} is created",
            )
            return
    raise LookupFailed(
        f"the topic is created, but its nodes did not open it within {_LEADER_TIMEOUT:g} s, so it has no channel yet",
        topic=name,
        hint=f"run `nsqext topic channel {name} --channel {DEFAULT_CHANNEL}` later; publishes are refused until then",
    )
