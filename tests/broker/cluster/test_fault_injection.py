"""Faults of a node."""

from __future__ import annotations

import anyio
import pytest

from nsqext.broker.fault_injection import NodeFaults, Rule
from nsqext.protocol.server.request_error import RequestError

pytestmark = pytest.mark.anyio

FRAME = (12).to_bytes(4, "big") + b"\0\0\0\0" + b"12345678"


async def test_drop_swallows_a_number_of_bytes_of_one_peer() -> None:
    faults = NodeFaults()
    faults.add(Rule("drop", "in", peer="a:1", left=4))
    assert await faults.carry("in", "b:1", b"abc") == (b"abc", False)
    assert await faults.carry("out", "a:1", b"abc") == (b"abc", False)
    assert await faults.carry("in", "a:1", b"abc") == (b"", False)
    assert await faults.carry("in", "a:1", b"abc") == (b"bc", False)
    assert not faults.active


async def test_a_cut_connection_sends_half_a_frame() -> None:
    faults = NodeFaults()
    faults.add(Rule("cut", "out", left=1))
    assert await faults.carry("out", "a:1", FRAME + FRAME) == (FRAME[:8], True)
    assert await faults.carry("out", "a:1", FRAME) == (FRAME, False)
    faults.add(Rule("cut", "in"))
    assert await faults.carry("in", "a:1", b"PUB x\n") == (b"PUB", True)


def test_rules_are_removed_one_by_one() -> None:
    faults = NodeFaults()
    first, second = Rule("delay", "out", seconds=1), Rule("delay", "out", seconds=1)
    faults.add(first)
    faults.add(second)
    faults.remove([first])
    assert [rule is second for rule in faults.rules] == [True]
    assert faults.active
    faults.remove([first, second])
    assert not faults.active


def test_a_rule_replaces_the_rule_of_the_same_kind_direction_and_peer() -> None:
    faults = NodeFaults()
    for rule in (Rule("drop", "in", left=4), Rule("drop", "in", peer="a:1", left=5), Rule("drop", "in", left=6)):
        faults.replace(rule)
    assert faults.pending() == ["drop in of a:1: 5 bytes", "drop in: 6 bytes"]


async def test_a_node_that_is_frozen_during_a_delay_sends_after_the_thaw() -> None:
    faults = NodeFaults()
    faults.add(Rule("delay", "out", seconds=0.001))
    sent: list[bytes] = []

    async def carry() -> None:
        data, _ = await faults.carry("out", "a:1", b"abc")
        sent.append(data)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(carry)
        await anyio.wait_all_tasks_blocked()
        faults.freeze()
        await anyio.sleep(0.01)
        assert sent == []
        faults.freeze()  # no effect
        faults.thaw()
    assert sent == [b"abc"]


async def test_a_fault_that_is_used_up_or_healed_during_a_delay_has_no_effect() -> None:
    faults = NodeFaults()
    passed: list[tuple[bytes, bool]] = []

    async def carry() -> None:
        passed.append(await faults.carry("out", "a:1", FRAME))

    for rule in (Rule("delay", "out", seconds=0.05), Rule("cut", "out", left=1)):
        faults.add(rule)
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(carry)
    for rule in (Rule("delay", "out", seconds=3600), Rule("drop", "out")):
        faults.replace(rule)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(carry)
        await anyio.wait_all_tasks_blocked()
        faults.heal()
    assert passed == [(FRAME[:8], True), (FRAME, False), (FRAME, False)]


def test_heal_removes_all_faults() -> None:
    faults = NodeFaults()
    faults.freeze()
    faults.refuse()
    faults.add(Rule("drop", "in"))
    faults.answer(RequestError("E_PUB_FAILED", "", fatal=False), 9)
    faults.heal()
    assert (faults.active, faults.frozen, faults.refusing, faults.rules, faults.command("PUB")) == (
        False,
        False,
        False,
        [],
        None,
    )
