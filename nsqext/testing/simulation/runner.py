"""Run scenarios, and find a minimum of faults that still fails."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import anyio

from nsqext.arguments import check_flags, check_number, check_time
from nsqext.broker.engine.storage.segments import DiskOptions
from nsqext.client.consumer.handlers.failure_policy import FailurePolicy
from nsqext.client.consumer.handlers.receiver_queues import ReceiverQueues
from nsqext.client.consumer.message import HandlerSignal
from nsqext.client.events import ClientEvents
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.testing.simulation.cluster import SimulatedCluster, as_server
from nsqext.testing.simulation.disk import SimulatedDisk
from nsqext.testing.simulation.faults import Fault, FaultOptions, Injector, draw_faults
from nsqext.testing.simulation.forgotten_await import NotedCalls, awaited, forgotten
from nsqext.testing.simulation.network import Network, NetworkOptions, current_host
from nsqext.testing.simulation.private_parts import SimulatedLoop, SimulationStuck
from nsqext.testing.simulation.results import Run, SimulationFailed, error_text, failed_assertion, repeating_call
from nsqext.testing.simulation.seams import SimulatedClock, simulated_machine
from nsqext.transport.event_loop import current_loop

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from nsqext.client.consumer.handlers.workers import AnyHandler
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.options import DeadLetterHook
    from nsqext.client.events import ClientEvent


class ClientProcess(NotedCalls):
    """A client process of a scenario, with sockets of its own; made by `World.start`."""

    def __init__(self, name: str, network: Network, calls: list[Coroutine[Any, Any, Any]]) -> None:
        super().__init__(calls)
        self.name: str = name
        self._network = network
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    async def run(self, main: Callable[[], Awaitable[object]]) -> None:
        current_host.set(self.name)
        try:
            with self._scope:
                await main()
        finally:
            self._ended.set()

    @awaited
    async def kill(self, *, silently: bool = False) -> None:
        """Kill the process as ``kill -9`` does; its code sends nothing afterwards.

        Args:
            silently: servers are not notified, as after a loss of power.
        """
        self._network.kill_host(self.name, silently=silently)
        self._scope.cancel()
        await self._ended.wait()

    @awaited
    async def wait(self) -> None:
        await self._ended.wait()


class World:
    """What a scenario gets.

    Attributes:
        seed: the seed.
        random: for the scenario's choices.
        cluster: the cluster.
        network: sockets and links.
        clock: the clocks.
        loop: the event loop.
        faults: the seed's faults.
        injected: the scenario has called `inject_faults`.
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
        self._asked = False
        self._injector = Injector(seed, cluster, loop.network, clock, loop.selector)
        self._tasks = tasks

    @property
    def effective(self) -> frozenset[str]:
        """Kinds of the faults that had an effect so far."""
        return frozenset(self._injector.effective)

    def forgotten(self) -> InvalidState | None:
        """Return the error of a call of the scenario that had no effect; None without such a call."""
        if self._asked and not self.injected:
            hint = "write async with world.inject_faults(): ..."
            return InvalidState("inject_faults() was called and not entered, and had no effect", hint=hint)
        return forgotten(self.cluster.calls)

    @property
    def clients(self) -> list[str]:
        """Names of client processes; ``client`` runs the scenario."""
        return self._injector.clients

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.network.now

    def start(self, main: Callable[[], Awaitable[object]], name: str = "") -> ClientProcess:
        """Start a client process beside the scenario; its exceptions end the scenario.

        Args:
            main: its program.
            name: by default p1, p2 and so on.
        """
        process = ClientProcess(name or f"p{len(self.clients)}", self.network, self.cluster.calls)
        if process.name in (*self.clients, *self.cluster.nodes, *self.cluster.lookupds, "server"):
            raise InvalidState(f"a process {process.name!r} exists")
        self.clients.append(process.name)
        self._tasks.start_soon(process.run, main)
        return process

    def inject_faults(self) -> AbstractAsyncContextManager[None]:
        """Inject the seed's faults; the end of the block waits for all and heals everything."""
        self._asked = True
        return self._inject_faults()

    @asynccontextmanager
    async def _inject_faults(self) -> AsyncIterator[None]:
        self.injected = True
        async with anyio.create_task_group() as tasks:
            for fault in self.faults:
                tasks.start_soon(self._injector.inject, fault)
            yield
        await self._injector.heal()


Scenario = Callable[[World], Awaitable[object]]

_SHRINK_RUNS = 60


def simulate(
    scenario: Scenario,
    seeds: int | Iterable[int] = 20,
    *,
    nodes: int = 3,
    lookupds: int = 2,
    faults: FaultOptions | None = None,
    network: NetworkOptions | None = None,
    time_limit: float = 600.0,
    disk: bool = False,
) -> list[Run]:
    """Run a scenario once for each seed, in a new simulated world.

    The scenario is a coroutine function of the `World`. It creates topics, starts clients, and injects the seed's
    faults with ``async with world.inject_faults()``. It fails by raising, usually by ``assert``, also in a handler,
    in a callback of ``on_event`` and in the function ``dead_letter``.
    Other errors of handlers fail no scenario, as their messages are delivered again: see `Run.handler_errors`.

    Not simulated: threads (functions for worker threads run at once), TLS (its random numbers are real), trio.

    Args:
        scenario: the scenario.
        seeds: the seeds, or their number; at least one.
        nodes: number of nsqd.
        lookupds: number of nsqlookupd.
        faults: which faults are drawn.
        network: properties of the network.
        time_limit: virtual seconds after which a run fails.
        disk: nodes store messages on a simulated disk, and sync each publish.

    Raises:
        SimulationFailed: the scenario raised; with the necessary faults.
        InvalidSetting: an argument is not valid, or would have no effect: ``faults`` of a scenario that never injects
            them, a chosen kind of faults that was drawn and had no effect in any run, no seed.
        InvalidState: called in an event loop.
    """
    _check_no_loop()
    numbers = range(1, check_number("seeds", seeds, 1) + 1) if isinstance(seeds, int) else [*seeds]
    if not numbers:
        raise InvalidSetting("seeds is empty, so that the scenario would not run")
    check_number("nodes", nodes, 1)
    check_number("lookupds", lookupds, 1)
    check_time("time_limit", time_limit, zero=False)
    check_flags(disk=disk)
    _check_options("faults", faults, FaultOptions)
    _check_options("network", network, NetworkOptions)
    options = (faults or FaultOptions()).possible(disk=disk, nodes=nodes)
    settings: dict[str, tuple[object, object]] = {"nodes": (nodes, 3), "lookupds": (lookupds, 2)}
    settings |= {"faults": (faults, None), "network": (network, None)}
    settings |= {"time_limit": (time_limit, 600.0), "disk": (disk, False)}
    names = [f"n{number + 1}" for number in range(nodes)], [f"l{number + 1}" for number in range(lookupds)]
    found = []
    for seed in numbers:
        again = partial(
            run_seed, scenario, seed, nodes=nodes, lookupds=lookupds, network=network, time_limit=time_limit, disk=disk
        )
        run = again(draw_faults(seed, options, *names))
        if run.error is not None:
            raise SimulationFailed(shrink(run, again), repeating_call(scenario, seed, settings)) from run.error
        found.append(run)
    if faults is not None and not any(run.injected for run in found):
        raise InvalidSetting(
            "the scenario injects no faults, so that faults= has no effect",
            hint="async with world.inject_faults(): ...",
        )
    if faults is not None and not faults.every_kind:
        injected = [run for run in found if run.injected]
        drawn = {fault.kind for run in injected for fault in run.faults}
        faults.check_effects(drawn, {kind for run in injected for kind in run.effective})
    return found


def _check_no_loop() -> None:
    loop = current_loop()
    if loop is not None:
        raise InvalidState(
            "a simulation has an event loop of its own, and was called in another one",
            hint="call it in a function that is declared with 'def', not 'async def'",
        )


def _check_options(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidSetting(f"{name}={value!r} is not a {kind.__name__}")


def shrink(run: Run, again: Callable[[Sequence[Fault]], Run], most: int = _SHRINK_RUNS) -> Run:
    """Return the failing run with the fewest faults that ``most`` runs find."""
    size = max(len(run.faults) // 2, 1)
    while run.faults and most > 0:
        smaller = None
        for start in range(0, len(run.faults), size):
            most -= 1
            tried = again(run.faults[:start] + run.faults[start + size :])
            if tried.error is not None:
                smaller = tried
                break
            if most <= 0:
                break
        if smaller is not None:
            run = smaller
            size = min(size, max(len(run.faults), 1))
        elif size == 1:
            break
        else:
            size //= 2
    return run


def run_seed(
    scenario: Scenario,
    seed: int,
    faults: Sequence[Fault],
    *,
    nodes: int = 3,
    lookupds: int = 2,
    network: NetworkOptions | None = None,
    time_limit: float = 600.0,
    keep_trace: bool = False,
    most_turns: int = 2_000_000,
    disk: bool | DiskOptions = False,
) -> Run:
    """Run a scenario with a seed and given faults; the result has its exception.

    Args:
        time_limit: virtual seconds after which the run fails.
        keep_trace: keep the last events as text.
        most_turns: turns of the event loop after which the run fails.
        disk: nodes store messages on a simulated disk, with a sync of each publish or with these options.
    """
    wires = Network(Random(f"network {seed}"), network, keep_trace=keep_trace)
    clock = SimulatedClock(wires)
    error: BaseException | None = None
    files = SimulatedDisk(wires, Random(f"disk {seed}")) if disk else None
    with simulated_machine(wires, clock, seed, disk=files):
        loop = SimulatedLoop(wires, most_turns)
        unhandled: list[BaseException] = []
        worlds: list[World] = []
        loop.set_exception_handler(lambda _, context: _note(unhandled, context))
        raised: Counter[str] = Counter()
        try:
            how = disk if isinstance(disk, DiskOptions) else None
            cluster = SimulatedCluster(nodes, lookupds, seed, files, how)

            def build(tasks: TaskGroup) -> World:
                worlds.append(World(seed, cluster, loop, clock, tuple(faults), tasks))
                return worlds[0]

            main = _main(scenario, build, cluster, loop, time_limit)
            with _noted_handlers(raised, unhandled):
                loop.run_until_complete(main)
            error = worlds[0].forgotten()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as found:  # `pytest.fail` raises no `Exception`
            error = found
        finally:
            unhandled += loop.unseen_errors()
            _close(loop)
        error = unhandled[0] if unhandled else error  # often the cause of the scenario's error
    return Run(
        seed=seed,
        faults=tuple(faults),
        trace=wires.trace,
        seconds=wires.now,
        turns=loop.selector.turns,
        error=error,
        lines=tuple(wires.lines or ()),
        injected=any(world.injected for world in worlds),
        effective=frozenset().union(*(world.effective for world in worlds)),
        handler_errors=raised,
    )


@contextmanager
def _noted_handlers(raised: Counter[str], failures: list[BaseException]) -> Iterator[None]:
    """Count what handlers of this thread raise; failed assertions, also of callbacks and dead_letter, are failures."""
    simulation = threading.get_ident()
    start_workers, add = ReceiverQueues.start_workers, ClientEvents.add

    def note(error: BaseException) -> None:
        if threading.get_ident() == simulation and (failed := failed_assertion(error)) is not None:
            failures.append(failed)

    def noting(answer: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def answer_failed(policy: FailurePolicy, messages: object, error: Exception) -> None:
            if threading.get_ident() == simulation and not isinstance(error, HandlerSignal):
                raised[error_text(error)] += 1
            note(error)
            await answer(policy, messages, error)

        return answer_failed

    def noting_start(queues: ReceiverQueues, handler: AnyHandler, dead_letters: DeadLetterHook | None) -> None:
        async def noting_hook(message: Message, error: Exception | None) -> None:
            try:
                if dead_letters is not None:
                    await dead_letters(message, error)
            except Exception as own:
                note(own)
                raise

        start_workers(queues, handler, None if dead_letters is None else noting_hook)

    def noting_add(events: ClientEvents, callback: Callable[[ClientEvent], object]) -> None:
        def noted(event: ClientEvent) -> None:
            try:
                callback(event)
            except Exception as error:
                note(error)
                raise

        add(events, callback)  # checks it
        events.callbacks[-1] = noted

    with (
        patch.object(FailurePolicy, "failed", noting(FailurePolicy.failed)),
        patch.object(FailurePolicy, "batch_failed", noting(FailurePolicy.batch_failed)),
        patch.object(ReceiverQueues, "start_workers", noting_start),
        patch.object(ClientEvents, "add", noting_add),
    ):
        yield


def _note(unhandled: list[BaseException], context: dict[str, Any]) -> None:
    """Keep what asyncio logs: an exception of a callback, or of a task that is not awaited."""
    error = context.get("exception")
    unhandled.append(error if isinstance(error, BaseException) else RuntimeError(str(context.get("message"))))


async def _main(
    scenario: Scenario,
    build: Callable[[TaskGroup], World],
    cluster: SimulatedCluster,
    loop: SimulatedLoop,
    time_limit: float,
) -> None:
    async def serve(*, task_status: TaskStatus[None]) -> None:
        with as_server():
            await cluster.runtime.run(task_status=task_status)

    async with anyio.create_task_group() as servers:
        await servers.start(serve)
        cluster.name_ports(loop.network)
        try:
            with anyio.move_on_after(time_limit) as limit:
                async with anyio.create_task_group() as tasks:
                    await scenario(build(tasks))
            if limit.cancelled_caught:
                raise TimeoutError(f"the scenario or a client process still ran at time_limit={time_limit:g} s")
        finally:
            cluster.runtime.stop()


def _close(loop: SimulatedLoop) -> None:
    try:
        left = asyncio.all_tasks(loop)
        for task in sorted(left, key=hash):
            task.cancel()
        loop.selector.allow(100_000)
        if left:
            loop.run_until_complete(asyncio.gather(*sorted(left, key=hash), return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    except SimulationStuck:
        pass
    finally:
        loop.close()
