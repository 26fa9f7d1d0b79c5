"""An asyncio event loop with virtual time, whose sockets are those of a `Network`.

Callbacks of ``call_soon`` run in their order, and timers in the order of their times, as asyncio promises. The order of
sockets that are ready at the same time, which of them are reported, and how late timers are, is drawn from the seed.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from asyncio.selector_events import BaseSelectorEventLoop
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from nsqext.testing.simulation.sockets import HOST

if TYPE_CHECKING:
    from nsqext.testing.simulation.network import Network

__all__ = ("SimulatedLoop", "SimulationStuck")

_TURN = 0.00002
"""Virtual seconds that a turn of the loop takes, at most."""
_MISS = 0.1
"""Share of ready sockets that a turn does not report."""


class SimulationStuck(BaseException):
    """The simulation made no progress: too many turns of the loop, or nothing to wait for."""


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
        """Count from 1 again."""
        cls._serials = count(1)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **settings: Any) -> SimulatedTask:
    return SimulatedTask(coroutine, loop=loop, **settings)


class _Callback(asyncio.Handle):
    """A function to call, without what asyncio keeps for its debug mode."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: Any, context: Context | None) -> None:
        self._callback, self._args, self._loop = callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._repr = self._source_traceback = None


class SimulatedSelector(selectors.BaseSelector):
    """Reports simulated sockets, and moves the time of the network forward instead of waiting.

    Args:
        network: the network.
        most_turns: turns after which `SimulationStuck` is raised.

    Attributes:
        turns: turns so far.
    """

    def __init__(self, network: Network, most_turns: int) -> None:
        self.turns: int = 0
        self._network = network
        self._most = most_turns
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._writers: dict[int, None] = {}
        self._paused: float = 0.0

    def pause(self, seconds: float) -> None:
        """Let the machine do nothing for a while, from the next turn on."""
        self._paused = max(self._paused, seconds)

    def allow(self, turns: int) -> None:
        """Allow some more turns."""
        self._most = self.turns + turns

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Report a socket."""
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
        """Report a socket no more."""
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._writers.pop(fd, None)
        return self._keys.pop(fd)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Change what is reported of a socket."""
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fd]._replace(events=events, data=data)
        self._set(fd, key)
        return key

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return the registered sockets."""
        return self._keys

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        """Return the registration of a socket."""
        return self._keys[fileobj if isinstance(fileobj, int) else fileobj.fileno()]

    def close(self) -> None:
        """Forget everything."""
        self._keys.clear()
        self._writers.clear()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the ready sockets; without any, move the time to the next event or to the end of the timeout."""
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


class SimulatedLoop(BaseSelectorEventLoop):
    """The event loop of a simulation.

    Args:
        network: sockets and time.
        most_turns: turns after which `SimulationStuck` is raised.
    """

    _ready: deque[Any]
    _scheduled: list[Any]
    _stopping: bool
    _process_events: Callable[[Any], None]

    def __init__(self, network: Network, most_turns: int = 5_000_000) -> None:
        self.network: Network = network
        self.selector: SimulatedSelector = SimulatedSelector(network, most_turns)
        super().__init__(self.selector)
        self._timers = 0
        SimulatedTask.restart()
        self.set_task_factory(cast("Any", _make_task))

    def time(self) -> float:
        """Return the virtual time."""
        return self.network.now

    # the same as in the base class, without its debug mode, and with timers that are compared as tuples

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call a function in the next turn."""
        handle = _Callback(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call a function after virtual seconds."""
        return self.call_at(self.network.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call a function at a virtual time."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers += 1
        heappush(self._scheduled, (when, self._timers, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: cancelled timers are removed at their time."""

    def _run_once(self) -> None:
        """Run one turn."""
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0][2]._cancelled:
            heappop(scheduled)
        timeout: float | None = None
        if ready or self._stopping:
            timeout = 0.0
        elif scheduled:
            timeout = max(0.0, scheduled[0][0] - self.network.now)
        events = self.selector.select(timeout)
        if events:
            self._process_events(events)
        end = self.network.now + 1e-9
        while scheduled and scheduled[0][0] < end:
            ready.append(heappop(scheduled)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    context = {"message": f"exception in {handle!r}", "exception": error, "handle": handle}
                    self.call_exception_handler(context)

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
        """Connect through the simulated network."""
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
        """Listen on the simulated network."""
        sock = settings.pop("sock", None)
        for name in ("family", "flags", "reuse_address", "reuse_port", "keep_alive"):
            settings.pop(name, None)
        if sock is None:
            sock = self.network.socket()
            sock.bind((HOST, port or 0))
        return await super().create_server(protocol_factory, sock=sock, **settings)
