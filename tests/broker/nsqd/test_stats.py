"""Statistics of both generations; each counter has a value of its own, so that no two can be confused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.commands import multi_body
from tests.support.nsqd_sessions import V1, Client, Clock, host, make_node, make_original, sized, web

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node

pytestmark = pytest.mark.anyio


def _make(generation: str, clock: Clock | None = None, **options: object) -> Node:
    node = make_node(clock, **options) if generation == "redesigned" else make_original(clock, **options)
    for topic in ("t", "u") if generation == "redesigned" else ():
        host(node, topic)
    return node


async def _stats(node: Node, query: str) -> Any:
    return (await web(node).get(f"/stats?format=json{query}", headers=V1)).json()


def _busy(node: Node, clock: Clock) -> None:
    """Let a consumer finish, requeue, delay and keep messages, and let some time out."""
    publisher, consumer = Client(node, "10.0.0.1:7"), Client(node, "10.0.0.2:8")
    consumer.ask(sized("IDENTIFY", b'{"msg_timeout":1000,"output_buffer_size":-1,"heartbeat_interval":60000}'))
    consumer.ask(b"SUB t ch\n")
    consumer.send(b"RDY 20\n")

    def publish(count: int) -> list[bytes]:
        for _ in range(count):
            assert publisher.ask(sized("PUB t", b"x" * 10)) == "OK"
        return [data[10:26] for data in consumer.messages()]

    publish(2)
    clock.seconds += 1.1
    node.tick()
    for data in consumer.messages():
        consumer.send(b"FIN " + data[10:26] + b"\n")
    first, second, *others = publish(12)
    consumer.send(b"FIN " + first + b"\nREQ " + second + b" 0\n")
    for other in others[:4]:
        consumer.send(b"REQ " + other + b" 60000\n")
    consumer.send(b"RDY 0\n")
    publish(6)


_CLIENT = {"in_flight_count": 7, "message_count": 17, "finish_count": 3, "requeue_count": 5, "ready_count": 0}
_CHANNEL = {
    "original": {"depth": 6, "in_flight_count": 7, "requeue_count": 5, "global_msg_count": 17},
    # captured: messages that are not finished are the depth, and a delay leaves a message in flight
    "redesigned": {"depth": 17, "in_flight_count": 11, "requeue_count": 3, "deferred_from_delay_count": 0},
}
_METRICS = {"original": (0, 6, 7, 5), "redesigned": (20, 17, 11, 3)}


@pytest.mark.parametrize("generation", ["redesigned", "original"])
async def test_each_counter_is_shown_as_itself(generation: str) -> None:
    clock = Clock()
    node = _make(generation, clock)
    _busy(node, clock)
    (topic,) = (await _stats(node, "&topic=t"))["topics"]
    (channel,) = topic["channels"]
    (client,) = channel["clients"]
    wanted = _CHANNEL[generation] | {"deferred_count": 4, "message_count": 20, "timeout_count": 2, "paused": False}
    assert {name: channel[name] for name in wanted} == wanted
    assert {name: client[name] for name in _CLIENT} == _CLIENT
    if generation == "redesigned":
        assert (client["timeout_count"], channel["delayed_queue_count"], topic["pub_failed_cnt"]) == (2, 0, 0)
        assert (topic["depth"], topic["message_count"], topic["msg_size_stats"][0]) == (800, 20, 20)
    else:
        assert (topic["depth"], topic["message_count"], topic["message_bytes"]) == (0, 20, 200)
    kept, *counts = _METRICS[generation]
    answer = await web(node).get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    described = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {line.partition("{")[0].partition(" ")[0] for line in lines if not line.startswith("#")} == described
    at = '{topic="t",partition="0"'
    for name, value in {
        "clients": 2,
        "publish_failed_total": 0,
        f"topic_depth{at}}}": kept,
        f"topic_messages_total{at}}}": 20,
        f"topic_leader{at}}}": 1,
        **{
            f'channel_{name}{at},channel="ch"}}': value
            for name, value in zip(("depth", "in_flight", "requeued_total"), counts, strict=True)
        },
        f'channel_deferred{at},channel="ch"}}': 4,
        f'channel_messages_total{at},channel="ch"}}': 20,
        f'channel_timed_out_total{at},channel="ch"}}': 2,
        f'channel_clients{at},channel="ch"}}': 1,
        f'channel_paused{at},channel="ch"}}': 0,
    }.items():
        assert f"nsqd_{name} {value}" in lines
    node.hosted["t", 0].leader = False
    assert f"nsqd_topic_leader{at}}} 0" in (await web(node).get("/metrics")).text.splitlines()


_BOTH = {"t": {"a": 1, "b": 1}, "u": {"a": 1}}
_HIDDEN = {"t": {"a": None, "b": None}, "u": {"a": None}}


@pytest.mark.parametrize(
    ("generation", "query", "shown"),
    [
        ("original", "", _BOTH),
        ("original", "&topic=u", {"u": {"a": 1}}),
        ("original", "&topic=t&channel=b", {"t": {"b": 1}}),
        ("original", "&channel=a", {"t": {"a": 1}, "u": {"a": 1}}),
        ("original", "&include_clients=false", _HIDDEN),
        ("redesigned", "", _HIDDEN),
        ("redesigned", "&needClients=true", _BOTH),
        ("redesigned", "&topic=t", {"t": {"a": 1, "b": 1}}),
        ("redesigned", "&topic=t&needClients=false", {"t": {"a": None, "b": None}}),
        ("redesigned", "&topic=t&channel=b", {"t": {"b": 1}}),
        ("redesigned", "&topic=t&channel=none", {"t": {"a": None, "b": None}}),
        ("redesigned", "&topic=t&partition=1", {}),
    ],
)
async def test_topics_channels_and_clients_can_be_chosen(
    generation: str, query: str, shown: dict[str, dict[str, int | None]]
) -> None:
    """Values are numbers of clients; None where they are not listed."""
    node = _make(generation)
    for number, place in enumerate(("t a", "t b", "u a")):
        assert Client(node, f"10.0.0.1:{number}").ask(f"SUB {place}\n".encode()) == "OK"
    found = {
        topic["topic_name"]: {
            channel["channel_name"]: None if channel["clients"] is None else len(channel["clients"])
            for channel in topic["channels"]
        }
        for topic in (await _stats(node, query))["topics"]
    }
    assert found == shown


async def test_a_request_over_http_is_a_single_write() -> None:
    """As by the real server, which counts the messages of MPUB."""
    node = _make("redesigned")
    client = Client(node)
    assert client.ask(sized("PUB t", b"x")) == client.ask(sized("MPUB t", multi_body([b"x", b"y", b"z"]))) == "OK"
    for path, body in (("pub", b"x"), ("mpub", b"x\ny\nz")):
        assert (await web(node).post(f"/{path}?topic=t", content=body)).text == "OK"
    (topic,) = (await _stats(node, "&topic=t"))["topics"]
    assert (topic["msg_write_latency_stats"], topic["msg_size_stats"][0]) == ([6, *[0] * 15], 8)


@pytest.mark.parametrize("generation", ["redesigned", "original"])
async def test_publishers_are_listed_by_topic_until_they_leave(generation: str) -> None:
    node = _make(generation)
    publisher = Client(node, "10.0.0.1:7")
    for topic, count in (("t", 1), ("u", 3)):
        for _ in range(count):
            assert publisher.ask(sized(f"PUB {topic}", b"x")) == "OK"

    async def counts(topic: str) -> list[tuple[str, int]]:
        found = await _stats(node, f"&topic={topic}")
        if generation == "original":
            assert all(one["state"] == 0 for one in found["producers"] or ())
            return [(each["topic"], each["count"]) for one in found["producers"] or () for each in one["pub_counts"]]
        return [(topic, one["pub_count"]) for one in found["topics"][0]["client_pub_stats"]]

    assert [await counts(topic) for topic in "tu"] == [[("t", 1)], [("u", 3)]]
    publisher.session.end()
    assert [await counts(topic) for topic in "tu"] == [[], []]


@pytest.mark.parametrize("generation", ["redesigned", "original"])
async def test_the_time_of_the_last_publish_is_shown(generation: str) -> None:
    clock = Clock()
    node = _make(generation, clock)
    publisher = Client(node, "10.0.0.1:7")
    last: list[int] = []
    for _ in range(2):
        assert publisher.ask(sized("PUB t", b"x")) == "OK"
        last.append(publisher.session.published["t"].last)
        clock.seconds += 10
    assert last[1] - last[0] == 10_000_000_000


@pytest.mark.parametrize("generation", ["redesigned", "original"])
async def test_a_node_is_not_healthy_while_its_disk_takes_no_messages(
    generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def shown() -> tuple[int, str, str, bool]:
        ping, text = await client.get("/ping"), (await client.get("/stats")).text
        return ping.status_code, ping.text, (await _stats(node, ""))["health"], f"Health: {ping.text}\n" in text

    node = _make(generation, data_path=tmp_path)
    client = web(node)
    publisher = Client(node)
    assert publisher.ask(sized("PUB t", b"x")) == "OK"
    with monkeypatch.context() as full:
        full.setattr("nsqext.broker.engine.storage.segments.os.write", fail)
        assert publisher.ask(sized("PUB t", b"x")).startswith("!E_PUB_FAILED ")
        status, health, *others = await shown()
    assert (status, health.startswith(f"NOK - {tmp_path}"), others) == (500, True, [health, True])
    assert Client(node).ask(sized("PUB t", b"x")) == "OK"
    assert await shown() == (200, "OK", "OK", True)
