"""A served web page for tests, and requests like those of a browser."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import anyio
import httpx

from nsqext.web import WebOptions, WebPage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nsqext.broker import Cluster

__all__ = ("browsing", "page_with", "press", "submit", "token_of")


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


class _Forms(HTMLParser):
    """Reads the forms of a page: action, fields as a browser sends them, and labels of buttons."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str], list[str]]] = []
        self._select: str | None = None
        self._in_button = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "form":
            self.found.append((given["action"] or "", {}, []))
        if not self.found:
            return
        _, fields, buttons = self.found[-1]
        name = given.get("name")
        if tag == "input" and name and (given.get("type") not in ("checkbox", "radio") or "checked" in given):
            fields[name] = given.get("value") or ""
        elif tag == "select":
            self._select = name
        elif tag == "option" and self._select:
            if "selected" in given or self._select not in fields:
                fields[self._select] = given.get("value") or ""
        elif tag == "button":
            self._in_button = True
            buttons.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "button":
            self._in_button = False
        elif tag == "select":
            self._select = None

    def handle_data(self, data: str) -> None:
        if self._in_button and self.found:
            self.found[-1][2][-1] += data


async def submit(browser: httpx.AsyncClient, path: str, label: str, action: str) -> httpx.Response:
    """Load a page and press the button of a form, as a browser without JavaScript does; confirm if asked."""
    text = (await browser.get(path)).text
    headers = {"origin": "http://localhost:8171", "sec-fetch-site": "same-origin"}
    while True:
        forms = _Forms()
        forms.feed(text)
        (fields,) = (
            given for where, given, buttons in forms.found if where == f"/actions/{action}" and label in buttons
        )
        sent = await browser.post(f"/actions/{action}", data=fields, headers=headers, follow_redirects=True)
        if "sure" in fields or 'name="sure"' not in sent.text:
            return sent
        text = sent.text
