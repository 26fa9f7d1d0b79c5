"""Serve a `WebPage` on an address, from synchronous and asynchronous programs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
from anyio.from_thread import start_blocking_portal

from nsqext.http.uvicorn_server import HttpServer, listen
from nsqext.types import Address

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from nsqext.web.app import WebPage


async def serve(
    page: WebPage, listener: socket.socket, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serve on asyncio until cancelled, then close the listening socket, which it owns, and every connection."""
    async with anyio.create_task_group() as tasks:
        await tasks.start(page.run)
        await tasks.start(HttpServer(page).serve, listener)
        task_status.started()


@contextmanager
def served(page: WebPage, address: Address) -> Iterator[Address]:
    """Serve in a thread while the block runs; yield the address with its port."""
    listener = listen(address)
    bound = Address(address.host, listener.getsockname()[1])
    with listener, start_blocking_portal("asyncio") as portal:
        serving, _ = portal.start_task(serve, page, listener)
        try:
            yield bound
        finally:
            serving.cancel()
