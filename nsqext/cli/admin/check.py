"""``nsqext check``: a health probe for monitoring and orchestration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from nsqext.cli.command import command, examples
from nsqext.cli.connection import Connection
from nsqext.errors import InvalidSetting, NsqError

if TYPE_CHECKING:
    from nsqext.admin import Admin


@examples("nsqext check", "nsqext check orders billing --max-lag 1000 --min-consumers 2 --timeout 3")
@command
async def run(
    connection: Connection,
    topic: Annotated[
        str | None, typer.Argument(help="The topic; every partition needs a leader that responds.")
    ] = None,
    channel: Annotated[str | None, typer.Argument(help="The channel.")] = None,
    max_lag: Annotated[
        int | None, typer.Option(min=0, help="Largest number of unfinished messages in the channel.")
    ] = None,
    min_consumers: Annotated[int, typer.Option(min=0, help="Smallest number of consumers of the channel.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which the check fails.")] = 5.0,
) -> None:
    """Probe a cluster, a topic or a channel; exit with 0 if it is healthy, and with 1 otherwise.

    Without a topic, lookup and every node must respond.
    """
    if channel is None and (max_lag is not None or min_consumers):
        raise InvalidSetting("--max-lag and --min-consumers need a channel")
    problems: list[str] = []
    with anyio.move_on_after(timeout) as scope:
        try:
            async with connection.admin() as admin:
                if topic is None:
                    problems.extend(await _check_nodes(admin))
                else:
                    problems.extend(await _check_topic(admin, topic))
                if topic is not None and channel is not None:
                    problems.extend(await _check_channel(admin, topic, channel, max_lag, min_consumers))
        except InvalidSetting:
            raise
        except NsqError as error:
            problems.append(str(error))
    if scope.cancelled_caught:
        problems.append(f"no response within {timeout:g} s")
    connection.show({"healthy": not problems, "problems": problems}, "; ".join(problems) or "healthy")
    if problems:
        raise typer.Exit(1)


async def _check_nodes(admin: Admin) -> list[str]:
    nodes = await admin.nodes()
    if not nodes:
        return ["lookup lists no node"]
    return [f"node {node.tcp} does not respond" for node in nodes if not node.reachable]


async def _check_topic(admin: Admin, topic: str) -> list[str]:
    info, stats = await admin.topic(topic), await admin.stats(topic)
    expected = range(info.meta.partition_num) if info.meta else ()
    problems = [f"partition {number} has no leader" for number in expected if number not in info.leaders]
    return problems + [f"node {node} does not respond" for node in stats.unreachable]


async def _check_channel(admin: Admin, topic: str, channel: str, max_lag: int | None, min_consumers: int) -> list[str]:
    stats = (await admin.stats(topic, channel)).channels.get(channel)
    if stats is None:
        return [f"the topic has no channel {channel}"]
    problems = []
    if max_lag is not None and stats.lag > max_lag:
        problems.append(f"{stats.lag} messages are unfinished; at most {max_lag} may be")
    consumers = len({(client.client_id, client.hostname) for client in stats.clients})
    if consumers < min_consumers:
        problems.append(f"{consumers} consumers; at least {min_consumers} are required")
    return problems
