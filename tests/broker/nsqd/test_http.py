"""The HTTP routes of a node of the redesigned generation, in both response formats."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import pytest

from nsqext.broker.nsqd.http.publish import write_json
from nsqext.http.api import Metric, render_metrics
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.protocol.server.request_error import RequestError
from tests.support.nsqd_sessions import V1, Client, Clock, host, make_node, make_original, ready_client, sized
from tests.support.nsqd_sessions import web as web_of

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node

pytestmark = pytest.mark.anyio


class _Web:
    """A browser that sends requests to a node."""

    def __init__(self, node: Node) -> None:
        self._client = web_of(node)

    async def get(self, path: str, *, v1: bool = False) -> httpx.Response:
        return await self._client.get(path, headers=V1 if v1 else {})

    async def post(self, path: str, body: Any = b"", headers: Any = None, *, v1: bool = False) -> httpx.Response:
        return await self._client.post(path, content=body, headers=httpx.Headers(V1 if v1 else headers))

    async def put(self, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> httpx.Response:
        return await self._client.put(path, content=body, headers=headers)


def _status(response: httpx.Response) -> tuple[int, Any]:
    return response.status_code, response.text


async def test_publishing_returns_ok_or_a_trace_reply() -> None:
    node = make_node()
    host(node)
    web = _Web(node)
    assert _status(await web.post("/pub?topic=t", b"one")) == (200, "OK")
    assert (await web.post("/pubtrace?topic=t&trace_id=007", b"two")).json() == {
        "status": "OK",
        "id": 3,
        "trace_id": "007",
        "queue_offset": 33,
        "rawsize": 33,
    }
    assert _status(await web.post("/mpub?topic=t", b"a\n\nb\n")) == (200, "OK")
    assert _status(await web.post("/mpub?topic=t&binary=1", b"\0\0\0\1\0\0\0\1c")) == (200, "OK")
    assert node.hosted["t", 0].partition.log.end_count == 5


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/pub?topic=t", b"", 406, "MSG_EMPTY"),
        ("/pub?topic=t", b"x" * 101, 413, "MSG_TOO_BIG"),
        ("/pub?topic=no", b"x", 404, "E_TOPIC_NOT_EXIST"),
        ("/pub", b"x", 404, "E_TOPIC_NOT_EXIST"),
        ("/mpub", b"x", 400, "MISSING_ARG_TOPIC"),
        ("/mpub?topic=b!", b"x", 400, "INVALID_ARG_TOPIC"),
        ("/mpub?topic=t&partition=z", b"x", 400, 'strconv.Atoi: parsing "z": invalid syntax'),
        ("/mpub?topic=t", b"x" * 101, 413, "MSG_TOO_BIG"),
        ("/mpub?topic=t", b"x" * 1001, 413, "BODY_TOO_BIG"),
        ("/mpub?topic=t&binary=", b"\0\0\0\1\0\0\0\0", 413, "BAD_MESSAGE"),
        ("/pub_ext?topic=t", b"x", 400, "E_INVALID_JSON_HEADER"),
        ("/pub_ext?topic=t&ext=%7B%7D", b"x", 400, "E_EXT_NOT_SUPPORT"),
        ("/pub_ext?topic=x&ext=%5B%5D", b"x", 400, "E_INVALID_JSON_HEADER"),
        ("/pub_ext?topic=x&ext=100%25", b"x", 400, "E_INVALID_JSON_HEADER"),
        ("/pub_ext?topic=x&ext=" + quote('{"##trace_id":7}'), b"x", 400, "INVALID_TRACE_ID"),
        ("/pub_ext?topic=x&ext=" + quote('{"a":1e400}'), b"x", 400, "E_INVALID_JSON_HEADER"),
        ("/pub_ext?topic=x&ext=" + quote('{"a":NaN}'), b"x", 400, "E_INVALID_JSON_HEADER"),
        ("/pub_ext?topic=x&ext=" + quote('{"a":' + "[" * 5000 + "]" * 5000 + "}"), b"x", 400, "E_INVALID_JSON_HEADER"),
        ("/pubtrace?topic=t&trace_id=-1", b"x", 400, "INVALID_TRACE_ID"),
        ("/pubtrace?topic=t&trace_id=%zz", b"x", 404, "E_TOPIC_NOT_EXIST"),
    ],
)
async def test_refused_publishes(path: str, body: bytes, status: int, text: str) -> None:
    node = make_node(limits=ServerLimits(max_msg_size=100, max_body_size=1000))
    host(node)
    host(node, "x", extend=True)
    web = _Web(node)
    bare = await web.post(path, body, v1=True)
    assert (bare.status_code, bare.text) == (status, f'{{"message":"{text}"}}')
    if not path.startswith("/pubtrace"):
        wrapped = await web.post(path, body)
        assert wrapped.status_code == 500
        assert wrapped.json() == {"status_code": 500, "status_txt": text, "data": None}


def _redesigned(limits: Any) -> Node:
    return make_node(limits=ServerLimits(**limits))


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("make", [_redesigned, make_original], ids=["redesigned", "original"])
async def test_bodies_of_exactly_the_limit_are_accepted(make: Callable[..., Node], in_chunks: bool) -> None:
    node = make(limits={"max_msg_size": 100, "max_body_size": 1000})
    hosted = host(node)
    lines = b"\n".join([b"x" * 100] * 9 + [b"x" * 91])

    async def parts(body: bytes) -> AsyncIterator[bytes]:
        yield body[:-1]
        yield body[-1:]

    for path, body in (("/pub", b"x" * 100), ("/mpub", lines)):
        if in_chunks and (path, make) == ("/pub", _redesigned):
            continue  # of unknown size: refused as an empty body
        answer = await web_of(node).post(f"{path}?topic=t", content=parts(body) if in_chunks else body)
        assert _status(answer) == (200, "OK"), path
    assert hosted.partition.log.end_count == 10 + (not in_chunks or make is make_original)


async def test_headers_are_read_from_the_query_and_from_http_headers() -> None:
    node = make_node()
    hosted = host(node, "x", extend=True)
    web = _Web(node)
    ext = quote(quote('{"b":"1 & 2","a":1}'))
    headers = [("X-NSQEXT-B", "over"), ("X-Nsqext-##trace_id", "5"), ("x-nsqext-b", "the first of equal ones counts")]
    answer = await web.post(f"/pub_ext?topic=x&ext={ext}", b"body", headers)
    assert answer.json()["data"]["trace_id"] == "5"
    entry = hosted.partition.log.at(1)
    assert entry is not None
    assert entry.record.header == b'{"##trace_id":"5","a":1,"b":"over"}'
    assert entry.record.trace_id == 5


async def test_a_header_longer_than_its_length_field_is_refused() -> None:
    node = make_node()
    host(node, "x", extend=True)
    answer = await _Web(node).post("/pub_ext?topic=x&ext=%7B%7D", b"body", {"X-NSQEXT-A": "x" * 65536})
    assert answer.json()["status_txt"] == "E_INVALID_JSON_HEADER"


@pytest.mark.parametrize(
    ("ext", "headers", "stored"),
    [
        ('{"a":"\\ud800b","\\uDC00":["\\ud83d\\ude00"]}', {}, '{"a":"\ufffdb","\ufffd":["\U0001f600"]}'),
        ("%7B%22a%22:%22%E4%B8%22%7D", {}, '{"a":"\ufffd\ufffd"}'),
        ("{}", {"X-NSQEXT-A": "caf\xe9"}, '{"a":"caf\\ufffd"}'),
        ("{}", {"X-NSQEXT-A": "caf\xc3\xa9"}, '{"a":"caf\xe9"}'),
    ],
)
async def test_header_values_that_are_not_text_are_replaced(ext: str, headers: dict[str, str], stored: str) -> None:
    node = make_node()
    hosted = host(node, "x", extend=True)
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    escaped = ext if ext.startswith("%") else quote(ext)
    answer = await _Web(node).post(f"/pub_ext?topic=x&ext={escaped}", b"body", raw)
    assert _status(answer) == (200, "OK")
    entry = hosted.partition.log.at(1)
    assert entry is not None
    assert entry.record.header.decode() == stored


async def test_a_null_header_is_ignored_over_http() -> None:
    node = make_node()
    host(node, "x", extend=True)
    web = _Web(node)
    assert _status(await web.post("/pub_ext?topic=x&ext=null", b"x")) == (200, "OK")
    answer = await web.post("/pub_ext?topic=x&ext=null", b"x", {"X-NSQEXT-A": "b"})
    assert _status(answer) == (500, '{"message":"INTERNAL_ERROR"}')


async def test_minus_zero_of_a_header_is_kept() -> None:
    node = make_node()
    hosted = host(node, "x", extend=True)
    answer = await _Web(node).post("/pub_ext?topic=x&ext=%7B%22a%22:-0%7D", b"body")
    entry = hosted.partition.log.at(1)
    assert answer.status_code == 200
    assert entry is not None
    assert entry.record.header == b'{"a":-0}'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None, "é<>&\u2028"]}, '{"a":[true,null,"é\\u003c\\u003e\\u0026\\u2028"],"b":1}'),
        ({"n": 12345678901234567890}, '{"n":12345678901234567000}'),
        (
            [0.1, 1e21, 1e-7, -0.0, 0, 1e20, -2.5e-9, 123.25],
            "[0.1,1e+21,1e-7,-0,0,100000000000000000000,-2.5e-9,123.25]",
        ),
    ],
)
def test_headers_are_written_as_the_server_writes_them(value: Any, text: str) -> None:
    assert write_json(value).decode() == text


async def test_publishes_on_a_follower_and_without_majority() -> None:
    node = make_node()
    hosted = host(node)
    web = _Web(node)
    hosted.writable = False
    assert _status(await web.post("/pub?topic=t", b"x", v1=True)) == (400, '{"message":"E_FAILED_ON_NOT_WRITABLE"}')
    hosted.leader = False
    hosted.partition.channel("ch")
    led = (
        "create",
        "delete",
        "empty",
        "fixconfirmed",
        "finishmemdelayed",
        "emptydelayed",
        "requeuedelayed",
        "setoffset",
    )
    for path in led:
        answer = await web.post(f"/channel/{path}?topic=t&partition=0&channel=ch", b"special:-1")
        assert _status(answer) == (400, '{"message":"E_FAILED_ON_NOT_LEADER"}'), path
    for path in ("pause", "unpause", "skip", "unskip"):
        answer = await web.post(f"/channel/{path}?topic=t&partition=0&channel=ch", b"")
        assert _status(answer) == (500, '{"message":"INTERNAL_ERROR"}'), path
    assert not (hosted.partition.channels["ch"].paused or hosted.partition.channels["ch"].skipped)
    assert (await web.get("/stats?format=json&leaderOnly=true", v1=True)).json()["topics"] == []
    assert _status(await web.post("/pub?topic=t&partition=0", b"x", v1=True))[0] == 400
    assert _status(await web.post("/pub?topic=t", b"x", v1=True))[0] == 404
    empty = {"Content-Length": "1", **V1}
    assert _status(await web.post("/pub?topic=t&partition=0", b"", empty)) == (406, '{"message":"MSG_EMPTY"}')
    batch = "/mpub?topic=t&partition=0&binary=true"
    assert _status(await web.post(batch, b"\0\0\0\0", v1=True)) == (413, '{"message":"BAD_BODY"}')
    finish = "/message/finish?topic=t&partition=0&channel=ch&msgid="
    for number, text in (("x", "INVALID_REQUEST"), ("2", "E_FAILED_ON_NOT_LEADER")):
        assert _status(await web.post(finish + number)) == (400, f'{{"message":"{text}"}}')
    hosted.leader = hosted.writable = True
    node.exiting = True
    assert _status(await web.post("/pub?topic=t", b"x", v1=True)) == (503, '{"message":"exiting"}')


async def test_a_publish_over_http_counts_a_byte_more_than_it_has() -> None:
    """As by the real server."""
    node = make_node(max_pub_waiting=5)
    host(node)
    answers = [await _Web(node).post("/pub?topic=t", b"x" * size, v1=True) for size in (4, 5)]
    text = '{"message":"E_PUB_TOO_MUCH_WAITING pub too much waiting in the queue: 6"}'
    assert [_status(answer) for answer in answers] == [(200, "OK"), (429, text)]


async def test_a_failed_replica_set_is_an_error_over_http_too() -> None:
    node = make_node()
    hosted = host(node)

    async def replicate(_: object) -> None:
        raise RequestError("E_FAILED_ON_NOT_WRITABLE", "", fatal=False)

    hosted.replicate = replicate
    answer = await _Web(node).post("/pub?topic=t", b"x", v1=True)
    assert _status(answer) == (400, '{"message":"E_FAILED_ON_NOT_WRITABLE"}')


async def test_channels_are_made_switched_and_removed() -> None:
    node = make_node()
    hosted = host(node)
    web, base = _Web(node), "topic=t&partition=0&channel=ch"
    for path in ("create", "create", "pause", "unpause", "skip", "unskip", "empty", "emptydelayed", "requeuedelayed"):
        assert _status(await web.post(f"/channel/{path}?{base}")) == (200, "")
    channel = hosted.partition.channels["ch"]
    await web.post(f"/channel/pause?{base}")
    assert channel.paused
    await web.post(f"/channel/setorder?{base}&order=true")
    assert channel.ordered
    assert (await web.post(f"/channel/setorder?{base}&order=1")).json() == {"message": "INVALID_OPTION"}
    assert (await web.post("/channel/pause?topic=t&channel=none")).json() == {"message": "CHANNEL_NOT_FOUND"}
    assert _status(await web.post(f"/channel/delete?{base}")) == (200, "")
    assert _status(await web.post(f"/channel/delete?{base}")) == (200, "")
    assert hosted.partition.channels == {}


async def test_channels_of_a_registering_topic_are_not_created_locally() -> None:
    node = make_node()
    host(node).auto_create_channels = False
    web = _Web(node)
    text = "channel ch not registered. channel should be initialized before use."
    assert _status(await web.post("/channel/create?topic=t&channel=ch")) == (403, f'{{"message":"{text}"}}')


async def test_a_channel_reads_at_the_position_that_is_set() -> None:
    node = make_node()
    hosted = host(node)
    web = _Web(node)
    for body in (b"a", b"b", b"c"):
        await web.post("/pub?topic=t", body)
    path = "/channel/setoffset?topic=t&channel=ch"
    assert (await web.post(path, b"special:-1")).json() == {"message": "CHANNEL_NOT_FOUND"}
    hosted.partition.channel("ch")
    assert _status(await web.post(path)) == (406, '{"message":"MSG_EMPTY"}')
    assert _status(await web.post(path, b"count:1")) == (400, '{"message":"invalid consume offset:count:1"}')
    assert _status(await web.post(path, b"special:2")) == (500, '{"message":"not supported offset type"}')
    assert (await web.post(path, b"virtual_queue:0\n")).text == (
        '{"message":"strconv.ParseInt: parsing "0\\n": invalid syntax"}'
    )
    assert _status(await web.post(path, b"msgcount:2")) == (200, "")
    consumer = Client(node)
    consumer.send(b"SUB t ch 0\nRDY 2\n")
    assert [data[-1:] for kind, data in consumer.receive() if kind == 2] == [b"b", b"c"]


async def test_a_position_in_a_body_of_unknown_size_is_refused() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"special:-1"

    node = make_node()
    host(node).partition.channel("ch")
    answer = await _Web(node).post("/channel/setoffset?topic=t&channel=ch", body())
    assert _status(answer) == (500, '{"message":"INTERNAL_ERROR"}')


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ("search_mode=id&search_pos=2", 404, "commit log end of file"),
        ("search_mode=count&search_pos=0&partition=0", 404, "commit log end of file"),
        ("search_mode=virtual_offset&search_pos=0&partition=0", 404, "commit log end of file"),
        ("search_mode=x&search_pos=0&partition=0", 400, "search mode should be one of id/count/virtual_offset"),
        ("search_mode=id&search_pos=2&delayed_queue=true", 400, "delayed queue search channel must be given"),
        ("search_mode=id&search_pos=2&delayed_queue=true&channel=ch", 404, "no message found in delayed queue"),
        ("search_mode=count&search_pos=2&partition=0&delayed_queue=true", 400, "delayed queue search mode must be id"),
    ],
)
async def test_a_missing_message(query: str, status: int, text: str) -> None:
    node = make_node()
    host(node)
    answer = await _Web(node).get(f"/message/get?topic=t&{query}")
    assert _status(answer) == (status, f'{{"message":"{text}"}}')


@pytest.mark.parametrize("mode", ["id", "count", "virtual_offset"])
async def test_a_node_without_a_cluster_finds_no_message(mode: str) -> None:
    node = make_node(clustered=False)
    host(node)
    web = _Web(node)
    await web.post("/pub?topic=t", b"first")
    answer = await web.get(f"/message/get?topic=t&partition=0&search_mode={mode}&search_pos=1")
    assert _status(answer) == (500, '{"message":"INTERNAL_ERROR"}')


async def test_an_ordered_topic_delays_nothing() -> None:
    node = make_node()
    host(node, ordered=True)
    answer = await _Web(node).get("/message/get?topic=t&search_mode=id&search_pos=2&delayed_queue=true&channel=ch")
    assert _status(answer) == (404, '{"message":"no delayed queue on the topic"}')


async def test_messages_are_found_and_finished() -> None:
    node = make_node()
    host(node)
    other = host(node, partition=1)
    web = _Web(node)
    consumer = Client(node)
    consumer.send(b"SUB t ch 0\nRDY 1\n")
    await web.post("/pubtrace?topic=t&trace_id=9", b"first")
    for search in (
        "search_mode=id&search_pos=2",
        "search_mode=count&search_pos=1",
        "search_mode=virtual_offset&search_pos=0",
    ):
        found = (await web.get(f"/message/get?topic=t&partition=0&{search}")).json()
        assert (found["id"], found["trace_id"], found["body"], found["queue_cnt_index"]) == (2, 9, "first", 1)
    await web.post("/pub?topic=t&partition=1", b"elsewhere")
    entry = other.partition.log.at(1)
    assert entry is not None
    found = (await web.get(f"/message/get?topic=t&search_mode=id&search_pos={entry.record.internal_id}")).json()
    assert found["body"] == "elsewhere", "an id names its partition"
    finish = "/message/finish?topic=t&channel=ch&msgid="
    assert _status(await web.post(f"{finish}7")) == (
        500,
        '{"message":"ErrType:7 ErrCode:0 : Message ID not in flight"}',
    )
    assert _status(await web.post(f"{finish}2")) == (200, "")
    assert node.hosted["t", 0].partition.channels["ch"].stats().depth == 0


async def test_stats_list_topics_channels_and_clients() -> None:
    clock = Clock()
    node = make_node(clock)
    hosted = host(node)
    web = _Web(node)
    consumer, producer = Client(node, "127.0.0.1:5"), Client(node, "127.0.0.1:6")
    consumer.send(sized("IDENTIFY", b'{"client_id":"me","hostname":"h","user_agent":"u/1"}') + b"SUB t ch 0\nRDY 2\n")
    producer.ask(sized("PUB t 0", b"x"))
    (topic,) = (await web.get("/stats?format=json&topic=t")).json()["data"]["topics"]
    assert topic["client_pub_stats"][0]["last_pub_ts"] == clock.wall() // 10**9
    (client,) = topic["channels"][0]["clients"]
    assert [client[name] for name in ("client_id", "state", "output_buffer_size")] == ["me", 3, 4096]
    closing = Client(node, "127.0.0.1:7")
    closing.send(b"SUB t closing 0\nRDY 5\nCLS\n")
    (topic,) = (await web.get("/stats?format=json&topic=t&channel=closing")).json()["data"]["topics"]
    (client,) = topic["channels"][0]["clients"]
    assert (client["state"], client["ready_count"]) == (4, 0)
    closing.session.end()
    hosted.partition.delete_channel("closing")
    assert (await web.get("/stats?format=json&topic=none", v1=True)).json()["topics"] == []
    clock.seconds += 3725
    text = (await web.get("/stats?topic=t")).text
    assert "uptime 1h2m5s" in text
    assert "      [ch                       ] depth: 1     be-depth: 1     inflt: 1    " in text
    assert "        [V2 me:5                 ] state: 3 inflt: 1    rdy: 2    fin: 0        " in text
    assert (await web.get("/stats")).text.count("\n") == 8
    assert "current confirm &{{{0 0} 0} 0}" in (await web.get("/message/stats?topic=t&channel=ch")).text
    (history,) = (await web.get("/message/historystats", v1=True)).json()["node_hourly_pub_size_stats"]
    assert (history["topic_name"], history["topic_partition"]) == ("t", "0")
    assert len((await web.get("/message/historystats?topic=t&partition=0")).json()["hourly_pub_size"]) == 22
    assert _status(await web.get("/message/historystats?topic=t&partition=x"))[0] == 400
    assert _status(await web.get("/message/historystats?partition=x")) == (404, '{"message":"E_TOPIC_NOT_EXIST"}')


async def test_the_hourly_bytes_of_a_node_are_of_two_hours_ago() -> None:
    clock = Clock()
    node = make_node(clock)
    host(node)
    web = _Web(node)
    await web.post("/pub?topic=t", b"four")
    clock.seconds += 2 * 3600
    (history,) = (await web.get("/message/historystats", v1=True)).json()["node_hourly_pub_size_stats"]
    assert history["hourly_pub_size"] == 4


async def test_partitions_are_listed_by_their_names() -> None:
    node = make_node()
    for number in (2, 10):
        host(node, partition=number)
    topics = (await _Web(node).get("/stats?format=json", v1=True)).json()["topics"]
    assert [topic["topic_partition"] for topic in topics] == ["10", "2"]


async def test_messages_that_are_delayed_by_up_to_an_hour_are_requeued_on_request() -> None:
    node = make_node()
    host(node)
    web, consumer = _Web(node), ready_client(node)
    await web.post("/pub?topic=t", b"m0")
    await web.post("/pub?topic=t", b"m1")
    consumer.session.output.urgent = True
    for data, delay in zip(consumer.messages(), (3_500_000, 3_700_000), strict=True):
        consumer.send(b"REQ " + data[10:26] + b" %d\n" % delay)
    assert _status(await web.post("/channel/requeuedelayed?topic=t&channel=ch")) == (200, "")
    consumer.session.output.urgent = True
    assert [data[26:] for data in consumer.messages()] == [b"m0"]


async def test_requests_of_an_operator() -> None:
    node = make_node()
    hosted = host(node)
    web = _Web(node)
    assert _status(await web.get("/ping")) == (200, "OK")
    info = (await web.get("/info")).json()["data"]
    assert (info["tcp_port"], info["http_port"], info["ha_support"]) == (4150, 4151, True)
    assert (await web.get("/serverstats")).json()["health"] == "OK"
    for query in ("", "?partition=x"):
        assert _status(await web.get(f"/coordinator/stats{query}")) == (500, '{"message":"Coordinator is disabled."}')
    node.coordinator_stats = lambda topic, partition: {topic: partition}
    assert (await web.get("/coordinator/stats?topic=t&partition=3")).json() == {"t": 3}
    assert (await web.get("/coordinator/stats?topic=t")).json() == {"t": -1}
    await web.post("/disable/write?type=all")
    assert not node.may_write(hosted)
    await web.post("/disable/write")
    assert node.may_write(hosted)
    assert (await web.post("/loglevel/set?loglevel=x")).json() == {"message": "BAD_LEVEL_STRING"}
    channel = hosted.partition.channel("ch")
    await web.post("/message/trace/enable?topic=t&channel=ch")
    assert (hosted.traced, channel.traced) == (False, True)
    await web.post("/message/trace/enable?topic=t")
    assert hosted.traced
    assert _status(await web.get("/pub"))[0] == 405
    assert _status(await web.get("/no")) == (404, '{"message":"NOT_FOUND"}')


async def test_options_are_shown_and_changed() -> None:
    node = make_node()
    web = _Web(node)
    assert _status(await web.get("/config/allow_ext_compatible")) == (200, "false")
    assert _status(await web.put("/config/allow_ext_compatible", b"true")) == (200, "true")
    assert node.switches.allow_ext_compatible
    assert _status(await web.put("/config/allow_ext_compatible", b"1")) == (400, '{"message":"INVALID_VALUE"}')
    assert _status(await web.put("/config/max_conn_for_client", b"true"))[0] == 400
    assert _status(await web.put("/config/verbose", b"")) == (413, '{"message":"INVALID_VALUE"}')
    assert _status(await web.get("/config/nothing")) == (400, '{"message":"INVALID_OPTION"}')
    assert _status(await web.put("/config/allow_ext_compatible", b"null")) == (200, "true")
    for addresses in (b'["n1:4160"]', b"[]", b'["n2:4160"]'):
        assert _status(await web.put("/config/nsqlookupd_tcp_addresses", addresses)) == (200, addresses.decode())
    assert _status(await web.put("/config/nsqlookupd_tcp_addresses", b"null")) == (200, "[]")
    assert _status(await web.put("/config/nsqlookupd_tcp_addresses", b"[1]"))[0] == 400
    for name, text in (
        ("log_level", "2"),
        ("max_conn_for_client", "500000"),
        ("tcp_address", "127.0.0.1:4150"),
        ("statsd_prefix", "nsq.127_0_0_1_4151."),
        ("req_to_end_threshold", "900000000000"),
        ("sync_timeout", "2000000000"),
        ("use_fsync", "false"),
        ("e2e_processing_latency_percentiles", "null"),
    ):
        assert _status(await web.get(f"/config/{name}")) == (200, text)


async def test_consumers_without_extend_support_are_accepted_while_the_node_runs() -> None:
    node = make_node()
    host(node, "x", extend=True)
    web = _Web(node)
    await web.put("/config/allow_sub_ext_compatible", b"true")
    consumer = Client(node)
    consumer.send(b"SUB x ch 0\nRDY 1\n")
    await web.post("/pub_ext?topic=x&ext=" + quote('{"a":"b"}'), b"body")
    assert [data[-4:] for kind, data in consumer.receive() if kind == 2] == [b"body"]


async def test_an_old_topic_drops_internal_headers_where_that_is_allowed() -> None:
    node = make_node(allow_ext_compatible=True)
    hosted = host(node)
    web = _Web(node)
    assert _status(await web.post("/pub_ext?topic=t&ext=" + quote('{"##a":"b"}'), b"x")) == (200, "OK")
    assert _status(await web.post("/pub_ext?topic=t&ext=" + quote('{"a":"b"}'), b"x"))[0] == 500
    entry = hosted.partition.log.at(1)
    assert entry is not None
    assert entry.record.header == b""


def test_label_values_are_escaped() -> None:
    metric = Metric("m", "gauge", "Text.", [({"a": 'q"\\\n'}, 1.5)])
    assert render_metrics([metric]) == '# HELP m Text.\n# TYPE m gauge\nm{a="q\\"\\\\\\n"} 1.5\n'
    assert render_metrics([metric._replace(samples=[])]) == ""


@pytest.mark.parametrize("path", ["/pub?topic=t", "/mpub?topic=t", "/config/log_level"])
@pytest.mark.parametrize("limits", [ServerLimits(), ServerLimits.original()], ids=["redesigned", "original"])
async def test_a_body_in_chunks_is_bounded(path: str, limits: ServerLimits) -> None:
    node = make_node(limits=limits)

    async def body() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 99_999 + b"\n"

    host(node)
    web = _Web(node)
    answer = await (web.put(path, body()) if "config" in path else web.post(path, body()))  # type: ignore[arg-type]
    assert answer.status_code == 413 or (limits.generation == "redesigned" and answer.status_code in (406, 500))
    assert node.hosted["t", 0].partition.log.end_count == 0
