"""The copies of one partition: what the leader has, the others get; nobody acknowledges before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
from attrs import define, field

from nsqext.broker.engine.errors import Refusal
from nsqext.protocol.server.request_error import Fault

if TYPE_CHECKING:
    from nsqext.broker.coordinator.topics import PartitionState
    from nsqext.broker.engine.partition import Partition, Stored
    from nsqext.broker.nsqd.node import Hosted

__all__ = ("ReplicaSet", "copy", "cut_tail")

_CHUNK = 1000


def cut_tail(source: Partition, target: Partition) -> None:
    """Take away what a copy has and its leader does not: publishes that were never acknowledged.

    Two records are the same when position, ids, time stamp and bytes are; what is behind the first difference goes.
    """
    leader, log = source.log, target.log
    number = log.end_count
    while number > max(log.start_count, leader.start_count):
        mine, twin = log.at(number), leader.at(number)
        if mine is twin or (mine and twin and (mine.offset, mine.record) == (twin.offset, twin.record)):
            break
        number -= 1
    if number < log.end_count:
        last = log.at(number + 1)
        target.truncate(last.offset if last else log.start_offset)


def copy(source: Partition, target: Partition, most: int = _CHUNK) -> bool:
    """Give a copy the next records that it lacks; returns whether it lacks nothing any more.

    Raises:
        Refusal: the copy's disk does not take them.
    """
    leader, done = source.log, target.log.end_count
    first = max(done, leader.start_count) + 1
    stop = min(leader.end_count, first + most - 1)
    entries = [entry for number in range(first, stop + 1) if (entry := leader.at(number)) is not None]
    if entries:
        target.append_replica(entries)
    return target.log.end_count >= leader.end_count


@define(eq=False)
class ReplicaSet:
    """One partition and the nodes that host it.

    Attributes:
        state: what the coordinator decided.
        hosts: the copy of each node.
        reachable: whether a node of this name answers.
    """

    topic: str
    partition: int
    state: PartitionState
    reachable: Callable[[str], bool]
    hosts: dict[str, Hosted] = field(factory=dict)
    _aligned: dict[str, int] = field(factory=dict, alias="aligned")
    _changed: anyio.Event = field(factory=anyio.Event, alias="changed")
    _refused: str = field(default="", init=False)

    @property
    def leader(self) -> Partition:
        """The leader's copy."""
        return self.hosts[self.state.leader].partition

    def notify(self) -> None:
        """Wake the publishes that wait, because something changed."""
        self._changed.set()
        self._changed = anyio.Event()

    async def wait(self) -> None:
        """Return after the next change."""
        await self._changed.wait()

    def push(self, stored: Stored | None = None) -> bool:
        """Give every in-sync follower what it lacks; returns whether each of them has everything."""
        complete = True
        self._refused = ""
        source = self.leader
        for name in self.state.in_sync:
            if name == self.state.leader:
                continue
            if not self.reachable(name):
                complete = False
                continue
            target = self.hosts[name].partition
            if target.log.start_offset < source.log.start_offset:
                target.log.trim(source.log.start_offset)
            try:
                self._give(name, target, stored)
            except Refusal as refusal:
                self._refused, complete = refusal.text, False
        return complete

    def _give(self, name: str, target: Partition, stored: Stored | None) -> None:
        if stored is not None and target.log.end_offset == stored.offset and self._is_aligned(name):
            target.append_replica(stored.entries)
            return
        self.align(name)
        while not copy(self.leader, target):
            pass

    def _is_aligned(self, name: str) -> bool:
        return self._aligned.get(name) == self.state.epoch

    def align(self, name: str) -> None:
        """Make a copy a prefix of the leader's, once in each epoch."""
        if not self._is_aligned(name):
            cut_tail(self.leader, self.hosts[name].partition)
            self._aligned[name] = self.state.epoch

    def forget(self, name: str) -> None:
        """Look at a copy anew, because its node was away."""
        self._aligned.pop(name, None)

    async def replicate(self, stored: Stored) -> None:
        """Return when every in-sync replica has the entries.

        Raises:
            Fault: E_FAILED_ON_NOT_WRITABLE: the leader changed or lost its majority; the entries may survive.
            Refusal: the disk of a replica does not take the entries; they may survive.
        """
        epoch = self.state.epoch
        if self.state.leader not in self.hosts:  # the topic was deleted meanwhile
            raise Fault("E_FAILED_ON_NOT_WRITABLE", "", fatal=False)
        while not self.push(stored):
            if self._refused:
                raise Refusal(self._refused)
            await self.wait()
            if self.state.epoch != epoch or self.state.resigned:
                raise Fault("E_FAILED_ON_NOT_WRITABLE", "", fatal=False)
