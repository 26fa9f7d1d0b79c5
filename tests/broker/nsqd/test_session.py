"""The server role of a connection without sockets: bytes in, bytes out."""

from __future__ import annotations

import itertools
from struct import pack

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.broker.fault_injection import NodeFaults
from nsqext.broker.nsqd.commands import REDESIGNED
from nsqext.broker.nsqd.node import Node
from nsqext.broker.nsqd.options import NodeOptions
from nsqext.errors import NsqError
from nsqext.protocol.frames import HEARTBEAT, FrameParser, FrameType, encode_frame
from nsqext.protocol.layers import DeflateLayer
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.protocol.server.request_error import RequestError
from nsqext.protocol.trace_reply import decode_trace_reply
from tests.support.commands import multi_body, trace_body
from tests.support.nsqd_sessions import Client, Clock, host, make_node, sized


def _ready(node: Node, ready: int = 10, channel: str = "ch") -> Client:
    client = Client(node, f"127.0.0.1:{2000 + len(node.sessions)}")
    assert client.ask(f"SUB t {channel} 0\n".encode()) == "OK"
    client.send(b"RDY %d\n" % ready)
    return client


def test_a_wrong_magic_is_refused_without_text() -> None:
    client = Client(make_node(), magic=False)
    assert client.ask(b"GET ") == "!E_BAD_PROTOCOL"
    assert not client.open


def test_a_new_client_has_a_minute_for_the_magic() -> None:
    clock = Clock()
    node = make_node(clock)
    client = Client(node, magic=False)
    client.send(b"  ")
    clock.seconds += 61
    node.tick()
    assert not client.open


def test_too_many_clients_get_an_error_and_are_closed() -> None:
    node = make_node(limits=ServerLimits(max_connections=1))
    first, second = Client(node), Client(node, magic=False)
    assert first.open
    assert second.ask(b"  V2") == "!too much client connections"
    assert not second.open


def _conversation(pieces: list[bytes]) -> list[tuple[int, bytes]]:
    node = make_node()
    host(node)
    client = Client(node, magic=False)
    frames = []
    for piece in pieces:
        client.send(piece)
        frames += client.receive()
    return [(kind, data[8:] if kind == 2 else data) for kind, data in frames]


_BYTES = b"".join(
    (
        b"  V2",
        b"SUB t ch 0\nRDY 5\n",
        sized("PUB t 0", b"one\nPUB"),
        sized("MPUB t", multi_body([b"two", b"three"])),
        b"FIN \0\0\0\0\0\0\0\x02" + bytes(8) + b"\n",
        b"REQ \0\0\0\0\0\0\0\x0a" + b"\n" * 8 + b" 0\n",
        b"NOP\r\n",
        b"BOGUS a b\n",
        sized("PUB t 0", b"never"),
    )
)


@given(st.lists(st.integers(0, len(_BYTES)), max_size=12))
def test_any_chunking_gives_the_same_answers(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(_BYTES)]
    frames = _conversation([_BYTES[start:stop] for start, stop in itertools.pairwise(places)])
    assert frames == _conversation([_BYTES])
    assert frames[-1] == (1, b"E_INVALID invalid command [[66 79 71 85 83] [97] [98]]")


@given(st.binary(max_size=200))
def test_no_bytes_break_a_session(data: bytes) -> None:
    node = make_node()
    host(node)
    client = Client(node)
    client.send(data)
    client.receive()


_WORDS = st.sampled_from(
    [b"t", b"x", b"ch", b"0", b"-1", b"9", b"", b"a!", b"virtual_queue:1", b"special:-1", b"\xff", b"5"]
)
_VERBS = st.sampled_from(sorted(REDESIGNED.commands)) | st.just(b"DPUB") | st.binary(max_size=6)
_BODIES = st.binary(max_size=30) | st.sampled_from(
    [
        b'{"extend_support":true}',
        b'{"feature_negotiation":true,"snappy":true}',
        multi_body([b"a", b"\0\x02{}b"]),
        b"\0\x02{}b",
    ]
)


def test_a_record_too_long_by_its_extend_part_is_refused_late() -> None:
    node = make_node(limits=ServerLimits(max_msg_size=100))
    host(node, "x", extend=True)
    client = Client(node)
    text = "ErrType:7 ErrCode:0 : invalid message write size (127) maxMsgSize=126"
    assert client.ask(sized("PUB x 0", b"b" * 100)) == f"!E_PUB_FAILED {text}"
    assert client.ask(sized("MPUB x 0", pack(">II", 1, 100) + b"b" * 100)) == f"!E_MPUB_FAILED {text}"
    assert client.open
    assert client.ask(sized("PUB x 0", b"b" * 99)) == "OK"
    entry = node.hosted["x", 0].partition.log.at(1)
    assert entry is not None
    assert entry.record.internal_id == 4


@given(st.lists(st.tuples(_VERBS, st.lists(_WORDS, max_size=5), st.none() | _BODIES), max_size=8))
def test_no_commands_break_a_session(commands: list[tuple[bytes, list[bytes], bytes | None]]) -> None:
    node = make_node()
    host(node)
    host(node, "x", extend=True)
    client = Client(node)
    for verb, words, body in commands:
        data = b" ".join([verb, *words]) + b"\n" + (b"" if body is None else pack(">I", len(body)) + body)
        try:
            client.session.receive(data)
        except NsqError:
            break  # bytes that do not belong to the negotiated layer
        client.session.step()
        client.session.take()
    client.session.end()


def test_responses_precede_deliveries_of_the_same_publish() -> None:
    node = make_node()
    host(node)
    client = _ready(node)
    client.send(sized("PUB t 0", b"a"))
    assert [kind for kind, _ in client.receive()] == [0, 2]


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


def test_bytes_that_are_not_text_are_unchanged() -> None:
    client = Client(make_node())
    client.send(b"SUB \xff\xfe ch\n")
    ((_, data),) = client.receive()
    assert data == b'E_BAD_TOPIC SUB topic name "\\xff\\xfe" is not valid'


def test_a_follower_refuses_publishes_and_stays_open() -> None:
    node = make_node()
    hosted = host(node)
    hosted.leader = False
    client = Client(node)
    assert client.ask(sized("PUB t 0", b"x")) == "!E_FAILED_ON_NOT_LEADER "
    assert client.open
    assert client.ask(b"SUB t ch 0\n") == "!E_FAILED_ON_NOT_LEADER "
    assert not client.open


def test_a_leader_without_majority_refuses_publishes_and_consumers() -> None:
    node = make_node()
    hosted = host(node)
    hosted.writable = False
    client = Client(node)
    assert client.ask(sized("MPUB t 0", multi_body([b"x"]))) == "!E_FAILED_ON_NOT_WRITABLE "
    assert client.ask(b"SUB t ch 0\n") == "!E_FAILED_ON_NOT_WRITABLE "
    assert not client.open


def test_writes_that_are_switched_off_are_answered_as_by_a_follower() -> None:
    node = make_node()
    host(node)
    host(node, "o", ordered=True)
    client = Client(node)
    node.switches.write_disabled = "ordered"
    assert client.ask(sized("PUB o 0", b"x")) == "!E_FAILED_ON_NOT_LEADER "
    assert client.ask(sized("PUB t 0", b"x")) == "OK"
    node.switches.write_disabled = "all"
    assert client.ask(sized("PUB t 0", b"x")) == "!E_FAILED_ON_NOT_LEADER "


def test_too_many_bytes_that_wait_are_refused_and_close() -> None:
    node = make_node(max_pub_waiting=10)
    hosted = host(node)
    hosted.waiting = 8
    client = Client(node)
    answer = client.ask(sized("PUB t 0", b"four"))
    assert answer == "!E_PUB_TOO_MUCH_WAITING pub too much waiting in the queue: 12"
    assert not client.open


def test_a_node_that_drains_refuses_publishes() -> None:
    node = make_node()
    host(node)
    node.exiting = True
    client = Client(node)
    assert client.ask(sized("PUB t 0", b"x")) == "!E_PUB_FAILED exiting"
    assert client.ask(sized("MPUB t 0", multi_body([b"x"]))) == "!E_MPUB_FAILED exiting"
    assert client.open


def test_a_batch_leaves_unread_bytes_in_the_stream() -> None:
    node = make_node()
    host(node)
    client = Client(node)
    body = multi_body([b"a"]) + b"NOPE\n"
    client.send(sized("MPUB t 0", body))
    assert [data for _, data in client.receive()] == [b"OK", b"E_INVALID invalid command [[78 79 80 69]]"]


def test_ready_is_a_window() -> None:
    node = make_node()
    host(node)
    consumer, producer = _ready(node, 1), Client(node)
    for body in (b"a", b"b"):
        assert producer.ask(sized("PUB t 0", body)) == "OK"
    (first,) = consumer.messages()
    consumer.send(b"FIN " + first[10:26] + b"\n")
    (second,) = consumer.messages()
    assert first.endswith(b"a")
    assert second.endswith(b"b")


def test_messages_of_a_client_are_delivered_to_the_next() -> None:
    node = make_node()
    host(node)
    consumer, producer = _ready(node, 1), Client(node)
    producer.ask(sized("PUB t 0", b"a"))
    assert len(consumer.messages()) == 1
    consumer.session.end()
    (again,) = _ready(node, 1).messages()
    assert again[8:10] == b"\0\x01"


def test_a_deleted_channel_closes_its_clients_without_an_error_frame() -> None:
    node = make_node()
    hosted = host(node)
    consumer = _ready(node)
    hosted.partition.delete_channel("ch")
    assert consumer.session.closed
    assert consumer.receive() == []


def test_a_removed_partition_closes_its_clients() -> None:
    node = make_node()
    host(node)
    consumer, producer = _ready(node), Client(node)
    node.unhost("t", 0)
    assert consumer.session.closed
    assert producer.ask(sized("PUB t 0", b"x")) == "!E_TOPIC_NOT_EXIST "


def test_heartbeats_are_sent_and_three_missed_ones_end_the_connection() -> None:
    clock = Clock()
    node = make_node(clock)
    client = Client(node)
    client.send(sized("IDENTIFY", b'{"heartbeat_interval":1000}'))
    assert client.receive() == [(0, b"OK")]
    for _ in range(2):
        clock.seconds += 1
        node.tick()
        assert client.receive() == [(0, HEARTBEAT)]
    client.send(b"NOP\n")
    clock.seconds += 2.9
    node.tick()
    assert client.open
    clock.seconds += 0.2
    node.tick()  # sends the heartbeat that was due before
    node.tick()
    assert not client.open


def test_heartbeats_can_be_switched_off_for_publishers() -> None:
    clock = Clock()
    node = make_node(clock)
    client = Client(node)
    client.send(sized("IDENTIFY", b'{"heartbeat_interval":-1}'))
    assert client.receive() == [(0, b"OK")]
    clock.seconds += 500
    node.tick()
    assert client.open
    assert client.receive() == []
    assert client.ask(b"SUB t ch\n") == "!E_INVALID cannot SUB with heartbeats disabled"


def _buffered(**fields: int) -> tuple[Clock, Node, Client, Client]:
    clock = Clock()
    node = make_node(clock)
    host(node)
    consumer = Client(node)
    body = b"{%s}" % ",".join(f'"{name}":{value}' for name, value in fields.items()).encode()
    consumer.send(sized("IDENTIFY", body) + b"SUB t ch 0\nRDY 5\n")
    assert len(consumer.receive()) == 2
    return clock, node, consumer, Client(node)


def test_messages_wait_in_the_output_buffer_as_long_as_negotiated() -> None:
    clock, node, consumer, producer = _buffered(output_buffer_timeout=500, output_buffer_size=16384)
    producer.ask(sized("PUB t 0", b"a"))
    clock.seconds += 0.4
    node.tick()
    assert consumer.messages() == []
    clock.seconds += 0.2
    node.tick()
    assert len(consumer.messages()) == 1


def test_a_full_buffer_a_full_window_and_any_answer_flush() -> None:
    _, _, consumer, producer = _buffered(output_buffer_timeout=1000, output_buffer_size=64)
    producer.ask(sized("PUB t 0", b"a" * 40))
    assert len(consumer.messages()) == 1
    _, _, consumer, producer = _buffered(output_buffer_timeout=1000, output_buffer_size=16384)
    for _ in range(4):
        producer.ask(sized("PUB t 0", b"a"))
    assert consumer.messages() == []
    producer.ask(sized("PUB t 0", b"a"))
    assert len(consumer.messages()) == 5
    _, _, consumer, producer = _buffered(output_buffer_timeout=1000, output_buffer_size=16384)
    producer.ask(sized("PUB t 0", b"a"))
    consumer.send(sized("PUB t 0", b"b"))
    assert [kind for kind, _ in consumer.receive()] == [2, 0, 2]


def test_a_choked_client_gets_nothing_until_it_has_read() -> None:
    node = make_node()
    host(node)
    consumer, producer = _ready(node, 100), Client(node)
    consumer.session.choke()
    producer.ask(sized("PUB t 0", b"a"))
    assert consumer.messages() == []
    consumer.send(b"RDY 1\n")
    assert consumer.messages() == []
    consumer.session.relieve()
    assert len(consumer.messages()) == 1


def test_a_client_with_much_unread_output_is_choked() -> None:
    node = make_node()
    hosted = host(node)
    consumer, producer = _ready(node, 0), Client(node)
    for _ in range(10):
        producer.ask(sized("PUB t 0", b"x" * 1_000_000))
    consumer.send(b"RDY 100\n")
    assert len(consumer.messages()) < 10
    consumer.session.relieve()
    consumer.session.relieve()
    assert consumer.messages()
    assert hosted.partition.channels["ch"].stats().in_flight_count <= 10


def test_deflate_begins_behind_the_reply() -> None:
    node = make_node()
    host(node)
    session = Client(node).session
    session.receive(sized("IDENTIFY", b'{"feature_negotiation":true,"deflate":true,"deflate_level":3}'))
    assert session.step() is None
    data = session.take()
    size = 4 + int.from_bytes(data[:4], "big")
    assert b'"deflate":true' in data[:size]
    layer = DeflateLayer(3)
    assert layer.decode(data[size:]) == encode_frame(0, b"OK")
    session.receive(layer.encode(sized("PUB t 0", b"x") + b"BOGUS\n"))
    assert session.step() is None
    assert layer.decode(session.take()).startswith(encode_frame(0, b"OK"))
    assert session.closing


def test_an_injected_error_is_answered_instead_of_running_the_command() -> None:
    faults = NodeFaults()
    node = Node("n1", NodeOptions(), faults)
    hosted = host(node)
    client = Client(node)
    faults.answer(RequestError("E_PUB_FAILED", "broken", fatal=False), 1, "PUB")
    assert client.ask(sized("PUB t 0", b"x")) == "!E_PUB_FAILED broken"
    assert client.ask(sized("PUB t 0", b"x")) == "OK"
    assert hosted.partition.log.end_count == 1


def test_a_node_without_cluster_creates_topics_on_command() -> None:
    node = make_node(clustered=False)
    client = Client(node)
    assert client.ask(b"INTERNAL_CREATE_TOPIC new 1 true\n") == "OK"
    assert node.hosted["new", 1].partition.extend
    assert client.ask(b"INTERNAL_CREATE_TOPIC new -1\n") == "!E_BAD_PARTITION partition should not less than 0"


def test_fin_errors_of_a_standalone_node_lack_the_coordinators_text() -> None:
    node = make_node(clustered=False)
    host(node)
    client = _ready(node)
    text = client.ask(b"FIN " + pack(">QQ", 5, 0) + b"\n")
    assert text == "!E_FIN_FAILED FIN [0 0 0 0 0 0 0 5 0 0 0 0 0 0 0 0] failed Message ID not in flight"


def test_the_first_channel_on_a_node_on_its_own_begins_at_the_last_flush() -> None:
    clock = Clock()
    node = make_node(clock, clustered=False, flush_interval=1.0)
    host(node)
    producer = Client(node)
    producer.ask(sized("PUB t 0", b"flushed"))
    node.tick()
    producer.ask(sized("PUB t 0", b"fresh"))
    assert [data[26:] for data in _ready(node, 1).messages()] == [b"fresh"]
    assert _ready(node, 1, "second").messages() == []


def _identify(client: Client, **fields: object) -> None:
    assert client.ask(sized("IDENTIFY", orjson.dumps(fields))) == "OK"


def test_deliveries_follow_the_first_identify() -> None:
    clock = Clock()
    node = make_node(clock)
    host(node)
    client = Client(node)
    _identify(client, msg_timeout=60_000)
    _identify(client, msg_timeout=1000)
    client.ask(b"SUB t ch 0\n")
    client.send(b"RDY 1\n" + sized("PUB t 0", b"one"))
    (message,) = [data for kind, data in client.receive() if kind == FrameType.MESSAGE]
    clock.seconds += 30
    node.tick()
    assert [data for kind, data in client.receive() if kind == FrameType.MESSAGE] == []
    client.send(b"TOUCH " + message[10:26] + b"\n")
    clock.seconds += 1.1
    node.tick()
    (again,) = client.messages()
    assert again[8:10] == b"\0\x02"


def test_revoked_sampling_does_not_forbid_order() -> None:
    node = make_node()
    host(node)
    client = Client(node)
    _identify(client, sample_rate=1)
    _identify(client, sample_rate=0)
    assert client.ask(b"SUB_ORDERED t ch 0\n") == "OK"
    other = Client(node)
    _identify(other, sample_rate=0)
    _identify(other, sample_rate=1)
    assert other.ask(b"SUB_ORDERED t ch 0\n") == "!E_INVALID order consume is not allowed while sample rate is not 0"


def test_a_client_that_adds_extend_support_later_receives_no_messages_and_no_heartbeats() -> None:
    clock = Clock()
    node = make_node(clock)
    host(node, extend=True)
    client = Client(node)
    _identify(client, heartbeat_interval=1000)
    _identify(client, heartbeat_interval=1000, extend_support=True)
    assert client.ask(b"SUB t ch 0\n") == "OK"
    client.send(b"RDY 1\n")
    assert Client(node).ask(sized("PUB t 0", b"one")) == "OK"
    for _ in range(3):
        assert client.open
        clock.seconds += 1
        node.tick()
    assert client.receive() == []
    assert not client.open


def test_a_delay_counts_in_64_bits() -> None:
    clock = Clock()
    node = make_node(clock)
    host(node)
    client = _ready(node, ready=1)
    client.send(sized("PUB t 0", b"one"))
    (message,) = [data for kind, data in client.receive() if kind == FrameType.MESSAGE]
    client.send(b"REQ " + message[10:26] + b" 18446744073710\n")
    clock.seconds += 0.01
    node.tick()
    (again,) = client.messages()
    assert again[8:10] == b"\0\x02"


@pytest.mark.parametrize(
    ("sent", "refusal"),
    [
        (b"IDENTIFY\n\0", "E_BAD_BODY IDENTIFY failed to read body size"),
        (b"IDENTIFY\n\0\0\0\x14{", "E_BAD_BODY IDENTIFY failed to read body"),
        (b"AUTH\n", "E_BAD_BODY AUTH failed to read body size"),
        (b"AUTH\n\0\0\0\5a", "E_BAD_BODY AUTH failed to read body"),
        (b"PUB t 0\n\0\0", "E_BAD_BODY failed to read body size"),
        (b"PUB t 0\n\0\0\0\5ab", "E_BAD_MESSAGE failed to read message body"),
        (b"MPUB t 0\n\0\0\0\x14\0", "E_BAD_BODY MPUB failed to read message count"),
        (
            b"MPUB t 0\n\0\0\0\x14\0\0\0\2\0\0\0\1a",
            "E_BAD_MESSAGE MPUB failed to read message(1) body size",
        ),
        (b"MPUB t 0\n\0\0\0\x14\0\0\0\2\0\0\0\5a", "E_BAD_MESSAGE MPUB failed to read message body"),
    ],
)
def test_a_body_that_is_cut_off_is_refused(sent: bytes, refusal: str) -> None:
    node = make_node()
    host(node)
    client = Client(node)
    client.send(sent)
    client.session.no_more()
    assert client.receive() == [(FrameType.ERROR, refusal.encode())]
    assert not client.open


@pytest.mark.parametrize("sent", [b"", b"PUB t", b"NOP\n", b"FIN 1234"])
def test_no_error_without_a_truncated_body(sent: bytes) -> None:
    client = Client(make_node())
    client.send(sent)
    client.session.no_more()
    assert client.receive() == []


def test_messages_of_an_ordered_channel_are_not_buffered() -> None:
    node = make_node()
    host(node, ordered=True)
    client = Client(node)
    assert client.ask(b"SUB_ORDERED t ch 0\n") == "OK"
    client.send(b"RDY 5\n")
    assert Client(node).ask(sized("PUB t 0", b"one")) == "OK"
    assert len(client.messages()) == 1


@pytest.mark.parametrize("limits", [ServerLimits(), ServerLimits.original()], ids=["redesigned", "original"])
@pytest.mark.parametrize("deflate", [False, True])
def test_the_answer_to_sub_leaves_alone_before_the_first_message(limits: ServerLimits, deflate: bool) -> None:
    node = make_node(limits=limits)
    if limits.generation == "ha":
        host(node).partition.channel("ch")
    Client(node).ask(sized("PUB t", b"first"))
    client = Client(node)
    layer = DeflateLayer()
    if deflate:
        client.send(sized("IDENTIFY", orjson.dumps({"feature_negotiation": True, "deflate": True})))
        first = client.writes()
        assert len(FrameParser().feed(first[0][: first[0].index(b"}") + 1])) == 1
        layer.decode(first[0][first[0].index(b"}") + 1 :])
    client.send(layer.encode(b"SUB t ch\nRDY 1\n") if deflate else b"SUB t ch\nRDY 1\n")
    writes = [layer.decode(data) if deflate else data for data in client.writes()]
    assert writes[0] == encode_frame(FrameType.RESPONSE, b"OK")
    assert [kind for kind, _ in FrameParser().feed(b"".join(writes[1:]))] == [FrameType.MESSAGE]


def test_snappy_is_not_offered_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = sized("IDENTIFY", orjson.dumps({"feature_negotiation": True, "snappy": True}))
    offering = Client(make_node())
    offering.send(asked)
    assert b'"snappy":true' in offering.writes()[0]
    monkeypatch.setattr("nsqext.broker.nsqd.node.find_spec", lambda _: None)
    client = Client(make_node())
    assert orjson.loads(client.ask(asked))["snappy"] is False
    assert client.open


def test_one_turn_of_a_connection_runs_a_bounded_number_of_commands() -> None:
    node = make_node()
    host(node)
    client = Client(node)
    command = sized("PUB t", b"x")
    client.session.receive(command * 5000)
    turns, answered = 0, 0
    while client.session.pending or not turns:
        assert client.session.step() is None
        turns += 1
        more = len(client.receive())
        assert more <= 256
        answered += more
    assert (answered, turns) == (5000, 20)


def test_commands_wait_while_replies_are_not_read() -> None:
    node = make_node(max_unsent=10_000)
    host(node)
    client = Client(node)
    client.ask(b"SUB t ch\n")
    client.session.receive(b"FIN 0123456789abcdef\n" * 2000)
    assert client.session.step() is None
    assert client.session.pending
    assert client.session.output.size < 10_000 + 300
    received = 0
    while client.session.pending:
        received += len(client.receive())
        client.session.step()
    assert received + len(client.receive()) == 2000
