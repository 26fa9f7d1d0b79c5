"""Which commands a node understands: chosen by its generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nsqext.broker.nsqd.classic.commands import COMMANDS as ORIGINAL_COMMANDS
from nsqext.broker.nsqd.connect import COMMANDS

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node
    from nsqext.broker.nsqd.session import Handler

__all__ = ("command_table",)


def command_table(node: Node) -> Mapping[bytes, Handler]:
    """Return the commands of the node's generation by name."""
    return ORIGINAL_COMMANDS if node.options.original else COMMANDS
