"""Touching of messages in flight."""

from __future__ import annotations

import gc
from math import inf

import anyio
import pytest

from nsqext.client.consumer.message import Message, touch_due
from nsqext.errors import MessageNotInFlight
from tests.support.messages import RecordingOwner, iteration, make_message


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
    message.received = message.delivered = now = 500.0
    while now < 600.0:
        if touch_due([message], now):
            message.received = now
        now += 0.25
    assert message.received <= 530.0
    assert len(owner.commands) == 4


@pytest.mark.parametrize(("horizon", "logged"), [(50.0, 1), (inf, 0)], ids=["timeout", "end of the connection"])
def test_a_held_message_that_the_server_took_back_is_logged_once(
    caplog: pytest.LogCaptureFixture, horizon: float, logged: int
) -> None:
    owner, held = RecordingOwner(), iteration()
    lost, answered, later = (make_message(owner, number) for number in range(3))
    lost.received = answered.received = 40.0
    later.received = inf
    answered.answered = True
    held.hold([lost, answered, later])
    owner.horizon = horizon
    for _ in range(2):
        assert held.held() == [later]
    assert len(caplog.records) == logged
    if logged:
        assert "-max-msg-timeout (900 s)" in caplog.text


def test_requeued_messages_are_touched_where_their_requeue_is_kept_back() -> None:
    owner = RecordingOwner()
    message = make_message(owner)
    message.answered = True
    assert [touch_due([message], 60.0), touch_due([message], 60.0, requeued=True)] == [0, 1]
    lost, other = make_message(RecordingOwner(), 2), make_message(owner, 3)
    lost.owner.refusal = MessageNotInFlight("gone")  # type: ignore[attr-defined]
    assert touch_due([lost, other], 60.0) == 1


def test_the_messages_of_a_task_are_requeued_without_those_of_others() -> None:
    owner, held = RecordingOwner(), iteration()
    messages = [make_message(owner, number) for number in range(6)]
    messages[0].answered = True
    messages[1].received = 10.0
    held.hold(messages[:3], 7)
    held.hold(messages[3:4], 8)
    held.hold(messages[4:5])
    owner.horizon = -1.0
    messages[1].received = -5.0
    held.requeue_held(7)
    assert owner.commands == ["REQ 2 0"]
    assert held.held() == messages[3:5]
    held.requeue_held()
    assert owner.commands == ["REQ 2 0", "REQ 3 0", "REQ 4 0"]
    assert held.held() == []


def test_few_of_many_answered_messages_are_kept() -> None:
    owner, held = RecordingOwner(), iteration()
    for number in range(500):
        message = make_message(owner, number)
        held.hold([message])
        message.answered = number % 100 > 0
    assert sum(type(one) is Message for one in gc.get_objects()) < 60
    assert [message.internal_id for message in held.held()] == [0, 100, 200, 300, 400]


@pytest.mark.anyio
async def test_the_wait_for_held_messages_ends_with_the_last_answer() -> None:
    owner, held = RecordingOwner(), iteration()
    message = make_message(owner)
    held.hold([message])
    ended: list[bool] = []

    async def wait() -> None:
        await held.wait_for_held()
        ended.append(message.answered)

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.03)
            assert ended == []
            message.answered = True
    assert ended == [True]
