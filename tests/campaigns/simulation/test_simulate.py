"""The simulated world: the same seed gives the same events, time is virtual, sockets behave as a kernel's."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from nsqext import ClientEvent, Consumer, Message, MessageBatch, Producer, Reject, Requeue
from nsqext.errors import InvalidSetting, InvalidState, NsqError
from nsqext.testing import FaultOptions, NetworkOptions, SimulationFailed, World, simulate
from nsqext.testing.simulation import KINDS, Fault, run_seed
from nsqext.testing.simulation.cluster import COORDINATOR
from nsqext.testing.simulation.faults import draw_faults
from nsqext.waits import chance
from tests.campaigns.simulation.__main__ import run_one
from tests.support.tables import table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from nsqext.testing.simulation.runner import Scenario

NODES, LOOKUPDS = ("n1", "n2", "n3"), ("l1", "l2")


async def orders(world: World) -> None:
    """Publish and consume under faults; every acknowledged message has to be consumed."""
    await world.cluster.create_topic("orders", 2, replicas=2, channels=["billing"])
    consumer = Consumer("orders", "billing", lookupd=world.cluster.lookupd)
    stored: set[bytes] = set()
    consumed: set[bytes] = set()

    @consumer.handler
    async def handle(message: Message) -> None:
        consumed.add(message.body)

    async with consumer, Producer(world.cluster.lookupd) as producer, world.inject_faults():
        for number in range(30):
            body = str(number).encode()
            try:
                await producer.publish("orders", body)
                stored.add(body)
            except NsqError:
                pass
            await anyio.sleep(0.1)
        with anyio.fail_after(120):
            while not stored <= consumed:  # noqa: ASYNC110
                await anyio.sleep(0.5)


def traces(seeds: Sequence[int]) -> list[str]:
    """Return the traces of a scenario and of a schedule for each seed, sorted."""
    runs = []
    for seed in seeds:
        scenario = run_seed(orders, seed, draw_faults(seed, FaultOptions(), NODES, LOOKUPDS))
        runs += [scenario, run_one(seed)]
    return sorted(run.trace for run in runs)


def test_a_seed_repeats_its_trace_in_another_process_after_others() -> None:
    found = []
    for hash_seed, seeds in (("4711", (0, 50)), ("4712", (50, 0))):  # sets of texts have another order
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[3])}
        program = f"from tests.campaigns.simulation.test_simulate import traces; print(*traces({seeds}))"
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=100
        )
        found.append(ended.stdout.split())
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


def test_a_seed_repeats_its_trace_in_one_process_beside_other_threads() -> None:
    faults, ended = draw_faults(5, FaultOptions(), NODES, LOOKUPDS), threading.Event()

    def draw() -> None:
        while not ended.wait(0.001):
            chance.random()

    other = threading.Thread(target=draw)
    other.start()
    try:
        first, second = run_seed(orders, 5, faults), run_seed(orders, 5, faults)
    finally:
        ended.set()
        other.join()
    assert first.error is None
    assert (first.trace, first.turns, first.seconds) == (second.trace, second.turns, second.seconds)


async def no_faults(world: World) -> None:
    """Inject nothing for an hour."""
    began, wall = time.monotonic(), time.time()
    await anyio.sleep(3600)
    assert 3600 <= time.monotonic() - began < 3601
    assert 3600 <= time.time() - wall < 3601


def test_time_is_virtual_and_real_again_afterwards() -> None:
    before = time.monotonic()
    run = run_seed(no_faults, 1, (), time_limit=4000)
    assert run.error is None
    assert time.monotonic() - before < 600 < run.seconds


async def silent_handler(world: World) -> None:
    """Wait for what never happens."""
    await anyio.sleep_forever()


def test_a_scenario_that_hangs_fails_at_the_time_limit() -> None:
    run = run_seed(silent_handler, 1, (), time_limit=20)
    assert "still ran at time_limit=20 s" in repr(run.error)


async def breaks_when_a_node_is_killed(world: World) -> None:
    """Fail if a node was down."""
    async with world.inject_faults():
        for _ in range(50):
            await anyio.sleep(0.1)
            assert not world.cluster.down & {"n1"}, "n1 is down"


def test_a_failure_names_seed_and_the_one_fault_that_is_needed() -> None:
    options = FaultOptions(kinds=("kill", "cut", "move", "clock_jump"), count=(8, 8), duration=3.0)
    with pytest.raises(SimulationFailed) as caught:
        simulate(breaks_when_a_node_is_killed, seeds=10, faults=options)
    assert [(fault.kind, fault.target) for fault in caught.value.run.faults] == [("kill", "n1")]
    assert "n1 is down" in str(caught.value)


def test_a_failure_has_the_call_that_repeats_it() -> None:
    """The call had no arguments but the seed: the seed then had other faults, and passed."""
    faults, network = FaultOptions(kinds=("kill", "cut"), count=(1, 3)), NetworkOptions(split=0.5)
    with pytest.raises(SimulationFailed) as caught:
        simulate(
            *(breaks_when_a_node_is_killed, 20),
            nodes=4,
            lookupds=1,
            faults=faults,
            network=network,
            time_limit=99,
            disk=True,
        )
    call = str(caught.value).partition("repeat it with: ")[2]
    seed = caught.value.run.seed
    options = "faults=FaultOptions(kinds=('kill', 'cut'), count=(1, 3)), network=NetworkOptions(split=0.5)"
    given = f"nodes=4, lookupds=1, {options}, time_limit=99, disk=True"
    assert call == f"simulate(breaks_when_a_node_is_killed, seeds=[{seed}], {given})"
    with pytest.raises(SimulationFailed) as again:
        eval(call)  # noqa: S307 - our own text
    assert again.value.run.trace == caught.value.run.trace


async def keeps_a_task_that_fails(world: World) -> None:
    """Keep a task whose error the program never sees, as asyncio's documentation advises for background tasks."""

    async def fail() -> None:
        raise ValueError("the receipt was not sent")

    KEPT.append(asyncio.create_task(fail()))
    await anyio.sleep(1)


KEPT: list[asyncio.Task[None]] = []


async def fails_by_pytest(world: World) -> None:
    """Fail with an error that is no `Exception`."""
    pytest.fail("two bookings")


@table(
    ("scenario", "text"),
    [
        (keeps_a_task_that_fails, "seed 1: ValueError: the receipt was not sent"),
        (fails_by_pytest, "seed 1: Failed: two bookings"),
    ],
)
def test_a_task_that_fails_and_pytest_fail_are_failures(scenario: Scenario, text: str) -> None:
    """The former passed, the latter named no seed."""
    with pytest.raises(SimulationFailed, match=re.escape(text)):
        simulate(scenario, seeds=1)


@pytest.mark.parametrize("batches", [False, True])
def test_what_handlers_raise_is_reported_and_a_failed_assertion_fails(batches: bool) -> None:
    """Such scenarios passed without a word: the error was only logged."""

    def raising(error: Exception) -> Callable[[World], Awaitable[None]]:
        async def scenario(world: World) -> None:
            await world.cluster.create_topic("orders", channels=["billing"])
            consumer = Consumer("orders", "billing", lookupd=world.cluster.lookupd)
            handled = anyio.Event()

            async def handle(message: Message) -> None:
                if message.attempts == 1:
                    raise error
                handled.set()

            async def handle_batch(batch: MessageBatch) -> None:
                await handle(batch[0])

            consumer.batch_handler()(handle_batch) if batches else consumer.handler(handle)
            async with consumer, Producer(world.cluster.lookupd) as producer:
                await producer.publish("orders", b"x")
                await handled.wait()

        return scenario

    (run,) = simulate(raising(ValueError("no such customer")), seeds=1)
    assert run.handler_errors == {"ValueError: no such customer": 1}
    (run,) = simulate(raising(Requeue(0.1, backoff=False)), seeds=1)
    assert run.handler_errors == {}, "it is no error"
    with pytest.raises(SimulationFailed, match="AssertionError: booked twice"):
        simulate(raising(AssertionError("booked twice")), seeds=1)
    with pytest.raises(SimulationFailed, match="AssertionError: booked twice"):
        simulate(raising(ExceptionGroup("of a task group", [OSError(), AssertionError("booked twice")])), seeds=1)


@pytest.mark.parametrize("where", ["dead_letter", "on_event"])
def test_a_failed_assertion_in_a_function_that_a_consumer_calls_fails(where: str) -> None:
    """The error was only logged, and the scenario passed."""

    def failing(error: Exception) -> Callable[[World], Awaitable[None]]:
        async def scenario(world: World) -> None:
            await world.cluster.create_topic("orders", channels=["billing"])
            raised = anyio.Event()

            async def dead_letter(message: Message, _: Exception | None) -> None:
                if where == "dead_letter" and not raised.is_set():
                    raised.set()
                    raise error

            lookupd = world.cluster.lookupd
            consumer = Consumer("orders", "billing", lookupd, max_attempts=1, dead_letter=dead_letter)

            @consumer.on_event
            def note(event: ClientEvent) -> None:
                if where == "on_event":
                    raised.set()
                    raise error

            @consumer.handler
            async def reject(message: Message) -> None:
                raise Reject

            async with consumer, Producer(lookupd) as producer:
                await producer.publish("orders", b"x")
                await raised.wait()

        return scenario

    (run,) = simulate(failing(OSError("no disk")), seeds=1)
    assert run.handler_errors == {}
    with pytest.raises(SimulationFailed, match="AssertionError: rejected twice"):
        simulate(failing(AssertionError("rejected twice")), seeds=1)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_fault_begins_and_ends(kind: str) -> None:
    target = "l1" if kind.startswith("lookup") else "n1"
    run = run_seed(
        orders, 1, [Fault(kind, 0.5, 1.0, target, 0.4)], disk=kind.startswith(("power", "disk")), keep_trace=True
    )
    assert run.error is None


@table(
    ("make", "text"),
    [
        (lambda: FaultOptions(kinds=("fire",)), "unknown kinds of faults: fire"),
        (lambda: FaultOptions(kinds=()), "no kinds of faults"),
        (lambda: FaultOptions(count=(3, 1)), "count=(3, 1)"),
        (lambda: FaultOptions(count=2), "count=2"),  # type: ignore[arg-type]
        (lambda: FaultOptions(count=(1.5, 2)), "count=(1.5, 2)"),  # type: ignore[arg-type]
        (lambda: FaultOptions(seconds=(0.1, math.inf)), "seconds=(0.1, inf)"),
        (lambda: FaultOptions(duration=-1.0), "duration=-1.0"),
        (lambda: NetworkOptions(latency=(-1.0, 1.0)), "latency=(-1.0, 1.0)"),
        (lambda: NetworkOptions(split=1.1), "split=1.1"),
        (lambda: NetworkOptions(late_seconds=math.nan), "late_seconds=nan"),
        (lambda: NetworkOptions(buffers=()), "buffers=()"),
        (lambda: NetworkOptions(buffers=(0,)), "a size in buffers=0"),
        (lambda: simulate(no_faults, seeds=0), "seeds=0"),
        (lambda: simulate(no_faults, seeds=[]), "seeds is empty"),
        (lambda: simulate(no_faults, nodes=0), "nodes=0"),
        (lambda: simulate(no_faults, lookupds=0), "lookupds=0"),
        (lambda: simulate(no_faults, time_limit=0), "time_limit=0"),
        (lambda: simulate(no_faults, faults=FaultOptions(kinds=["disk_full"])), "disk_full have no effect without a"),
        (lambda: simulate(no_faults, faults=FaultOptions(kinds=["cut", "disk_slow"])), "disk_slow have no effect with"),
        (lambda: simulate(no_faults, nodes=1, faults=FaultOptions(kinds=["cut", "move"])), "move have no effect witho"),
        (lambda: simulate(only_faults, faults=FaultOptions(kinds=["recreate"])), "world.cluster.recreated"),
        (lambda: simulate(only_faults, faults=FaultOptions(kinds=["kill", "upgrade"])), "of kinds upgrade had no"),
        (lambda: simulate(no_faults, 1, faults=FaultOptions(), time_limit=4000), "injects no faults"),
        (lambda: simulate(no_faults, 1, faults={"kinds": ["cut"]}), "is not a FaultOptions"),  # type: ignore[arg-type]
        (lambda: simulate(no_faults, 1, network={"split": 1}), "is not a NetworkOptions"),  # type: ignore[arg-type]
        (lambda: simulate(no_faults, 1, disk="no"), "disk='no'"),  # type: ignore[arg-type]
    ],
)
def test_what_would_have_no_effect_is_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(text)):
        make()


async def only_faults(world: World) -> None:
    """Inject faults into a cluster without topics."""
    async with world.inject_faults():
        await anyio.sleep(1)


def test_faults_of_every_kind_leave_out_what_the_simulation_cannot_inject() -> None:
    """A third of the faults could have been of disks that were not there."""
    runs = simulate(only_faults, seeds=20, nodes=1, faults=FaultOptions(count=(9, 9)))
    drawn = {fault.kind for run in runs for fault in run.faults}
    assert len(drawn) > 20
    assert drawn.isdisjoint(("disk_full", "disk_failing", "disk_slow", "move", "separate"))


@pytest.mark.anyio
async def test_a_simulation_in_an_event_loop_is_refused() -> None:
    """It was an error of asyncio, with a warning about a coroutine."""
    with pytest.raises(InvalidState, match="declared with 'def', not 'async def'"):
        simulate(only_faults, seeds=1)


@table(
    ("wrong", "text"),
    [
        (lambda cluster: cluster.create_topic("orders", channels="billing"), "channels='billing' is a text"),
        (lambda cluster: cluster.create_topic("orders", extend="no"), "extend='no' is not True or False"),
        (lambda cluster: cluster.create_topic("orders", dispatch="key_failover"), "no effect without channels"),
        (lambda cluster: cluster.separate("n1", "n9"), "unknown node 'n9'"),
        (lambda cluster: cluster.connect("l1", COORDINATOR), "'l1' is a lookup node"),
        (lambda cluster: cluster.separate("n1", "n1"), "'n1' has no link to itself"),
        (lambda cluster: cluster.move_leader("orders", 0, "n9"), "unknown node 'n9'"),
        (lambda cluster: cluster.move_leader("orders", 0, "n1"), "unknown partition (topic orders, partition 0)"),
        (lambda cluster: cluster.kill("n9"), "unknown node 'n9': the cluster has n1, n2, n3, l1, l2"),
        (lambda cluster: cluster.restart("n9"), "unknown node 'n9'"),
        (lambda cluster: cluster.terminate("n9"), "unknown node 'n9'"),
    ],
)
def test_wrong_arguments_of_the_cluster_are_refused(wrong: Callable[[Any], Any], text: str) -> None:
    """A text became channels of one letter each, and links of unknown nodes were cut without effect."""

    async def scenario(world: World) -> None:
        ended = wrong(world.cluster)
        if ended is not None:
            await ended

    error = run_seed(scenario, 1, ()).error
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert text in str(error)


async def freezes_a_node_that_is_down(world: World) -> None:
    """The node ran when it was restarted."""
    await world.cluster.kill("n1")
    world.cluster.freeze("n1")


async def forgets_to_await_the_end_of_a_process(world: World) -> None:
    """Nothing is killed."""
    process: Any = world.start(anyio.lowlevel.checkpoint)
    process.kill()


async def awaits_the_first_call_only(world: World) -> None:
    """The node stays down."""
    await world.cluster.kill("n1")
    world.cluster.restart("n1")  # type: ignore[unused-coroutine]


async def forgets_to_enter_the_block_of_faults(world: World) -> None:
    """No fault is injected."""
    world.inject_faults()


@table(
    ("scenario", "text"),
    [
        (awaits_the_first_call_only, "restart() was called and not awaited"),
        (forgets_to_enter_the_block_of_faults, "inject_faults() was called and not entered, and had no effect"),
        (freezes_a_node_that_is_down, "'n1' is down, and cannot be frozen: restart it first"),
        (forgets_to_await_the_end_of_a_process, "kill() was called and not awaited, and had no effect"),
    ],
)
def test_faults_that_are_not_injected_fail(scenario: Scenario, text: str) -> None:
    """Such scenarios passed, with at most a warning of Python."""
    with pytest.raises(SimulationFailed, match=re.escape(text)):
        simulate(scenario, seeds=1)


async def kills_its_producer(world: World) -> None:
    """A client process that is killed sends nothing more, and leaves the others alone."""
    await world.cluster.create_topic("orders", channels=["billing"])
    sent: list[int] = []

    async def produce() -> None:
        async with Producer(world.cluster.lookupd) as producer:
            for number in range(1000):
                await producer.publish("orders", b"%d" % number)
                sent.append(number)
                await anyio.sleep(0.01)

    process = world.start(produce)
    await anyio.sleep(1)
    await process.kill(silently=world.random.random() < 0.5)
    count = len(sent)
    assert 0 < count < 200
    await anyio.sleep(1)
    assert len(sent) == count
    async with Producer(world.cluster.lookupd) as producer:
        await producer.publish("orders", b"another")


def test_client_processes_are_killed_independently() -> None:
    assert len(simulate(kills_its_producer, seeds=6)) == 6


async def cuts_links_between_nodes(world: World) -> None:
    """A follower that its leader does not reach leaves the in-sync replicas; an isolated leader is replaced."""
    cluster = world.cluster
    await cluster.create_topic("orders", 1, replicas=3, channels=["billing"])
    state = cluster.runtime.replicas("orders", 0).state
    leader = state.leader
    follower = next(name for name in state.in_sync if name != leader)
    async with Producer(cluster.lookupd) as producer:
        cluster.separate(leader, follower)
        await producer.publish("orders", b"one")
        assert follower not in state.in_sync
        cluster.connect(leader, follower)
        await anyio.sleep(1)
        assert len(state.in_sync) == 3
        cluster.separate(COORDINATOR, leader)
        await anyio.sleep(1)
        assert state.leader != leader
        await producer.publish("orders", b"two")
        cluster.connect(COORDINATOR, leader)
        await anyio.sleep(1)
        assert len(state.in_sync) == 3


def test_links_between_nodes_are_cut() -> None:
    assert run_seed(cuts_links_between_nodes, 1, ()).error is None


async def loses_power(world: World) -> None:
    """Every node loses power at once; what was acknowledged is on the disks."""
    cluster = world.cluster
    await cluster.create_topic("orders", 2, replicas=2, channels=["billing"])
    consumed: set[bytes] = set()
    consumer = Consumer("orders", "billing", lookupd=cluster.lookupd)

    @consumer.handler
    async def handle(message: Message) -> None:
        consumed.add(message.body)

    bodies = {b"%d" % number for number in range(20)}
    async with Producer(cluster.lookupd) as producer:
        for body in sorted(bodies):
            await producer.publish("orders", body)
    for name in cluster.nodes:
        await cluster.cut_power(name)
    await cluster.heal()
    async with consumer:
        with anyio.fail_after(30):
            while consumed != bodies:  # noqa: ASYNC110
                await anyio.sleep(0.1)


def test_nodes_read_their_disks_after_a_loss_of_power() -> None:
    assert [run_seed(loses_power, seed, (), disk=True).error for seed in range(1, 6)] == [None] * 5


async def deletes_a_topic_while_disks_fail(world: World) -> None:
    """Delete a topic whose files cannot be synced."""
    cluster = world.cluster
    await cluster.create_topic("orders", channels=["billing"])
    async with Producer(cluster.lookupd) as producer:
        await producer.publish("orders", b"one")
    assert cluster.disk is not None
    cluster.disk.failing.update(cluster.nodes)
    cluster.runtime.delete_topic("orders")
    del cluster.topics["orders"]


def test_messages_that_wait_on_disk_survive_a_loss_of_power() -> None:
    again: list[bytes] = []

    async def scenario(world: World) -> None:
        await world.cluster.create_topic("orders", channels=["billing"])
        consumer = Consumer("orders", "billing", lookupd=world.cluster.lookupd, backoff="off")

        @consumer.handler
        async def handle(message: Message) -> None:
            if world.now < 10:
                raise Requeue(1200.0, backoff=False)
            again.append(message.body)

        async with consumer, Producer(lookupd=world.cluster.lookupd) as producer:
            for number in range(3):
                await producer.publish("orders", b"%d" % number)
            await anyio.sleep(10)
            for name in world.cluster.nodes:
                await world.cluster.cut_power(name)
                await world.cluster.restart(name)
            await anyio.sleep(1300)

    simulate(scenario, seeds=[1], disk=True, time_limit=2000.0)
    assert sorted(again) == [b"0", b"1", b"2"]


def test_a_topic_can_be_deleted_while_disks_fail() -> None:
    assert run_seed(deletes_a_topic_while_disks_fail, 1, (), disk=True).error is None
