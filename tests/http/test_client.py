"""HTTP requests from one server to another."""

from __future__ import annotations

import logging
import ssl
import threading

import anyio
import pytest

from nsqext.http import client as http_client
from nsqext.http.client import HttpClient, HttpRequestFailed

CLOSED = "http://127.0.0.1:1/auth?secret=hunter2"


@pytest.mark.anyio
async def test_the_loop_runs_while_the_http_client_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    served, loaded = threading.Event(), []

    def slow() -> ssl.SSLContext:
        assert served.wait(20), "the loop was blocked by the import"
        loaded.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return loaded[-1]

    monkeypatch.setattr(http_client, "_contexts", [])
    monkeypatch.setattr(http_client, "_load", slow)

    async def ask() -> None:
        client = HttpClient(5)
        with pytest.raises(HttpRequestFailed):
            await client.request("GET", CLOSED)
        await client.aclose()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        served.set()
    await ask()
    assert len(loaded) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("url", [CLOSED, "http://[bad/?secret=hunter2", "nothing://?secret=hunter2"])
async def test_a_failed_request_names_no_secret(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = HttpClient(5)
    with pytest.raises(HttpRequestFailed) as failed:
        await client.request("GET", url)
    await client.aclose()
    assert "hunter2" not in f"{failed.value!r} {caplog.text}"
