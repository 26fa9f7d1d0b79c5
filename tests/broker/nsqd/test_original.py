"""The original generation: its commands, its ids, its HTTP API."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nsqext.protocol.frames import HEARTBEAT
from nsqext.protocol.tls_layer import TlsLayer
from tests.support.commands import multi_body
from tests.support.nsqd_sessions import Client, Clock, make_node, make_original, sized
from tests.support.nsqd_sessions import web as web_of

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node

pytestmark = pytest.mark.anyio

_LEVELS = (b"fatal", b"error", b"warn", b"info", b"debug")


def _consumer(node: Node, topic: str = "t", ready: int = 10) -> Client:
    client = Client(node, f"127.0.0.1:{3000 + len(node.sessions)}")
    assert client.ask(b"SUB %b ch\n" % topic.encode()) == "OK"
    client.send(b"RDY %d\n" % ready)
    return client


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (sized("PUB", b"x"), "!E_INVALID PUB insufficient number of parameters"),
        (sized("PUB b!", b"x"), '!E_BAD_TOPIC PUB topic name "b!" is not valid'),
        (sized("PUB t", b""), "!E_BAD_MESSAGE PUB invalid message body size 0"),
        (b"PUB t\n\0\x10\0\1", "!E_BAD_MESSAGE PUB message too big 1048577 > 1048576"),
        (sized("MPUB b!", b"x"), '!E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "b!" is not valid'),
        (b"MPUB t\n\0\x50\0\1", "!E_BAD_BODY MPUB body too big 5242881 > 5242880"),
        (sized("MPUB t", multi_body([b""])), "!E_BAD_MESSAGE MPUB invalid message(0) body size 0"),
        (sized("DPUB t", b"x"), "!E_INVALID DPUB insufficient number of parameters"),
        (sized("DPUB t x", b"x"), "!E_INVALID DPUB could not parse timeout x"),
        (sized("DPUB t 3600001", b"x"), "!E_INVALID DPUB timeout 3600001 out of range 0-3600000"),
        (
            sized("DPUB t 18446744073709551615", b"x"),
            "!E_INVALID DPUB timeout 18446744073709551615 out of range 0-3600000",
        ),
        (b"PUB_TRACE t\n", "!E_INVALID invalid command PUB_TRACE"),
        (b"SUB_ORDERED t c\n", "!E_INVALID invalid command SUB_ORDERED"),
        (b"SUB t\n", "!E_INVALID SUB insufficient number of parameters"),
        (b"FIN 0123456789abcdef\n", "!E_INVALID cannot FIN in current state"),
        (sized("AUTH", b"x"), "!E_AUTH_DISABLED AUTH disabled"),
    ],
)
def test_refusals_are_fatal_and_worded_as_the_originals(data: bytes, answer: str) -> None:
    client = Client(make_original())
    assert client.ask(data) == answer
    assert not client.open


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (b"FIN 0123456789abcdef\n", "!E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight"),
        (b"REQ 0123456789abcdef 5\n", "!E_REQ_FAILED REQ 0123456789abcdef failed ID not in flight"),
        (b"TOUCH zzzzzzzzzzzzzzzz\n", "!E_TOUCH_FAILED TOUCH zzzzzzzzzzzzzzzz failed ID not in flight"),
        (b"FIN short\n", "!E_INVALID invalid message ID"),
        (b"FIN\n", "!E_INVALID FIN insufficient number of params"),
        (b"REQ 0123456789abcdef\n", "!E_INVALID REQ insufficient number of params"),
        (b"REQ 0123456789abcdef x\n", "!E_INVALID REQ could not parse timeout x"),
        (b"SUB t ch\n", "!E_INVALID cannot SUB in current state"),
    ],
)
def test_acknowledgements_that_fail(line: bytes, answer: str) -> None:
    client = _consumer(make_original())
    assert client.ask(line) == answer
    assert client.open is ("FAILED" in answer)


def test_an_id_in_capital_letters_names_no_message() -> None:
    client = _consumer(make_original(), ready=1)
    assert Client(client.session.node).ask(sized("PUB t", b"x")) == "OK"
    (message,) = client.messages()
    wire_id = message[10:26].upper()
    assert wire_id != message[10:26]
    for verb, end in ((b"FIN", b""), (b"TOUCH", b""), (b"REQ", b" 0")):
        wanted = f"!E_{verb.decode()}_FAILED {verb.decode()} {wire_id.decode()} failed ID not in flight"
        assert client.ask(verb + b" " + wire_id + end + b"\n") == wanted


def test_topics_are_created_on_first_use_and_registered() -> None:
    node = make_original()
    expected: list[Any] = []
    node.on_topic_created = expected.append
    node.on_channel_created = lambda *names: expected.append(names)
    client = Client(node)
    assert client.ask(sized("PUB new", b"x")) == "OK"
    assert client.ask(b"SUB other ch\n") == "OK"
    assert expected == ["new", "other", ("other", 0, "ch")]


@pytest.mark.parametrize("rest", [b"", b"\0\0\0\0", sized("", multi_body([b""]))[1:]])
def test_mpub_creates_its_topic_before_the_body_is_read(rest: bytes) -> None:
    node = make_original()
    Client(node).send(b"MPUB t\n" + rest)
    assert ("t", 0) in node.hosted


def test_channels_take_no_more_consumers_than_allowed() -> None:
    node = make_original(limits={"max_channel_consumers": 1})
    _consumer(node)
    client = Client(node)
    assert client.ask(b"SUB t ch\n") == "!E_SUB_FAILED SUB failed consumers for t:ch exceeds limit of 1"


@pytest.mark.parametrize("line", ["PUB t", "DPUB t 1", "MPUB t"])
def test_a_publish_that_cannot_be_stored_is_refused_by_its_name(line: str) -> None:
    node = make_original(memory_bound=1)
    client, verb = Client(node), line.split()[0]
    node.create_topic("t").partition.channel("ch")
    assert client.ask(sized("PUB t", b"x")) == "OK"
    answer = client.ask(sized(line, multi_body([b"x"])))
    assert answer.startswith(f"!E_{verb}_FAILED {verb} failed topic t ")
    assert not client.open


def test_ephemeral_topics_end_with_their_last_channel() -> None:
    node = make_original()
    expected: list[Any] = []
    node.on_topic_deleted = expected.append
    client = Client(node)
    client.ask(b"SUB e#ephemeral c#ephemeral\n")
    client.session.end()
    assert node.hosted == {}
    assert expected == ["e#ephemeral"]


async def test_messages_that_wait_in_an_ephemeral_topic_are_dropped_beyond_its_memory() -> None:
    """Counted, as by the real server."""
    node = make_original(mem_queue_size=3)
    publisher = Client(node)
    for number in range(3):
        batch = multi_body([b"%d" % number, b"dropped, from the second on"])
        assert publisher.ask(sized("MPUB e#ephemeral", batch)) == "OK"
    assert publisher.ask(sized("DPUB e#ephemeral 1000", b"dropped")) == "OK"
    answer = await web_of(node).get("/stats?format=json&topic=e%23ephemeral")
    (topic,) = answer.json()["topics"]
    assert (topic["depth"], topic["backend_depth"], topic["message_count"]) == (3, 0, 7)
    consumer = _consumer(node, "e#ephemeral", ready=4)
    assert publisher.ask(sized("PUB e#ephemeral", b"last")) == "OK"
    assert [data[26:] for data in consumer.messages()] == [b"0", b"dropped, from the second on", b"1", b"last"]


def test_a_restarted_node_has_no_ephemeral_topic() -> None:
    node = make_original()
    node.channel(node.create_topic("e#ephemeral"), "ch")
    node.create_topic("t")
    node.restart()
    assert list(node.hosted) == [("t", 0)]


@pytest.mark.parametrize("data", [b"SUB t ch\n", sized("PUB t", b"x"), sized("MPUB t", multi_body([b"x"]))])
def test_an_unauthorized_client_creates_no_topic(data: bytes) -> None:
    node = make_original(limits={"auth": True})
    assert Client(node).ask(data) == f"!E_AUTH_FIRST AUTH required before {data.split()[0].decode()}"
    assert node.hosted == {}


def test_silent_clients_have_two_intervals_and_the_magic_has_no_limit() -> None:
    clock = Clock()
    node = make_original(clock)
    client, waiting = Client(node), Client(node, magic=False)
    assert client.ask(sized("IDENTIFY", b'{"heartbeat_interval":1000}')) == "OK"
    clock.seconds += 0.01
    client.send(b"NOP\n")
    for _ in range(2):
        clock.seconds += 1.005
        node.tick()
        assert client.receive() == [(0, HEARTBEAT)]
    node.tick()
    assert not client.open
    clock.seconds += 1000
    node.tick()
    assert waiting.open


def test_topics_are_found_again_on_the_disk(tmp_path: Any) -> None:
    clock = Clock()
    node = make_original(clock, data_path=tmp_path)
    Client(node).ask(sized("PUB t", b"kept"))
    (message,) = _consumer(node, ready=1).messages()
    node.unhost("t", 0)
    clock.seconds += 1
    again = make_original(clock, data_path=tmp_path)
    again.load()
    (found,) = _consumer(again, ready=1).messages()
    assert found[10:] == message[10:], "its id too"
    assert again.delete_topic("t")
    gone = make_original(data_path=tmp_path)
    gone.load()
    assert gone.hosted == {}


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/pub?topic=t", b"", 400, "MSG_EMPTY"),
        ("/pub", b"x", 400, "MISSING_ARG_TOPIC"),
        ("/pub?topic=", b"x", 400, "INVALID_TOPIC"),
        ("/pub?topic=t&defer=x", b"x", 400, "INVALID_DEFER"),
        ("/pub?topic=t&defer=3600001", b"x", 400, "INVALID_DEFER"),
        ("/pub?topic=t", b"x" * 101, 413, "MSG_TOO_BIG"),
        ("/mpub?topic=t", b"x" * 1001, 413, "BODY_TOO_BIG"),
        ("/mpub?topic=t&binary=true", b"\0\0\0\0", 413, "BAD_BODY"),
        ("/topic/delete?topic=none", b"", 404, "TOPIC_NOT_FOUND"),
        ("/topic/empty?topic=b!", b"", 400, "INVALID_TOPIC"),
        ("/topic/pause", b"", 400, "MISSING_ARG_TOPIC"),
        ("/channel/create?topic=none&channel=c", b"", 404, "TOPIC_NOT_FOUND"),
        ("/channel/create?topic=b!&channel=c", b"", 400, "INVALID_ARG_TOPIC"),
        ("/channel/create?topic=none", b"", 400, "MISSING_ARG_CHANNEL"),
        ("/channel/create?topic=none&channel=", b"", 400, "INVALID_ARG_CHANNEL"),
    ],
)
async def test_http_refusals(path: str, body: bytes, status: int, text: str) -> None:
    web = web_of(make_original(limits={"max_msg_size": 100, "max_body_size": 1000}))
    answer = await web.post(path, content=body)
    assert (answer.status_code, answer.text) == (status, f'{{"message":"{text}"}}')


async def test_a_topic_is_created_before_the_delay_of_its_message_is_read() -> None:
    node = make_original()
    answer = await web_of(node).post("/pub?topic=t&defer=x", content=b"x")
    assert (answer.status_code, list(node.hosted)) == (400, [("t", 0)])


async def test_topics_and_channels_over_http() -> None:
    node = make_original()
    web = web_of(node)
    for path in ("/topic/create?topic=t", "/topic/pause?topic=t", "/channel/create?topic=t&channel=c"):
        answer = await web.post(path)
        assert (answer.status_code, answer.text) == (200, "")
    assert (await web.post("/pub?topic=t", content=b"x")).text == "OK"
    assert (await web.post("/mpub?topic=t", content=b"a\n\nb")).text == "OK"
    assert (await web.post("/mpub?topic=t&binary=false", content=b"c")).text == "OK"
    (topic,) = (await web.get("/stats?format=json&topic=t")).json()["topics"]
    assert (topic["depth"], topic["message_count"], topic["message_bytes"], topic["paused"]) == (4, 4, 4, True)
    await web.post("/topic/empty?topic=t")
    await web.post("/pub?topic=t", content=b"y")
    await web.post("/topic/unpause?topic=t")
    (topic,) = (await web.get("/stats?format=json")).json()["topics"]
    assert topic["channels"][0]["depth"] == 1
    await web.post("/channel/empty?topic=t&channel=c")
    await web.post("/channel/pause?topic=t&channel=c")
    text = (await web.get("/stats?include_mem=false")).text
    assert "   [t              ] depth: 0     be-depth: 0     msgs: 5        e2e%: \n" in text
    assert "   *P [c                        ] depth: 0     " in text
    for defer in (0, 3600000):
        assert (await web.post(f"/pub?topic=t&defer={defer}", content=b"late")).text == "OK"
    assert (await web.post("/channel/delete?topic=t&channel=no")).json() == {"message": "CHANNEL_NOT_FOUND"}
    assert (await web.post("/topic/delete?topic=t")).status_code == 200
    answer = (await web.get("/stats?format=json&topic=t&include_mem=0")).json()
    assert (answer["topics"], answer["producers"], "memory" in answer) == (None, None, False)


async def test_stats_list_consumers_and_producers() -> None:
    node = make_original()
    web = web_of(node)
    consumer, producer = _consumer(node, ready=1), Client(node, "10.0.0.1:7")
    producer.ask(sized("PUB t", b"a"))
    consumer.messages()
    (found,) = (await web.get("/stats?format=json&topic=t")).json()["producers"]
    received = ("ready_count", "in_flight_count", "message_count", "finish_count", "requeue_count")
    assert [found[name] for name in received] == [0] * 5
    assert not (await web.get("/stats?format=json&topic=t&channel=other")).json()["topics"]
    for others in ("topic=t&include_clients=false", "topic=other"):
        assert (await web.get(f"/stats?format=json&{others}")).json()["producers"] is None
    assert (found["client_id"], found["pub_counts"]) == ("10.0.0.1", [{"topic": "t", "count": 1}])
    text = (await web.get("/stats")).text
    assert "   [V2 10.0.0.1:7           ] msgs: 1        topics: t=1 connected: 0s\n" in text
    assert "heap_objects" in text


async def test_a_consumer_shows_what_it_publishes_to_other_topics_unless_one_is_asked_for() -> None:
    node = make_original()
    web, consumer = web_of(node), _consumer(node, ready=0)
    consumer.ask(sized("PUB other", b"a"))

    async def counts(query: str) -> object:
        topics = (await web.get(f"/stats?format=json{query}")).json()["topics"]
        (client,) = next(topic["channels"][0]["clients"] for topic in topics if topic["topic_name"] == "t")
        return client.get("pub_counts")

    assert await counts("") == [{"topic": "other", "count": 1}]
    assert await counts("&topic=t") is None


async def test_stats_of_a_consumer_that_also_publishes_are_the_same_in_both_lists() -> None:
    node = make_original()
    web = web_of(node)
    consumer = _consumer(node, ready=1)
    consumer.send(sized("PUB t", b"a"))
    answer = (await web.get("/stats?format=json&topic=t")).json()
    (found,) = answer["producers"]
    assert (found["state"], found["ready_count"], found["in_flight_count"], found["message_count"]) == (3, 1, 1, 1)
    assert answer["topics"][0]["channels"][0]["clients"] == [found]


async def test_a_channel_that_is_created_again_counts_its_deliveries_from_zero() -> None:
    node = make_original()
    web = web_of(node)
    consumer, producer = _consumer(node, ready=1), Client(node, "10.0.0.1:7")
    producer.ask(sized("PUB t", b"a"))
    consumer.messages()
    for path in ("/channel/delete?topic=t&channel=ch", "/channel/create?topic=t&channel=ch"):
        assert (await web.post(path)).status_code == 200
    (channel,) = (await web.get("/stats?format=json&topic=t")).json()["topics"][0]["channels"]
    assert "global_msg_count" not in channel
    producer.ask(sized("PUB t", b"b"))
    _consumer(node, ready=1).messages()
    for hosted in node.hosted.values():
        assert hosted.deliveries == {"ch": 1}
        node.restart()
        assert hosted.deliveries == {}


async def test_a_topic_that_the_disk_does_not_take_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").touch()  # where its folder would be
    node = make_original(data_path=tmp_path)
    reason = f"{tmp_path / 't'} cannot be used: File exists: choose another data path, or make room on its disk"
    batch = sized("MPUB t", multi_body([b"x"]))
    for verb, command in (("PUB", sized("PUB t", b"x")), ("SUB", b"SUB t ch\n"), ("MPUB", batch)):
        assert Client(node).ask(command) == f"!E_{verb}_FAILED {verb} failed {reason}"
    alone = Client(make_node(clustered=False, data_path=tmp_path))
    assert alone.ask(b"INTERNAL_CREATE_TOPIC t 0\n") == f"!E_CREATE_TOPIC_FAILED {reason}"
    web = web_of(node)
    for path in ("/pub?topic=t", "/mpub?topic=t", "/topic/create?topic=t"):
        answer = await web.post(path, content=b"x")
        assert (answer.status_code, answer.json()) == (500, {"message": reason})
    assert node.hosted == {}


async def test_info_ping_and_options() -> None:
    node = make_original(limits={"max_rdy_count": 7})
    web = web_of(node)
    assert (await web.get("/ping")).text == "OK"
    info = (await web.get("/info")).json()
    assert (info["tcp_port"], info["max_heartbeat_interval"], info["max_deflate_level"]) == (4150, 60_000_000_000, 6)
    assert (await web.get("/config/max_rdy_count")).text == "7"
    assert (await web.get("/config/sync_timeout")).text == "2000000000"
    assert (await web.put("/config/nsqlookupd_tcp_addresses", content=b'["127.0.0.1:1"]')).json() == ["127.0.0.1:1"]
    assert node.switches.lookupd_addresses == ["127.0.0.1:1"]
    assert [(await web.put("/config/log_level", content=level)).text for level in _LEVELS] == list("54321")
    assert (await web.put("/config/log_level", content=b"INFO")).text == "2"
    assert (await web.put("/config/verbose", content=b"true")).json() == {"message": "INVALID_OPTION"}


async def test_stats_list_the_tls_of_clients() -> None:
    node = make_original()
    web, plain, secure = web_of(node), _consumer(node), _consumer(node)
    secure.session.output.layers.append(TlsLayer(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server_side=True))
    plain.session.settings.tls = True  # requested without feature negotiation: the connection stays in clear
    assert plain.session is not secure.session
    clients = (await web.get("/stats?format=json&topic=t")).json()["topics"][0]["channels"][0]["clients"]
    found = {one["remote_address"]: (one["tls"], one["tls_negotiated_protocol_is_mutual"]) for one in clients}
    assert found == {plain.session.peer: (False, False), secure.session.peer: (True, True)}


async def test_topology_is_sent_to_clients_and_shown_in_stats() -> None:
    node = make_original(limits={"topology_region": "r", "topology_zone": "z"})
    web, client = web_of(node), Client(node)
    reply = json.loads(client.ask(sized("IDENTIFY", b'{"feature_negotiation":true,"topology_zone":"mine"}')))
    assert (reply["topology_region"], reply["topology_zone"]) == ("r", "z")
    info = (await web.get("/info")).json()
    assert (info["topology_region"], info["topology_zone"]) == ("r", "z")
    assert client.ask(b"SUB t c\n") == "OK"
    (found,) = (await web.get("/stats?format=json&topic=t")).json()["topics"][0]["channels"][0]["clients"]
    assert (found["topology_region"], found["topology_zone"]) == ("", "mine")


@pytest.mark.parametrize(
    ("path", "allowed"), [("/pub", "OPTIONS, POST"), ("/ping", "GET, OPTIONS"), ("/config/x", "GET, OPTIONS, PUT")]
)
async def test_allowed_methods_are_listed_in_order(path: str, allowed: str) -> None:
    web = web_of(make_original())
    assert (await web.request("DELETE", path)).headers["allow"] == allowed
    answer = await web.options(path)
    assert (answer.status_code, answer.text, answer.headers["allow"]) == (200, "", allowed)


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "PATCH", "FOO"])
async def test_http_is_refused_where_https_is_required(method: str) -> None:
    answer = await web_of(make_original(https_only=True)).request(method, "/ping")
    assert (answer.status_code, answer.text) == (403, '{"message": "TLS_REQUIRED", "https_port": 4152}')


_CHANNEL = (
    "channel_name depth backend_depth in_flight_count deferred_count message_count global_msg_count requeue_count "
    "timeout_count client_count clients paused e2e_processing_latency"
)
_TOPIC = "topic_name channels depth backend_depth message_count message_bytes paused e2e_processing_latency"
_CLIENT = (
    "client_id hostname version remote_address state ready_count in_flight_count message_count finish_count "
    "requeue_count connect_ts sample_rate deflate snappy user_agent topology_zone topology_region tls tls_cipher_suite "
    "tls_version tls_negotiated_protocol tls_negotiated_protocol_is_mutual"
)


@pytest.mark.anyio
async def test_stats_have_the_members_that_nsqadmin_reads() -> None:
    """The API of the original nsqadmin was compared on this server and the real one, member by member."""
    node = make_original()
    _consumer(node)
    Client(node).ask(sized("PUB t", b"x"))
    answer = (await web_of(node).get("/stats?format=json")).json()
    assert list(answer) == ["version", "health", "start_time", "topics", "memory", "producers"]
    (topic,) = answer["topics"]
    (channel,) = topic["channels"]
    (client,) = channel["clients"]
    assert [list(topic), list(channel), list(client)] == [_TOPIC.split(), _CHANNEL.split(), _CLIENT.split()]
    assert all(type(client[name]) is int for name in ("ready_count", "connect_ts", "state", "finish_count"))
    assert client["remote_address"].count(":") == 1
