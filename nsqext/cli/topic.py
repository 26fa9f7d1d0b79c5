"""``nsqext topic``: create and delete topics, and create channels."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from nsqext import Admin
from nsqext.cli.common import Lookupd, Url, lookup_addresses, perform, show
from nsqext.errors import InvalidSetting
from nsqext.protocol.names import DEFAULT_CHANNEL

__all__ = ("Action", "run")


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
    addresses = lookup_addresses(url, lookupd)

    async def act() -> None:
        async with Admin(addresses) as admin:
            if action is Action.DELETE:
                await admin.delete_topic(name)
                show({"topic": name, "deleted": True}, f"{name} is deleted")
                return
            created = channels
            if action is Action.CREATE:
                await admin.create_topic(
                    name, partitions=partitions, replicas=replicas, extend=extend, ordered=ordered, multipart=multipart
                )
                show({"topic": name, "created": True}, f"{name} is created")
                if not channels and (await admin.topic(name)).generation == "ha":
                    created = [DEFAULT_CHANNEL]
            for one in created:
                await admin.create_channel(name, one)
                show({"topic": name, "channel": one, "created": True}, f"channel {one} of {name} is created")

    perform(act)
