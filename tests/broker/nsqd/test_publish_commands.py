"""PUB and its variants: the order of the checks, refusals, and answers."""

from __future__ import annotations

from struct import pack

import pytest

from nsqext.broker.engine.storage.partition_store import NewMessage, Stored
from nsqext.broker.nsqd.publish_commands import commit
from nsqext.protocol.frames import decode_trace_reply
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.protocol.server.request_error import RequestError
from tests.support.commands import multi_body, trace_body
from tests.support.nsqd_sessions import Client, Clock, host, make_node, ready_client, sized


def test_a_record_too_long_by_its_extend_part_is_refused_late() -> None:
    node = make_node(limits=ServerLimits(max_msg_size=100))
    host(node, "x", extend=True)
    client = Client(node)
    text = "ErrType:7 ErrCode:0 : invalid message write size (127) maxMsgSize=126"
    assert client.ask(sized("PUB x 0", b"b" * 100)) == f"!E_PUB_FAILED {text}"
    assert client.ask(sized("MPUB x 0", pack(">II", 1, 100) + b"b" * 100)) == f"!E_MPUB_FAILED {text}"
    assert client.open
    assert (node.hosted["x", 0].failed, node.publish_failed) == (2, 2)
    assert client.ask(sized("PUB x 0", b"b" * 99)) == "OK"
    entry = node.hosted["x", 0].partition.log.at(1)
    assert entry is not None
    assert entry.record.internal_id == 4


def test_responses_precede_deliveries_of_the_same_publish() -> None:
    clock = Clock()
    node = make_node(clock)
    host(node)
    client = ready_client(node)
    client.send(sized("PUB t 0", b"a"))
    assert [kind for kind, _ in client.receive()] == [0]
    clock.seconds += 0.05
    node.faults.freeze()
    node.expire_output()
    assert client.receive() == []
    node.faults.thaw()
    node.expire_output()
    assert [kind for kind, _ in client.receive()] == [2], "the response does not take the message along"


@pytest.mark.parametrize("generation", ["redesigned", "original"])
def test_commands_that_arrive_together_are_answered_before_their_messages_are_delivered(generation: str) -> None:
    clock = Clock()
    limits = ServerLimits() if generation == "redesigned" else ServerLimits.original()
    node = make_node(clock, limits=limits, clustered=False)
    host(node).partition.channel("ch")
    client = Client(node)
    client.send(b"SUB t ch\nRDY 5\n" + sized("PUB t", b"a") + sized("PUB t", b"b"))
    clock.seconds += 0.25
    node.expire_output()
    assert [(kind, data[-1:]) for kind, data in client.receive()] == [(0, b"K")] * 3 + [(2, b"a"), (2, b"b")]


def test_a_trace_reply_says_where_the_message_is() -> None:
    node = make_node()
    host(node)
    client = Client(node)
    client.send(sized("PUB_TRACE t 0", trace_body(7, b"abc")))
    ((_, data),) = client.receive()
    assert decode_trace_reply(data, 7) == (2, 7, 0, 33)


@pytest.mark.parametrize(
    ("line", "body", "answer"),
    [
        ("PUB", b"x", "!E_INVALID insufficient number of parameters"),
        ("PUB t zz", b"x", '!E_BAD_PARTITION topic partition is not valid: strconv.Atoi: parsing "zz": invalid syntax'),
        ("PUB t 5", b"x", "!E_TOPIC_NOT_EXIST "),
        ("PUB t 5 more", b"x", "OK"),
        ("PUB other", b"x", "!E_TOPIC_NOT_EXIST "),
        ("PUB t 0", b"", "!E_BAD_BODY invalid body size 0"),
        ("MPUB t 0", multi_body([b"a", b""]), "!E_BAD_MESSAGE MPUB invalid message(1) body size 0"),
        ("DPUB t 5", b"x", "!E_INVALID invalid command [[68 80 85 66] [116] [53]]"),
        ("PUB_EXT t 0", b"\0\x02{}x", "!E_EXT_NOT_SUPPORT ext content not supported in topic t"),
    ],
)
def test_publishes_are_checked_in_the_servers_order(line: str, body: bytes, answer: str) -> None:
    node = make_node()
    host(node)
    client = Client(node)
    assert client.ask(sized(line, body)) == answer
    assert client.open is (answer == "OK" or "EXT_NOT" in answer)


def test_a_publish_without_a_partition_goes_to_the_first_that_the_node_leads() -> None:
    node = make_node()
    led = [host(node, partition=number) for number in range(3)]
    led[0].leader = False
    client = Client(node)
    for line in ("PUB t 2", "PUB t", "MPUB t 2", "MPUB t"):
        assert client.ask(sized(line, multi_body([b"x"]))) == "OK"
    assert [hosted.partition.log.end_count for hosted in led] == [0, 2, 2]


def test_bytes_that_are_not_text_are_unchanged() -> None:
    client = Client(make_node())
    client.send(b"SUB \xff\xfe ch\n")
    ((_, data),) = client.receive()
    assert data == b'E_BAD_TOPIC SUB topic name "\\xff\\xfe" is not valid'


def test_too_many_bytes_that_wait_are_refused_and_close() -> None:
    node = make_node(max_pub_waiting=10)
    hosted = host(node)
    hosted.waiting = 8
    client = Client(node)
    answer = client.ask(sized("PUB t 0", b"four"))
    assert answer == "!E_PUB_TOO_MUCH_WAITING pub too much waiting in the queue: 12"
    assert not client.open


def test_a_batch_leaves_unread_bytes_in_the_stream() -> None:
    node = make_node()
    host(node)
    client = Client(node)
    body = multi_body([b"a"]) + b"NOPE\n"
    client.send(sized("MPUB t 0", body))
    assert [data for _, data in client.receive()] == [b"OK", b"E_INVALID invalid command [[78 79 80 69]]"]


def test_an_unauthorized_client_does_not_learn_what_is_wrong_with_a_body() -> None:
    node = make_node(limits=ServerLimits(auth=True))
    host(node)
    assert Client(node).ask(sized("PUB_TRACE t 0", bytes(8))) == "!E_AUTH_FIRST AUTH required before PUB"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("code", "leader", "answer"),
    [
        ("E_PUB_FAILED", True, "E_FAILED_ON_NOT_WRITABLE"),
        ("E_PUB_FAILED", False, "E_FAILED_ON_NOT_LEADER"),
        ("E_MPUB_FAILED", False, "E_FAILED_ON_NOT_WRITABLE"),
    ],
)
async def test_a_publish_that_was_not_replicated_is_counted_as_failed(code: str, leader: bool, answer: str) -> None:
    async def refuse(_: Stored) -> None:
        raise RequestError("E_FAILED_ON_NOT_WRITABLE", "", fatal=False)

    node = make_node()
    hosted = host(node)
    hosted.replicate = refuse
    hosted.leader = leader
    stored = hosted.partition.put([NewMessage(b"x")])
    with pytest.raises(RequestError, match=answer):
        await commit(node, hosted, stored, hosted.epoch, code)
    assert (hosted.failed, node.publish_failed, hosted.waiting, hosted.partition.readable) == (1, 1, 0, 0)


@pytest.mark.anyio
async def test_a_publish_of_a_node_that_is_killed_before_it_replicates_is_not_acknowledged() -> None:
    """Its leader role ends before its connections do; it answered OK, and the next leader lacked the message."""

    async def replicate(_: Stored) -> None:
        raise AssertionError("it has no role any more")

    node = make_node()
    hosted = host(node)
    hosted.replicate = replicate
    client = Client(node)
    client.session.receive(sized("PUB t", b"x"))
    waiting = client.session.step()
    assert waiting is not None
    hosted.replicate, hosted.leader, hosted.writable = None, False, False
    await waiting
    assert [data for _, data in client.receive()] == [b"E_FAILED_ON_NOT_LEADER "]
    assert hosted.partition.readable == 0
