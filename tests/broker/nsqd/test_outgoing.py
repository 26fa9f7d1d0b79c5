"""Nodes that ask others go on serving while the HTTP client is loaded."""

from __future__ import annotations

import threading

import anyio
import pytest

from nsqext.broker import outgoing


@pytest.mark.anyio
async def test_the_loop_runs_while_the_http_client_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    served, imported = threading.Event(), []

    def slow(name: str) -> None:
        assert served.wait(20), "the loop stood still"
        imported.append(name)

    monkeypatch.setattr(outgoing, "_loaded", [])
    monkeypatch.setattr(outgoing, "import_module", slow)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outgoing.load_http_client)
        await anyio.wait_all_tasks_blocked()
        served.set()
    await outgoing.load_http_client()
    assert imported == ["httpx"]
