"""Messages in flight and deferred messages."""

from __future__ import annotations

from math import inf

from nsqext.broker.engine.channel.in_flight import Delivery, InFlight
from nsqext.broker.engine.storage.log import LogEntry
from nsqext.protocol.record import Record
from tests.support.engine_partition import Consumer


def delivery(number: int, deadline: float = 0.0, owner: Consumer | None = None) -> Delivery:
    made = Delivery(LogEntry(Record(0, number, 0, b""), number * 30, 30, number))
    made.deadline, made.owner = deadline, owner
    return made


def test_due_messages_are_returned_in_order() -> None:
    table = InFlight()
    for number, deadline in ((1, 30.0), (2, 10.0), (3, 20.0)):
        table.add(delivery(number, deadline))
    assert table.pop_due(9.9) == []
    assert table.next_deadline() == 10.0
    assert [found.entry.count for found in table.pop_due(20.0)] == [2, 3]
    assert table.next_deadline() == 30.0
    table.remove(1)
    assert table.next_deadline() == inf


def test_touched_messages_stay() -> None:
    table = InFlight()
    touched = delivery(1, 10.0)
    table.add(touched)
    touched.deadline = 50.0
    assert table.pop_due(10.0) == []
    assert table.next_deadline() == 50.0


def test_deferred_messages_have_no_owner() -> None:
    table = InFlight()
    client = Consumer()
    mine, deferred = delivery(1, 10.0, client), delivery(2, 10.0, client)
    table.add(mine)
    table.add(deferred)
    table.defer(deferred, 20.0)
    assert table.of(client) == [mine]
    assert list(table.deferred_messages()) == [deferred]
    assert table.deferred == 1
    assert table.pop_due(10.0) == [mine]
    assert table.pop_due(20.0) == [deferred]
    assert (table.deferred, table.table) == (0, {})


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
