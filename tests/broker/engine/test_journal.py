"""The journal of the delayed queues."""

from __future__ import annotations

from pathlib import Path

from nsqext.broker.engine.delayed import Delayed, DelayedQueue
from nsqext.broker.engine.journal import ChannelJournal, DelayedJournal
from nsqext.broker.engine.log import Entry
from nsqext.protocol.messages import EXT_JSON
from nsqext.protocol.record import Record


def delayed(number: int) -> Delayed:
    record = Record(7, number, 9, b"body\n%d" % number, EXT_JSON, b'{"k":"v"}', extend=True)
    return Delayed(Entry(record, number * 100, 100, number), 3, 1000 + number)


def held(path: Path) -> dict[str, list[int]]:
    return {channel: sorted(messages) for channel, messages in DelayedJournal(path).load().items()}


def test_changes_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = DelayedJournal(path)
    one, two = (DelayedQueue(ChannelJournal(journal, name)) for name in ("one", "two"))
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


def test_a_torn_last_line_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = DelayedJournal(path)
    queue = DelayedQueue(ChannelJournal(journal, "ch"))
    queue.put(delayed(1))
    queue.put(delayed(2))
    journal.close()
    path.write_bytes(path.read_bytes()[:-9])
    assert held(path) == {"ch": [1]}


def test_what_is_gone_is_not_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = DelayedJournal(path)
    queue = DelayedQueue(ChannelJournal(journal, "ch"))
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
