"""Calls from blocking code into an event loop, which runs in a daemon thread: one for each process, started on demand.

A forked process starts an event loop of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from nsqext.sync.loop import call as call_through

__all__ = ("call", "iterate", "portal")

T = TypeVar("T")

_lock = threading.Lock()
_running: tuple[int, BlockingPortal] | None = None


def _renew() -> None:
    """Forget the event loop of the parent process, whose thread was not forked, and its lock, which may be held."""
    global _lock, _running
    _lock = threading.Lock()
    _running = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def portal() -> BlockingPortal:
    """Return the portal to the event loop of this process; the first call starts it."""
    global _running
    with _lock:
        if _running is None or _running[0] != os.getpid():
            opened: Future[BlockingPortal] = Future()
            threading.Thread(target=_serve, args=(opened,), name="nsqext-spark", daemon=True).start()
            _running = os.getpid(), opened.result()
        return _running[1]


def _serve(opened: Future[BlockingPortal]) -> None:
    options = {"use_uvloop": find_spec("uvloop") is not None}
    try:
        anyio.run(_keep_open, opened, backend="asyncio", backend_options=options)
    except BaseException as error:
        if not opened.done():
            opened.set_exception(error)
        raise


async def _keep_open(opened: Future[BlockingPortal]) -> None:
    async with BlockingPortal() as found:
        opened.set_result(found)
        await found.sleep_until_stopped()


def call(function: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
    """Run a coroutine function in the event loop and return its result; an interrupt of the caller cancels it.

    Raises:
        InvalidState: called in the event loop's own thread.
    """
    return call_through(portal(), "event loop", function, *args)


def iterate(
    manager: AbstractAsyncContextManager[Any, bool | None], following: Callable[[], Coroutine[Any, Any, T | None]]
) -> Iterator[T]:
    """Enter a context manager in the event loop, and call a coroutine function until it returns None.

    Closing the generator leaves the context manager.
    """
    with portal().wrap_async_context_manager(manager):
        while (item := call(following)) is not None:
            yield item
