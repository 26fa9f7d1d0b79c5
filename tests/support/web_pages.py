"""A served web page for tests, and requests like those of a browser."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx

from nsqext.web import WebOptions, WebPage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nsqext.broker import Cluster

__all__ = ("browsing", "page_with", "press", "token_of")


@asynccontextmanager
async def browsing(
    cluster: Cluster | list[str], *, embedded: bool = False, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the page of a cluster and yield an HTTP client for it.

    Args:
        cluster: an embedded cluster, or lookup addresses.
        embedded: whether the page offers faults of the cluster.
        options: options of the page.
    """
    if isinstance(cluster, list):
        page = WebPage(cluster, WebOptions(**options))
    else:
        page = WebPage(cluster.lookupd, WebOptions(**options), cluster=cluster if embedded else None)
    async with anyio.create_task_group() as tasks:
        await tasks.start(page.run)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=page), base_url="http://localhost:8171"
        ) as browser:
            yield browser
        tasks.cancel_scope.cancel()


async def page_with(browser: httpx.AsyncClient, path: str, holds: Callable[[str], bool]) -> str:
    """Load a page repeatedly until its text satisfies a condition; return the text."""
    with anyio.fail_after(30):
        while True:
            text = (await browser.get(path)).text
            if holds(text):
                return text
            await anyio.sleep(0.05)


async def token_of(browser: httpx.AsyncClient) -> str:
    """Return the token of the forms of the overview."""
    found = re.search(r'name="token" value="([0-9a-f]+)"', (await browser.get("/")).text)
    assert found is not None
    return found[1]


async def press(browser: httpx.AsyncClient, action: str, **fields: str) -> httpx.Response:
    """Send the form of an action with its token, confirmed; follow the redirect to the page with the result."""
    form = {"token": await token_of(browser), "sure": "yes", **fields}
    headers = {"origin": "http://localhost:8171", "sec-fetch-site": "same-origin"}
    return await browser.post(f"/actions/{action}", data=form, headers=headers, follow_redirects=True)
