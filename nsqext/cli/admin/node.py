"""``nsqext node``: list and remove nodes, and change their options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson

from nsqext.cli.command import Result, changes, command, examples
from nsqext.cli.connection import ServerAccess
from nsqext.cli.parameters import Argument, CommandGroup, Option

if TYPE_CHECKING:
    from nsqext.admin import Admin, NodeStatus

app: CommandGroup = CommandGroup()

Node = Annotated[str, Argument(help="HOST:PORT of the node's TCP side.")]
OptionName = Annotated[str, Argument(help="Name of the option: its flag, with underscores.")]


def node_record(node: NodeStatus) -> dict[str, Any]:
    """Return a node for tables and JSON."""
    return {
        "node": str(node.tcp),
        "http": node.http and str(node.http),
        "generation": node.generation,
        "version": node.version,
        "hostname": node.hostname,
        "reachable": node.reachable,
        "topics": len(node.topics),
        "tombstoned": list(node.tombstoned),
    }


@app.command("list")
@examples("nsqext node list", "nsqext node list --json | jq 'select(.reachable | not)'")
@command
async def list_nodes(connection: ServerAccess) -> None:
    """List every nsqd that lookup lists, and whether it responds."""
    async with connection.admin() as admin:
        records = [node_record(node) for node in await admin.nodes()]
    connection.table(("node", "http", "version", "reachable", "topics", "tombstoned"), records)


@app.command("remove")
@examples("nsqext node remove 127.0.0.1:4150 --yes")
@changes(question="Move all partitions of {node} to other nodes? Only a restart of the lookup leader undoes it.")
async def remove(admin: Admin, node: Node) -> Result:
    """Make a redesigned cluster move all partitions of a node to other nodes, before its shutdown."""
    await admin.remove_node(node)
    return {"node": node, "removing": True}, f"{node} is being removed"


@app.command("disable-writes")
@examples("nsqext node disable-writes --yes")
@changes(question="Refuse publishes on all nodes?")
async def disable_writes(
    admin: Admin,
    ordered_only: Annotated[bool, Option("--ordered-only", help="Publishes to ordered topics only.")] = False,
) -> Result:
    """Make all nodes of the redesigned NSQ refuse publishes, until `enable-writes`."""
    await admin.disable_writes(ordered_only=ordered_only)
    if ordered_only:
        return {"writes": "ordered"}, "writes to ordered topics are disabled"
    return {"writes": "disabled"}, "writes are disabled"


@app.command("enable-writes")
@examples("nsqext node enable-writes --yes")
@changes()
async def enable_writes(admin: Admin) -> Result:
    """Make all nodes accept publishes again."""
    await admin.enable_writes()
    return {"writes": "enabled"}, "writes are enabled"


@app.command("log-level")
@examples("nsqext node log-level debug --yes")
@changes()
async def log_level(
    admin: Admin, level: Annotated[Literal["error", "warning", "info", "debug"], Argument(help="The level.")]
) -> Result:
    """Set the log level of all nodes, and of the lookup nodes of the redesigned NSQ, until they restart."""
    await admin.set_log_level(level)
    return {"log_level": level}, f"the log level is {level}"


@app.command("option")
@examples("nsqext node option 127.0.0.1:4150 msg_timeout", "nsqext node option 127.0.0.1:4150 verbose --set true --yes")
@changes(reads_without="value")
async def option(
    admin: Admin,
    node: Node,
    name: OptionName,
    value: Annotated[str | None, Option("--set", help="The new value, as JSON or text.")] = None,
) -> Result:
    """Show an option of a node, or change it until the node restarts; times are nanoseconds."""
    found = await (admin.node_option(node, name) if value is None else admin.set_node_option(node, name, value))
    shown = found if isinstance(found, str) else orjson.dumps(found).decode()
    return {"node": node, "option": name, "value": found}, f"{name} of {node} is {shown}"
