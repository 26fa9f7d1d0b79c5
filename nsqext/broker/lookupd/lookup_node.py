"""Base of the lookup nodes of both generations: addresses, delay, and what the node is made to show."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import anyio
from attrs import define

from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.http.api import Call, Handler

_UNKNOWN = Address("127.0.0.1", 0)


@define(eq=False, kw_only=True)
class LookupNode(ABC):
    """One lookup node without its sockets."""

    name: str = "nsqlookupd"  # its name in the cluster, ``l1`` for example
    tcp: Address = _UNKNOWN  # address of its TCP side
    http: Address = _UNKNOWN  # address of its HTTP API
    delay: float = 0.0  # seconds by which each response is delayed
    alive: bool = True  # it runs

    @abstractmethod
    def show_current(self) -> None:
        """Show the present state of the cluster again, without delay."""

    @abstractmethod
    def show_nothing(self) -> None:
        """Show no node and no topic."""

    @abstractmethod
    def show_snapshot(self) -> None:
        """Show the state of this moment from now on; later changes are not shown."""

    def delayed(self, handler: Handler) -> Handler:
        """Wrap a handler so that its response is sent after `delay` seconds."""

        async def respond(call: Call) -> object:
            if self.delay:
                await anyio.sleep(self.delay)
            return handler(call)

        return respond
