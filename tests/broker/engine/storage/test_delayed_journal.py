"""The journal of the delayed queues."""

from __future__ import annotations

import errno
import os
from base64 import b64encode
from pathlib import Path

import pytest

from nsqext.broker.engine.storage.delayed_queue import Delayed, DelayedJournal, DelayedQueue
from nsqext.broker.engine.storage.files import with_checksum
from nsqext.broker.engine.storage.log import LogEntry, Refusal
from nsqext.protocol.messages import EXT_JSON
from nsqext.protocol.record import Record, encode_record


def delayed(number: int) -> Delayed:
    record = Record(7, number, 9, b"body\n%d" % number, EXT_JSON, b'{"k":"v"}', extend=True)
    return Delayed(LogEntry(record, number * 100, 100, number), 3, 1000 + number)


def held(path: Path) -> dict[str, list[int]]:
    return {channel: sorted(messages) for channel, messages in DelayedJournal(path).load().items()}


def test_changes_are_restored(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = DelayedJournal(path)
    one, two = (DelayedQueue(name, journal) for name in ("one", "two"))
    for number in (1, 2, 3):
        one.put(delayed(number))
        two.put(delayed(number))
    one.remove(2)
    one.remove(2)
    two.clear()
    two.put(delayed(4))
    journal.close()
    assert held(path) == {"one": [1, 3], "two": [4]}
    again = DelayedJournal(path).load()["one"][1]
    assert (again.attempts, again.due, again.entry.offset, again.entry.size) == (3, 1001, 100, 100)
    assert again.entry.record == delayed(1).entry.record


def test_lines_that_were_written_earlier_are_read(tmp_path: Path) -> None:
    path, record = tmp_path / "journal", Record(7, 5, 9, b"body")
    coded = b64encode(encode_record(record))
    lines = [
        b'{"channel":"gone","record":"%b"}' % coded,
        b'{"channel":"one","record":"%b"}' % coded,
        b'{"channel":"one","removed":4}',
        b'{"channel":"gone"}',
        b'{"channel":"two","removed":null,"record":"%b","offset":1,"size":2,"count":3,"attempts":4,"due":5}' % coded,
    ]
    path.write_bytes(b"".join(with_checksum(line) + b"\n" for line in lines))
    found = {
        channel: [(one.entry.offset, one.entry.size, one.entry.count, one.attempts, one.due, one.entry.record)]
        for channel, messages in DelayedJournal(path).load().items()
        for one in messages.values()
    }
    assert found == {"one": [(0, 0, 0, 0, 0, record)], "two": [(1, 2, 3, 4, 5, record)]}


def test_damage_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal"
    journal = DelayedJournal(path)
    assert (journal.load(), journal.torn_bytes, journal.damaged_file) == ({}, 0, "")
    for number in (1, 2, 3):
        journal.put("ch", delayed(number))
    data = path.read_bytes()
    assert (sorted(journal.load()["ch"]), journal.torn_bytes, journal.damaged_file) == ([1, 2, 3], 0, "")
    path.write_bytes(b"x" + data + b"torn")
    assert (sorted(journal.load()["ch"]), journal.torn_bytes, journal.damaged_file) == ([2, 3], 4, "journal.damaged")
    assert "1 of 3 changes of delayed queues are lost" in caplog.text
    assert path.read_bytes() == (tmp_path / "journal.damaged").read_bytes() == b"x" + data + b"torn"


@pytest.mark.parametrize(("over", "overgrown"), [(-1, False), (0, False), (1, True)])
def test_a_journal_is_overgrown_if_most_of_it_is_about_removed_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: int, overgrown: bool
) -> None:
    journal = DelayedJournal(tmp_path / "journal")
    journal.rewrite([("ch", [delayed(1)])])
    size = journal.path.stat().st_size
    for _ in range(4):
        journal.put("ch", delayed(1))
    assert journal.path.stat().st_size == 5 * size
    monkeypatch.setattr("nsqext.broker.engine.storage.delayed_queue._OVERGROWN", 5 * size - over)
    assert journal.is_overgrown == overgrown
    monkeypatch.setattr("nsqext.broker.engine.storage.delayed_queue._OVERGROWN", 1)
    assert journal.is_overgrown, "it has five times the size after the last compaction"
    journal.rewrite([("ch", [delayed(1), delayed(2)])])
    journal.close()
    assert not journal.is_overgrown
    again = DelayedJournal(journal.path)
    again.put("ch", delayed(3))
    assert again.is_overgrown, "it has never been compacted"


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = DelayedJournal(path)
    queue = DelayedQueue("ch", journal)
    queue.put(delayed(1))
    queue.put(delayed(2))
    journal.close()
    path.write_bytes(path.read_bytes()[:-9])
    assert held(path) == {"ch": [1]}


def test_a_damaged_journal_is_read_again_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = DelayedJournal(path)
    queue = DelayedQueue("ch", journal)
    for number in (1, 2):
        queue.put(delayed(number))
    journal.close()
    path.write_bytes(path.read_bytes().replace(b"{", b"[", 1))
    assert held(path) == held(path) == {"ch": [2]}


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 40])
def test_a_partly_written_line_is_removed(
    tmp_path: Path, taken: int, reopened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    queue = DelayedQueue("ch", DelayedJournal(path))
    queue.put(delayed(1))
    write, left = os.write, [taken]

    def fill(out: int, data: bytes) -> int:
        size = left.pop() if left else 0
        if not size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(out, data[:size])

    if reopened:
        queue = DelayedQueue("ch", DelayedJournal(path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fill)
        with pytest.raises(Refusal, match="No space left"):
            queue.put(delayed(2))
    queue.put(delayed(3))
    assert held(path) == {"ch": [1, 3]}


def test_a_line_written_in_pieces_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "journal", os.write
    monkeypatch.setattr(os, "write", lambda out, data: write(out, data[:7]))
    queue = DelayedQueue("ch", DelayedJournal(path))
    queue.put(delayed(1))
    queue.put(delayed(2))
    assert held(path) == {"ch": [1, 2]}


@pytest.mark.parametrize("taken", [[9], []])
def test_no_record_is_written_behind_one_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    path, write, left = tmp_path / "journal", os.write, list(taken)

    def fill(out: int, data: bytes) -> int:
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(out, data[: left.pop()])

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    queue = DelayedQueue("ch", DelayedJournal(path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fill)
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(Refusal, match="No space left"):
            queue.put(delayed(1))
    if taken:
        with pytest.raises(Refusal):
            queue.put(delayed(2))
    else:
        queue.put(delayed(2))
    assert held(path) == ({} if taken else {"ch": [2]})


def test_a_closed_journal_is_not_created_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = DelayedJournal(path)
    queue = DelayedQueue("ch", journal)
    queue.put(delayed(1))
    journal.destroy()
    with pytest.raises(Refusal, match="exiting"):
        queue.put(delayed(2))
    queue.remove(1)
    assert list(tmp_path.iterdir()) == []


def test_compaction_drops_removed_messages(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = DelayedJournal(path)
    queue = DelayedQueue("ch", journal)
    for number in range(20):
        queue.put(delayed(number))
        queue.remove(number)
    queue.put(delayed(99))
    size = path.stat().st_size
    journal.rewrite((channel, messages.values()) for channel, messages in journal.load().items())
    assert path.stat().st_size < size / 10
    queue.put(delayed(100))
    assert held(path) == {"ch": [99, 100]}
    journal.destroy()
    assert held(path) == {}


def test_no_file_stays_open(tmp_path: Path) -> None:
    def opened() -> int:
        return len([*Path("/dev/fd").iterdir()])

    before = opened()
    journal = DelayedJournal(tmp_path / "journal")
    journal.put("ch", delayed(1))
    assert opened() == before + 1
    journal.rewrite([])
    assert opened() == before
    journal.put("ch", delayed(1))
    journal.close()
    assert opened() == before
