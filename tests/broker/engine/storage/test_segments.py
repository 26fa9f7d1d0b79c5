"""The files of a queue, and failing disks."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from nsqext.broker.engine.storage.log import Log, Refusal
from nsqext.broker.engine.storage.segments import DiskOptions, SegmentStore
from nsqext.errors import InvalidSetting
from nsqext.protocol.record import decode_record
from tests.support.engine_partition import Bench

if TYPE_CHECKING:
    from nsqext.broker.engine.storage.recovery import Recovery

SMALL = DiskOptions(max_file_bytes=60)


class BrokenDisk:
    """A disk that is full, or has room for a few bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: int = 0) -> None:
        self.takes = takes
        self.write = os.write
        self.monkeypatch = monkeypatch
        monkeypatch.setattr("nsqext.broker.engine.storage.segments.os.write", self.fail)

    def fail(self, out: int, data: bytes) -> int:
        """Write a few bytes, or fail."""
        if not self.takes:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken, self.takes = self.takes, 0
        return self.write(out, data[:taken])

    def repair(self) -> None:
        """End the fault."""
        self.monkeypatch.setattr("nsqext.broker.engine.storage.segments.os.write", self.write)


def _stored(folder: Path, count: int) -> SegmentStore:
    """Return the files of a queue with some messages, which nothing else has open."""
    bench = Bench(data_path=folder, disk=SMALL)
    for number in range(count):
        bench.publish(f"m{number}")
    bench.partition.close()
    return SegmentStore(folder / "orders", "orders", 0, SMALL)


def test_the_format_is_the_real_servers(tmp_path: Path) -> None:
    Bench(data_path=tmp_path, extend=True).publish("body")
    data = (tmp_path / "orders/orders-0.diskqueue.000000.dat").read_bytes()
    assert data[:4] == (len(data) - 4).to_bytes(4, "big")
    assert data[12:14] == b"\xa0\x00"
    record, stop = decode_record(data)
    assert (record.internal_id, record.body, stop) == (2, b"body", 35)


def test_files_contain_their_begin(tmp_path: Path) -> None:
    bench = Bench(data_path=tmp_path, disk=SMALL)
    for number in range(5):
        bench.publish(f"m{number}")
    bases = sorted((tmp_path / "orders").glob("*.base.json"))
    assert [orjson.loads(base.read_bytes())["content"] for base in bases] == [
        {"offset": 0, "count": 0},
        {"offset": 64, "count": 2},
        {"offset": 128, "count": 4},
    ]


def test_a_file_that_ends_too_early_loses_only_its_last_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(data_path=tmp_path, disk=SMALL)
    for number in range(6):
        bench.publish(f"m{number}")
    bench.partition.close()
    middle = tmp_path / "orders/orders-0.diskqueue.000001.dat"
    middle.write_bytes(middle.read_bytes()[:-1])
    again = Bench(data_path=tmp_path, disk=SMALL)
    recovery = again.partition.recovery
    assert recovery is not None
    assert (recovery.messages, recovery.lost_messages) == (5, 1)
    assert recovery.damaged_files == ["orders-0.diskqueue.000001.dat.damaged"]
    assert "1 messages" in caplog.text
    log = again.partition.log
    bodies = [entry and entry.record.body for entry in map(log.at, range(1, 7))]
    assert bodies == [b"m0", b"m1", b"m2", None, b"m4", b"m5"]
    assert again.publish("next").message_id == 8
    assert Bench(data_path=tmp_path).partition.log.end_count == 7


@pytest.mark.parametrize("damage", [b"{", b"{}", b"[]"])
def test_a_damaged_begin_is_derived_from_the_file_before(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(data_path=tmp_path, disk=SMALL)
    for number in range(6):
        bench.publish(f"m{number}")
    for number in (0, 1):
        (tmp_path / f"orders/orders-0.diskqueue.{number:06d}.base.json").write_bytes(damage)
    again = Bench(data_path=tmp_path, disk=SMALL).partition
    log, recovery = again.log, again.recovery
    assert recovery is not None
    assert (recovery.is_damaged, recovery.lost_messages) == (True, 0)
    assert caplog.text.count("base.json cannot be read") == 2
    assert (log.start_offset, log.end_offset, log.end_count) == (0, 192, 6)
    assert Bench(data_path=tmp_path, disk=SMALL).partition.log.end_count == 6


STATES = ("channels.json", "channels.json.copy")


def _recovered(folder: Path) -> tuple[Log, Recovery]:
    """Open the queue; return it and what was found, and close it."""
    opened = Bench(data_path=folder, disk=SMALL).partition
    log, recovery = opened.log, opened.recovery
    assert recovery is not None
    opened.close()
    return log, recovery


def _reopened(folder: Path, *, remove: Sequence[str] = (), damage: Sequence[str] = ()) -> tuple[Log, Recovery]:
    """Store six messages in three files, remove and damage files, open the queue; nothing is reported twice."""
    _stored(folder, 6)
    for name in remove:
        (folder / f"orders/orders-0.{name}").unlink()
    for name in damage:
        (folder / f"orders/orders-0.{name}").write_bytes(b"{")
    found = _recovered(folder)
    assert not _recovered(folder)[1].is_damaged
    return found


def test_a_begin_is_known_from_the_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, recovery = _reopened(tmp_path, remove=["diskqueue.000000.dat", "diskqueue.000001.base.json"])
    assert (log.start_offset, log.end_offset, log.end_count) == (64, 192, 6)
    assert (recovery.lost_bytes, recovery.lost_messages) == (64, 2)
    assert "the records begin at offset 64" in caplog.text


@pytest.mark.parametrize("damaged", [["000000"], ["000001"], ["000000", "000001"], ["000002"]])
def test_a_begin_is_known_from_the_file_before_if_the_state_is_lost(tmp_path: Path, damaged: list[str]) -> None:
    log, recovery = _reopened(tmp_path, remove=STATES, damage=[f"diskqueue.{number}.base.json" for number in damaged])
    assert (log.start_offset, log.start_count, log.end_offset, log.end_count) == (0, 0, 192, 6)
    assert (recovery.messages, recovery.lost_messages) == (6, 0)


@pytest.mark.parametrize("damage", [True, False])
def test_a_file_with_an_unknown_begin_is_kept_aside(
    tmp_path: Path, damage: bool, caplog: pytest.LogCaptureFixture
) -> None:
    base = "diskqueue.000001.base.json"
    log, recovery = _reopened(
        tmp_path, remove=["diskqueue.000000.dat", *STATES, *[base] * (not damage)], damage=[base] * damage
    )
    assert (log.start_offset, log.end_offset, log.end_count) == (128, 192, 6)
    assert "orders-0.diskqueue.000001.dat.lost" in recovery.damaged_files
    assert "000001.dat begins at an unknown offset; renamed to orders-0.diskqueue.000001.dat.lost" in caplog.text


def test_messages_before_the_first_known_begin_are_counted_as_lost(tmp_path: Path) -> None:
    log, recovery = _reopened(tmp_path, remove=["diskqueue.000000.dat", *STATES], damage=["diskqueue.000000.base.json"])
    assert (log.start_offset, log.start_count, log.end_offset) == (64, 2, 192)
    assert (recovery.lost_bytes, recovery.lost_messages) == (64, 2)


def test_an_empty_first_file_is_reported_once(tmp_path: Path) -> None:
    _stored(tmp_path, 6)
    for name in ("diskqueue.000000.dat", *STATES):
        (tmp_path / f"orders/orders-0.{name}").write_bytes(b"")
    assert [_recovered(tmp_path)[1].lost_messages for _ in range(2)] == [2, 0]


def test_everything_is_lost_without_files(tmp_path: Path) -> None:
    names = [f"diskqueue.{number:06d}.{kind}" for number in range(3) for kind in ("dat", "base.json")]
    log, recovery = _reopened(tmp_path, remove=names)
    assert (log.start_offset, log.end_count) == (192, 6)
    assert recovery.lost_bytes == 192


def test_a_file_that_was_begun_and_not_written_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _stored(tmp_path, 6)
    list(store.recover())

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, pytest.raises(Refusal, match="Too many"):
        patch.setattr("nsqext.broker.engine.storage.segments.os.open", refuse)
        store.restart(192, 6)
    log, recovery = _recovered(tmp_path)
    assert (log.start_offset, log.end_count, recovery.is_damaged) == (0, 6, False)


def test_bytes_behind_the_stored_end_are_torn(tmp_path: Path) -> None:
    _stored(tmp_path, 6)
    with (tmp_path / "orders/orders-0.diskqueue.000002.dat").open("ab") as file:
        file.write(bytes(7))
    log, recovery = _recovered(tmp_path)
    assert (recovery.torn_bytes, recovery.is_damaged, log.end_count) == (7, False, 6)


@pytest.mark.parametrize("left", [1, 31])
def test_a_record_of_which_only_a_part_is_left_is_damage(tmp_path: Path, left: int) -> None:
    _stored(tmp_path, 6)
    file = tmp_path / "orders/orders-0.diskqueue.000002.dat"
    file.write_bytes(file.read_bytes()[: 32 + left])
    log, recovery = _recovered(tmp_path)
    assert (recovery.torn_bytes, recovery.is_damaged, recovery.lost_messages, log.end_count) == (0, True, 1, 5)


def test_a_kill_while_a_damaged_file_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stored(tmp_path, 6)
    file = tmp_path / "orders/orders-0.diskqueue.000001.dat"
    file.write_bytes(bytes(4) + file.read_bytes()[4:])

    class Killed(BaseException):
        """Stands for the death of the process."""

    def write(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("nsqext.broker.engine.storage.files.write_atomically", write)
        Bench(data_path=tmp_path, disk=SMALL)
    log, recovery = _recovered(tmp_path)
    assert (recovery.messages, recovery.lost_messages, log.end_offset) == (5, 1, 192)


@pytest.mark.parametrize(("count", "number"), [(6, 1), (1, 0)])
def test_a_file_that_overlaps_with_another_one_is_kept_aside(tmp_path: Path, count: int, number: int) -> None:
    _stored(tmp_path, count)
    for kind in ("dat", "base.json"):
        file = tmp_path / f"orders/orders-0.diskqueue.{number:06d}.{kind}"
        file.with_name(f"orders-0.diskqueue.000007.{kind}").write_bytes(file.read_bytes())
    log, recovery = _recovered(tmp_path)
    assert recovery.damaged_files == ["orders-0.diskqueue.000007.dat.lost"]
    assert (recovery.messages, log.end_count) == (count, count)
    assert not (tmp_path / "orders/orders-0.diskqueue.000007.dat").exists()


@pytest.mark.parametrize("takes", [0, 7])
def test_a_full_disk_refuses_until_it_has_room(tmp_path: Path, takes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(data_path=tmp_path)
    consumer = bench.consume(ready=10)
    bench.publish("m0")
    disk = BrokenDisk(monkeypatch, takes)
    with pytest.raises(Refusal, match="No space left"):
        bench.publish("lost", "lost too")
    disk.repair()
    assert bench.publish("m1").message_id == 3
    assert consumer.bodies() == ["m0", "m1"]
    assert Bench(data_path=tmp_path).partition.log.end_count == 2


def test_no_record_follows_a_tail_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(data_path=tmp_path)
    bench.publish("m0")
    disk = BrokenDisk(monkeypatch, 7)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("nsqext.broker.engine.storage.segments.os.ftruncate", refuse)
        with pytest.raises(Refusal, match="No space left"):
            bench.publish("lost")
    disk.repair()
    with pytest.raises(Refusal, match="closed after an error"):
        bench.publish("lost")
    assert Bench(data_path=tmp_path).partition.log.end_count == 1


@pytest.mark.parametrize("where", ["ftruncate", "open"])
def test_no_record_follows_a_queue_that_cannot_be_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    bench = Bench(data_path=tmp_path)
    bench.publish("m0")
    bench.publish("m1")

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(f"nsqext.broker.engine.storage.segments.os.{where}", refuse)
        with pytest.raises(Refusal, match="cannot be cut off"):
            bench.partition.truncate(32)
    with pytest.raises(Refusal, match="closed after an error"):
        bench.publish("lost")
    assert Bench(data_path=tmp_path).partition.log.end_count in (1, 2)


def test_a_failed_restart_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(data_path=tmp_path)
    bench.publish("m0")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nsqext.broker.engine.storage.files.write_atomically", refuse)
        with pytest.raises(Refusal, match="No space left"):
            bench.partition.log.restart(3200, 100)
    bench.publish("m1")
    assert Bench(data_path=tmp_path).partition.log.end_count == 2


def test_a_queue_that_is_restarted_begins_at_the_new_position(tmp_path: Path) -> None:
    store = _stored(tmp_path, 4)
    list(store.recover())
    store.restart(3200, 100)
    assert (store.beginning, len(store.begins)) == ((3200, 100), 1)
    store.close()
    assert [path.name for path in (tmp_path / "orders").glob("*.dat")] == ["orders-0.diskqueue.000002.dat"]


def test_no_record_is_written_to_a_queue_of_which_old_files_could_not_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(data_path=tmp_path)
    bench.publish("m0")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(Refusal, match="Operation not permitted"):
            bench.partition.log.restart(3200, 100)
    with pytest.raises(Refusal, match="closed after an error"):
        bench.publish("m1")


@pytest.mark.parametrize("removed", [0, 1])
def test_a_kill_during_a_restart_of_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int) -> None:
    bench = Bench(data_path=tmp_path, disk=SMALL)
    for number in range(4):
        bench.publish(f"m{number}")
    remove, left = Path.unlink, [None] * removed * 2

    class Killed(BaseException):
        """Stands for the death of the process."""

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if not left:
            raise Killed
        left.pop()
        remove(path, missing_ok)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "unlink", unlink)
        bench.partition.log.restart(3200, 100)
    log = Bench(data_path=tmp_path, disk=SMALL).partition.log
    assert (log.start_count, log.end_count) == (2 * removed, 4)


def test_files_that_cannot_be_removed_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(data_path=tmp_path, disk=DiskOptions(max_file_bytes=60, retention_bytes=0), memory_bound=1)
    consumer = bench.consume(ready=100)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    for number in range(30):
        bench.publish(f"m{number}")
        bench.finish(consumer, [number + 2])
        bench.wait(1)
    assert "cannot be removed: Operation not permitted" in caplog.text


def test_a_failed_fsync_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(data_path=tmp_path, disk=DiskOptions(fsync="interval"))
    bench.publish("m0")
    asked: list[int] = []

    def refuse(out: int) -> None:
        asked.append(out)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("nsqext.broker.engine.storage.segments.os.fsync", refuse)
        bench.wait(1)
        bench.wait(1)
    assert len(asked) == 2
    assert "Input/output error" in caplog.text
    monkeypatch.setattr("nsqext.broker.engine.storage.segments.os.fsync", asked.append)
    bench.wait(1)
    bench.wait(1)
    assert len(asked) == 3


def test_an_error_names_an_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "orders").write_text("no folder")
    with pytest.raises(InvalidSetting, match="orders cannot be used"):
        Bench(data_path=tmp_path)


def test_a_failed_write_of_the_state_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(data_path=tmp_path)
    with monkeypatch.context() as patch:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr("nsqext.broker.engine.storage.partition_store.write_atomically", refuse)
        bench.channel()
    assert "No space left" in caplog.text
    assert Bench(data_path=tmp_path).partition.channels == {}
    bench.wait(1)
    assert list(Bench(data_path=tmp_path).partition.channels) == ["ch"]


def test_records_are_loaded_across_files(tmp_path: Path) -> None:
    store = _stored(tmp_path, 7)
    assert sum(len(run) for run in store.recover()) == 7
    loaded = store.load((32, 1), 192)
    assert [(entry.count, entry.offset, entry.size, entry.record.body) for entry in loaded] == [
        (number + 1, 32 * number, 32, b"m%d" % number) for number in range(1, 6)
    ]
    store.close()


@pytest.mark.parametrize(("offset", "left"), [(0, 3), (63, 3), (64, 2), (128, 1), (192, 1)])
def test_files_before_an_offset_are_removed(tmp_path: Path, offset: int, left: int) -> None:
    store = _stored(tmp_path, 6)
    list(store.recover())
    store.trim(offset)
    assert store.begins == [(number, 64 * number, 2 * number) for number in range(3 - left, 3)]
    store.close()


@pytest.mark.parametrize(("offset", "sizes"), [(0, [0]), (32, [32]), (64, [64, 0]), (96, [64, 32]), (192, [64] * 3)])
def test_everything_behind_an_offset_is_removed(tmp_path: Path, offset: int, sizes: list[int]) -> None:
    store = _stored(tmp_path, 6)
    list(store.recover())
    store.truncate(offset)
    store.close()
    assert sum(path.stat().st_size for path in (tmp_path / "orders").glob("*.dat")) == sum(sizes)
    log, _ = _recovered(tmp_path)
    assert (log.end_offset, log.end_count) == (offset, offset // 32)


def test_a_queue_that_is_cut_off_before_its_begin_is_empty(tmp_path: Path) -> None:
    store = _stored(tmp_path, 6)
    list(store.recover())
    store.trim(128)
    store.truncate(64)
    store.close()
    assert [path.stat().st_size for path in (tmp_path / "orders").glob("*.dat")] == [0]


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = len([*Path("/dev/fd").iterdir()])
    for end in (SegmentStore.close, SegmentStore._release, SegmentStore.destroy):
        store = _stored(tmp_path, 3)
        list(store.recover())
        end(store)
        assert len([*Path("/dev/fd").iterdir()]) == before
