"""The private parts of asyncio, anyio and httpx that a simulation replaces, all in this file.

They may change with any release: a simulation refuses to run with other versions than `TESTED`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import version
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from anyio.lowlevel import checkpoint

from nsqext.errors import InvalidState
from nsqext.testing.simulation.selector import SimulatedSelector
from nsqext.testing.simulation.sockets import HOST

if TYPE_CHECKING:
    from nsqext.testing.simulation.network import Network

TESTED = {"anyio": ("4.12", "4.16"), "httpx": ("0.27", "0.28"), "uvicorn": ("0.34", "0.54")}
"""The lowest and the highest version of each package that the project's tests run simulations with."""
_PYTHONS = ((3, 11), (3, 14))

HTTPX_URL = ("httpx._urls", "urlparse")
"""A pure function, which is slow."""

Replacement = tuple[Any, str, Any]
"""A module or class, the name of one of its attributes, and the value of it during a simulation."""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


@cache
def check_versions() -> None:
    """Check that the installed versions are those whose private parts are known."""
    if not _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]:
        raise InvalidState(
            f"simulations replace private parts of asyncio, and were not tested with Python {sys.version.split()[0]}",
            hint=f"use Python {'.'.join(map(str, _PYTHONS[0]))} to {'.'.join(map(str, _PYTHONS[1]))}",
        )
    for package, (lowest, highest) in TESTED.items():
        if not _numbers(lowest) <= _numbers(found := version(package)) <= _numbers(highest):
            raise InvalidState(
                f"simulations replace private parts of {package}, and were not tested with version {found}",
                hint=f"install {package} {lowest} to {highest}, or a newer nsqext",
            )


# asyncio


class SimulatedTask(asyncio.Task[Any]):
    """A task whose hash does not depend on its address, so that sets of tasks have the same order in each process."""

    _serials = count(1)

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._serial = next(self._serials)
        super().__init__(*args, **settings)

    def __hash__(self) -> int:
        return self._serial

    @classmethod
    def restart(cls) -> None:
        cls._serials = count(1)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **settings: Any) -> SimulatedTask:
    return SimulatedTask(coroutine, loop=loop, **settings)


class SimulatedLoop(BaseSelectorEventLoop):
    """The event loop of a simulation.

    Args:
        most_turns: turns after which `SimulationStuck` is raised.
    """

    def __init__(self, network: Network, most_turns: int = 5_000_000) -> None:
        self.network: Network = network
        self.selector: SimulatedSelector = SimulatedSelector(network, most_turns)
        super().__init__(self.selector)
        SimulatedTask.restart()
        self.set_task_factory(cast("Any", _make_task))

    def time(self) -> float:
        return self.network.now

    # the base class connects two real sockets, with which other threads and signals wake the loop

    def _make_self_pipe(self) -> None: ...

    def _close_self_pipe(self) -> None: ...

    def _write_to_self(self) -> None: ...

    async def getaddrinfo(self, host: Any, port: Any, **settings: Any) -> Any:
        """Resolve every name to the one address of the simulation."""
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (HOST, int(port or 0)))]

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> Any:
        """Call the function at once: threads would make the order of events depend on the machine."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **settings: Any
    ) -> Any:
        sock = settings.pop("sock", None)
        for name in ("family", "proto", "flags", "local_addr", "happy_eyeballs_delay", "interleave", "all_errors"):
            settings.pop(name, None)
        if sock is None:
            sock = self.network.socket()
            try:
                await self.sock_connect(sock, (HOST, port))
            except BaseException:
                sock.close()
                raise
            if settings.get("ssl") and "server_hostname" not in settings:
                settings["server_hostname"] = host
        return await super().create_connection(protocol_factory, sock=sock, **settings)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **settings: Any) -> Any:
        sock = settings.pop("sock", None)
        for name in ("family", "flags", "reuse_address", "reuse_port", "keep_alive"):
            settings.pop(name, None)
        if sock is None:
            sock = self.network.socket()
            sock.bind((HOST, port or 0))
        return await super().create_server(protocol_factory, sock=sock, **settings)


# anyio


@contextmanager
def run_by_anyio() -> Iterator[None]:
    """Run a part of a task as in a process that `anyio.run` started; ``asyncio.run`` does not set the library."""
    eventloop = import_module("anyio._core._eventloop")
    library = eventloop.set_current_async_library("asyncio")
    try:
        yield
    finally:
        eventloop.reset_current_async_library(library)


def _current_library(sniffio: Any) -> Callable[[], str | None]:
    """Return a stand-in for anyio's `current_async_library`, with the same results for asyncio in less time."""
    local, variable = sniffio.thread_local, sniffio.current_async_library_cvar

    def current_async_library() -> str | None:
        found = local.name or variable.get()
        return found if found is not None or _current_task() is None else "asyncio"

    return current_async_library


def _current_task() -> asyncio.Task[Any] | None:
    """Return the running task, None without one or without an event loop; asyncio's is slow before Python 3.12."""
    if sys.version_info < (3, 12):
        running: dict[Any, asyncio.Task[Any]] = asyncio.tasks._current_tasks  # type: ignore[attr-defined]
        return running.get(asyncio._get_running_loop())
    return asyncio.current_task() if asyncio._get_running_loop() is not None else None


def _numbered_scope(backend: Any) -> type:
    """Return anyio's cancel scope with a hash that does not depend on its address."""
    serials = count(1)

    class CancelScope(backend.CancelScope):  # type: ignore[misc]
        __slots__ = ("_serial",)

        def __init__(self, *args: Any, **settings: Any) -> None:
            self._serial = next(serials)
            super().__init__(*args, **settings)

        def __hash__(self) -> int:
            return self._serial

    return CancelScope


async def _run_at_once(function: Callable[..., Any], args: tuple[Any, ...], *_: Any, **__: Any) -> Any:
    """Stand for a worker thread."""
    await checkpoint()
    return function(*args)


def parts_of_anyio() -> Iterator[Replacement]:
    """Replace what depends on addresses and threads, and what is slow."""
    backend = import_module("anyio._backends._asyncio")
    yield backend, "CancelScope", _numbered_scope(backend)
    yield backend, "current_task", _current_task
    yield backend.AsyncIOBackend, "run_sync_in_worker_thread", staticmethod(_run_at_once)
    sniffio = sys.modules.get("sniffio")  # an optional dependency of anyio
    if sniffio is not None:
        yield import_module("anyio._core._eventloop"), "current_async_library", _current_library(sniffio)
