"""Simulated worlds: killed processes, failing handlers, clocks that are set, links that are slow or blocked."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import socket
import struct
import time
from importlib import import_module
from math import inf
from random import Random
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from nsqext import Admin, Consumer, Producer
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.testing import FaultOptions, NetworkOptions, SimulationFailed, World, simulate
from nsqext.testing.simulation import Fault, Run, run_seed
from nsqext.testing.simulation.network import Network, check_range, current_host
from nsqext.testing.simulation.runner import shrink
from nsqext.testing.simulation.seams import EPOCH
from nsqext.testing.simulation.sockets import HOST
from tests.support.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import ModuleType

    from nsqext.testing.simulation.runner import Scenario
    from nsqext.testing.simulation.sockets import SimulatedSocket

KEPT: list[asyncio.Task[None]] = []


@table(
    ("value", "whole", "text"),
    [
        ((2, 1), False, "r=(2, 1) is not a range: give the smallest and the largest of its numbers"),
        ((1, 2, 3), False, "r=(1, 2, 3) is not a range"),
        ((1,), False, "r=(1,) is not a range"),
        ((0, inf), False, "r=(0, inf) is not a range"),
        ((0, 1.5), True, "the smallest and the largest of its whole numbers"),
        ("12", False, "r='12' is not a range"),
    ],
)
def test_a_range_has_a_smallest_and_a_largest_number(value: object, whole: bool, text: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        check_range("r", value, whole=whole)
    assert text in str(caught.value)
    check_range("r", (1, 1), whole=whole)
    check_range("r", [0, 2])


async def fails_because_of_a_task(world: World) -> None:
    async def fail() -> None:
        raise ValueError("the receipt was not sent")

    KEPT.append(asyncio.create_task(fail()))
    await anyio.sleep(1)
    raise AssertionError("no receipt")


def test_the_error_of_a_task_is_named_before_what_it_causes() -> None:
    with pytest.raises(SimulationFailed, match="ValueError: the receipt was not sent"):
        simulate(fails_because_of_a_task, seeds=1)


async def awaits_a_task_that_fails(world: World) -> None:
    async def fail() -> None:
        raise ValueError("expected")

    KEPT.append(asyncio.create_task(fail()))
    with pytest.raises(ValueError, match="expected"):
        await KEPT[-1]
    KEPT.append(asyncio.create_task(asyncio.sleep(1)))
    KEPT[-1].cancel()


def test_the_error_of_a_task_that_is_awaited_is_no_error_of_the_run() -> None:
    assert simulate(awaits_a_task_that_fails, seeds=1)[0].error is None


async def kills_a_process_that_publishes_at_its_end(world: World) -> None:
    await world.cluster.create_topic("orders", channels=["billing"])
    begun, ended = anyio.Event(), list[str]()

    async def work() -> None:
        async with Producer(world.cluster.lookupd) as producer:
            await producer.ping()
            begun.set()
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.move_on_after(3, shield=True):
                    await producer.publish("orders", b"of a killed process")
                ended.append("work")

    process = world.start(work)
    await begun.wait()
    await process.kill()
    assert ended == ["work"], "kill returns once the process has ended"
    async with Admin(world.cluster.lookupd) as admin:
        assert (await admin.stats("orders")).messages == 0


def test_a_killed_process_sends_nothing_and_has_ended() -> None:
    assert [run_seed(kills_a_process_that_publishes_at_its_end, seed, ()).error for seed in range(1, 4)] == [None] * 3


async def starts_two_processes_of_one_name(world: World) -> None:
    for name in ("one", "other"):
        world.start(anyio.lowlevel.checkpoint, name)
    for name in ("other", "n1", "l1", "server"):  # to kill a process with the name of a node would kill the node
        with pytest.raises(InvalidState, match=f"a process '{name}' exists"):
            world.start(anyio.lowlevel.checkpoint, name)


async def sets_the_clock(world: World) -> None:
    async with world.inject_faults():
        await anyio.sleep(2)
        assert time.time() - EPOCH - world.now == pytest.approx(7200 * 0.25)
        assert time.time_ns() / 1e9 - EPOCH - world.now == pytest.approx(7200 * 0.25)
    assert time.time() - EPOCH == pytest.approx(world.now)
    assert time.time_ns() / 1e9 - EPOCH == pytest.approx(world.now)


async def sees_a_stall_end_and_blocks_a_link(world: World) -> None:
    async with world.inject_faults():
        await anyio.sleep(1)
        assert world.network.stalled == {"client"}
        await anyio.sleep(1)
        assert not world.network.stalled
        world.network.block("client", "n1")
    assert not world.network.blocked, "the end of the block heals everything"


async def connects_after_a_refusal(world: World) -> None:
    await world.cluster.create_topic("orders", channels=["billing"])
    async with world.inject_faults():
        await anyio.sleep(2)
        async with Producer(world.cluster.lookupd) as producer:
            with anyio.fail_after(5):
                await producer.publish("orders", b"x")


async def receives_what_was_published_when_it_is_flushed(world: World) -> None:
    await world.cluster.create_topic("orders", channels=["billing"])
    async with Producer(world.cluster.lookupd) as producer, world.inject_faults():
        await anyio.sleep(1)
        await producer.publish("orders", b"x")
        async with Consumer("orders", "billing", lookupd=world.cluster.lookupd) as consumer:
            await anext(consumer)
            assert 2.5 <= world.now < 4


async def moves_a_leader_to_a_node_that_is_down(world: World) -> None:
    cluster = world.cluster
    await cluster.create_topic("orders", replicas=2, channels=["billing"])
    leader = cluster.leader("orders")
    other = next(name for name in cluster.nodes if name != leader)
    await cluster.kill(other)
    assert not await cluster.move_leader("orders", 0, other)
    assert cluster.leader("orders") == leader


async def knows_the_hosts_of_all_ports(world: World) -> None:
    runtime = world.cluster.runtime
    servers = [(name, runtime.node(name)) for name in world.cluster.nodes]
    found = {name: {world.network.host_of(one.port) for one in (node.tcp, node.http)} for name, node in servers}
    lookupds = [(name, runtime.lookupds[name].lookupd) for name in world.cluster.lookupds]
    found |= {name: {world.network.host_of(one.port) for one in (node.tcp, node.http)} for name, node in lookupds}
    assert found == {name: {name} for name in ("n1", "n2", "n3", "l1", "l2")}


async def closes_the_socket_of_a_refused_connection(world: World) -> None:
    open_sockets = len(world.network.sockets)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.get_running_loop().create_connection(asyncio.Protocol, HOST, 1)
    assert len(world.network.sockets) == open_sockets


async def creates_no_topic_again_without_a_disk(world: World) -> None:
    cluster, disk = world.cluster, world.cluster.disk
    assert disk is not None
    await cluster.create_topic("orders", channels=["billing"])
    for broken in (disk.full, disk.failing):
        broken.add("n1")
        assert not await cluster.recreate_topic("orders")
        await cluster.heal()
        assert not broken, "the end of all faults"
    assert await cluster.recreate_topic("orders")


def test_a_topic_is_not_created_again_on_a_disk_that_cannot_store_it() -> None:
    assert run_seed(creates_no_topic_again_without_a_disk, 1, (), nodes=1, disk=True).error is None


@table(
    ("scenario", "faults", "nodes"),
    [
        (knows_the_hosts_of_all_ports, [], 3),
        (closes_the_socket_of_a_refused_connection, [], 1),
        (starts_two_processes_of_one_name, [], 3),
        (sets_the_clock, [Fault("clock_jump", 1.0, 1.0, "n1", 0.75)], 3),
        (sees_a_stall_end_and_blocks_a_link, [Fault("stall", 0.5, 1.0, "n1", 0.4)], 3),
        (connects_after_a_refusal, [Fault("refuse", 0.5, 1.0, "n1", 0.5)], 1),
        (receives_what_was_published_when_it_is_flushed, [Fault("hold_flush", 0.5, 2.0, "n1", 0.5)], 1),
        (moves_a_leader_to_a_node_that_is_down, [], 3),
    ],
)
def test_what_a_scenario_sees(scenario: Scenario, faults: list[Fault], nodes: int) -> None:
    assert run_seed(scenario, 1, faults, nodes=nodes).error is None


async def has_one_extended_topic(world: World) -> None:
    await world.cluster.create_topic("orders", extend=True)
    world.cluster.upgraded += ["orders"]
    async with world.inject_faults():
        await anyio.sleep(1)


@pytest.mark.parametrize(
    ("kinds", "effective"),
    [
        (("upgrade",), set()),
        (("recreate", "kill"), {"kill"}),
        (("kill", "freeze", "terminate", "hold_flush"), {"kill"}),
        (("cut",), set()),
        (("half_open",), set()),
        (("move",), set()),
    ],
)
def test_a_fault_that_changes_nothing_has_no_effect(kinds: tuple[str, ...], effective: set[str]) -> None:
    faults = [Fault(kind, number / 10, 2.0, "n1", 0.4) for number, kind in enumerate(kinds)]
    run = run_seed(has_one_extended_topic, 1, faults, nodes=1)
    assert (run.error, {*run.effective}) == (None, effective)


async def injects_kills(world: World) -> None:
    if world.faults[0].kind == "kill":
        async with world.inject_faults():
            await anyio.sleep(1)


def test_faults_of_runs_that_inject_none_need_no_effect() -> None:
    runs = simulate(injects_kills, seeds=10, faults=FaultOptions(kinds=["kill", "refuse"], count=(1, 1)))
    assert {run.injected for run in runs} == {True, False}


async def nothing(world: World) -> None:
    """Draw from the program's random numbers."""
    assert 0 <= random.random() < 1


def test_the_random_numbers_and_the_collector_of_the_program_are_as_before() -> None:
    before = random.getstate()
    assert gc.isenabled()
    assert simulate(nothing, seeds=1)[0].error is None
    assert (random.getstate() == before, gc.isenabled()) == (True, True)


def test_a_collector_that_was_switched_off_stays_so() -> None:
    gc.disable()
    try:
        simulate(nothing, seeds=1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_module_that_is_imported_meanwhile_has_the_clock_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the next simulation it had neither its clock nor the machine's."""

    async def scenario(world: World) -> None:
        loaded.append(import_module(name))
        assert loaded[0].monotonic() == world.now

    loaded: list[ModuleType] = []
    name = f"later_{token_hex(4)}"
    (tmp_path / f"{name}.py").write_text("from time import monotonic\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    simulate(scenario, seeds=1)
    assert loaded[0].monotonic is time.monotonic


def test_the_number_of_runs_that_look_for_fewer_faults_is_bounded() -> None:
    def again(faults: Sequence[Fault]) -> Run:
        runs.append(len(faults))
        return Run(1, tuple(faults), "", 0.0, 0)

    runs: list[int] = []
    faults = tuple(Fault("kill", float(number), 1.0, "n1", 0.5) for number in range(8))
    failed = Run(1, faults, "", 0.0, 0, error=AssertionError())
    assert shrink(failed, again, 5) is failed
    assert runs == [4, 4, 6, 6, 6]


def test_runs_of_other_bytes_have_other_traces() -> None:
    first, second = Network(Random(1)), Network(Random(1))
    first.note("data", b"one")
    second.note("data", b"two")
    assert first.trace != second.trace


def connected(network: Network) -> tuple[SimulatedSocket, SimulatedSocket]:
    """Return both ends of a connection of a client to a server."""
    token = current_host.set("server")
    listener = network.socket()
    listener.bind((HOST, 0))
    network.name_port(listener.getsockname()[1], "server")
    listener.listen()
    current_host.reset(token)
    client = network.socket()
    with pytest.raises(BlockingIOError):
        client.connect(listener.getsockname())
    later(network, 1.0)
    accepted, _ = listener.accept()
    return client, accepted  # type: ignore[return-value]


def later(network: Network, seconds: float) -> None:
    network.now += seconds
    network.run_due()


WHOLE = NetworkOptions(split=0.0, partial=0.0)


def test_data_that_was_sent_on_a_blocked_link_arrives_afterwards() -> None:
    network = Network(Random(1), WHOLE)
    client, server = connected(network)
    network.block("client", "server")
    assert client.send(b"waits") == 5
    later(network, 60.0)
    with pytest.raises(BlockingIOError):
        server.recv(10)
    network.unblock("client", "server")
    later(network, 1.0)
    assert server.recv(10) == b"waits"


def test_what_a_socket_has_sent_on_a_blocked_link_before_its_close_arrives_afterwards() -> None:
    network = Network(Random(1), WHOLE)
    client, server = connected(network)
    network.block("client", "server")
    client.send(b"waits")
    client.close()
    later(network, 60.0)
    network.unblock("client", "server")
    later(network, 1.0)
    assert (server.recv(10), server.recv(10)) == (b"waits", b"")


def end_of(sock: SimulatedSocket) -> str:
    """Return what a socket reads: that nothing has arrived, the end of the connection, or a reset."""
    try:
        return {b"": "end"}[sock.recv(10)]
    except BlockingIOError:
        return "nothing"
    except ConnectionResetError:
        return "reset"


@table(
    ("unread", "linger", "expected"),
    [
        (False, None, "end"),
        (True, None, "reset"),
        (False, (1, 0), "reset"),
        (False, (0, 0), "end"),
        (False, (1, 5), "end"),
    ],
)
def test_a_socket_that_is_closed_ends_or_resets_its_connection(
    unread: bool, linger: tuple[int, int] | None, expected: str
) -> None:
    network = Network(Random(1), WHOLE)
    client, server = connected(network)
    if unread:
        client.send(b"unread")
        later(network, 1.0)
    if linger is not None:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", *linger))
    server.close()
    later(network, 1.0)
    assert end_of(client) == expected


def test_a_listener_that_is_closed_resets_what_it_has_not_accepted() -> None:
    network = Network(Random(1), WHOLE)
    listener, client = network.socket(), network.socket()
    listener.bind((HOST, 0))
    listener.listen()
    with pytest.raises(BlockingIOError):
        client.connect(listener.getsockname())
    later(network, 1.0)
    listener.close()
    later(network, 1.0)
    assert end_of(client) == "reset"


def test_the_error_of_a_connection_is_read_once() -> None:
    network = Network(Random(1), WHOLE)
    client = network.socket()
    with pytest.raises(BlockingIOError):
        client.connect((HOST, 1))
    later(network, 1.0)
    read = [client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for _ in range(2)]
    assert read == [errno.ECONNREFUSED, 0]


@pytest.mark.parametrize("silently", [False, True])
def test_a_process_that_vanishes_silently_sends_nothing(silently: bool) -> None:
    network = Network(Random(1), WHOLE)
    _, server = connected(network)
    network.kill_host("client", silently=silently)
    later(network, 60.0)
    assert (end_of(server) == "nothing") is silently


@pytest.mark.parametrize("link", [("client", "server"), ("server", "client")])
def test_no_connection_opens_while_a_direction_is_blocked(link: tuple[str, str]) -> None:
    network = Network(Random(1), WHOLE)
    network.block(*link)
    with pytest.raises(BlockingIOError, match=os.strerror(errno.EAGAIN)):
        connected(network)


def test_a_connection_that_is_cut_has_ended_at_both_ends() -> None:
    network = Network(Random(1), WHOLE)
    client, server = connected(network)
    network.cut(server)
    for end in (client, server):
        with pytest.raises(ConnectionResetError):
            end.recv(10)
        assert end.recv(10) == b"", "the error is reported once"


def test_a_stalled_process_neither_reads_nor_writes() -> None:
    network = Network(Random(1), WHOLE)
    client, server = connected(network)
    server.send(b"unread")
    later(network, 1.0)
    network.stalled.add("client")
    for use in (lambda: client.send(b"x"), lambda: client.recv(10)):
        with pytest.raises(BlockingIOError):
            use()
    network.stalled.clear()
    assert (client.recv(10), client.send(b"x")) == (b"unread", 1)


def test_a_peer_that_does_not_read_fills_the_buffers() -> None:
    network = Network(Random(1), NetworkOptions(split=0.0, partial=0.0, buffers=(100,)))
    client, server = connected(network)
    assert client.send(bytes(150)) == 100
    later(network, 1.0)
    with pytest.raises(BlockingIOError):
        client.send(b"x")
    assert len(server.recv(40)) == 40
    assert client.send(bytes(150)) == 40


def test_a_slow_link_delays_what_it_carries() -> None:
    network = Network(Random(1), WHOLE)
    client, server = connected(network)
    network.slow["client", "server"] = 1_000_000.0
    client.send(b"slow")
    later(network, 10.0)
    with pytest.raises(BlockingIOError):
        server.recv(10)
    server.send(b"fast")
    later(network, 1.0)
    assert client.recv(10) == b"fast", "the other direction is as fast as before"
