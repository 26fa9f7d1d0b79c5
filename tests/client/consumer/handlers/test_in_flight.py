"""Touching of messages in flight."""

from __future__ import annotations

from nsqext.client.consumer.handlers.in_flight import touch_due
from nsqext.errors import MessageNotInFlight
from tests.support.messages import RecordingOwner, make_message


def test_messages_are_touched_after_half_of_the_timeout() -> None:
    owner = RecordingOwner()
    message = make_message(owner)
    message.received = message.delivered = 100.0
    assert touch_due([message], 129.9) == 0
    assert touch_due([message], 130.0) == 1
    message.received = 130.0
    assert touch_due([message], 159.0) == 0
    assert touch_due([message], 160.0) == 1
    assert owner.commands == ["TOUCH 1", "TOUCH 1"]


def test_answered_and_lost_messages_are_not_touched() -> None:
    owner = RecordingOwner()
    message = make_message(owner)
    owner.refusal = MessageNotInFlight("gone")
    assert touch_due([message], 60.0) == 0
    owner.refusal = None
    message.answered = True
    assert touch_due([message], 60.0) == 0
    assert owner.commands == []


def test_messages_are_not_touched_beyond_the_limit_of_the_server() -> None:
    owner = RecordingOwner()
    owner.msg_timeout, owner.max_msg_timeout = 10.0, 30.0
    message = make_message(owner)
    now = 0.0
    while now < 100.0:
        if touch_due([message], now):
            message.received = now
        now += 0.25
    assert message.received <= 30.0
    assert len(owner.commands) == 4
