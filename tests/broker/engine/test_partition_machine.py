"""Random schedules: the guarantees of the engine hold for any order of events.

No committed message is lost, messages in flight never exceed RDY, a finished message is not redelivered (after a crash:
if the position was on disk), ordered channels keep the order, tagged messages are delivered to tagged clients while
these are connected, and the queue keeps the messages that the slowest channel has not read.
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
from nsqext.broker.engine.options import ChannelKind
from nsqext.broker.engine.storage.log import Refusal, StartPosition
from nsqext.broker.engine.storage.partition_store import NewMessage, Stored
from tests.support.channel_schedule import Schedule, Watched
from tests.support.engine_partition import Consumer

if TYPE_CHECKING:
    from pathlib import Path

    from nsqext.broker.engine.partition import Partition
    from nsqext.protocol.messages import RawMessage

# five machines share most rules: each runs fewer schedules than the usual number
SCHEDULE = settings(
    max_examples=settings().max_examples * 40 // 100, stateful_step_count=50, report_multiple_bugs=False
)
_WRITE = os.write


@contextmanager
def full_disk(takes: int = 0) -> Iterator[None]:
    """Make the disk accept a number of further bytes, and no new file."""
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
        patch("nsqext.broker.engine.storage.files.write_atomically", refuse),
        patch("nsqext.broker.engine.storage.partition_store.write_atomically", refuse),
    ):
        yield


class Disk(Schedule):
    """A disk that fills up, torn records, and a slow channel."""

    def open(self, folder: str = "n1") -> Partition:
        """Open the partition with the slow channel."""
        partition = super().open(folder)
        partition.channel("slow")
        return partition

    @rule(size=st.integers(100, 5000))
    def publish_something_big(self, size: int) -> None:
        """Publish a message that fills a file and a segment."""
        self.commit(self.partition.put([NewMessage(b"m" * size)]))

    @rule(count=st.integers(1, 3), takes=st.integers(0, 60))
    def publish_on_a_full_disk(self, count: int, takes: int) -> None:
        """Publish while the disk has no room, or too little."""
        end = self.partition.log.end_offset
        with full_disk(takes), pytest.raises(Refusal):
            self.partition.put([NewMessage(b"lost" * 10)] * count)
        assert self.partition.log.end_offset == end

    @rule(seconds=st.sampled_from([0.1, 1.0, 61.0]))
    def wait_on_a_full_disk(self, seconds: float) -> None:
        """Advance the clock while the disk cannot be written."""
        written, wanted = self.written, set(self.wanted)
        with full_disk():
            self.advance(seconds)
        self.written, self.wanted = written & self.finished, wanted

    @rule(cut=st.integers(1, 60))
    def crash_while_it_writes(self, cut: int) -> None:
        """Kill the process in the middle of a record that was not acknowledged."""
        stored = self.partition.put([NewMessage(b"torn" * 10)])
        last = self.newest()
        self.kill()
        os.truncate(last, last.stat().st_size - min(cut, stored.size))
        self.partition = self.open()
        assert self.partition.log.end_offset == stored.offset

    @rule()
    def crash_before_the_answer(self) -> None:
        """Kill the process after a record was written and before it was acknowledged: it is stored."""
        stored = self.partition.put([NewMessage(b"m")])
        self.kill()
        self.partition = self.open()
        self.committed.add(stored.message_id)
        if self.channel.skipped:
            self.doubtful.add(stored.message_id)

    def newest(self) -> Path:
        """Return the last file."""
        return max((self.folder / "n1" / "orders").glob("*.dat"))

    @rule(count=st.integers(1, 40))
    def consume_slow_channel(self, count: int) -> None:
        """Finish some messages of the slow channel, one at a time."""
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
    def nothing_is_removed_before_the_slowest_channel(self) -> None:
        """The queue starts at or before the position of the slowest channel."""
        log, slow = self.partition.log, self.partition.channel("slow")
        assert log.start_offset <= slow.acked.offset
        assert self.partition.log.held < 2 * self.memory_bytes + 60_000

    @invariant()
    def the_slow_channel_has_the_rest_before_it(self) -> None:
        """Its unfinished messages are readable."""
        log, slow = self.partition.log, self.partition.channel("slow")
        for count in range(slow.acked.count + 1, log.end_count + 1):
            assert log.at(count) is not None


class Operated(Disk):
    """An operator moves positions, empties, skips, deletes and switches."""

    @initialize(extended=st.booleans())
    def choose(self, extended: bool) -> None:
        """Start with an extend topic or a plain one."""
        if not extended:
            self.partition.close(destroy=True)
            self.extended = False
            self.partition = self.open()
            assert self.channel.acked.count == 0

    @rule()
    def upgrade(self) -> None:
        """Make the topic an extend topic; that survives a crash."""
        self.partition.upgrade_extend()
        self.extended = True

    @rule()
    def crash_and_read_the_topic_from_the_disk(self) -> None:
        """Kill the process; the topic's extend support is read from disk."""
        extended, self.extended = self.extended, False
        self.crash()
        self.extended = extended

    def give_up(self, ids: set[int]) -> None:
        """Stop expecting these messages; the one that was read ahead may still be delivered."""
        self.doubtful |= ids - self.finished
        self.moved = True

    @precondition(lambda self: not self.ordered)
    @rule(place=st.floats(0, 1))
    def set_offset(self, place: float) -> None:
        """Move the position: all messages before it count as finished, none after it."""
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
        """Skip or unskip; both discard all messages."""
        self.give_up(self.committed)
        if skipped:
            self.channel.set_skipped(True)
        else:
            self.channel.set_skipped(False)

    @rule()
    def delete(self) -> None:
        """Delete and create the channel: earlier messages are not delivered, also after a crash."""
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
        """Requeue the messages of the delayed queue."""
        self.channel.requeue_delayed(2000)

    @rule()
    def read_again(self) -> None:
        """Read again from the acknowledged position."""
        self.moved = True
        self.channel.redeliver_unfinished()

    @rule(which=st.integers(0, 5))
    def finish_forced(self, which: int) -> None:
        """Finish a message at any client."""
        ids = sorted(self.channel.cursor.in_flight.table)
        if ids:
            internal_id = ids[which % len(ids)]
            self.finished.add(internal_id)
            for consumer in self.consumers.values():
                consumer.held.discard(internal_id)
            self.channel.finish_forced(internal_id)

    @rule(limit=st.integers(1, 3))
    def limit(self, limit: int) -> None:
        """Limit the messages in flight."""
        self.channel.set_client_limit("127.0.0.1", limit)

    @rule(name=st.sampled_from(["a#ephemeral", "b#ephemeral"]))
    def use_ephemeral_channel(self, name: str) -> None:
        """Use an ephemeral channel, which leaves no data."""
        channel, consumer = self.partition.channel(name), Consumer(997, extend=True)
        channel.subscribe(consumer)
        channel.set_ready(consumer, 5)
        channel.unsubscribe(consumer)
        assert name not in self.partition.channels

    @precondition(lambda self: not self.ordered)
    @rule(kind=st.sampled_from([ChannelKind("key_failover"), ChannelKind("shared")]))
    def change_type(self, kind: ChannelKind) -> None:
        """Change the type of the channel without subscribers; messages in flight are redelivered."""
        for consumer in list(self.consumers.values()):
            self.leave(consumer)
        channel = self.partition.admit("ch", kind)
        assert channel.kind.type == kind.type


class Leaders(Schedule):
    """Two replicas, each of which may lead."""

    def __init__(self) -> None:
        super().__init__()
        self.names = ["n1", "n2"]  # the leader first
        self.follower = self.open("n2")
        self.follower.suspend()

    def share(self) -> None:
        """Copy missing records to the follower."""
        if self.follower.log.start_offset < self.partition.log.start_offset:
            self.follower.log.trim(self.partition.log.start_offset)
        while not copy_records(self.partition, self.follower):
            pass

    def commit(self, stored: Stored) -> None:
        """Commit messages that the follower has."""
        self.share()
        super().commit(stored)

    @rule(seconds=st.sampled_from([0.1, 1.0, 61.0]))
    def mirror(self, seconds: float) -> None:
        """Mirror the channels and advance the clock of both."""
        mirror_channels(self.partition, self.follower)
        self.follower.tick()
        self.advance(seconds)

    @rule(lost=st.integers(0, 3))
    def lose_leader(self, lost: int) -> None:
        """Make the follower the leader; the old leader removes records that were not acknowledged."""
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
        self.written = set()  # the new leader may have written an older position

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
        """It has the same records, including all that any channel has not finished."""
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
        """Consume the duplicate of the first SUB_ORDERED."""
        first = Consumer(999, extend=True)
        partition.channel("ch").subscribe(first, ordered=True)
        partition.channel("ch").set_ready(first, 1)
        partition.channel("ch").unsubscribe(first)

    def check(self, consumer: Watched, message: RawMessage) -> None:
        """Only the first unfinished message may be delivered."""
        super().check(consumer, message)
        left = sorted(self.committed - self.finished - self.doubtful)
        assert message.internal_id in self.doubtful or message.internal_id == left[0], "out of order"
        assert not any(other.held for other in self.consumers.values()), "two in flight"


class OperatedOrdered(Ordered, Operated):
    """Ordered, with an operator."""


class Original(Schedule):
    """The original server."""

    generation = "original"
    extended = False

    @rule(delay=st.sampled_from([0.5, 100.0]))
    def publish_deferred(self, delay: float) -> None:
        """Publish with DPUB."""
        stored = self.partition.put([NewMessage(b"m", delay=delay)])
        self.committed.add(stored.message_id)
        self.partition.commit(stored)


class OperatedOriginal(Original, Disk):
    """The original server with a disk that fills up, torn records, and an operator."""

    def finish_all(self) -> None:
        """Pass the topic's messages to the channels, and consume them."""
        self.partition.set_paused(False)
        super().finish_all()

    @rule(paused=st.booleans())
    def pause_topic(self, paused: bool) -> None:
        """Pause or unpause the topic; that survives a crash."""
        if paused:
            self.partition.set_paused(True)
        else:
            self.partition.set_paused(False)

    @rule()
    def empty_topic(self) -> None:
        """Discard the messages of the topic; the channels keep theirs."""
        log = self.partition.log
        entries = [log.at(count) for count in range(self.partition.readable + 1, log.end_count + 1)]
        self.doubtful |= {entry.record.internal_id for entry in entries if entry is not None}
        self.partition.empty()

    @rule()
    def empty(self) -> None:
        """Empty the channel, messages in flight included; the messages of the topic are still delivered."""
        log = self.partition.log
        entries = [log.at(count) for count in range(log.start_count + 1, self.partition.readable + 1)]
        self.doubtful |= {entry.record.internal_id for entry in entries if entry is not None} - self.finished
        self.moved = True
        self.channel.empty()


# what the other classes have alone, these have too
for machine in (Disk, Operated, OperatedOrdered, Leaders, OperatedOriginal):
    machine.TestCase.settings = SCHEDULE

TestDisk = Disk.TestCase
TestOperated = Operated.TestCase
TestOperatedOrdered = OperatedOrdered.TestCase
TestLeaders = Leaders.TestCase
TestOperatedOriginal = OperatedOriginal.TestCase
