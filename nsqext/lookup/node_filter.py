"""The user's choice of the discovered nodes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.types import Address

logger: logging.Logger = logging.getLogger("nsqext.lookup")

_MAX_FAILED = 1024
"""Nodes of which it is remembered that an error was logged."""


class NodeFilter:
    """Calls the function of the setting ``node_filter``; a node for which it raises is used."""

    def __init__(self, function: Callable[[str], bool]) -> None:
        self._function = function  # returns whether the node at ``host:port`` is used
        self._failed: set[Address] = set()

    def __call__(self, node: Address) -> bool:
        try:
            return bool(self._function(str(node)))
        except Exception:
            if node not in self._failed and len(self._failed) < _MAX_FAILED:
                self._failed.add(node)
                logger.exception("node_filter raised for %s; the node is used", node)
            return True


def log_filtered(view: PartitionMap) -> None:
    """Log which nodes ``node_filter`` leaves out of a topic."""
    left_out = [f"partition {number} at {node}" if number >= 0 else str(node) for number, node in view.filtered]
    use = "published to" if view.access == "w" else "consumed from"
    logger.warning("%s: not %s because of node_filter: %s", view.topic, use, ", ".join(left_out))
