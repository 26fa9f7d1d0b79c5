"""The client role: responses match commands, heartbeats get a response, the end is reported to all waiting callers."""

from __future__ import annotations

import pytest

from nsqext.errors import ConnectionLost, HeartbeatMissed, NotSent, ProtocolError
from nsqext.errors.server import (
    FinishFailed,
    InvalidCommand,
    NotLeader,
    RequeueFailed,
    TooManyConnections,
    TopicNotExist,
    TouchFailed,
)
from nsqext.protocol.client.client_protocol import MAX_NOTICES, ClientProtocol, Reply
from nsqext.protocol.client.commands import NOP
from nsqext.protocol.frames import HEARTBEAT, OK, FrameType, encode_frame


def _client(waiting: int = 0) -> tuple[ClientProtocol, list[Reply]]:
    client, replies = ClientProtocol("n1:4150"), [Reply() for _ in range(waiting)]
    for reply in replies:
        client.expect(reply)
    return client, replies


def _response(data: bytes = OK) -> bytes:
    return encode_frame(0, data)


def _error(data: bytes) -> bytes:
    return encode_frame(1, data)


def test_responses_have_the_order_of_the_commands() -> None:
    client, (first, second, third) = _client(3)
    assert client.receive_data(_response(b"one") + _error(b"E_FAILED_ON_NOT_LEADER ")) == []
    assert first.data == b"one"
    assert isinstance(second.error, NotLeader)
    assert second.error.node == "n1:4150"
    assert not third.done
    assert client.waiting == 1
    assert client.error is None
    client.receive_data(_response(b""))
    assert third.data == b""
    assert third.done


@pytest.mark.parametrize("kind", FrameType)
def test_each_type_of_frame_is_handled(kind: FrameType) -> None:
    client, (reply,) = _client(1)
    messages = client.receive_data(encode_frame(kind, b"E_FAILED_ON_NOT_LEADER "))
    assert client.error is None
    handled = {
        FrameType.RESPONSE: reply.data is not None,
        FrameType.ERROR: isinstance(reply.error, NotLeader),
        FrameType.MESSAGE: messages != [],
    }
    assert [type_ for type_, done in handled.items() if done] == [kind]


def test_an_answer_wakes_the_waiter() -> None:
    client, (first, second) = _client(2)
    woken: list[str] = []
    first.wake = lambda: woken.append("first")
    second.wake = lambda: woken.append("second")
    client.receive_data(_response())
    assert woken == ["first"]
    client.receive_data(_error(b"E_PUB_FAILED exiting"))
    assert woken == ["first", "second"]


def test_a_request_expires_once() -> None:
    client, (first, second) = _client(2)
    first.deadline, second.deadline = 10.0, 20.0
    woken: list[str] = []
    first.wake = lambda: woken.append("first")
    assert [client.expire(now) for now in (10.0, 11.0, 12.0, 21.0)] == [0, 1, 0, 1]
    assert woken == ["first"]
    assert first.done and second.done
    client.receive_data(_response() * 2)
    assert (client.waiting, client.error) == (0, None), "late responses belong to them"


def test_a_request_that_has_expired_keeps_its_error_when_the_connection_ends() -> None:
    client, (first, second) = _client(2)
    first.deadline = 10.0
    client.expire(11.0)
    expired = first.error
    client.fail(ConnectionLost("lost"))
    assert first.error is expired
    assert type(second.error) is ConnectionLost


def test_the_oldest_pending_request_is_woken_to_read() -> None:
    client, replies = _client(3)
    woken: list[int] = []
    replies[1].wake = lambda: woken.append(1)
    replies[2].wake = lambda: woken.append(2)
    client.wake_next()
    assert woken == [1]
    ClientProtocol().wake_next()


def test_messages_are_returned_in_order_around_responses() -> None:
    client, (reply,) = _client(1)
    data = encode_frame(2, b"a") + _response() + encode_frame(2, b"b")
    assert client.receive_data(data) == [b"a", b"b"]
    assert reply.data == OK


def test_heartbeats_are_answered_and_are_no_response() -> None:
    client, (reply,) = _client(1)
    client.receive_data(_response(HEARTBEAT) * 2 + _response())
    assert client.out == [NOP, NOP]
    assert client.heartbeats == 2
    assert reply.data == OK


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"E_FIN_FAILED FIN [0] failed", FinishFailed),
        (b"E_REQ_FAILED x", RequeueFailed),
        (b"E_TOUCH_FAILED x", TouchFailed),
    ],
)
def test_rejected_acknowledgements_are_no_response(data: bytes, kind: type[Exception]) -> None:
    client, (reply,) = _client(1)
    client.receive_data(_error(data))
    assert [type(notice) for notice in client.notices] == [kind]
    assert not reply.done
    assert client.error is None
    client.receive_data(_error(data) * MAX_NOTICES)
    assert isinstance(client.error, ProtocolError), "unread notices are bounded"


def test_commands_after_a_fatal_error_were_not_read() -> None:
    client, (first, second, third) = _client(3)
    client.receive_data(_error(b"E_TOPIC_NOT_EXIST ") + _response())
    assert isinstance(first.error, TopicNotExist)
    assert client.error is first.error
    for reply in (second, third):
        assert (type(reply.error), reply.data) == (NotSent, None)
        assert reply.error is not None and reply.error.__cause__ is client.error
    assert client.waiting == 0
    assert isinstance(client.loss(), NotSent)


def test_a_lost_connection_leaves_the_outcome_unknown() -> None:
    client, (reply,) = _client(1)
    woken: list[bool] = []
    reply.wake = lambda: woken.append(True)
    client.fail(HeartbeatMissed("silent"))
    assert type(reply.error) is HeartbeatMissed
    assert woken == [True]
    client.fail(ConnectionLost("later"))
    assert type(client.error) is HeartbeatMissed
    assert isinstance(client.loss(), NotSent)
    assert type(client.loss(unsent=False)) is HeartbeatMissed


def test_an_error_without_a_request_ends_the_connection() -> None:
    client, _ = _client()
    client.receive_data(_error(b"E_INVALID RDY count 2501 out of range 0-2500"))
    assert isinstance(client.error, InvalidCommand)
    client, _ = _client()
    client.receive_data(_error(b"too much client connections"))
    assert isinstance(client.error, TooManyConnections)


def test_a_response_without_a_request_ends_the_connection() -> None:
    client, _ = _client()
    client.receive_data(_response(b"surprise"))
    assert isinstance(client.error, ProtocolError)
    assert "response without a request: b'surprise'" in str(client.error)


def test_bytes_of_another_protocol_fail_pending_requests_and_give_a_hint() -> None:
    client, (reply,) = _client(1)
    assert client.receive_data(b"HTTP/1.1 400 Bad Request\r\n\r\n") == []
    assert isinstance(client.error, ProtocolError)
    assert type(reply.error) is ConnectionLost
    assert "give the TCP address of nsqd" in str(reply.error)


def test_messages_before_a_fault_are_kept() -> None:
    client, _ = _client()
    assert client.receive_data(encode_frame(2, b"m") + b"\xff" * 8) == [b"m"]
    assert client.error is not None
    assert client.receive_data(encode_frame(2, b"m")) == []


def test_one_frame_at_a_time_and_heartbeats_between() -> None:
    client, (first, second) = _client(2)
    client.read_ahead(False)
    client.receive_data(_response(HEARTBEAT) * 5000 + _response(b"json") + b"\x01\x02")
    assert client.heartbeats == len(client.out) == 5000
    assert first.data == b"json"
    assert client.take_rest() == b"\x01\x02"
    client.receive_data(_response(b"one") + _response(b"two"))
    assert second.data == b"one"
    client.expect(third := Reply())
    client.read_ahead()
    client.receive_data(b"")
    assert third.data == b"two"
