"""The HTTP client of nodes that ask others: loaded when it is needed, without holding up the clients of the node."""

from __future__ import annotations

from importlib import import_module

from anyio import to_thread

__all__ = ("load_http_client",)

_loaded: list[bool] = []


async def load_http_client() -> None:
    """Import httpx, in a thread: it takes a fifth of a second, in which the node's loop has to serve.

    Cancellation waits for the import.
    """
    if not _loaded:
        await to_thread.run_sync(import_module, "httpx")
        _loaded.append(True)
