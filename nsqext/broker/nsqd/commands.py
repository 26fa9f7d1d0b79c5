"""Which commands a node understands: chosen by its generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nsqext.broker.nsqd import connect

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node
    from nsqext.broker.nsqd.session import Handler

__all__ = ("command_table",)


def command_table(node: Node) -> Mapping[bytes, Handler]:
    """Return the commands of the node's generation by name."""
    return connect.COMMANDS
