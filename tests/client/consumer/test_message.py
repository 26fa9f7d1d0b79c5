"""A received message."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext.client.consumer.handlers.message_keys import key_reader
from nsqext.client.consumer.unpacking import UnpackBudget, unpack
from nsqext.errors import InvalidInput, InvalidState, MessageNotInFlight, ProtocolError
from nsqext.protocol.client.body_compression import compress_body
from nsqext.protocol.messages import EXT_TAG
from tests.support.messages import RecordingOwner, make_message

if TYPE_CHECKING:
    from nsqext import Message

pytestmark = pytest.mark.anyio


async def test_it_is_answered_once() -> None:
    for answer in ("finish", "requeue"):
        owner = RecordingOwner()
        message = make_message(owner)
        await message.touch()
        await getattr(message, answer)()
        for again in ("finish", "requeue", "touch"):
            with pytest.raises(InvalidState, match="finished or requeued already"):
                await getattr(message, again)()
        assert len(owner.commands) == 2
        assert message.answered


async def test_requeue_carries_delay_and_backoff() -> None:
    owner = RecordingOwner()
    await make_message(owner, 1).requeue(1.5)
    await make_message(owner, 2).requeue(backoff=True)
    assert owner.commands == ["REQ 1 1.5", "REQ 2 0!"]


@pytest.mark.parametrize("delay", [-1, 1e9, float("nan"), "1", True])
async def test_delays_that_no_server_accepts(delay: float) -> None:
    message = make_message(RecordingOwner())
    with pytest.raises(InvalidInput):
        await message.requeue(delay)
    assert not message.answered


async def test_servers_would_ignore_the_delay_of_an_ordered_message() -> None:
    owner = RecordingOwner(in_order=True)
    message = make_message(owner)
    with pytest.raises(InvalidInput, match=r"requeue without a delay, or raise Requeue\(delay=0.5\) in a handler"):
        await message.requeue(0.5)
    await message.requeue()
    assert owner.commands == ["REQ 1 0"]


async def test_lost_messages_raise_or_are_ignored() -> None:
    owner = RecordingOwner()
    owner.refusal = MessageNotInFlight("gone")
    message = make_message(owner)
    for answer in ("finish", "requeue", "touch"):
        with pytest.raises(MessageNotInFlight):
            await getattr(message, answer)()
    assert not (message.answered or message.requeue_called)
    owner.ignore_lost = True
    await message.touch()
    await message.finish()
    assert message.answered


async def test_after_a_handler_lost_messages_are_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    owner = RecordingOwner()
    owner.refusal = MessageNotInFlight("gone")
    with caplog.at_level(logging.WARNING, "nsqext.consumer"):
        make_message(owner).finish_now()
        make_message(owner).requeue_now(1.0, backoff=True)
    assert [record.message for record in caplog.records] == [
        "a handled message will be redelivered: gone",
        "a message that was not handled will be redelivered: gone",
    ]


def test_headers_and_tag() -> None:
    message = make_message(RecordingOwner(), headers={"a": "b"}, tag="canary", trace_id=9)
    assert dict(message.headers) == {"a": "b"}
    assert dict(message.reserved_headers) == {"##client_dispatch_tag": "canary"}
    assert (message.tag, message.trace_id, message.internal_id) == ("canary", 9, 1)
    assert (make_message(RecordingOwner()).tag, dict(make_message(RecordingOwner()).headers)) == (None, {})
    assert (message.topic, message.partition, message.node, message.in_order) == ("t", 3, "127.0.0.1:4150", False)
    owner = RecordingOwner()
    owner.original = True
    assert make_message(owner, trace_id=9).trace_id == 0, "all bytes of an id are the server's there"


def test_a_header_may_be_a_tag_alone() -> None:
    message = make_message(RecordingOwner())
    message.version = EXT_TAG
    tags = []
    for header in (b"canary", b""):
        message.header = header
        tags.append(message.tag)
    assert tags == ["canary", None]


def test_reserved_names_are_known_however_they_are_written() -> None:
    message = make_message(RecordingOwner(), headers={"a": "b"})
    message.header = b'{"\\u0023\\u0023trace_id":"7","a":"b","c":"##"}'
    assert dict(message.headers) == {"a": "b", "c": "##"}
    assert dict(message.reserved_headers) == {"##trace_id": "7"}
    message = make_message(RecordingOwner(), headers={"a": "b"})
    message.header = b'{"\\u0023\\u0023trace_id":"7","a":"b"}'
    assert dict(message.headers) == {"a": "b"}


def test_its_repr_shows_the_position_and_not_the_body() -> None:
    text = repr(make_message(RecordingOwner(), 5, b"secret", attempts=2))
    assert "t[3]" in text
    assert "attempts=2" in text
    assert "secret" not in text


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4"])
def test_compressed_bodies_are_restored(codec: str) -> None:
    packed = compress_body(codec, b"x" * 1000)  # type: ignore[arg-type]
    assert packed is not None
    message = make_message(RecordingOwner(), body=packed[0], headers={**packed[1], "mine": "stays"})
    unpack(message)
    assert message.body == b"x" * 1000
    assert dict(message.headers) == {"mine": "stays"}
    unpack(message)
    assert message.body == b"x" * 1000


def test_a_key_function_sees_the_restored_body_and_the_handler_the_packed_one_until_it_is_handed_out() -> None:
    packed = compress_body("gzip", b"x" * 1000)
    assert packed is not None
    body, headers = packed

    def look(message: Message) -> bytes:
        return b"%d %d" % (len(message.body), "nsq.client.compress" in message.headers)

    def fail(message: Message) -> bytes:
        raise ZeroDivisionError

    read, packed_body = key_reader(look), b"%d 1" % len(body)
    message = make_message(RecordingOwner(), body=body, headers=headers)
    assert read(message) == packed_body, "it will not be restored"
    message.budget = budget = UnpackBudget(10_000)
    assert read(message) == b"1000 0"
    assert look(message) == packed_body
    with pytest.raises(InvalidInput, match="the key function failed"):
        key_reader(fail)(message)
    assert look(message) == packed_body
    message.body = b"damaged"
    assert read(message) == b"7 1"
    assert budget.used == 0


def test_damaged_bodies_stay_as_they_are() -> None:
    message = make_message(RecordingOwner(), body=b"no gzip", headers={"nsq.client.compress": "1", "nsq.msg.size": "9"})
    with pytest.raises(ProtocolError):
        unpack(message)
    assert message.body == b"no gzip"
    assert "nsq.client.compress" in message.headers


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("answer", ["finish", "requeue", "finish_now", "requeue_now"])
async def test_each_answer_releases_the_unpacked_bytes(answer: str, lost: bool) -> None:
    owner, budget = RecordingOwner(), UnpackBudget(100)
    owner.ignore_lost = True
    owner.refusal = MessageNotInFlight("gone") if lost else None
    message = make_message(owner)
    message.budget = budget
    assert budget.reserve(message, 80)
    match answer:
        case "finish":
            await message.finish()
        case "requeue":
            await message.requeue()
        case "finish_now":
            message.finish_now()
        case _:
            message.requeue_now(0.0, backoff=False)
    assert (message.answered, budget.used, budget.holds(message)) == (True, 0, False)


def test_a_budget_is_used_up_by_others_and_one_message_may_be_larger() -> None:
    owner, budget = RecordingOwner(), UnpackBudget(100)
    one, two, three = (make_message(owner, number) for number in range(3))
    assert budget.reserve(one, 60)
    assert [budget.reserve(two, 41), budget.reserve(two, 40), budget.used] == [False, True, 100]
    assert [budget.reserve(two, 90), budget.used] == [True, 150], "what it turned out to be"
    budget.release(two)
    budget.release(two)
    assert budget.used == 60
    budget.release(one)
    assert [budget.reserve(three, 1000), budget.used] == [True, 1000]
    owner.horizon = 1.0
    budget.release_expired()
    assert budget.used == 0
    endless = UnpackBudget(0)
    assert [endless.reserve(one, 10**9), endless.reserve(two, 10**9)] == [True, True]


async def test_tasks_that_wait_for_room_are_woken() -> None:
    owner, budget, woken = RecordingOwner(), UnpackBudget(100), list[int]()
    message = make_message(owner)
    assert budget.reserve(message, 100)

    async def wait(number: int) -> None:
        await budget.wait()
        woken.append(number)

    async with anyio.create_task_group() as tasks:
        for number, wake in enumerate((lambda: budget.release(message), budget.wake)):
            tasks.start_soon(wait, number)
            await anyio.wait_all_tasks_blocked()
            assert len(woken) == number
            wake()
            await anyio.wait_all_tasks_blocked()
            assert len(woken) == number + 1


def test_a_message_continues_with_its_new_delivery() -> None:
    old, new = RecordingOwner(), RecordingOwner()
    for attempts, later in ((1, 2), (5, 2)):
        message, delivery = make_message(old, attempts=attempts), make_message(new, attempts=later)
        delivery.received = 50.0
        message.renew(delivery)
        assert (message.owner, message.received, message.delivered) == (new, 50.0, 50.0)
        assert message.attempts == max(attempts, later)
        assert message.counted is delivery.counted


def test_when_a_handler_may_begin() -> None:
    owner = RecordingOwner()
    message = make_message(owner)
    message.received = 100.0
    owner.horizon = 100.0
    assert [message.may_begin(now) for now in (100.0, 100.1, 150.0)] == [True, True, True]
    owner.expired = lambda message: True  # type: ignore[method-assign]
    assert [message.may_begin(now) for now in (100.1, 100.3)] == [True, False]
    owner.horizon = 100.5
    assert not message.may_begin(100.1)
