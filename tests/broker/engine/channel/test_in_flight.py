"""Messages in flight and deferred messages."""

from __future__ import annotations

from math import inf

from nsqext.broker.engine.channel.in_flight import Delivery, InFlight
from nsqext.broker.engine.storage.log import LogEntry
from nsqext.protocol.record import Record


def delivery(number: int) -> Delivery:
    return Delivery(LogEntry(Record(0, number, 0, b""), number * 30, 30, number))


def test_a_removed_delay_is_ignored() -> None:
    table = InFlight()
    first = delivery(1)
    table.defer(first, 20.0)
    table.remove(1)
    first.deferred = False
    table.defer(first, 30.0)
    assert table.next_deadline() == 30.0
    assert table.pop_due(25.0) == []
    assert table.clear() == [first]
    assert (table.deferred, table.next_deadline()) == (0, inf)


def test_a_message_that_is_deferred_again_after_all_were_dropped_is_due_once() -> None:
    table, again = InFlight(), delivery(1)
    table.defer(again, 20.0)
    table.clear()
    table.defer(again, 20.0)
    assert table.pop_due(20.0) == [again]
