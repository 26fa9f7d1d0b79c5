"""A partition on disk, after a clean end and after a kill."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from nsqext.broker.engine.storage.files import with_checksum
from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import stored_partitions
from nsqext.broker.engine.storage.segments import DiskOptions
from tests.support.channel_scripts import ChannelScript
from tests.support.engine_partition import Bench, tagged
from tests.support.tables import table

if TYPE_CHECKING:
    from pathlib import Path


SCENES = {
    "messages and positions are restored": """
        a sub 10; pub m0 m1 m2 m3; a fin 2; wait 1; a fin 4; wait 1; kill; acked count=1; b sub 10;
        b gets m1/1 m3/1; pub m4; b gets m4/1; b fin 6""",
    "the delayed queue survives": """
        a sub 10; pub m0 m1 m2; a req 2 1200; a req 3 1200; a req 4 1200; wait 1; do requeue_delayed 1200; a fin 3;
        kill; has delayed_queue_count=2; b sub 10; b gets; wait 1201; b gets m0/2 m2/2""",
    "a new channel has no delayed messages of a deleted channel": """
        pub m0; a sub; pub m1; a req 3 1200; topic do delete_channel ch; channel; kill; has delayed_queue_count=0""",
    "the end of a replica that was cut off stays cut off": """
        channel; pub m0 m1 m2 m3 m4; topic do truncate 96; pub other; kill; a sub 10; a gets m0 m1 m2 other""",
}


@table(("scene", "script"), SCENES.items())
def test_scenes(scene: str, script: str, tmp_path: Path) -> None:
    assert ChannelScript.checks(script, data_path=tmp_path), scene


FIRST_FILE = "orders/orders-0.diskqueue.000000.dat"


def on_disk(path: Path, **options: Any) -> Bench:
    return Bench(data_path=path, **options)


@pytest.mark.parametrize("cut", [1, 10, 29, 31])
def test_a_torn_record_is_removed_and_reported(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    bench = on_disk(tmp_path)
    bench.channel()
    bench.publish("m0", "m1")
    file = tmp_path / FIRST_FILE
    with file.open("r+b") as data:
        data.truncate(64 - cut)
    again = on_disk(tmp_path)
    assert again.partition.recovery is not None
    assert (again.partition.recovery.messages, again.partition.recovery.torn_bytes) == (1, 32 - cut)
    assert "torn record" in caplog.text
    assert file.stat().st_size == 32
    again.publish("next")
    assert again.consume(ready=10).bodies() == ["m0", "next"]


def test_headers_survive(tmp_path: Path) -> None:
    bench = on_disk(tmp_path, extend=True)
    bench.channel()
    bench.publish(tagged("m0", "canary"))
    consumer = on_disk(tmp_path).consume(ready=1, extend=True)
    (message,) = consumer.take()
    assert message.header == b'{"##client_dispatch_tag":"canary"}'


def test_switches_survive(tmp_path: Path) -> None:
    bench = on_disk(tmp_path)
    bench.channel().set_paused(True)
    bench.channel("other").set_skipped(True)
    bench.channel("gone")
    bench.partition.delete_channel("gone")
    bench.channel("tmp#ephemeral")
    on_disk(tmp_path)  # which is killed at once
    again = on_disk(tmp_path).partition
    assert sorted(again.channels) == ["ch", "other"]
    assert (again.channels["ch"].paused, again.channels["other"].skipped) == (True, True)


def test_the_state_is_written_once_for_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = on_disk(tmp_path, disk=DiskOptions(max_file_bytes=1000))
    written: list[object] = []
    monkeypatch.setattr(
        "nsqext.broker.engine.storage.partition_store.write_atomically", lambda *what, **_: written.append(what)
    )
    for _ in range(100):
        bench.publish("x" * 70)
    assert len(written) == 2 * 9


def test_files_before_the_slowest_channel_are_removed(tmp_path: Path) -> None:
    disk = DiskOptions(max_file_bytes=1000, retention_bytes=0)
    bench = on_disk(tmp_path, disk=disk, cache_bytes=100_000)
    fast, slow = bench.consume(ready=2500), bench.consume(2, ready=2500, channel="slow")
    for _ in range(300):
        bench.publish("x" * 100)
    files = list((tmp_path / "orders").glob("*.dat"))
    bench.finish(fast, range(2, 302))
    bench.wait(1)
    assert list((tmp_path / "orders").glob("*.dat")) == files
    bench.finish(slow, range(2, 302), "slow")
    bench.wait(1)
    left = list((tmp_path / "orders").glob("*.dat"))
    assert 0 < len(left) < len(files)
    again = on_disk(tmp_path, disk=disk)
    assert again.partition.log.end_count == 300
    again.publish("next")
    assert again.consume(ready=1).bodies() == ["next"]


@pytest.mark.parametrize("damage", ["gone", "short", "garbled"])
def test_a_channel_waits_for_unreadable_messages(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = on_disk(tmp_path, cache_bytes=20_000, disk=DiskOptions(max_file_bytes=5000))
    bench.channel()
    for number in range(500):
        bench.publish(f"{number:0200}")
    file = sorted(tmp_path.rglob("*.dat"))[5]
    data = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(data[:700] if damage == "short" else b"\0" * len(data))
    consumer = bench.consume(ready=2500)
    for _ in range(3):
        bench.wait(1)
    got = consumer.bodies()
    assert 0 < len(got) < 500
    assert caplog.text.count("cannot be read") == 1
    bench.publish("more")
    file.write_bytes(data)
    bench.wait(1)
    assert [*got, *consumer.bodies()] == [*(f"{number:0200}" for number in range(500)), "more"]


def test_a_slow_channel_does_not_fill_the_memory(tmp_path: Path) -> None:
    bench = on_disk(tmp_path, cache_bytes=200_000)
    bench.channel("slow")
    bench.channel()
    for number in range(2000):
        bench.publish(f"{number:0200}")
    consumer = bench.consume(ready=100)
    got = []
    while consumer.got:
        for message in consumer.take():
            got.append(int(message.body))
            bench.channel().finish(consumer, message.internal_id)
        bench.partition.tick()
        assert bench.partition.log.held <= 300_000
    assert got == list(range(2000))


def test_the_journal_of_the_delayed_queue_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.broker.engine.storage.delayed_queue._OVERGROWN", 5000)
    bench = on_disk(tmp_path)
    consumer = bench.consume()
    bench.publish(*(f"m{number}" for number in range(100)))
    journal = tmp_path / "orders" / "orders-0.delayed.jsonl"
    for counter in range(2, 102):
        bench.channel().requeue(consumer, counter, 1200)
        if counter > 4:
            bench.channel().cursor.delayed.remove(counter)
        bench.wait(1)
    assert journal.stat().st_size < 10_000
    again = on_disk(tmp_path)
    assert sorted(again.channel().cursor.delayed.messages) == [2, 3, 4]


def test_a_full_disk_has_room_again_when_messages_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskOptions(max_file_bytes=1000, retention_bytes=0)
    bench = on_disk(tmp_path, disk=disk, cache_bytes=20_000)
    consumer = bench.consume(ready=2500)
    for _ in range(100):
        bench.publish("x" * 100)
    files = list(tmp_path.rglob("*.dat"))
    bench.finish(consumer, range(90, 101))
    bench.wait(1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nsqext.broker.engine.storage.partition_store.write_atomically", refuse)
        bench.finish(consumer, range(2, 80))
        bench.wait(1)
        assert len(list(tmp_path.rglob("*.dat"))) < len(files)
        again = on_disk(tmp_path, disk=disk).consume(ready=2500)
        left = {message.internal_id for message in again.take()}
        assert left >= set(range(80, 90)) | {101}
        assert not left & set(range(90, 101))
    bench.wait(1)
    assert on_disk(tmp_path, disk=disk).channel().acked.count == 78


def test_a_topic_without_channels_is_bounded_on_disk(tmp_path: Path) -> None:
    disk = DiskOptions(max_file_bytes=10_000, retention_bytes=0)
    bench = on_disk(tmp_path, cache_bytes=100_000, disk=disk)
    for _ in range(2000):
        bench.publish("x" * 100)
        bench.partition.tick()
    assert len(list((tmp_path / "orders").glob("*.dat"))) < 12


def test_without_a_disk_a_full_memory_refuses() -> None:
    bench = Bench(memory_bound=100_000)
    consumer = bench.consume(ready=2500)
    with pytest.raises(Refusal, match="not consumed"):
        for _ in range(1000):
            bench.publish("x")
    bench.finish(consumer, range(2, bench.partition.log.end_count + 2))
    for _ in range(5000):
        bench.publish("x")
        bench.channel().finish(consumer, consumer.take()[-1].internal_id)
    assert bench.partition.log.held < 1_000_000


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_topic_can_be_removed(tmp_path: Path, is_missing: bool) -> None:
    bench = on_disk(tmp_path)
    bench.publish("m0")
    for kind in ("dat", "base.json") * is_missing:
        (tmp_path / f"orders/orders-0.diskqueue.000000.{kind}").unlink()
    bench.partition.close(destroy=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Refusal, match=r"^exiting$"):
        bench.publish("m1")


def test_stored_partitions_are_listed(tmp_path: Path) -> None:
    on_disk(tmp_path, extend=True).channel()
    on_disk(tmp_path, number=3, ordered=True)
    found = {(state.topic, state.partition, state.extend, state.ordered) for state in stored_partitions(tmp_path)}
    assert found == {("orders", 0, True, False), ("orders", 3, False, True)}


def test_a_damaged_state_of_a_partition_is_listed_from_its_copy(tmp_path: Path) -> None:
    partition = on_disk(tmp_path, extend=True)
    partition.channel()
    partition.partition.close()
    (path,) = tmp_path.glob("orders/*.channels.json")
    for damaged in (b"{", with_checksum(b'{"topic": "orders", "partition": -1}')):
        path.write_bytes(damaged)
        (state,) = stored_partitions(tmp_path)
        assert (state.extend, [channel.name for channel in state.channels]) == (True, ["ch"])


class SyncedFiles:
    """Records the size of a queue file at its last fsync."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[int, int] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._record)

    def _record(self, descriptor: int) -> None:
        self._fsync(descriptor)
        status = os.fstat(descriptor)
        self._sizes[status.st_ino] = status.st_size

    def unsynced(self, kind: str = "dat") -> list[int]:
        """Return the bytes of each queue file, oldest first, that were not synced; -1 for a file that never was."""
        files = [path.stat() for path in sorted(self._folder.rglob(f"*.diskqueue.*.{kind}"))]
        return [one.st_size - self._sizes[one.st_ino] if one.st_ino in self._sizes else -1 for one in files]


@pytest.mark.parametrize(
    ("fsync", "published", "ticked", "closed"),
    [
        ("never", [-1, -1, -1], [-1, -1, -1], [-1, -1, -1]),
        ("interval", [0, 0, -1], [0, 0, 0], [0, 0, 0]),
        ("always", [0, 0, 0], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_fsync(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fsync: str,
    published: list[int],
    ticked: list[int],
    closed: list[int],
) -> None:
    synced = SyncedFiles(monkeypatch, tmp_path)
    bench = on_disk(tmp_path, disk=DiskOptions(fsync=fsync, max_file_bytes=1))
    for number in range(3):
        bench.publish(f"m{number}")
    assert synced.unsynced() == published
    bench.wait(1)
    assert synced.unsynced() == ticked
    bench.publish("m3")
    bench.partition.close()
    assert synced.unsynced() == synced.unsynced("base.json") == [*closed, closed[-1]]
    monkeypatch.undo()
    assert on_disk(tmp_path).partition.log.end_count == 4
