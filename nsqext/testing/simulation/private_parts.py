"""The private parts of asyncio, anyio and uvicorn that a simulation replaces.

They may change with any release: simulations run only with versions in `TESTED`.
"""

from __future__ import annotations

import asyncio
import re
import selectors
import socket
import sys
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import version
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from anyio.lowlevel import checkpoint

from nsqext.errors import InvalidState
from nsqext.testing.simulation.sockets import HOST

if TYPE_CHECKING:
    from nsqext.testing.simulation.network import Network

_TURN = 0.00002  # longest virtual turn of the loop, in seconds
_MISS = 0.1  # share of ready sockets that a turn does not report


class SimulationStuck(BaseException):
    """Too many turns of the loop, or nothing to wait for."""


class SimulatedSelector(selectors.BaseSelector):
    """Reports simulated sockets, and advances the network's time instead of waiting.

    The seed decides which ready sockets are reported, in which order. After ``most_turns`` it raises `SimulationStuck`.
    """

    def __init__(self, network: Network, most_turns: int) -> None:
        self.turns: int = 0
        self._network = network
        self._most = most_turns
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._writers: dict[int, None] = {}
        self._paused: float = 0.0

    def pause(self, seconds: float) -> None:
        """Let the machine stand still from the next turn on."""
        self._paused = max(self._paused, seconds)

    def allow(self, turns: int) -> None:
        self._most = self.turns + turns

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if fd not in self._network.sockets:
            raise ValueError(f"{fileobj!r} is not an open socket of the simulation")
        key = selectors.SelectorKey(fileobj, fd, events, data)
        if fd in self._keys:
            raise KeyError(f"{fileobj!r} (FD {fd}) is already registered")
        self._set(fd, key)
        return key

    def _set(self, fd: int, key: selectors.SelectorKey) -> None:
        self._keys[fd] = key
        if key.events & selectors.EVENT_WRITE:
            self._writers[fd] = None
        else:
            self._writers.pop(fd, None)
        if key.events & selectors.EVENT_READ and self._network.sockets[fd].readable:
            self._network.readable[fd] = None

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._writers.pop(fd, None)
        return self._keys.pop(fd)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fd]._replace(events=events, data=data)
        self._set(fd, key)
        return key

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[fileobj if isinstance(fileobj, int) else fileobj.fileno()]

    def close(self) -> None:
        self._keys.clear()
        self._writers.clear()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return ready sockets; without any, advance to the next event or the end of the timeout."""
        network = self._network
        self.turns += 1
        if self.turns > self._most:
            raise SimulationStuck(f"no end after {self._most} turns of the event loop, {network.now:.1f} s")
        network.now += network.random.random() * _TURN
        if self._paused:
            network.note(f"pause {self._paused:.3f}")
            network.now += self._paused
            self._paused = 0.0
        if network.events and network.events[0][0] <= network.now:
            network.run_due()
        found = self._ready() if network.readable or self._writers else []
        if found or timeout == 0:
            return found
        limit = None if timeout is None else network.now + max(timeout, 0.0)
        if limit is not None and network.random.random() < network.options.late:
            limit += network.random.random() * network.options.late_seconds
        while not found:
            due = network.events[0][0] if network.events else None
            if due is None or (limit is not None and limit < due):
                if limit is None:
                    raise SimulationStuck(f"every task waits and nothing can happen any more, {network.now:.1f} s")
                network.now = limit
                return found
            network.now = max(network.now, due)
            network.run_due()
            found = self._ready()
        return found

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        network = self._network
        sockets, keys = network.sockets, self._keys
        masks: dict[int, int] = {}
        for fd in list(network.readable):
            sock, key = sockets.get(fd), keys.get(fd)
            if sock is None or not (sock.buffer or sock.readable) or sock.host in network.dead:
                del network.readable[fd]
            elif key is not None and key.events & selectors.EVENT_READ:
                masks[fd] = selectors.EVENT_READ
            else:
                del network.readable[fd]  # `_set` adds it again
        for fd in self._writers:
            sock = sockets.get(fd)
            if sock is not None and sock.writable and sock.host not in network.dead:
                masks[fd] = masks.get(fd, 0) | selectors.EVENT_WRITE
        if network.stalled:
            masks = {fd: mask for fd, mask in masks.items() if sockets[fd].host not in network.stalled}
        found = [(keys[fd], mask) for fd, mask in masks.items()]
        if len(found) > 1:
            random = network.random
            random.shuffle(found)
            if random.random() < _MISS:
                del found[random.randrange(1, len(found)) :]
        return found


TESTED = {"anyio": ("4.12", "4.16"), "uvicorn": ("0.34", "0.54")}
"""Lowest and highest tested versions."""
_PYTHONS = ((3, 11), (3, 14))

Replacement = tuple[Any, str, Any]
"""Module or class, name of an attribute, and its value during a simulation."""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


@cache
def check_versions() -> None:
    """Raise InvalidState for versions that were not tested."""
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


def _numbered(kind: Any) -> Any:
    """Return a class with hashes independent of addresses: sets have the same order in each process."""
    serials = count(1)

    class Numbered(kind):  # type: ignore[misc]
        __slots__ = ("_serial",)

        def __init__(self, *args: Any, **settings: Any) -> None:
            self._serial = next(serials)
            super().__init__(*args, **settings)

        def __hash__(self) -> int:
            return self._serial

    return Numbered


# asyncio


class SimulatedLoop(BaseSelectorEventLoop):
    """The event loop of a simulation."""

    def __init__(self, network: Network, most_turns: int = 5_000_000) -> None:
        self.network: Network = network
        self.selector: SimulatedSelector = SimulatedSelector(network, most_turns)
        super().__init__(self.selector)
        kind, self._made = _numbered(asyncio.Task), WeakSet[Any]()

        def make(loop: Any, coroutine: Any, **settings: Any) -> Any:
            task = kind(coroutine, loop=loop, **settings)
            self._made.add(task)
            return task

        self.set_task_factory(make)

    def unseen_errors(self) -> list[BaseException]:
        """Return the errors of ended tasks that the program keeps and did not await, in the order of the tasks."""
        return [task.exception() for task in sorted(self._made, key=hash) if task._log_traceback]

    def time(self) -> float:
        return self.network.now

    # the base class connects real sockets, by which threads and signals wake the loop

    def _make_self_pipe(self) -> None: ...

    def _close_self_pipe(self) -> None: ...

    def _write_to_self(self) -> None: ...

    async def getaddrinfo(self, host: Any, port: Any, **settings: Any) -> Any:
        """Resolve every name to the simulation's address."""
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (HOST, int(port or 0)))]

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> Any:
        """Call the function at once: with threads, the order of events depends on the machine."""
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
    """Run a part of a task as below `anyio.run`; ``asyncio.run`` does not set the library."""
    eventloop = import_module("anyio._core._eventloop")
    library = eventloop.set_current_async_library("asyncio")
    try:
        yield
    finally:
        eventloop.reset_current_async_library(library)


async def _run_at_once(function: Callable[..., Any], args: tuple[Any, ...], *_: Any, **__: Any) -> Any:
    await checkpoint()
    return function(*args)


def private_parts() -> Iterator[Replacement]:
    """Yield replacements for what depends on addresses and threads."""
    server = import_module("nsqext.http.uvicorn_server")
    yield server, "GoProtocol", _numbered(server.GoProtocol)
    backend = import_module("anyio._backends._asyncio")
    yield backend, "CancelScope", _numbered(backend.CancelScope)
    yield backend.AsyncIOBackend, "run_sync_in_worker_thread", staticmethod(_run_at_once)
