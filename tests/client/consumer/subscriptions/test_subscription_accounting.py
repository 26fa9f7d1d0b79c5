"""What one subscription counts, answers and reports, on a connection and a clock of the test."""

from __future__ import annotations

import gc
import logging
import time
from math import inf
from struct import pack
from typing import TYPE_CHECKING, Any

import pytest

from nsqext import Position
from nsqext.client.consumer.message import InFlightCount, KeySharing
from nsqext.client.consumer.options import DeliveryOptions
from nsqext.client.consumer.subscriptions.subscription import Subscription
from nsqext.client.trace_log import trace_log
from nsqext.errors import ConnectionLost, MessageNotInFlight, OrderViolation, ProtocolError, ServerError
from nsqext.errors.server import FinishFailed, RequeueFailed, TouchFailed
from nsqext.protocol.client.body_compression import COMPRESS_HEADER
from nsqext.protocol.client.commands import CLS
from nsqext.protocol.headers import encode_headers
from nsqext.protocol.identify import Negotiated
from nsqext.protocol.messages import DUE_HEADER
from nsqext.types import TopicMeta
from tests.support.subscriptions import delivered, subscribed

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT = Negotiated(msg_timeout=60.0)
_EXTEND = TopicMeta(1, extend_support=True)


def _id(number: int) -> bytes:
    return pack(">QQ", number, 0)


def _headed(reserved: dict[str, str]) -> bytes:
    """Return the extend part of a message with reserved headers."""
    part = encode_headers({}, reserved=reserved)
    return b"\x04" + len(part).to_bytes(2, "big") + part


def _early(seconds: float) -> bytes:
    """Return the extend part of a message that is due in some seconds."""
    return _headed({DUE_HEADER: str(round((time.time() + seconds) * 1000))})


def test_what_was_received_is_counted_until_it_is_answered_or_times_out() -> None:
    with subscribed(negotiated=_TIMEOUT) as made:
        subject = made.subject
        assert (subject.received_at, subject.busy, subject.live, subject.stopped) == (100.0, False, True, False)
        (one,) = made.receive(1)
        assert subject.busy
        two, three = made.receive(2, 3)
        made.now = 101.0
        made.receive(4)
        assert [message.internal_id for message in made.messages] == [1, 2, 3, 4]
        assert (subject.received, subject.in_flight, subject.received_at, subject.busy) == (4, 4, 101.0, True)
        assert subject.received_bytes == 4 * (26 + 4)
        assert subject.take_unrecorded()[:2] == (4, 120)
        made.receive(5)
        assert [subject.take_unrecorded()[:2], subject.take_unrecorded()] == [(1, 30), (0, 0, inf, inf)]
        subject.finish(one)
        subject.defer(two, 1.5)
        assert (subject.in_flight, subject.requeued) == (3, 1)
        assert made.flushed() == b"FIN %b\nREQ %b 1500\n" % (one.id, two.id)
        made.now = 160.5
        subject.tick()
        assert (subject.in_flight, subject.timed_out, subject.horizon) == (2, 1, 100.5)
        for answer in (subject.finish, subject.touch, lambda message: subject.defer(message, 0)):
            with pytest.raises(MessageNotInFlight, match="its timeout has passed") as caught:
                answer(three)
            assert (caught.value.topic, caught.value.partition, caught.value.node) == ("t", 0, "127.0.0.1:4150")
        assert (subject.in_flight, made.flushed()) == (2, b"")
        made.now = 163.0
        made.receive(6)
        assert (subject.in_flight, subject.timed_out) == (1, 3), "a read looks at the clock as well"


def test_a_touched_message_times_out_later_than_the_others_of_its_read() -> None:
    with subscribed(negotiated=_TIMEOUT) as made:
        subject = made.subject
        one, two = made.receive(1, 2)
        made.now = 150.0
        subject.touch(one)
        assert (subject.in_flight, one.received, one.delivered) == (2, 150.0, 100.0)
        assert made.flushed() == b"TOUCH %b\n" % one.id
        made.now = 170.0
        assert [subject.expired(one), subject.expired(two)] == [False, True]
        subject.tick()
        assert (subject.in_flight, subject.timed_out) == (1, 1)
        subject.finish(one)
        assert (subject.in_flight, made.flushed()) == (0, b"FIN %b\n" % one.id)
        made.now = 300.0
        subject.tick()
        assert subject.timed_out == 1


def _counts() -> int:
    return sum(type(one) is InFlightCount for one in gc.get_objects())


def test_counts_of_answered_messages_are_dropped_while_an_older_message_is_in_flight() -> None:
    """One message that is touched for hours must not keep a count of each read since then."""
    with subscribed(negotiated=_TIMEOUT) as made:
        before, (oldest,) = _counts(), made.receive(1)
        for number in range(2, 500):
            for message in made.receive(number):
                made.subject.finish(message)
            made.messages.clear()
        assert (made.subject.in_flight, _counts() - before < 30) == (1, True)
        made.now = 161.0
        made.subject.tick()
        assert (made.subject.in_flight, made.subject.timed_out) == (0, 1)
        with pytest.raises(MessageNotInFlight):
            made.subject.finish(oldest)


def test_messages_that_waited_in_the_socket_are_as_old_as_the_read_before() -> None:
    with subscribed(negotiated=_TIMEOUT) as made:
        made.now, made.monitor.on_time_until, made.monitor.receipt = 160.0, 160.0, 140.0
        assert made.receive(1)[0].received == 140.0
        made.monitor.on_time_until = 160.1
        assert made.receive(2)[0].received == 160.0


def test_no_message_is_older_than_its_connection() -> None:
    """The timer of a consumer without connections rests, so that its last tick may be long ago."""
    with subscribed(negotiated=_TIMEOUT) as made:
        made.now, made.monitor.on_time_until, made.monitor.receipt = 100.3, 0.0, 40.0
        assert made.receive(1)[0].received == 100.0


def test_the_monitor_hears_of_a_read_while_it_is_idle_or_the_subscription_is_watched() -> None:
    with subscribed() as made:
        made.receive(1)
        assert (made.monitor.calls, list(made.monitor.unrecorded)) == ([], [made.subject])
        for made.subject.watched, made.monitor.idle in ((True, False), (False, True)):
            made.receive(2)
            assert made.monitor.calls == ["received"]
            made.monitor.calls.clear()


def test_answers_are_announced_once_for_each_flush() -> None:
    with subscribed() as made:
        messages, subject = made.receive(*range(1, 5)), made.subject
        for answers in ((subject.finish, subject.touch), (subject.touch, subject.finish)):
            for answer in answers:
                answer(messages.pop())
            assert made.monitor.calls == ["needs_flush"]
            assert len(made.flushed().splitlines()) == 2
            made.monitor.calls.clear()


def test_answers_that_the_monitor_wants_at_once_are_sent_at_once() -> None:
    with subscribed() as made:
        messages, subject = made.receive(*range(1, 4)), made.subject
        made.monitor.at_once = True
        for count, answer in enumerate((subject.finish, subject.touch), 1):
            answer(messages[count])
            assert len(made.wire.sent) == count
        made.monitor.at_once = False
        subject.finish(messages[0])
        assert len(made.wire.sent) == 2


def test_many_answers_are_sent_before_the_end_of_the_turn() -> None:
    with subscribed() as made:
        for message in made.receive(*range(1000)):
            made.subject.finish(message)
        (sent,) = made.wire.sent
        assert 500 <= sent.count(b"FIN ") < 1000
        assert made.flushed().count(b"FIN ") == 1000


def test_more_messages_than_rdy_allows_end_the_connection() -> None:
    with subscribed() as made:
        made.subject.set_ready(5)
        made.receive(*range(2 * 5 + 16))
        assert made.wire.usable
        made.receive(99)
        assert isinstance(made.wire.ended[0], ProtocolError)
        assert "27 messages that were not answered, with RDY 5" in str(made.wire.ended[0])


def test_messages_that_timed_out_leave_room_for_their_redeliveries() -> None:
    with subscribed(negotiated=_TIMEOUT) as made:
        made.subject.set_ready(5)
        made.receive(*range(26))
        made.now = 161.0
        made.receive(*range(26))
        assert (made.wire.usable, made.subject.in_flight) == (True, 26)


def test_what_is_no_message_ends_the_connection_after_those_before_it() -> None:
    with subscribed() as made:
        made.read([delivered(1), b"short"])
        assert [message.internal_id for message in made.messages] == [1]
        assert isinstance(made.wire.ended[0], ProtocolError)
        assert made.subject.in_flight == 1
        assert made.monitor.calls == []


def test_nothing_is_received_after_the_end() -> None:
    with subscribed() as made:
        (message,) = made.receive(1)
        made.subject.end()
        assert made.receive(2) == []
        assert (made.subject.received, made.subject.live) == (1, False)
        assert made.subject.expired(message)
        with pytest.raises(MessageNotInFlight, match="its connection was closed"):
            made.subject.finish(message)
        made.subject.set_ready(3)
        made.subject.reset("x")
        assert (made.subject.ready, made.flushed(), made.wire.ended) == (0, b"", [None])


def test_the_positions_before_a_move_are_finished_unseen() -> None:
    with subscribed(queue_position=True) as made:
        made.subject.skip_to(Position.offset(200))
        assert made.subject.moved
        at = [pack(">QI", offset, 10) for offset in (100, 190, 200, 100)]
        frames = [delivered(number, position=position) for number, position in enumerate(at, 1)]
        made.read(frames[:1])
        assert made.messages == []
        made.read(frames[1:])
        assert [message.internal_id for message in made.messages] == [3, 4], "only what precedes it is skipped"
        assert made.subject.start is None
        assert made.flushed() == b"FIN %b\nFIN %b\n" % (_id(1), _id(2))
        assert made.subject.in_flight == 2


@pytest.mark.parametrize(("topic", "logged"), [("t", ["nsqext.trace"]), ("other", [])])
def test_messages_of_a_traced_topic_are_logged(topic: str, logged: list[str], caplog: pytest.LogCaptureFixture) -> None:
    trace_log.on(topic)
    try:
        with caplog.at_level(logging.INFO, "nsqext.trace"), subscribed() as made:
            made.receive(1)
    finally:
        trace_log.off()
    assert [record.name for record in caplog.records] == logged


@pytest.mark.parametrize(
    ("decompress", "header", "bounded"),
    [(True, {COMPRESS_HEADER: "gzip"}, True), (False, {COMPRESS_HEADER: "gzip"}, False), (True, {"##a": "b"}, False)],
)
def test_only_bodies_that_will_be_unpacked_are_bounded(decompress: bool, header: dict[str, str], bounded: bool) -> None:
    with subscribed(_EXTEND, delivery=DeliveryOptions(decompress=decompress)) as made:
        (message,) = made.receive(1, position=_headed(header))
        assert message.budget is (made.monitor.unpack_budget if bounded else None)


def test_a_second_copy_of_an_ordered_message_is_not_delivered() -> None:
    with subscribed(TopicMeta(1, ordered=True)) as made:
        at = pack(">QI", 0, 30)
        assert [message.internal_id for message in made.receive(1, 1, position=at)] == [1]
        assert (made.subject.max_ready, made.subject.in_flight, made.subject.in_order) == (1, 1, True)
        assert made.receive(1, position=pack(">QI", 30, 30)) == []
        assert isinstance(made.wire.ended[0], OrderViolation)


# Backoff


def test_failures_and_successes_change_the_backoff() -> None:
    with subscribed() as made:
        one, two, three, four = made.receive(1, 2, 3, 4)
        made.subject.finish(one)
        made.subject.requeue(two, 0.0, backoff=False)
        assert (made.monitor.calls, made.backoff.level) == (["needs_flush"], 0)
        made.subject.requeue(three, 0.0, backoff=True)
        assert (made.monitor.calls, made.backoff.level) == (["needs_flush", "rebalance"], 1)
        assert made.backoff.until == 102.0
        made.subject.record_outcome(failed=True)
        assert made.monitor.calls == ["needs_flush", "rebalance"], "outcomes of a pause change nothing"
        made.backoff.tick(102.0)
        made.now = 103.0
        made.subject.record_outcome(failed=False)
        assert (made.backoff.until, made.monitor.calls[2:]) == (105.0, ["rebalance"])
        made.subject.finish(four)
        assert made.monitor.calls[3:] == []
        made.backoff.tick(105.0)
        five, six = made.receive(5, 6)
        made.subject.requeue(six, 0.0, backoff=None)
        assert (made.backoff.until, made.monitor.calls[3:]) == (0.0, []), "it has no outcome"
        made.subject.finish(five)
        assert (made.backoff.level, made.monitor.calls[3:]) == (0, ["rebalance"])


def test_a_requeue_is_as_long_as_a_server_may_accept_and_is_remembered() -> None:
    with subscribed() as made:
        one, two = made.receive(1, 2)
        made.subject.requeue(one, 10 * 24 * 3600.0, backoff=False)
        made.subject.requeue(two, 1.25, backoff=False)
        assert made.flushed() == b"REQ %b 259200000\nREQ %b 1250\n" % (_id(1), _id(2))
        assert made.monitor.early_messages().postponed == {("t", _id(1)): (100.0 + 10 * 24 * 3600.0, 0)}


# Messages that are not due


@pytest.mark.parametrize(
    ("seconds", "share", "in_flight", "kept"),
    [(5.0, 4, 2, True), (5.0, 4, 3, False), (5.0, 2, 1, True), (60.0, 100, 1, False)],
)
def test_messages_that_are_due_soon_stay_in_flight_while_they_leave_room(
    seconds: float, share: int, in_flight: int, kept: bool
) -> None:
    with subscribed(_EXTEND, negotiated=_TIMEOUT) as made:
        made.monitor.share = share
        made.receive(*range(in_flight - 1), position=b"\0")
        before = len(made.messages)
        made.monitor.calls.clear()
        made.receive(50, position=_early(seconds), attempts=1)
        assert made.messages[before:] == []
        assert bool(made.monitor.kept) is kept
        assert (b"REQ " in made.flushed()) is not kept
        assert ("make_room" in made.monitor.calls) is (2 * in_flight <= share)


def test_in_a_backoff_messages_that_are_due_soon_do_not_stay_in_flight() -> None:
    """They would use up its RDY, which is 1 until a message was handled."""
    with subscribed(_EXTEND, negotiated=_TIMEOUT) as made:
        made.monitor.share = 100
        made.subject.record_outcome(failed=True)
        made.receive(1, position=_early(5.0))
        assert (made.monitor.kept, made.flushed()[:4]) == ([], b"REQ ")


def test_an_early_message_that_timed_out_in_the_socket_is_not_answered() -> None:
    """Its requeue raised, and the other messages of the read were not delivered."""
    with subscribed(_EXTEND, negotiated=_TIMEOUT) as made:
        made.now, made.monitor.on_time_until, made.monitor.receipt = 170.0, 160.0, 105.0
        made.read([delivered(1, position=_early(60.0)), delivered(2, position=b"\0")])
        assert [message.internal_id for message in made.messages] == [2]
        assert made.flushed() == b""


def test_a_read_with_messages_that_are_due_does_not_grow_rdy() -> None:
    with subscribed(_EXTEND, negotiated=_TIMEOUT) as made:
        made.monitor.share = 100
        made.read([delivered(1, position=_early(5.0)), delivered(2, position=b"\0")])
        assert [message.internal_id for message in made.messages] == [2]
        assert made.monitor.calls == []


@pytest.mark.parametrize(("partition", "key_tags", "keeps"), [(None, 0, False), (0, 0, True), (0, 4, True)])
def test_what_may_be_kept_in_flight(partition: int, key_tags: int, keeps: bool) -> None:
    options: dict[str, Any] = {"dispatch": "key_failover"} if key_tags else {}
    with subscribed(_EXTEND, partition=partition, key_tags=key_tags, negotiated=_TIMEOUT, **options) as made:
        made.monitor.share = 100
        made.receive(1, position=_early(5.0) + (bytes(12) if key_tags else b""))
        assert bool(made.monitor.kept) is keeps


def test_on_a_key_failover_channel_a_message_that_is_early_is_requeued_at_once() -> None:
    """A higher RDY, with which the server sends later messages of the key, must not be sent before the requeue."""
    with subscribed(_EXTEND, negotiated=_TIMEOUT, dispatch="key_failover") as made:
        assert made.subject.key_sharing is KeySharing.SERVER
        made.monitor.share = 100
        made.receive(1, position=_early(5.0))
        assert [line.split()[0] for line in made.wire.sent] == [b"REQ"]
        made.wire.sent.clear()
        (message,) = made.receive(2, position=b"\0")
        made.subject.finish(message)
        made.receive(3, position=b"\0")
        assert made.wire.sent == [], "nothing was early"
    with subscribed(_EXTEND, negotiated=_TIMEOUT) as other:
        other.receive(1, position=_early(60.0))
        assert other.wire.sent == []


def test_messages_without_extend_headers_are_not_looked_at_for_their_due_time() -> None:
    with subscribed(negotiated=_TIMEOUT) as made:
        made.read([delivered(1, b"##due")])
        assert len(made.messages) == 1
        assert made.monitor.calls == []


# What it tells of itself


@pytest.mark.parametrize("key_tags", [4, 0])
def test_a_message_is_lost_when_its_server_may_have_given_its_keys_to_another_consumer(key_tags: int) -> None:
    options: dict[str, Any] = {"dispatch": "key_failover"} if key_tags else {}
    with subscribed(_EXTEND, key_tags=key_tags, negotiated=Negotiated(msg_timeout=1000.0), **options) as made:
        (message,) = made.receive(1, position=b"\0" + (bytes(12) if key_tags else b""))
        made.now, made.wire.received_at = 175.0, 100.0
        assert not made.subject.expired(message)
        made.now = 175.1
        assert made.subject.expired(message) is bool(key_tags)
        made.wire.heartbeat_interval = 0.0
        assert not made.subject.expired(message)


def test_a_reset_names_its_reason() -> None:
    with subscribed() as made:
        made.subject.reset("a reason")
        (error,) = made.wire.ended
        assert isinstance(error, ConnectionLost)
        assert (error.message, error.topic, error.node) == ("ended by the client: a reason", "t", "127.0.0.1:4150")


@pytest.mark.parametrize("end", [Subscription.end, lambda subject: subject.reset("a reason")])
def test_pending_answers_are_sent_before_the_client_ends_the_connection(end: Callable[[Subscription], None]) -> None:
    """Answers may wait for others when a leader moves: without this, the server would deliver the messages again."""
    with subscribed() as made:
        (message,) = made.receive(1)
        made.subject.finish(message)
        made.subject.set_ready(7)
        end(made.subject)
        assert (made.wire.sent, made.wire.usable) == ([b"FIN %b\n" % message.id], False)
        made.subject.end()
        assert len(made.wire.sent) == 1


def test_rdy_is_sent_with_the_next_flush_and_announced_if_it_changes() -> None:
    with subscribed() as made:
        made.subject.set_ready(5)
        made.subject.set_ready(6)
        assert (made.subject.ready, made.monitor.calls) == (6, ["needs_flush"])
        assert made.flushed() == b"RDY 6\n"
        made.subject.set_ready(6)
        assert (made.flushed(), made.monitor.calls) == (b"", ["needs_flush"])


def test_notices_of_the_server_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with subscribed() as made:
        made.wire.notices[:] = ["E_FIN_FAILED 1", "E_TOUCH_FAILED 2"]
        made.subject.tick()
        made.subject.tick()
        assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
            "E_FIN_FAILED 1",
            "E_TOUCH_FAILED 2",
        ]
        assert made.wire.ticks == 2


@pytest.mark.parametrize(("kind", "ends"), [(FinishFailed, True), (RequeueFailed, True), (TouchFailed, False)])
def test_a_connection_ends_where_nsqd_may_count_a_message_twice(kind: type[ServerError], ends: bool) -> None:
    with subscribed(TopicMeta(), partition=None) as made:
        made.wire.notices[:] = [kind("E_FAILED", "message not in flight")]
        made.subject.tick()
        assert bool(made.wire.ended) is ends


@pytest.mark.parametrize(
    ("partition", "meta", "upgradable"), [(0, TopicMeta(1), True), (0, _EXTEND, False), (None, TopicMeta(), False)]
)
def test_only_topics_of_the_redesigned_nsq_without_headers_can_be_upgraded(
    partition: int, meta: TopicMeta, upgradable: bool
) -> None:
    with subscribed(meta, partition=partition) as made:
        assert made.subject.upgradable is upgradable


@pytest.mark.anyio
async def test_closing_sends_what_is_pending_and_cls_once() -> None:
    with subscribed() as made:
        (message,) = made.receive(1)
        made.subject.finish(message)
        await made.subject.stop()
        assert (made.subject.stopped, made.subject.live, made.wire.requests) == (True, True, [CLS])
        assert made.wire.sent == [b"FIN %b\n" % message.id]
        await made.subject.close()
        assert (made.subject.live, made.wire.usable) == (False, False)
        await made.subject.close()
        assert made.wire.requests == [CLS]


@pytest.mark.anyio
async def test_closing_stops_first() -> None:
    with subscribed() as made:
        await made.subject.close()
        assert (made.subject.stopped, made.wire.requests, made.wire.usable) == (True, [CLS], False)


def test_its_end_ends_what_is_in_flight() -> None:
    with subscribed() as made:
        (message,) = made.receive(1)
        made.close()
        assert (made.subject.live, message.expired) == (False, True)
