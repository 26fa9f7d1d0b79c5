"""HTTP requests from one server to another."""

from __future__ import annotations

import logging
import ssl
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext.http import client as http_client
from nsqext.http.client import HttpClient, HttpRequestFailed
from tests.support.fake_lookupd import serving

if TYPE_CHECKING:
    from anyio.abc import SocketStream

CLOSED = "http://127.0.0.1:1/auth?secret=hunter2"


@pytest.mark.anyio
@pytest.mark.parametrize("url", [CLOSED, CLOSED.replace("http:", "https:")])
async def test_the_loop_runs_while_httpcore_and_certificates_are_loaded(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, loaded = threading.Event(), []

    def load(*_: object) -> ssl.SSLContext:
        assert served.wait(20), "the loop was blocked"
        loaded.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return loaded[-1]

    if url == CLOSED:
        monkeypatch.setattr(http_client, "sys", SimpleNamespace(modules={}))
        monkeypatch.setattr(http_client, "load_httpcore", load)
    monkeypatch.setattr(http_client, "system_certificates", load)
    client = HttpClient(5)

    async def ask() -> None:
        with pytest.raises(HttpRequestFailed):
            await client.request("GET", url)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        served.set()
    assert len(loaded) == 1
    await client.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("url", [CLOSED, "http://[bad/?secret=hunter2", "nothing://?secret=hunter2"])
async def test_a_failed_request_names_no_secret(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = HttpClient(5)
    with pytest.raises(HttpRequestFailed) as failed:
        await client.request("GET", url)
    await client.aclose()
    assert "hunter2" not in f"{failed.value!r} {caplog.text}"


async def _close_after_request(stream: SocketStream) -> None:
    await stream.receive()


@pytest.mark.anyio
async def test_a_failed_request_says_whether_it_may_have_been_sent() -> None:
    client, sent = HttpClient(5), list[bool]()
    async with serving(_close_after_request) as address:
        for url in (f"http://{address}/pub", CLOSED, "http://[bad/"):
            with pytest.raises(HttpRequestFailed) as failed:
                await client.request("POST", url, content=b"x")
            sent.append(failed.value.sent)
    await client.aclose()
    assert sent == [True, False, False]
