"""Random schedules: whatever happens in whatever order, the promises of the engine hold.

Nothing committed is lost, no more is in flight than RDY allows, what is finished stays finished (after a crash: what
was finished and written down), ordered channels never overtake, tagged messages go to tagged clients while they are
there, and the queue keeps what the slowest channel has before it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from nsqext.broker.coordinator.replication import copy_records, cut_tail, hand_over_channels, mirror_channels
from nsqext.broker.engine.channel.kind import ChannelKind
from nsqext.broker.engine.channel_types import admit
from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.partition import NewMessage, Partition
from nsqext.broker.engine.start_position import StartPosition
from tests.support.channel_schedule import Schedule, Watched
from tests.support.engine_partition import Consumer

if TYPE_CHECKING:
    from pathlib import Path

    from nsqext.broker.engine.partition import Stored
    from nsqext.protocol.messages import RawMessage

SCHEDULE = settings(stateful_step_count=50, report_multiple_bugs=False)
_WRITE = os.write


@contextmanager
def full_disk(takes: int = 0) -> Iterator[None]:
    """Have the disk take so many bytes more, and replace no file."""
    left = [takes]

    def fill(out: int, data: bytes) -> int:
        size = left.pop() if left else 0
        if not size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return _WRITE(out, data[:size])

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        patch("nsqext.broker.engine.storage.segments.os.write", fill),
        patch("nsqext.broker.engine.storage.segments.write_atomically", refuse),
        patch("nsqext.broker.engine.storage.partition_store.write_atomically", refuse),
    ):
        yield


class Disk(Schedule):
    """With a disk that fills up, records that are torn, and a channel that keeps far behind."""

    def open(self, folder: str = "n1") -> Partition:
        """Open it, with the slow channel in any case."""
        partition = super().open(folder)
        partition.channel("slow")
        return partition

    @rule(size=st.integers(100, 5000))
    def publish_something_big(self, size: int) -> None:
        """Publish a message that takes files and segments of its own."""
        self.commit(self.partition.put([NewMessage(b"m" * size)]))

    @rule(count=st.integers(1, 3), takes=st.integers(0, 60))
    def publish_on_a_full_disk(self, count: int, takes: int) -> None:
        """Publish where the disk has no room, or not enough."""
        end = self.partition.log.end_offset
        with full_disk(takes), pytest.raises(Refusal):
            self.partition.put([NewMessage(b"lost" * 10)] * count)
        assert self.partition.log.end_offset == end

    @rule(seconds=st.sampled_from([0.1, 1.0, 61.0]))
    def wait_on_a_full_disk(self, seconds: float) -> None:
        """Let time pass while nothing can be written down."""
        written, wanted = self.written, set(self.wanted)
        with full_disk():
            self.advance(seconds)
        self.written, self.wanted = written & self.finished, wanted

    @rule(cut=st.integers(1, 60))
    def crash_while_it_writes(self, cut: int) -> None:
        """Kill the process in the middle of a record that nobody was told is stored."""
        stored = self.partition.put([NewMessage(b"torn" * 10)])
        last = self.newest()
        self.kill()
        os.truncate(last, last.stat().st_size - min(cut, stored.size))
        self.partition = self.open()
        assert self.partition.log.end_offset == stored.offset

    @rule()
    def crash_before_the_answer(self) -> None:
        """Kill the process when a record is written and nobody was told: it is there."""
        stored = self.partition.put([NewMessage(b"m")])
        self.kill()
        self.partition = self.open()
        self.committed.add(stored.message_id)
        if self.channel.skipped:
            self.doubtful.add(stored.message_id)

    def newest(self) -> Path:
        """Return the file that is written to."""
        return max((self.folder / "n1" / "orders").glob("*.dat"))

    @rule(count=st.integers(1, 40))
    def let_the_slow_channel_read(self, count: int) -> None:
        """Have it finish some messages, one after the other."""
        channel = self.partition.channel("slow")
        consumer = Consumer(998, extend=True)
        channel.subscribe(consumer)
        channel.set_ready(consumer, 1)
        for _ in range(count):
            for message in consumer.take():
                channel.finish(consumer, message.internal_id)
        channel.unsubscribe(consumer)
        consumer.take()

    @invariant()
    def nothing_is_let_go_before_the_slowest(self) -> None:
        """The queue and its files begin where the slowest channel is, or before."""
        log, slow = self.partition.log, self.partition.channel("slow")
        assert log.start_offset <= slow.acked.offset
        assert self.partition.log.held < 2 * self.memory_bytes + 60_000

    @invariant()
    def the_slow_channel_has_the_rest_before_it(self) -> None:
        """What it has not finished can be read."""
        log, slow = self.partition.log, self.partition.channel("slow")
        for count in range(slow.acked.count + 1, log.end_count + 1):
            assert log.at(count) is not None


class Operated(Disk):
    """With somebody who moves positions, empties, skips, deletes and switches."""

    @initialize(extended=st.booleans())
    def choose(self, extended: bool) -> None:
        """Begin with an extend topic or another one."""
        if not extended:
            self.partition.close(destroy=True)
            self.extended = False
            self.partition = self.open()
            assert self.channel.acked.count == 0

    @rule()
    def upgrade(self) -> None:
        """Make the topic an extend topic; there is no way back, also after a crash."""
        self.partition.upgrade_extend()
        self.extended = True

    @rule()
    def crash_and_read_the_topic_from_the_disk(self) -> None:
        """Kill the process; whether the topic is extended is told by the disk alone."""
        extended, self.extended = self.extended, False
        self.crash()
        self.extended = extended

    def give_up(self, ids: set[int]) -> None:
        """Messages that nobody is owed any more; one that was in hand may come all the same."""
        self.doubtful |= ids - self.finished
        self.moved = True

    @precondition(lambda self: not self.ordered)
    @rule(place=st.floats(0, 1))
    def set_offset(self, place: float) -> None:
        """Read on elsewhere: what is before counts as finished, nothing behind it does."""
        log = self.partition.log
        count = log.start_count + int(place * (log.end_count - log.start_count))
        entries = [log.at(number) for number in range(count + 1, log.end_count + 1)]
        behind = {entry.record.internal_id for entry in entries if entry is not None} & self.committed
        if not behind:
            return
        self.give_up(self.committed - behind)
        self.doubtful -= behind
        self.wanted |= behind
        self.written -= behind
        self.finished -= behind
        if self.channel.skipped:
            self.doubtful |= behind
        self.channel.set_offset(StartPosition("msgcount", count + 1))

    @rule()
    def empty(self) -> None:
        """Empty the channel."""
        self.give_up(self.committed)
        self.channel.empty()

    @rule(skipped=st.booleans())
    def skip(self, skipped: bool) -> None:
        """Skip or unskip: what is there is dropped in either case."""
        self.give_up(self.committed)
        if skipped:
            self.channel.skip()
        else:
            self.channel.unskip()

    @rule()
    def delete(self) -> None:
        """Delete the channel and make it anew: nothing of before comes, also after a crash."""
        self.forget_consumers()
        self.partition.delete_channel("ch")
        self.prepare(self.partition)
        assert self.channel.acked.count == self.partition.readable
        self.finished = set(self.committed)
        self.written = set(self.committed)
        self.doubtful.clear()
        self.wanted.clear()

    @rule()
    def bring_delayed(self) -> None:
        """Bring back what waits in the delayed queue."""
        self.channel.requeue_delayed(2000)

    @rule()
    def read_again(self) -> None:
        """Read from the confirmed position."""
        self.moved = True
        self.channel.redeliver_unfinished()

    @rule(which=st.integers(0, 5))
    def finish_forced(self, which: int) -> None:
        """Finish a message whoever has it."""
        ids = sorted(self.channel.cursor.in_flight.table)
        if ids:
            internal_id = ids[which % len(ids)]
            self.finished.add(internal_id)
            for consumer in self.consumers.values():
                consumer.held.discard(internal_id)
            self.channel.finish_forced(internal_id)

    @rule(limit=st.integers(1, 3))
    def limit(self, limit: int) -> None:
        """Let no client have more than so many messages."""
        self.channel.set_client_limit("127.0.0.1", limit)

    @rule(name=st.sampled_from(["a#ephemeral", "b#ephemeral"]))
    def come_and_go(self, name: str) -> None:
        """Have a channel that is gone with its only consumer, and leaves nothing."""
        channel, consumer = self.partition.channel(name), Consumer(997, extend=True)
        channel.subscribe(consumer)
        channel.set_ready(consumer, 5)
        channel.unsubscribe(consumer)
        assert name not in self.partition.channels

    @precondition(lambda self: not self.ordered)
    @rule(kind=st.sampled_from([ChannelKind("key_failover"), ChannelKind("shared")]))
    def change_type(self, kind: ChannelKind) -> None:
        """Give the channel another type while nobody is there; what was on its way comes again."""
        for consumer in list(self.consumers.values()):
            self.leave(consumer)
        channel = admit(self.partition, "ch", kind)
        assert channel.kind.type == kind.type


class Leaders(Schedule):
    """Two copies, of which either may lead; both are told what the coordinator tells them."""

    def __init__(self) -> None:
        super().__init__()
        self.names = ["n1", "n2"]  # the leader first
        self.follower = self.open("n2")
        self.follower.suspend()

    def share(self) -> None:
        """Give the follower what it lacks."""
        if self.follower.log.start_offset < self.partition.log.start_offset:
            self.follower.log.trim(self.partition.log.start_offset)
        while not copy_records(self.partition, self.follower):
            pass

    def commit(self, stored: Stored) -> None:
        """Acknowledge what the follower has, too."""
        self.share()
        super().commit(stored)

    @rule(seconds=st.sampled_from([0.1, 1.0, 61.0]))
    def mirror(self, seconds: float) -> None:
        """Have the follower hear of the channels, and time pass for both."""
        mirror_channels(self.partition, self.follower)
        self.follower.tick()
        self.advance(seconds)

    @rule(lost=st.integers(0, 3))
    def lose_leader(self, lost: int) -> None:
        """Have the follower take over; what it was not given was not acknowledged, and is taken from the old leader."""
        if lost:
            self.partition.put([NewMessage(b"lost" * 100)] * lost)
        self.partition.suspend()
        for consumer in self.consumers.values():
            assert consumer.has_closed
        self.forget_consumers()
        hand_over_channels(self.partition, self.follower)
        self.follower.resume()
        self.names.reverse()
        self.partition, self.follower = self.follower, self.partition
        cut_tail(self.partition, self.follower)
        self.share()
        self.written = set()  # the new leader has written down less, perhaps

    @rule()
    def crash(self) -> None:
        """Kill all nodes."""
        self.kill()
        self.follower.close(save=False)
        self.partition, self.follower = (self.open(name) for name in self.names)
        self.follower.suspend()
        cut_tail(self.partition, self.follower)
        self.share()

    @invariant()
    def the_follower_has_everything(self) -> None:
        """It holds the same records, and not fewer than any channel has before it."""
        mine, theirs = self.partition.log, self.follower.log
        assert (mine.end_offset, mine.end_count) == (theirs.end_offset, theirs.end_count)
        assert theirs.start_offset <= self.channel.acked.offset
        for count in range(max(mine.start_count, theirs.start_count) + 1, mine.end_count + 1):
            one, other = mine.at(count), theirs.at(count)
            assert one is not None
            assert other is not None
            assert (one.offset, one.record) == (other.offset, other.record)


class Ordered(Schedule):
    """One message at a time, in the order of the queue."""

    ordered = True

    def open(self, folder: str = "n1") -> Partition:
        """Open the partition."""
        partition = super().open(folder)
        self.prepare(partition)
        return partition

    def prepare(self, partition: Partition) -> None:
        """Get over the reset that the first SUB_ORDERED brings, with its duplicate."""
        first = Consumer(999, extend=True)
        partition.channel("ch").subscribe(first, ordered=True)
        partition.channel("ch").set_ready(first, 1)
        partition.channel("ch").unsubscribe(first)

    def check(self, consumer: Watched, message: RawMessage) -> None:
        """Only the first message that is not finished may come."""
        super().check(consumer, message)
        left = sorted(self.committed - self.finished - self.doubtful)
        assert message.internal_id in self.doubtful or message.internal_id == left[0], "overtaken"
        assert not any(other.held for other in self.consumers.values()), "two in flight"


class OperatedOrdered(Ordered, Operated):
    """The same with an operator."""


class Original(Schedule):
    """The original server."""

    generation = "nsq"
    extended = False

    @rule(delay=st.sampled_from([0.5, 100.0]))
    def publish_deferred(self, delay: float) -> None:
        """Publish with DPUB."""
        stored = self.partition.put([NewMessage(b"m", delay=delay)])
        self.committed.add(stored.message_id)
        self.partition.commit(stored)


class OperatedOriginal(Original, Disk):
    """The original server with a disk that fills up, records that are torn, and an operator."""

    def finish_all(self) -> None:
        """Pass on what the topic holds, and consume it."""
        self.partition.unpause()
        super().finish_all()

    @rule(paused=st.booleans())
    def pause_topic(self, paused: bool) -> None:
        """Have the topic hold what is published, also over a crash, or pass it on."""
        if paused:
            self.partition.pause()
        else:
            self.partition.unpause()

    @rule()
    def empty_topic(self) -> None:
        """Drop what the topic holds; the channels keep what they have."""
        log = self.partition.log
        entries = [log.at(count) for count in range(self.partition.readable + 1, log.end_count + 1)]
        self.doubtful |= {entry.record.internal_id for entry in entries if entry is not None}
        self.partition.empty()

    @rule()
    def empty(self) -> None:
        """Empty the channel, of what is at clients, too; what the topic holds is still to come."""
        log = self.partition.log
        entries = [log.at(count) for count in range(log.start_count + 1, self.partition.readable + 1)]
        self.doubtful |= {entry.record.internal_id for entry in entries if entry is not None} - self.finished
        self.moved = True
        self.channel.empty()


for machine in (Schedule, Disk, Operated, OperatedOrdered, Leaders, Ordered, Original, OperatedOriginal):
    machine.TestCase.settings = SCHEDULE

TestSchedule = Schedule.TestCase
TestDisk = Disk.TestCase
TestOperated = Operated.TestCase
TestOperatedOrdered = OperatedOrdered.TestCase
TestLeaders = Leaders.TestCase
TestOrdered = Ordered.TestCase
TestOriginal = Original.TestCase
TestOperatedOriginal = OperatedOriginal.TestCase
