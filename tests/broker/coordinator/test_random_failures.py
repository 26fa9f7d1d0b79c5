"""Random schedules of publishes, kills, freezes, restarts and moves: no acknowledged message is lost."""

from __future__ import annotations

import random

import anyio
import pytest

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.coordinator import membership
from nsqext.broker.coordinator.coordinator import Coordinator, CoordinatorOptions
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.engine.storage.log import Refusal
from nsqext.protocol.server.request_error import RequestError
from tests.support.coordinators import bodies, counted, hosted, publish, running, until, wrong_roles

NODES = ("n1", "n2", "n3", "n4")
OPTIONS = CoordinatorOptions(lease=0.004, join_pause=0.002, replace_after=0.02)


class Schedule:
    """One run.

    Attributes:
        acknowledged: the receipts of the publisher, in order.
    """

    def __init__(self, coordinator: Coordinator, seed: int) -> None:
        self.coordinator = coordinator
        self.rng = random.Random(seed)
        self.acknowledged: list[bytes] = []
        self.sent = 0

    async def publish(self) -> None:
        """Publish one message after the other on the current leader."""
        while True:
            replicas = self.coordinator.replica_sets["t", 0]
            found = hosted(self.coordinator, replicas.state.leader)
            if not (found.leader and found.writable) or not self.coordinator.reachable(replicas.state.leader):
                await replicas.changes.wait()
                continue
            self.sent += 1
            body = b"%d" % self.sent
            try:
                await publish(self.coordinator, body)
            except RequestError:
                continue
            self.acknowledged.append(body)
            await anyio.sleep(0.0002)

    async def break_things(self, steps: int) -> None:
        """Inject random faults into at most one of three copies at a time, so that a majority remains."""
        for _ in range(steps):
            name = self.rng.choice(NODES)
            member = self.coordinator.members[name]
            action = self.rng.choice(("kill", "freeze", "move", "leave", "cut", "wait"))
            if action == "move":
                await self._move(name)
            elif action == "kill":
                member.alive = False
                membership.silent(self.coordinator, member)
                await self._pause()
                membership.returned(self.coordinator, member)
            elif action == "freeze":
                member.node.faults.freeze()
                membership.silent(self.coordinator, member)
                await self._pause()
                member.node.faults.thaw()
                membership.thawed(self.coordinator, member)
            elif action == "leave":
                membership.left(self.coordinator, member)
                await self._pause()
                membership.returned(self.coordinator, member)
            elif action == "cut":
                other = self.rng.choice([node for node in NODES if node != name])
                self.coordinator.separate(name, other)
                await self._pause()
                self.coordinator.connect(name, other)
            assert self.coordinator.load() == counted(self.coordinator)
            assert wrong_roles(self.coordinator) == []
            await self._pause()

    async def _move(self, name: str) -> None:
        source = self.coordinator.replica_sets["t", 0].state.leader
        try:
            with anyio.move_on_after(0.05):
                await admin.move_partition(self.coordinator, "t", 0, source, name, leader=True)
        except Refusal:
            return

    async def _pause(self) -> None:
        await anyio.sleep(self.rng.choice((0, 0.001, 0.006, 0.03)))


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(25))
async def test_acknowledged_messages_are_never_lost(seed: int) -> None:
    async with running(len(NODES), OPTIONS) as coordinator:
        admin.create_topic(coordinator, "t", TopicSpec(1, 3))
        schedule = Schedule(coordinator, seed)
        async with anyio.create_task_group() as group:
            group.start_soon(schedule.publish)
            await schedule.break_things(12)
            group.cancel_scope.cancel()
        await until(coordinator, "writable")
        replicas = coordinator.replica_sets["t", 0]
        with anyio.fail_after(25):
            while sorted(replicas.state.in_sync) != sorted(replicas.state.replicas):
                await replicas.changes.wait()
        await publish(coordinator, b"last")
        kept = bodies(coordinator, replicas.state.leader)
        promised = set(schedule.acknowledged)
        assert [body for body in kept if body in promised] == schedule.acknowledged
        assert len(kept) == len(set(kept))
        assert all(bodies(coordinator, name) == kept for name in replicas.state.replicas)
        assert len(replicas.state.replicas) == 3
        assert schedule.acknowledged
