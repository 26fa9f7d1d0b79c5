"""A random schedule of one channel, and the invariants that hold for any order of events.

No committed message is lost, messages in flight never exceed RDY, a finished message is not redelivered (after a crash:
if the position was on disk), ordered channels keep the order, and tagged messages are delivered to tagged clients while
these are connected.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from nsqext.broker.engine.options import PartitionOptions
from nsqext.broker.engine.partition import Partition
from nsqext.broker.engine.storage.partition_store import NewMessage, Stored
from nsqext.broker.engine.storage.segments import DiskOptions
from nsqext.protocol.headers import decode_headers
from nsqext.protocol.messages import TAG_HEADER
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.engine_partition import Bench, Consumer, tagged

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.protocol.messages import RawMessage

__all__ = ("Schedule", "Watched")


class Watched(Consumer):
    """A consumer that checks each message."""

    def __init__(self, machine: Schedule, number: int, **options: Any) -> None:
        super().__init__(number, **options)
        self.machine = machine
        self.held: set[int] = set()

    def deliver(self, message: RawMessage) -> None:
        """Check and keep a message."""
        if self.machine.moved:
            self.machine.forget_dropped()
            self.held.discard(message.internal_id)  # it was in flight when the position was moved, and is read again
        assert len(self.held) < self.ready, "more in flight than RDY"
        assert message.internal_id not in self.machine.finished, "finished and delivered again"
        self.machine.check(self, message)
        for other in self.machine.consumers.values():
            assert message.internal_id not in other.held, "in flight to two clients"
        self.held.add(message.internal_id)


class Schedule(RuleBasedStateMachine):
    """Publishers, consumers, time and failures of one channel."""

    consumer = Bundle("consumer")
    ordered = False
    generation = "redesigned"
    extended = True
    memory_bytes = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="nsqext-engine-"))
        self.bench = Bench()
        self.partition = self.open()
        self.consumers: dict[int, Watched] = {}
        self.numbers = 0
        self.committed: set[int] = set()
        self.finished: set[int] = set()
        self.written: set[int] = set()  # finished, with the position on disk
        self.doubtful: set[int] = set()  # may be redelivered: finished before a crash, or skipped
        self.wanted: set[int] = set()  # must be redelivered because the position was moved, if the move is on disk
        self.moved = False  # the read position was moved, so messages held by consumers may be discarded already

    def open(self, folder: str = "n1") -> Partition:
        """Open the partition from disk, with small bounds and small files."""
        options = PartitionOptions(
            extend=self.extended,
            ordered=self.ordered,
            limits=ServerLimits() if self.generation == "redesigned" else ServerLimits.original(),
            clock=self.bench.clock,
            wall=self.bench.wall,
            memory_bound=self.memory_bytes,
            cache_bytes=self.memory_bytes,
            data_path=self.folder / folder,
            disk=DiskOptions(max_file_bytes=200, retention_bytes=0),
        )
        return Partition("orders", 0, options)

    def prepare(self, partition: Partition) -> None:
        """Prepare a new channel."""

    def teardown(self) -> None:
        """Check that no committed message is lost: a last consumer receives and finishes all of them."""
        if self.channel.skipped:
            self.channel.set_skipped(False)
        self.finish_all()
        missing = self.committed - self.finished - self.doubtful
        self.partition.close()
        shutil.rmtree(self.folder)
        assert not missing

    def finish_all(self) -> None:
        """Consume all remaining messages."""
        for consumer in list(self.consumers.values()):
            self.leave(consumer)
        self.channel.set_paused(False)
        last = self.join(2500, "")
        for _ in range(8):
            self.settle()
            while last.held:
                for internal_id in sorted(last.held):
                    self.finish(last, internal_id)
            self.advance(86400.0)

    @property
    def channel(self) -> Channel:
        """The channel."""
        return self.partition.channel("ch")

    def check(self, consumer: Watched, message: RawMessage) -> None:
        """Check the rules of tags."""
        wanted = decode_headers(message.header).get(TAG_HEADER, "")
        if consumer.tag:
            assert wanted == consumer.tag, "a tagged client received another tag"
        elif wanted:
            assert wanted not in {other.tag for other in self.consumers.values()}, (
                "a tagged message was delivered to an untagged client"
            )

    def settle(self) -> None:
        """Drop timed out messages from the consumers."""
        self.forget_dropped()
        self.moved = self.moved and self.channel.cursor._rewind is not None
        for consumer in self.consumers.values():
            consumer.take()

    def forget_dropped(self) -> None:
        """Make consumers hold exactly the messages in flight to them."""
        flights = self.channel.cursor.in_flight.table
        for consumer in self.consumers.values():
            mine = {internal_id for internal_id, flight in flights.items() if flight.owner is consumer}
            consumer.held &= mine

    def join(self, ready: int, tag: str) -> Watched:
        """Subscribe a consumer."""
        self.numbers += 1
        consumer = Watched(self, self.numbers, tag=tag if self.partition.extend else "", extend=True)
        self.consumers[consumer.id] = consumer
        self.channel.subscribe(consumer, ordered=self.ordered)
        self.channel.set_ready(consumer, ready)
        return consumer

    def leave(self, consumer: Watched) -> None:
        """Disconnect a consumer."""
        del self.consumers[consumer.id]
        consumer.held.clear()
        self.channel.unsubscribe(consumer)

    def forget_consumers(self) -> None:
        """Drop all connections."""
        for consumer in self.consumers.values():
            consumer.held.clear()
        self.consumers.clear()

    def finish(self, consumer: Watched, internal_id: int) -> None:
        """Finish a message."""
        consumer.held.remove(internal_id)
        self.finished.add(internal_id)
        self.channel.finish(consumer, internal_id)

    def advance(self, seconds: float) -> None:
        """Advance the clock; timed out messages are no longer held."""
        self.bench.now += seconds
        flights = self.channel.cursor.in_flight.table
        for consumer in self.consumers.values():
            late = {key for key in consumer.held if key in flights and flights[key].deadline <= self.bench.now}
            consumer.held -= late
        before = set(self.finished)
        self.partition.tick()
        if seconds >= self.partition.options.disk.sync_interval:
            self.written = before
            self.wanted.clear()

    # rules

    @initialize()
    def begin(self) -> None:
        """Create the channel before the first publish."""
        assert self.channel.acked.count == 0

    @rule(tags=st.lists(st.sampled_from(["", "", "a", "b"]), min_size=1, max_size=5))
    def publish(self, tags: list[str]) -> None:
        """Publish a batch."""
        new = [tagged("m", tag) if tag and self.partition.extend else NewMessage(b"m") for tag in tags]
        stored = self.partition.put(new)
        self.commit(stored)

    def commit(self, stored: Stored) -> None:
        """Acknowledge a publish."""
        ids = {entry.record.internal_id for entry in stored.entries}
        self.committed |= ids
        if self.channel.skipped:
            self.doubtful |= ids
        self.partition.commit(stored)

    @rule(count=st.integers(1, 3))
    def publish_that_fails(self, count: int) -> None:
        """Write a batch and roll it back."""
        self.partition.rollback(self.partition.put([NewMessage(b"lost")] * count))

    @rule(target=consumer, ready=st.integers(0, 4), tag=st.sampled_from(["", "", "a", "b"]))
    def connect(self, ready: int, tag: str) -> Any:
        """Connect a consumer."""
        if len(self.consumers) >= 4:
            return multiple()
        return self.join(ready, tag if self.generation == "redesigned" else "")

    @rule(consumer=consumes(consumer))
    def disconnect(self, consumer: Watched) -> None:
        """Disconnect a consumer."""
        if consumer.id in self.consumers:
            self.leave(consumer)

    @rule(consumer=consumer, ready=st.integers(0, 5))
    def change_ready(self, consumer: Watched, ready: int) -> None:
        """Send RDY; messages in flight are not affected."""
        if consumer.id in self.consumers:
            self.channel.set_ready(consumer, ready)

    @rule(consumer=consumer, which=st.integers(0, 5))
    def acknowledge(self, consumer: Watched, which: int) -> None:
        """Finish one of the messages in flight."""
        if consumer.held:
            self.finish(consumer, sorted(consumer.held)[which % len(consumer.held)])

    @rule(consumer=consumer, which=st.integers(0, 5), delay=st.sampled_from([0.0, 0.0, 0.5, 30.0, 1000.0]))
    def send_back(self, consumer: Watched, which: int, delay: float) -> None:
        """Requeue one of the messages in flight."""
        if consumer.held:
            internal_id = sorted(consumer.held)[which % len(consumer.held)]
            if not (self.ordered and delay):
                consumer.held.remove(internal_id)
            self.channel.requeue(consumer, internal_id, delay)

    @rule(consumer=consumer, which=st.integers(0, 5))
    def touch(self, consumer: Watched, which: int) -> None:
        """Touch one of the messages in flight."""
        if consumer.held:
            self.channel.touch(consumer, sorted(consumer.held)[which % len(consumer.held)])

    @rule(seconds=st.sampled_from([0.1, 1.0, 45.0, 61.0, 1001.0]))
    def wait(self, seconds: float) -> None:
        """Advance the clock."""
        self.advance(seconds)

    @rule(paused=st.booleans())
    def switch(self, paused: bool) -> None:
        """Pause or unpause the channel."""
        if paused:
            self.channel.set_paused(True)
        else:
            self.channel.set_paused(False)

    @rule()
    def crash(self) -> None:
        """Kill the process and open the partition again."""
        self.kill()
        self.partition = self.open()

    def kill(self) -> None:
        """Kill the process; the last changes may or may not be on disk."""
        self.forget_consumers()
        self.partition.close(save=False)
        self.doubtful |= (self.finished ^ self.written) | self.wanted
        self.wanted.clear()
        self.finished &= self.written
        self.written = set(self.finished)

    @invariant()
    def offsets_follow_each_other(self) -> None:
        """The queue has no gap."""
        assert self.partition.extend or not self.extended
        log = self.partition.log
        offset, count = log.start_offset, log.start_count
        while count < log.end_count:
            count += 1
            entry = log.at(count)
            assert entry is not None
            assert (entry.offset, entry.count) == (offset, count)
            offset += entry.size
        assert offset == log.end_offset

    @invariant()
    def counts_agree(self) -> None:
        """The counts of the engine equal those of the consumers."""
        self.settle()
        for number, consumer in self.consumers.items():
            assert self.channel.clients[number].in_flight == len(consumer.held)
        confirmed = self.channel.acked
        assert confirmed.count <= self.partition.readable <= self.partition.log.end_count
        assert confirmed.starts == sorted(confirmed.starts)
