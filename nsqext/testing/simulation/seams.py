"""Replace what product code takes from the machine: clocks, randomness, sockets, threads, names of host and process.

The replacements apply only to the simulation's thread.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from nsqext.testing.simulation.private_parts import Replacement, check_versions, private_parts
from nsqext.waits import chance

if TYPE_CHECKING:
    from nsqext.testing.simulation.disk import SimulatedDisk
    from nsqext.testing.simulation.network import Network

EPOCH = 1_700_000_000.0
"""Seconds since 1970 at the start of every simulation."""

# loaded before a simulation, whose trace must not depend on earlier imports
_PRODUCT = (
    "nsqext",
    "nsqext.admin",
    "nsqext.broker.runtimes",
    "nsqext.client.producer.http_connection",
    "nsqext.http.client",
    "nsqext.http.connections",
    "httpx",
)
_SOCKET_USERS = ("nsqext.transport.handshake", "nsqext.broker.listeners")


class SimulatedClock:
    """The clocks of a simulation; the monotonic clock is the network's time.

    Attributes:
        jumped: seconds by which the wall clock was set forward, or negative for back.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.jumped: float = 0.0

    def monotonic(self) -> float:
        return self._network.now

    def monotonic_ns(self) -> int:
        return round(self._network.now * 1e9)

    def time(self) -> float:
        return EPOCH + self._network.now + self.jumped

    def time_ns(self) -> int:
        return int(EPOCH) * 1_000_000_000 + round((self._network.now + self.jumped) * 1e9)


def _only_this_thread(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``simulated`` in the running simulation's thread, else ``real``."""
    owner = threading.get_ident()

    def chosen(*args: Any, **settings: Any) -> Any:
        if _running[0] is simulated_by and threading.get_ident() == owner:
            return simulated(*args, **settings)
        return real(*args, **settings)

    simulated_by = _running[0]
    return chosen


_running: list[object | None] = [None]


@contextmanager
def simulated_machine(
    network: Network, clock: SimulatedClock, seed: int, *, disk: SimulatedDisk | None = None
) -> Iterator[None]:
    """Let product code in this thread run on a simulated machine; without a disk, it has no files."""
    check_versions()
    _load_product()
    before = random.getstate()
    collecting = gc.isenabled()
    _running[0] = network
    loaded = set(sys.modules)
    functions: list[Replacement] = []
    try:
        with ExitStack() as stack:
            functions += _functions_of_the_machine(clock, random.Random(f"entropy {seed}"))
            for replacements in (
                functions,
                ((import_module(user), "make_socket", network.socket) for user in _SOCKET_USERS),
                private_parts(),
                _jitter(random.Random(f"product {seed}")),
                () if disk is None else _files(disk),
            ):
                for owner, name, replacement in replacements:
                    stack.enter_context(patch.object(owner, name, replacement))
            random.seed(f"product {seed}")
            gc.disable()  # finalizers would run at machine-dependent times
            yield
    finally:
        _running[0] = None
        _restore(loaded, functions)
        random.setstate(before)
        if collecting:
            gc.enable()


def _functions_of_the_machine(clock: SimulatedClock, entropy: random.Random) -> Iterator[Replacement]:
    """Replace clocks, entropy and names, also where modules imported functions by name."""
    functions = (
        (time, "monotonic", clock.monotonic),
        (time, "monotonic_ns", clock.monotonic_ns),
        (time, "perf_counter", clock.monotonic),
        (time, "time", clock.time),
        (time, "time_ns", clock.time_ns),
        (os, "urandom", entropy.randbytes),
        (os, "getpid", lambda: 1),
        (socket, "gethostname", lambda: "simulated"),
    )
    captured = _captured(getattr(module, name) for module, name, _ in functions)
    for module, name, simulated in functions:
        real = getattr(module, name)
        chosen = _only_this_thread(real, simulated)
        yield module, name, chosen
        for user, attribute in captured[real]:
            yield user, attribute, chosen


def _jitter(seeded: random.Random) -> Iterator[Replacement]:
    """Replace the source of jitter: what other threads draw from it does not change what the simulation draws."""
    for name in ("random", "getrandbits"):  # all other methods call these
        yield chance, name, _only_this_thread(getattr(chance, name), getattr(seeded, name))


def _restore(loaded: set[str], functions: Sequence[Replacement]) -> None:
    """Bind the real functions in modules imported meanwhile, for the next simulation."""
    real = {replacement: getattr(owner, name) for owner, name, replacement in functions}
    for path in sys.modules.keys() - loaded:
        module = sys.modules[path]
        for name, value in tuple(vars(module).items()):
            if isinstance(value, FunctionType) and value in real:
                setattr(module, name, real[value])


def _files(disk: SimulatedDisk) -> Iterator[Replacement]:
    yield import_module("nsqext.broker.runtime"), "locked", lambda *_, **__: nullcontext()
    for name, function in disk.replacements():
        yield os, name, function


@cache
def _load_product() -> None:
    for name in _PRODUCT:
        import_module(name)


_captured_names: dict[int, dict[Any, list[tuple[Any, str]]]] = {}


def _captured(functions: Iterable[Any]) -> dict[Any, list[tuple[Any, str]]]:
    """Return the package's modules and names that imported these functions by name."""
    loaded = len(sys.modules)
    if loaded not in _captured_names:
        found: dict[Any, list[tuple[Any, str]]] = {function: [] for function in functions}
        for path, module in sorted(sys.modules.items()):
            if path.startswith("nsqext.") and not path.startswith("nsqext.testing."):
                for name, value in vars(module).items():
                    if isinstance(value, BuiltinFunctionType) and value in found:
                        found[value].append((module, name))
        _captured_names.clear()
        _captured_names[loaded] = found
    return _captured_names[loaded]
