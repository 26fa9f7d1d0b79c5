"""Virtual time: the selector of the simulated event loop, which moves the time forward instead of waiting.

The order of sockets that are ready at the same time, and which of them are reported, is drawn from the seed.
"""

from __future__ import annotations

import selectors
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsqext.testing.simulation.network import Network

_TURN = 0.00002
"""Virtual seconds that a turn of the loop takes, at most."""
_MISS = 0.1
"""Share of ready sockets that a turn does not report."""


class SimulationStuck(BaseException):
    """The simulation made no progress: too many turns of the loop, or nothing to wait for."""


class SimulatedSelector(selectors.BaseSelector):
    """Reports simulated sockets, and moves the time of the network forward instead of waiting.

    Args:
        most_turns: turns after which `SimulationStuck` is raised.
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
