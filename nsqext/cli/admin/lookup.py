"""``nsqext lookup``: show the nodes, topics and partitions that the lookup service reports."""

from __future__ import annotations

from typing import Annotated

import attrs
import typer

from nsqext.cli.admin.topic import describe_meta
from nsqext.cli.command import command, examples
from nsqext.cli.connection import Connection
from nsqext.lookup.client import LookupClient
from nsqext.lookup.partition_map import PartitionMap, merged


def _show_map(connection: Connection, found: PartitionMap) -> None:
    meta = found.meta
    connection.show(
        {"topic": found.topic, "meta": attrs.asdict(meta)},
        f"{found.topic}: {', '.join(describe_meta(meta)) if meta.partition_num else 'original NSQ'}",
    )
    for partition, leader in found.leaders.items():
        http = found.http.get(leader)
        connection.show(
            {"topic": found.topic, "partition": partition, "leader": str(leader), "http": http and str(http)},
            f"  partition {partition}: {leader}",
        )
    for node in found.nodes:
        connection.show({"topic": found.topic, "node": str(node)}, f"  node {node}")


@examples("nsqext lookup --lookupd 127.0.0.1:4161", "nsqext lookup orders --access w")
@command
async def run(
    connection: Connection,
    topic: Annotated[str | None, typer.Argument(help="A topic; without it, all nodes and topics.")] = None,
    access: Annotated[str, typer.Option(help="w: partitions for producers; r: partitions for consumers.")] = "r",
) -> None:
    """Show lookup nodes, nsqd nodes and topics, or the partitions of a topic."""
    async with LookupClient(connection.lookup(), connection.options().lookup) as client:
        if topic is not None:
            _show_map(connection, merged(topic, access, await client.lookup(topic, access)))
            return
        for lookup in await client.lookup_nodes():
            leader = " (leader)" if lookup.leader else ""
            record = {"lookupd": str(lookup.address), "leader": lookup.leader}
            connection.show(record, f"nsqlookupd {lookup.address}{leader}")
        for node in await client.nodes():
            connection.show({"nsqd": str(node.tcp), "version": node.version}, f"nsqd {node.tcp} {node.version}")
        for name in await client.topics():
            connection.show({"topic": name}, f"topic {name}")
