"""From blocking code into an event loop: one in a thread of its own for each process, started when it is needed.

The thread ends with the process, which it does not keep alive. A process that was forked starts one of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from nsqext.sync.loop import call as call_through

if TYPE_CHECKING:
    from nsqext.spark.read.range_reader import RangeReader
    from nsqext.spark.read.reassembly import Block

__all__ = ("blocks", "call", "portal")

T = TypeVar("T")

_lock = threading.Lock()
_running: tuple[int, BlockingPortal] | None = None


def _renew() -> None:
    """Forget the parent's loop, whose thread was left behind, and its lock, which somebody may hold there."""
    global _lock, _running
    _lock = threading.Lock()
    _running = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def portal() -> BlockingPortal:
    """Return the way into this process's event loop, which is started by the first call."""
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
    """Run a coroutine function in the event loop and return its result; what interrupts the caller cancels it.

    Raises:
        InvalidState: this is the event loop's own thread.
    """
    return call_through(portal(), "event loop", function, *args)


def blocks(reader: RangeReader) -> Iterator[Block]:
    """Read a range from blocking code, block by block; a generator that is closed early closes the reader.

    Raises:
        NsqError: see `RangeReader.next_block`.
    """
    with portal().wrap_async_context_manager(reader):
        while (block := call(reader.next_block)) is not None:
            yield block
