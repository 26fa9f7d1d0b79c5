"""The world that a scenario runs in: a cluster, a network, clocks, client processes, and the faults of its seed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

import anyio

from nsqext.errors import InvalidState
from nsqext.testing.simulation.faults import Fault, Injector
from nsqext.testing.simulation.network import current_host

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from nsqext.testing.simulation.cluster import SimulatedCluster
    from nsqext.testing.simulation.network import Network
    from nsqext.testing.simulation.private_parts import SimulatedLoop
    from nsqext.testing.simulation.seams import SimulatedClock


class ClientProcess:
    """A client process of a scenario, with sockets of its own; `World.start` makes it."""

    def __init__(self, name: str, network: Network) -> None:
        self.name: str = name
        self._network = network
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    async def run(self, main: Callable[[], Awaitable[object]]) -> None:
        """Run the program."""
        current_host.set(self.name)
        try:
            with self._scope:
                await main()
        finally:
            self._ended.set()

    async def kill(self, *, silently: bool = False) -> None:
        """Kill the process as ``kill -9`` does; nothing that its code sends afterwards is transmitted.

        Args:
            silently: servers are not notified, as when the machine lost its power.
        """
        self._network.kill_host(self.name, silently=silently)
        self._scope.cancel()
        await self._ended.wait()

    async def wait(self) -> None:
        """Return when the program has ended."""
        await self._ended.wait()


class World:
    """What a scenario gets.

    Attributes:
        seed: the seed.
        random: for the scenario's own choices.
        cluster: the cluster.
        network: sockets and links.
        clock: the clocks.
        loop: the event loop.
        faults: the faults of this seed.
        injected: whether the scenario has called `inject_faults`.
    """

    def __init__(
        self,
        seed: int,
        cluster: SimulatedCluster,
        loop: SimulatedLoop,
        clock: SimulatedClock,
        faults: tuple[Fault, ...],
        tasks: TaskGroup,
    ) -> None:
        self.seed: int = seed
        self.random: Random = Random(f"scenario {seed}")
        self.cluster: SimulatedCluster = cluster
        self.loop: SimulatedLoop = loop
        self.network: Network = loop.network
        self.clock: SimulatedClock = clock
        self.faults: tuple[Fault, ...] = faults
        self.injected: bool = False
        self._injector = Injector(seed, cluster, loop.network, clock, loop.selector)
        self._tasks = tasks

    @property
    def clients(self) -> list[str]:
        """Names of the client processes; ``client`` is the one that runs the scenario."""
        return self._injector.clients

    @property
    def now(self) -> float:
        """Virtual seconds since the simulation began."""
        return self.network.now

    def start(self, main: Callable[[], Awaitable[object]], name: str = "") -> ClientProcess:
        """Start a client process beside the scenario; an exception of it ends the scenario.

        Args:
            main: its program.
            name: its name; by default p1, p2 and so on.
        """
        process = ClientProcess(name or f"p{len(self.clients)}", self.network)
        if process.name in self.clients:
            raise InvalidState(f"a process {process.name!r} exists")
        self.clients.append(process.name)
        self._tasks.start_soon(process.run, main)
        return process

    @asynccontextmanager
    async def inject_faults(self) -> AsyncIterator[None]:
        """Inject the faults of the seed; the end of the block waits for all of them and heals everything."""
        self.injected = True
        async with anyio.create_task_group() as tasks:
            for fault in self.faults:
                tasks.start_soon(self._injector.inject, fault)
            yield
        await self._injector.heal()
