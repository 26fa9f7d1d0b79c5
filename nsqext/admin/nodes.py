"""Methods of the administration client that list and change nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.admin.base import AdminBase
from nsqext.admin.stats import node_statuses

if TYPE_CHECKING:
    from nsqext.admin.results import NodeStatus

__all__ = ("NodeAdmin",)


class NodeAdmin(AdminBase):
    """Methods of `nsqext.Admin` for nodes."""

    async def nodes(self) -> tuple[NodeStatus, ...]:
        """Return every nsqd that lookup lists, sorted by TCP address, and whether it responds.

        Raises:
            LookupFailed: no lookup node returned a usable response.
        """
        return await node_statuses(self._open())
