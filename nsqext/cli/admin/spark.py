"""``nsqext spark anchors``: list and delete the anchor channels of streaming queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from nsqext.admin import PartitionChannelStats
from nsqext.cli.command import Yes, command, examples, perform
from nsqext.cli.connection import ServerAccess, confirm, counted
from nsqext.cli.parameters import Argument, Option
from nsqext.cli.waiting import waits
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.lookup.options import parse_lookup_addresses
from nsqext.spark.cluster.admin import MARK, QUERY_MARK, SourceAdmin
from nsqext.spark.cluster.client_config import ClientConfig

_TIMEOUT = 10.0


@examples("nsqext spark anchors list orders", "nsqext spark anchors delete orders --channel query --yes")
@command
def run(
    connection: ServerAccess,
    subject: Annotated[Literal["anchors"], Argument(help="Anchor channels of streaming queries.")],
    action: Annotated[Literal["list", "delete"], Argument(help="list or delete.")],
    topic: Annotated[str, Argument(help="The topic.")],
    channel: Annotated[
        str | None, Option(help="The option channel of the query. (list: all channels by default)")
    ] = None,
    yes: Yes = False,
) -> None:
    """List the channels of a topic that can be anchors, or delete the anchor channel of an ended query.

    An anchor channel makes the servers retain messages until its query has read them. Delete it when query and
    checkpoint are not needed any more. A channel with consumers, or with messages that consumers processed since its
    leader opened it, is not an anchor, and is neither listed nor deleted.
    """
    if action == "delete" and channel is None:
        raise InvalidSetting("no channel is given", hint="use --channel NAME, the option channel of the query")
    if action == "delete":
        confirm(f"Delete the anchor channel {channel} of {topic}? Its query cannot continue without it.", yes=yes)
    lookupd = tuple(map(str, parse_lookup_addresses(connection.lookup())))
    config = ClientConfig(lookupd, connection.texts(), timeout=_TIMEOUT)

    async def act() -> None:
        async with SourceAdmin(config) as admin:
            found = await _anchors(admin, topic, channel)
            if action == "list":
                others = {name for (_, name), stats in found.items() if not _can_be_anchor(stats)}
                for (partition, name), stats in sorted(found.items()):
                    if name not in others:
                        await _show(connection, admin, topic, partition, name, stats)
                return
            if channel is None or not found:
                raise InvalidState(f"the channel {channel} does not exist", topic=topic)
            for (partition, name), stats in found.items():
                if not _can_be_anchor(stats):
                    raise InvalidState(
                        f"the channel {name} has {counted(stats.connections, 'consumer')}, and consumers processed "
                        f"{counted(_processed(stats), 'message')}: it is not an anchor channel",
                        topic=topic,
                        partition=partition,
                        hint="nsqext channel delete deletes channels of consumers",
                    )
            for partition, name in sorted(found):
                await admin.delete_anchor(topic, partition, name)
                connection.show(
                    {"topic": topic, "partition": partition, "channel": name, "deleted": True},
                    f"channel {name} of {topic}, partition {partition} is deleted",
                )

    with waits.waiting(f"responses of the leaders of {topic}"):
        perform(act)


def _processed(stats: PartitionChannelStats) -> int:
    """Return how many messages consumers received."""
    return stats.in_flight + stats.requeued + stats.timed_out + stats.finished


def _can_be_anchor(stats: PartitionChannelStats) -> bool:
    return not stats.connections and not _processed(stats)


async def _anchors(
    admin: SourceAdmin, topic: str, channel: str | None
) -> Mapping[tuple[int, str], PartitionChannelStats]:
    """Return durable channels, or the named channel, by partition and name."""
    found: dict[tuple[int, str], PartitionChannelStats] = {}
    for partition in await admin.leaders.partitions(topic):
        stats = await admin.leaders.ask(topic, partition, admin.leaders.nodes.stats)
        for name, one in stats.channels.items():
            if "#" in name or name.endswith((MARK, QUERY_MARK)):
                continue
            if channel is None or name == channel:
                found[partition, name] = one
    return found


async def _show(
    connection: ServerAccess, admin: SourceAdmin, topic: str, partition: int, name: str, stats: PartitionChannelStats
) -> None:
    position = await admin.position(topic, partition, name)
    if position is None:
        return
    behind = max(stats.messages - position.count, 0)
    connection.show(
        {
            "topic": topic,
            "partition": partition,
            "channel": name,
            "position": position.count,
            "end": stats.messages,
            "behind": behind,
        },
        f"{topic}[{partition}] {name}: at {position.count} of {stats.messages}, {behind} behind",
    )
