"""A served web page for tests, and what a browser would do with it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx

from nsqext.web import WebOptions, WebPage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nsqext.broker import Cluster

__all__ = ("browsing", "page_with")


@asynccontextmanager
async def browsing(cluster: Cluster | list[str], **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run a page of a cluster, and give an HTTP client for it."""
    lookupd = cluster if isinstance(cluster, list) else cluster.lookupd
    page = WebPage(lookupd, WebOptions(**options))
    async with anyio.create_task_group() as tasks:
        await tasks.start(page.run)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=page), base_url="http://localhost:8171"
        ) as browser:
            yield browser
        tasks.cancel_scope.cancel()


async def page_with(browser: httpx.AsyncClient, path: str, holds: Callable[[str], bool]) -> str:
    """Load a page until its text fulfils a condition; return the text."""
    with anyio.fail_after(10):
        while True:
            text = (await browser.get(path)).text
            if holds(text):
                return text
            await anyio.sleep(0.05)
