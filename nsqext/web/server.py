"""Serve a `WebPage` on an address, from synchronous and asynchronous programs."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import anyio

from nsqext.broker.uvicorn_server import HttpServer
from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from nsqext.types import Address
    from nsqext.web.app import WebPage

__all__ = ("listen", "serve")


def listen(address: Address) -> socket.socket:
    """Return a socket that listens on an address; port 0 chooses a free one.

    Raises:
        InvalidSetting: another process uses it, or the host is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise InvalidSetting(
            f"cannot listen on {address}: {error.strerror}", hint="choose another port, or 0 for a free one"
        ) from error


async def serve(
    page: WebPage, listener: socket.socket, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled; the socket and every connection are closed then. Runs on asyncio.

    Args:
        page: the page.
        listener: a listening socket; its ownership passes to the server.
        task_status: started once requests are answered.
    """
    listener.setblocking(False)
    async with anyio.create_task_group() as tasks:
        await tasks.start(page.run)
        await tasks.start(HttpServer(page).serve, listener)
        task_status.started()
