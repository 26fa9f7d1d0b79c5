"""The files of a queue when it is opened: what is read of them, what is reported, what is left on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from nsqext.broker.engine.storage.files import SegmentFolder
from nsqext.broker.engine.storage.log import LogEntry
from nsqext.broker.engine.storage.recovery import Recovery
from nsqext.broker.engine.storage.segments import DiskOptions, SegmentStore
from nsqext.protocol.record import Record, encode_record

SIZE = 50
JUNK = b"\xff" * SIZE


def record(counter: int) -> Record:
    return Record(counter, counter, 0, b"x" * (SIZE - 30))


class Files:
    """The folder of a queue, whose messages have 50 bytes each and the ids 2, 3 and so on."""

    def __init__(self, path: Path) -> None:
        self.folder = SegmentFolder(path, "orders", 0, sync=False)
        self.end = 0  # messages that `store` found, and those before them

    def write(self, number: int, parts: Sequence[int | bytes], *, before: int | None = None, follows: int = -1) -> None:
        """Write a file of records and other bytes, with a number of messages before it."""
        count = int(parts[0]) - 2 if before is None else before
        file = self.folder.file(number, SIZE * count, count)
        file.follows = follows
        data = b"".join(part if isinstance(part, bytes) else encode_record(record(part)) for part in parts)
        self.folder.write(file, data)

    def store(
        self, known: int = 0, begins: Mapping[int, tuple[int, int]] | None = None
    ) -> tuple[list[int], SegmentStore]:
        """Return the ids that are found, and the opened queue, which had at least a number of messages."""
        store = SegmentStore(self.folder.path, "orders", 0, DiskOptions())
        entries = [entry for run in store.recover((SIZE * known, known), begins) for entry in run]
        assert [(entry.offset, entry.count) for entry in entries] == [
            (SIZE * (entry.count - 1), entry.count) for entry in entries
        ]
        assert store.recovery.messages == len(entries)
        self.end = entries[-1].count if entries else 0
        return [entry.record.internal_id for entry in entries], store

    def found(self, known: int = 0, begins: Mapping[int, tuple[int, int]] | None = None) -> tuple[list[int], Recovery]:
        """Return the ids that are found, and what is reported; nothing is reported twice, once the end is stored."""
        ids, store = self.store(known, begins)
        store.close()
        again, repaired = self.store(min(known, self.end))
        repaired.close()
        assert (again, repaired.recovery.is_damaged, repaired.recovery.torn_bytes) == (ids, False, 0)
        return ids, store.recovery

    def names(self) -> list[str]:
        """Return the numbers and kinds of the files."""
        return sorted(path.name.removeprefix("orders-0.diskqueue.") for path in self.folder.path.iterdir())


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def lost(messages: int, *names: str, size: int | None = None) -> Recovery:
    """Return a report of lost messages and of the files that had them."""
    files = [f"orders-0.diskqueue.{name}" for name in names]
    return Recovery(0, "", 0, files, SIZE * messages if size is None else size, messages)


def report(recovery: Recovery) -> Recovery:
    recovery.messages = 0
    return recovery


@pytest.mark.parametrize(
    ("first", "kept"),
    [
        ([2, 3], 2),
        ([2, 4], 1),
        ([2, 5], 1),
        ([2, 6], 1),
        ([2, 1 << 40], 1),
        ([2, 3, 5], 2),
        ([2, 3, 4, 6], 3),
        ([1 << 40], 0),
        ([3], 0),
        ([2, 8, 9], 3),
    ],
)
def test_the_last_id_of_a_file_is_not_larger_than_the_first_of_the_next_one(
    files: Files, first: list[int], kept: int
) -> None:
    count = len(first)
    files.write(0, first, before=0)
    files.write(1, [count + 2, count + 3])
    files.write(2, [count + 4, count + 5])
    ids, recovery = files.found(count + 4)
    assert ids == [*first[:kept], *range(count + 2, count + 6)]
    assert (recovery.lost_messages, recovery.lost_bytes) == (count - kept, SIZE * (count - kept))


def test_the_last_id_of_a_file_that_begins_late_is_compared_with_the_expected_one(files: Files) -> None:
    files.write(3, [90], before=10)
    files.write(4, [13, 14])
    ids, recovery = files.found(13)
    assert (ids, recovery.lost_messages) == ([13, 14], 1)


def test_messages_between_files_are_reported_once(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files.write(0, [2, 3])
    files.write(1, [8, 9])
    files.write(2, [10, 11])
    files.write(3, [13])
    ids, recovery = files.found(12)
    assert ids == [2, 3, 8, 9, 10, 11, 13]
    assert report(recovery) == lost(5, "000000.dat", "000002.dat")
    assert "200 bytes with 4 messages before offset 300 are missing" in caplog.text
    assert files.folder.read_begin(1).follows == 100
    assert [files.folder.read_begin(number).follows for number in (0, 2, 3)] == [-1, -1, 500]


@pytest.mark.parametrize(("follows", "messages"), [(100, 0), (99, 4), (0, 4), (-1, 4)])
def test_messages_before_a_file_that_says_where_the_queue_ended_were_reported(
    files: Files, follows: int, messages: int
) -> None:
    files.write(0, [2, 3])
    files.write(1, [8, 9], follows=follows)
    assert files.found(8)[1].lost_messages == messages


@pytest.mark.parametrize("known", [0, 2, 4])
def test_a_file_of_which_only_the_begin_is_left(files: Files, known: int, caplog: pytest.LogCaptureFixture) -> None:
    files.write(0, [2, 3])
    files.write(1, [4, 5])
    files.folder.data_path(1).unlink()
    ids, recovery = files.found(known)
    assert ids == [2, 3]
    assert report(recovery) == (lost(2, "000001.dat") if known > 2 else Recovery())
    assert ("nothing is known of its messages" in caplog.text) == (known <= 2)
    assert files.names() == ["000000.base.json", "000000.dat", "000001.base.json.lost"]


def test_a_missing_file_in_the_middle_is_named(files: Files) -> None:
    for number in range(4):
        files.write(number, [2 + 2 * number, 3 + 2 * number])
    files.folder.data_path(1).unlink()
    files.folder.data_path(2).unlink()
    files.folder.base_path(2).write_bytes(b"{")
    ids, recovery = files.found(8)
    assert (ids, report(recovery)) == ([2, 3, 8, 9], lost(4, "000002.dat", "000001.dat"))


def test_a_file_whose_begin_is_lost_too_is_named_when_the_queue_had_more(files: Files) -> None:
    files.write(0, [2, 3])
    files.folder.base_path(1).write_bytes(b"{")
    assert files.found(2)[1].damaged_files == ["orders-0.diskqueue.000001.dat"]


def test_missing_files_at_the_begin_are_lost_messages(files: Files) -> None:
    for number in range(3):
        files.write(number, [2 + 2 * number, 3 + 2 * number])
    for number in (0, 1):
        files.folder.data_path(number).unlink()
    ids, recovery = files.found(6)
    assert (ids, report(recovery)) == ([6, 7], lost(4, "000000.dat", "000001.dat"))


@pytest.mark.parametrize("bases", [True, False])
def test_a_queue_without_files_continues_at_its_end(files: Files, bases: bool) -> None:
    for number in (2, 3):
        files.write(number, [8 + 2 * number, 9 + 2 * number])
        files.folder.data_path(number).unlink()
        if not bases:
            files.folder.base_path(number).unlink()
    ids, store = files.store(14)
    assert (ids, store.beginning) == ([], (700, 14))
    assert store.begins == [(4 if bases else 0, 700, 14)]
    assert report(store.recovery) == (lost(4, "000002.dat", "000003.dat") if bases else lost(0, size=700))
    store.close()


def test_damaged_bytes_split_a_file(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files.write(0, [2, JUNK, 4])
    files.write(1, [JUNK, 6, 7, JUNK], before=3)
    files.write(2, [9, 10])
    ids, store = files.store(9)
    assert ids == [2, 4, 6, 7, 9, 10]
    names = ["000000.dat.damaged", "000001.dat.damaged"]
    assert report(store.recovery) == lost(3, *names)
    assert store.begins == [(3, 0, 0), (4, 100, 2), (5, 200, 4), (2, 350, 7)]
    store.append([LogEntry(record(11), 450, SIZE, 10)])
    assert len(store.begins) == 4, "the last file continues"
    store.close()
    assert [files.folder.read_begin(number).follows for number in (3, 4, 5, 2)] == [-1, 50, 150, 300]
    kinds = [f"{number:06}.{kind}" for number in (2, 3, 4, 5) for kind in ("base.json", "dat")]
    assert files.names() == sorted([*names, *kinds])
    assert "50 bytes with about 1 messages are lost, 2 messages are readable" in caplog.text
    assert files.found(10) == ([*ids, 11], Recovery(7))


@pytest.mark.parametrize(("left", "known", "torn"), [(20, 1, 20), (20, 2, 0), (0, 2, 0), (49, 3, 0)])
def test_an_end_that_was_known_is_not_torn(files: Files, left: int, known: int, torn: int) -> None:
    files.write(0, [2, encode_record(record(3))[:left]])
    ids, recovery = files.found(known)
    assert (ids, recovery.torn_bytes) == ([2], torn)
    missing = known - 1
    assert (recovery.lost_messages, recovery.lost_bytes) == (missing, SIZE * missing)
    name = "000000.dat.damaged" if left else "000000.dat"
    assert recovery.damaged_files == [f"orders-0.diskqueue.{name}"] * (missing > 0)


@pytest.mark.parametrize("known", [0, 4])
def test_a_begin_that_is_lost_is_found_in_the_file_before(files: Files, known: int) -> None:
    files.write(0, [2, JUNK, 4])
    files.write(1, [5, 6])
    files.folder.base_path(1).unlink()
    ids, recovery = files.found(known)
    assert ids == [2, 4, 5, 6]
    assert (recovery.lost_messages, recovery.damaged_files) == (
        1,
        ["orders-0.diskqueue.000001.base.json", "orders-0.diskqueue.000000.dat.damaged"],
    )


def test_the_stored_begin_of_a_file_precedes_the_end_of_the_file_before(files: Files) -> None:
    files.write(0, [2, 3, 4])
    files.write(1, [6])
    files.folder.base_path(1).write_bytes(b"{")
    ids, recovery = files.found(5, {1: (200, 4), 0: (50, 1)})
    assert (ids, recovery.lost_messages) == ([2, 3, 4, 6], 1)


def test_an_empty_file_has_a_begin(files: Files) -> None:
    files.write(0, [b""], before=4)
    files.write(1, [6, 7])
    files.folder.base_path(1).unlink()
    ids, recovery = files.found()
    assert (ids, recovery.lost_messages) == ([6, 7], 0)


def test_a_gap_that_a_replica_copied_is_no_loss(files: Files) -> None:
    _, store = files.store()
    for counter in (2, 3, 6):
        store.append([LogEntry(record(counter), SIZE * (counter - 2), SIZE, counter - 1)])
    assert store.begins == [(0, 0, 0), (1, 200, 4)]
    store.close()
    assert files.found(5) == ([2, 3, 6], Recovery(3))
