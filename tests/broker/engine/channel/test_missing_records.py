"""Records that a channel cannot read: lost on disk, unreadable for a time, or removed by the leader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.engine.storage.log import LogEntry, Refusal
from tests.support.engine_partition import Bench, Consumer

if TYPE_CHECKING:
    import pytest


def _replica(*, ready: int = 9) -> tuple[Bench, Consumer, list[LogEntry]]:
    """Return a partition that received the first of four records, a consumer, and the other records."""
    source = Bench()
    first, *others = source.publish("m0", "m1", "m2", "m3").entries
    bench = Bench()
    consumer = bench.consume(ready=ready)
    bench.partition.append_replica([first])
    return bench, consumer, others


def test_lost_records_count_as_finished() -> None:
    bench, consumer, (_, third, fourth) = _replica()
    before = bench.partition.changes
    bench.partition.append_replica([third, fourth], leader_start=0)
    assert consumer.bodies() == ["m0", "m2", "m3"]
    assert bench.partition.changes == before + 1, "the position is written"
    channel = bench.channel()
    assert (channel.cursor.offset, channel.cursor.count, channel.stats().depth) == (128, 4, 4)
    for counter, position in ((2, (64, 2)), (4, (96, 3)), (5, (128, 4))):
        bench.finish(consumer, [counter])
        assert (channel.acked.offset, channel.acked.count, channel.acked.intervals) == (*position, [])


def test_a_channel_follows_a_queue_that_starts_later() -> None:
    bench, consumer, (_, third, fourth) = _replica()
    bench.partition.append_replica([third, fourth])
    assert consumer.bodies() == ["m0", "m2", "m3"]
    stats, acked = bench.channel().stats(), bench.channel().acked
    assert (stats.in_flight_count, stats.depth, acked.offset, acked.count) == (2, 2, 64, 2)


def test_a_channel_waits_for_a_record_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench, consumer, _ = _replica(ready=1)
    bench.publish("m1", "m2", "m3")
    assert (consumer.bodies(), bench.partition.tick()) == (["m0"], bench.now + 60)
    log, unreadable = bench.partition.log, 3
    at = log.at

    def refuse(count: int) -> LogEntry | None:
        if count == unreadable:
            raise Refusal(f"record {count} cannot be read")
        return at(count)

    monkeypatch.setattr(log, "at", refuse)
    bench.finish(consumer, [2])
    assert consumer.bodies() == ["m1"]
    for _ in range(2):
        assert bench.partition.tick() == bench.now, "it is tried again with the next tick"
    unreadable = 4
    bench.wait(1)
    assert bench.partition.tick() == bench.now + 59
    bench.finish(consumer, [3])
    assert (consumer.bodies(), bench.partition.tick()) == (["m2"], bench.now)
    assert [record.message for record in caplog.records] == ["record 3 cannot be read", "record 4 cannot be read"]
