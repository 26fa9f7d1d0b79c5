"""Touching of messages in flight."""

from __future__ import annotations

from math import inf

import pytest

from nsqext.client.consumer.handlers.in_flight import HeldMessages, touch_due
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


@pytest.mark.parametrize(("horizon", "logged"), [(50.0, 1), (inf, 0)], ids=["timeout", "end of the connection"])
def test_a_held_message_that_the_server_took_back_is_logged_once(
    caplog: pytest.LogCaptureFixture, horizon: float, logged: int
) -> None:
    owner, held = RecordingOwner(), HeldMessages()
    lost, answered, later = (make_message(owner, number) for number in range(3))
    lost.received = answered.received = 40.0
    later.received = inf
    answered.answered = True
    held.add([lost, answered, later])
    owner.horizon = horizon
    for _ in range(2):
        assert held.unanswered() == [later]
    assert len(caplog.records) == logged
    if logged:
        assert "-max-msg-timeout (900 s)" in caplog.text
