"""The replicas of a partition: copy records, wait for acknowledgements, hand over channels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import define, field

from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import Stored
from nsqext.protocol.server.request_error import RequestError
from nsqext.waits import Waiters

if TYPE_CHECKING:
    from nsqext.broker.coordinator.topics import CoordinatedPartition
    from nsqext.broker.engine.partition import Partition
    from nsqext.broker.nsqd.node import Hosted

_CHUNK = 1000  # records copied in one turn of the event loop
logger: logging.Logger = logging.getLogger(__name__)


def cut_tail(source: Partition, target: Partition) -> None:
    """Remove records of a replica that its leader lacks: publishes that were never acknowledged.

    Records are equal in position, ids, time stamp and bytes. What follows the first difference, or records that the
    replica lost on disk and the leader has, is copied again.
    """
    leader, log = source.log, target.log
    number = log.whole_count if leader.whole_count > log.whole_count else log.end_count
    while number > max(log.start_count, leader.start_count):
        mine, twin = log.at(number), leader.at(number)
        if mine is twin or (mine and twin and (mine.offset, mine.record) == (twin.offset, twin.record)):
            break
        number -= 1
    if number < log.end_count:
        last = log.at(number + 1)
        target.truncate(last.offset if last else log.start_offset)


def copy_records(source: Partition, target: Partition, most: int = _CHUNK) -> bool:
    """Copy missing records to a replica; return whether it is complete. Raises `Refusal` for a full disk."""
    leader, done = source.log, target.log.end_count
    first = max(done, leader.start_count) + 1
    while gap := leader.gap_at(first):
        first = gap.end_count + 1
    stop = min(leader.end_count, first + most - 1)
    entries = [entry for number in range(first, stop + 1) if (entry := leader.at(number)) is not None]
    if entries:
        target.append_replica(entries, leader_start=leader.start_offset)
    return target.log.end_count >= leader.end_count


def commit_all(partition: Partition) -> None:
    """Make the whole queue readable: every in-sync replica has it."""
    last = partition.log.at(partition.log.end_count)
    if last is not None and last.count > partition.readable:
        partition.commit(Stored(last.record.internal_id, last.offset, last.size, [last]))


def mirror_channels(leader: Partition, follower: Partition) -> None:
    """Copy a leader's channels to a follower, which keeps their unfinished messages."""
    for name in [name for name in follower.channels if name not in leader.channels]:
        follower.delete_channel(name)
    for name, channel in list(leader.channels.items()):
        if channel.ephemeral:
            continue
        state = channel.state()
        is_new = name not in follower.channels
        twin = follower.set_kind(name, channel.kind)
        current = twin.state()
        state.delayed = current.delayed  # handed over with the leadership
        if is_new or current != state:
            twin.read_ahead = None
            twin.restore(state, ())
            follower.note_progress()
    if follower.log.start_offset < leader.log.start_offset:
        follower.log.trim(leader.log.start_offset)


def hand_over_channels(old: Partition, new: Partition) -> None:
    """Give a new leader the old leader's channels; messages in flight are redelivered."""
    mirror_channels(old, new)
    for name, channel in old.channels.items():
        if channel.ephemeral:
            continue
        mine, theirs = new.channels[name].cursor, channel.cursor
        mine.delayed.clear()
        for delayed in theirs.delayed.messages.values():
            try:
                mine.delayed.put(delayed)
            except Refusal as refusal:
                logger.warning("a delayed message is kept in memory only: %s", refusal.text)
                mine.delayed.restore(delayed)
        new.channels[name].read_ahead = None
        mine.rewind(forget=False)


@define(eq=False)
class ReplicaSet:
    """A partition and the nodes that host it."""

    topic: str
    partition: int
    state: CoordinatedPartition
    #: whether a node (first name) gets answers from another node (second)
    reachable: Callable[[str, str], bool]
    hosts: dict[str, Hosted] = field(factory=dict)
    _aligned: dict[str, tuple[int, int]] = field(factory=dict, alias="aligned")
    _mirrored: dict[str, tuple[str, int, int]] = field(factory=dict, alias="mirrored")
    changes: Waiters = field(factory=Waiters, init=False)
    _refused: str = field(default="", init=False)

    @property
    def leader(self) -> Partition:
        return self.hosts[self.state.leader].partition

    def push(self, stored: Stored | None = None) -> bool:
        """Copy missing records to every in-sync follower; return whether all are complete.

        A follower that lacks only ``stored``, the last append, gets it without a search.
        """
        complete = True
        self._refused = ""
        source = self.leader
        for name in self.state.in_sync:
            if name == self.state.leader:
                continue
            if not self.reachable(self.state.leader, name):
                complete = False
                continue
            target = self.hosts[name].partition
            if target.log.start_offset < source.log.start_offset:
                target.log.trim(source.log.start_offset)
            try:
                self._push_to(name, target, stored)
            except Refusal as refusal:
                self._refused, complete = refusal.text, False
        return complete

    def _push_to(self, name: str, target: Partition, stored: Stored | None) -> None:
        if stored is not None and target.log.end_offset == stored.offset and self._is_aligned(name):
            target.append_replica(stored.entries)
            return
        self.align(name)
        while not copy_records(self.leader, target):
            pass

    @property
    def _history(self) -> tuple[int, int]:
        return self.state.epoch, self.leader.truncations

    def _is_aligned(self, name: str) -> bool:
        return self._aligned.get(name) == self._history

    def mirror_to(self, name: str) -> None:
        leader = self.leader
        version = self.state.leader, self.state.epoch, leader.changes
        if self._mirrored.get(name) != version:
            mirror_channels(leader, self.hosts[name].partition)
            self._mirrored[name] = version

    def align(self, name: str) -> None:
        """Make a replica a prefix of the leader's log, once per epoch and truncation of this log.

        A leader takes back the parts of a batch that is refused; a replica that catches up may have copied them.
        """
        if not self._is_aligned(name):
            cut_tail(self.leader, self.hosts[name].partition)
            self._aligned[name] = self._history

    def forget(self, name: str) -> None:
        """Align a replica again before the next copy, because its node was down."""
        self._aligned.pop(name, None)
        self._mirrored.pop(name, None)

    def uncommit_tail(self) -> None:
        """Hide a new leader's messages that an in-sync follower lacks: delivered messages must not be lost."""
        leader = self.leader
        held = min(self.hosts[name].partition.log.end_count for name in self.state.in_sync if name in self.hosts)
        if held < leader.committed:
            leader.uncommit(held)

    async def replicate(self, stored: Stored) -> None:
        """Return when every in-sync replica has the entries; after an error the outcome is unknown.

        Raises:
            RequestError: the leader changed or lost its majority.
            Refusal: a replica cannot write to its disk.
        """
        epoch = self.state.epoch
        if self.state.leader not in self.hosts:  # the topic was deleted
            raise RequestError("E_FAILED_ON_NOT_WRITABLE", "", fatal=False)
        while not self.push(stored):
            if self._refused:
                raise Refusal(self._refused)
            await self.changes.wait()
            if self.state.epoch != epoch or self.state.resigned:
                raise RequestError("E_FAILED_ON_NOT_WRITABLE", "", fatal=False)
