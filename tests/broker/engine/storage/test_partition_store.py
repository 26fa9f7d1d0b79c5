"""The state of a partition on disk, beside its queue."""

from __future__ import annotations

import errno
import gc
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nsqext.broker.engine.storage.log import Log, Refusal
from nsqext.broker.engine.storage.partition_store import (
    ChannelState,
    NewMessage,
    PartitionStore,
    StoredPartition,
    as_entries,
    counter_of,
    stored_partitions,
)
from nsqext.broker.engine.storage.segments import DiskOptions
from nsqext.protocol.names import MAX_PARTITION
from nsqext.protocol.record import Record
from nsqext.protocol.server.command_parser import PublishItem
from tests.broker.engine.storage.test_log import gapped
from tests.support.engine_partition import Bench

if TYPE_CHECKING:
    from nsqext.broker.engine.storage.delayed_queue import Delayed

STATE, COPY, JOURNAL = "orders-0.channels.json", "orders-0.channels.json.copy", "orders-0.delayed.jsonl"


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def opened(path: Path) -> tuple[PartitionStore, StoredPartition | None, Log]:
    store = PartitionStore(path, "orders", 0, DiskOptions())
    state = store.load()
    return store, state, store.open_log(state, 1 << 20, 1 << 20)


def stored(path: Path, *delayed: int) -> Path:
    """Store three messages and two channels, one of which has delayed messages; return the folder."""
    bench = Bench(data_path=path)
    bench.channel("other")
    consumer = bench.consume(ready=5)
    bench.publish("m0", "m1", "m2")
    for number in delayed:
        bench.channel().requeue(consumer, number, 1200)
    bench.partition.close()
    return path / "orders"


def test_stored_messages_cost_the_garbage_collector_nothing() -> None:
    """A collection of millions of messages would stop all clients for a quarter of a second."""
    has_gc = 1 << 14  # Py_TPFLAGS_HAVE_GC
    message = NewMessage(b"a")
    (entry,) = as_entries([message], Log(), (0, 2, 7), False)
    for one in (entry, entry.record, message, PublishItem(b"a")):
        assert not gc.is_tracked(one)
        assert not type(one).__flags__ & has_gc, "nor a header of 16 bytes"


@pytest.mark.parametrize("extend", [False, True])
def test_messages_are_numbered_from_the_end_of_the_queue(extend: bool) -> None:
    log = Log(None, 1000, 20)
    header = NewMessage(b"m1", 9, b"{}", 4)
    first, second = as_entries([NewMessage(b"m0"), header], log, (5, 1022, 7), extend)
    assert first.record == Record(7, (5 << 50) + 1022, 0, b"m0", 0, b"", 0, extend)
    kept = (4, b"{}") if extend else (0, b"")
    assert second.record == Record(8, (5 << 50) + 1023, 9, b"m1", *kept, 0, extend)
    size = 32 + extend
    assert [(one.offset, one.size, one.count) for one in (first, second)] == [
        (1000, size, 21),
        (1000 + size, size + 4 * extend, 22),
    ]
    assert [counter_of(one) for one in (first, second)] == [1022, 1023]
    assert (log.end_offset, log.end_count) == (1000, 20)


@pytest.mark.parametrize("name", [STATE, COPY])
@pytest.mark.parametrize("damage", [None, b"{"])
def test_one_of_two_files_is_lost(
    tmp_path: Path, name: str, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(tmp_path) / name
    path.unlink()
    if damage:
        path.write_bytes(damage)
    store, state, log = opened(tmp_path)
    kept = f"{name}.damaged" if damage else name
    assert state is not None
    assert [channel.name for channel in state.channels] == ["other", "ch"]
    assert (store.store.recovery.damaged_files, store.dirty, log.end_count) == ([kept], True, 3)
    assert "channels are read from its copy" in caplog.text
    assert not path.exists()
    assert (path.parent / kept).exists() == bool(damage)
    store.save(state)
    assert (path.exists(), store.dirty) == (True, False)
    store.close()
    store, _, _ = opened(tmp_path)
    assert (store.store.recovery.is_damaged, store.dirty) == (False, False)
    store.close()


def test_two_lost_files_are_reported_if_there_are_messages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, state, log = opened(tmp_path)
    assert (state, log.end_count, store.store.recovery.is_damaged, caplog.text) == (None, 0, False, "")
    store.close()
    folder = stored(tmp_path)
    for name in (STATE, COPY):
        (folder / name).unlink()
    store, state, log = opened(tmp_path)
    assert (state, log.end_count, store.store.recovery.damaged_files) == (None, 3, [STATE, COPY])
    assert "the channels of 3 messages are unknown" in caplog.text
    store.close()


def test_positions_of_channels_are_numbered_again(caplog: pytest.LogCaptureFixture) -> None:
    log = gapped()
    before, behind = log.find_count(5), log.find_count(9)
    log.trim(log.find_count(2))
    channels = [ChannelState("a", 0, 0), ChannelState("b", before - 1, 9), ChannelState("c", log.end_offset, 99)]
    channels[1].intervals = [(behind - 30, behind, 77), (log.end_offset - 1, log.end_offset, 78)]
    StoredPartition("orders", 0, channels=channels).renumber(log)
    assert [(channel.offset, channel.count) for channel in channels] == [
        (log.start_offset, 2),
        (before, 7),
        (log.end_offset, 14),
    ]
    assert channels[1].intervals == [(behind - 30, behind, 10), (log.end_offset - 1, log.end_offset, 14)]
    assert f"{log.start_offset} bytes of unfinished messages are lost" in caplog.text
    assert "channel b" not in caplog.text


@pytest.mark.parametrize(("torn", "left"), [(b"", 0), (b"{torn", 5)])
def test_a_torn_line_of_the_journal_is_no_damage(tmp_path: Path, torn: bytes, left: int) -> None:
    folder = stored(tmp_path, 2, 3)
    with (folder / JOURNAL).open("ab") as journal:
        journal.write(torn)
    recovery = Bench(data_path=tmp_path).partition.recovery
    assert recovery is not None
    assert (recovery.torn_file, recovery.torn_bytes, recovery.is_damaged) == (JOURNAL if torn else "", left, False)


def test_the_torn_file_of_messages_is_named_first(tmp_path: Path) -> None:
    folder = stored(tmp_path, 2)
    for name, torn in ((JOURNAL, b"{torn"), ("orders-0.diskqueue.000000.dat", b"xyz")):
        with (folder / name).open("ab") as file:
            file.write(torn)
    recovery = Bench(data_path=tmp_path).partition.recovery
    assert recovery is not None
    assert (recovery.torn_file, recovery.torn_bytes) == ("orders-0.diskqueue.000000.dat", 3)


@pytest.mark.parametrize(("delayed", "lost"), [((), []), ((2, 3), [JOURNAL])])
def test_a_missing_journal_is_a_loss_if_it_had_messages(
    tmp_path: Path, delayed: tuple[int, ...], lost: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (stored(tmp_path, *delayed) / JOURNAL).unlink(missing_ok=True)
    recovery = Bench(data_path=tmp_path).partition.recovery
    assert recovery is not None
    assert (recovery.damaged_files, recovery.lost_messages) == (lost, len(delayed))
    assert ("by channel: {'ch': 2}" in caplog.text) == bool(lost)


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    journal = stored(tmp_path, 2, 3) / JOURNAL
    journal.write_bytes(b"x" + journal.read_bytes())
    recovery = Bench(data_path=tmp_path).partition.recovery
    assert recovery is not None
    assert recovery.damaged_files == [f"{JOURNAL}.damaged"]
    again = Bench(data_path=tmp_path).partition.recovery
    assert again is not None
    assert not again.is_damaged


def test_a_journal_that_cannot_be_compacted_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = stored(tmp_path, 2) / JOURNAL
    data = journal.read_bytes()
    store, state, _ = opened(tmp_path)
    assert state is not None
    store.load_delayed(state)
    asked: list[str] = []

    def held() -> list[tuple[str, list[Delayed]]]:
        asked.append("ch")
        return []

    with monkeypatch.context() as patch:
        patch.setattr("nsqext.broker.engine.storage.delayed_queue.write_atomically", refuse)
        store.compact(held)
        assert asked == []
        patch.setattr("nsqext.broker.engine.storage.delayed_queue._OVERGROWN", 0)
        for _ in range(5):
            store.journal.put("ch", store.journal.load()["ch"][2])
        store.compact(held)
    assert (asked, "the journal cannot be compacted" in caplog.text) == (["ch"], True)
    assert journal.read_bytes().startswith(data)
    store.close()


def test_the_state_is_written_with_each_interval_if_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path)
    store, state, _ = opened(tmp_path)
    assert state is not None
    assert (store.begin_interval(100.0), store.next_deadline) == (False, inf)
    store.dirty = True
    assert (store.begin_interval(100.4), store.next_deadline) == (False, 100.5)
    assert (store.begin_interval(100.5), store.next_deadline) == (True, 101.0)
    with monkeypatch.context() as patch:
        patch.setattr("nsqext.broker.engine.storage.partition_store.write_atomically", refuse)
        store.save(state)
    assert (store.dirty, "No space left" in caplog.text) == (True, True)
    store.save(state)
    assert (store.dirty, store.next_deadline) == (False, inf)
    monkeypatch.setattr(type(store.store), "is_dirty", True)
    assert store.next_deadline == 101.0, "the queue has to be synced"
    store.close()


def test_only_the_files_of_a_partition_are_removed(tmp_path: Path) -> None:
    folder = stored(tmp_path, 2)
    other = Bench(data_path=tmp_path, number=1).partition
    store, _, _ = opened(tmp_path)
    store.destroy()
    assert {path.name.split(".")[0] for path in folder.iterdir()} == {"orders-1"}
    other.close(destroy=True)
    assert not folder.exists()
    store.destroy()


@pytest.mark.parametrize("fsync", ["never", "interval", "always"])
def test_the_state_is_synced_if_messages_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: str) -> None:
    store = PartitionStore(tmp_path, "orders", 0, DiskOptions(fsync=fsync))
    store.open_log(None, 1 << 20, 1 << 20)
    synced: list[int] = []
    monkeypatch.setattr("nsqext.broker.engine.storage.files.os.fsync", synced.append)
    store.save(StoredPartition("orders", 0))
    assert bool(synced) == (fsync != "never")
    store.close()


@pytest.mark.parametrize("fsync", ["never", "interval", "always"])
def test_delayed_messages_are_synced_before_the_state_that_counts_them_as_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: str
) -> None:
    """A loss of power in between lost them."""
    stored(tmp_path, 2)
    store = PartitionStore(tmp_path, "orders", 0, DiskOptions(fsync=fsync))
    state = store.load()
    assert state is not None
    store.open_log(state, 1 << 20, 1 << 20)
    synced: list[str] = []
    fails = False

    def sync(descriptor: int) -> None:
        if fails:
            refuse()
        name = Path(f"/dev/fd/{descriptor}").resolve().name
        synced.append(name.removesuffix(".new").removesuffix(".copy"))

    monkeypatch.setattr("nsqext.broker.engine.storage.files.os.fsync", sync)
    delayed = store.load_delayed(state)["ch"][2]
    assert synced == ([] if fsync == "never" else [JOURNAL, "orders"])
    store.journal.put("ch", delayed)
    fails = True
    store.save(state)
    assert store.dirty == (fsync != "never"), "the state waits for the journal"
    fails = False
    for _ in range(2):
        synced.clear()
        store.save(state)
        assert synced == ([] if fsync == "never" else [JOURNAL, *[STATE, "orders"] * 2])
        store.journal.put("ch", delayed)
    store.save(state)
    synced.clear()
    store.save(state)
    assert JOURNAL not in synced, "nothing was written"
    store.close()


def test_a_closed_partition_takes_no_delayed_messages(tmp_path: Path) -> None:
    before = len([*Path("/dev/fd").iterdir()])
    stored(tmp_path, 2)
    store, state, _ = opened(tmp_path)
    assert state is not None
    delayed = store.load_delayed(state)["ch"][2]
    store.journal.put("ch", delayed)
    store.close()
    assert len([*Path("/dev/fd").iterdir()]) == before
    with pytest.raises(Refusal, match="exiting"):
        store.journal.put("ch", delayed)


def test_a_stored_partition_has_a_valid_number_and_valid_names() -> None:
    highest = StoredPartition("orders", MAX_PARTITION, channels=[ChannelState("ch", 0, 0)])
    assert StoredPartition.decode(highest.encode()) == highest
    for topic, number, channel in (("orders", MAX_PARTITION + 1, "ch"), ("a b", 0, "ch"), ("orders", 0, "a b")):
        wrong = StoredPartition(topic, number, channels=[ChannelState(channel, 0, 0)])
        with pytest.raises(ValueError, match=r"there is no partition|not valid"):
            StoredPartition.decode(wrong.encode())


@pytest.mark.parametrize("name", ["diskqueue.000012.dat", "channels.json", "channels.json.copy"])
def test_a_partition_is_known_from_any_of_its_files(tmp_path: Path, name: str) -> None:
    for path in ("a-1/a-1-23", "other/other-0"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / f"{path}.{name}").write_bytes(b"{")
    (tmp_path / "other" / f"other-1.{name}.damaged").write_bytes(b"{")
    assert list(stored_partitions(tmp_path)) == [StoredPartition("a-1", 23), StoredPartition("other", 0)]
