"""``nsqext lookup``: what the lookup service knows."""

from __future__ import annotations

from typing import Annotated

import attrs
import typer

from nsqext.cli.common import Lookupd, Url, lookup_client, perform, show
from nsqext.errors import NsqError
from nsqext.lookup.client import failure
from nsqext.lookup.partition_map import PartitionMap, PartitionMapMerger

__all__ = ("run",)


def _show_view(view: PartitionMap) -> None:
    meta = view.meta
    kind = ", ".join(name for name, holds in (("extend", meta.extend_support), ("ordered", meta.ordered)) if holds)
    show(
        {"topic": view.topic, "meta": attrs.asdict(meta)},
        f"{view.topic}: {meta.partition_num or 'no'} partitions, {meta.replica or 'no'} replicas{kind and ', ' + kind}",
    )
    for partition, leader in view.leaders.items():
        http = view.http.get(leader)
        show(
            {"topic": view.topic, "partition": partition, "leader": str(leader), "http": http and str(http)},
            f"  partition {partition}: {leader}",
        )
    for node in view.nodes:
        show({"topic": view.topic, "node": str(node)}, f"  node {node}")


def run(
    topic: Annotated[str | None, typer.Argument(help="A topic; everything there is without it.")] = None,
    access: Annotated[str, typer.Option(help="w for where to publish, r for where to consume.")] = "r",
    lookupd: Lookupd = None,
    url: Url = None,
) -> None:
    """Show lookup nodes, nsqd nodes and topics; or where the partitions of a topic are."""
    client = lookup_client(url, lookupd)

    async def everything() -> None:
        async with client:
            for lookup in await client.lookup_nodes():
                leader = " (leader)" if lookup.leader else ""
                show({"lookupd": str(lookup.address), "leader": lookup.leader}, f"nsqlookupd {lookup.address}{leader}")
            for node in await client.nodes():
                show({"nsqd": str(node.tcp), "version": node.version}, f"nsqd {node.tcp} {node.version}")
            for name in await client.topics():
                show({"topic": name}, f"topic {name}")

    async def one(name: str) -> None:
        async with client:
            answers = await client.lookup(name, access)
        if not any(answer.found for answer in answers):
            errors: list[NsqError] = [answer.error for answer in answers if answer.error is not None]
            raise failure(errors, name)
        table = PartitionMapMerger(name, access)
        table.merge(answers)
        _show_view(table.current)

    perform(everything if topic is None else lambda: one(topic))
