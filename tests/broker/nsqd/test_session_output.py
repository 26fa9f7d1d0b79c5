"""When messages and answers are sent: output buffer, choked clients, layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
import pytest

from nsqext.protocol.client.client_protocol import FrameParser
from nsqext.protocol.frames import FrameType, encode_frame
from nsqext.protocol.layers import DeflateLayer
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.nsqd_sessions import Client, Clock, host, make_node, ready_client, sized

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node


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


def test_a_full_buffer_a_full_window_and_any_answer_flush_what_waits() -> None:
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
    assert [kind for kind, _ in consumer.receive()] == [2, 0]


def test_a_choked_client_gets_nothing_until_it_has_read() -> None:
    node = make_node()
    host(node)
    consumer, producer = ready_client(node, 100), Client(node)
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
    consumer, producer = ready_client(node, 0), Client(node)
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


@pytest.mark.parametrize(("channel", "size"), [("ch", 4096), ("ch#ephemeral", 100)])
def test_the_buffer_of_a_consumer_is_enlarged_unless_its_channel_is_ephemeral(channel: str, size: int) -> None:
    node = make_node()
    host(node)
    assert ready_client(node, channel=channel).session.settings.output_buffer_size == size


def test_a_second_identify_keeps_the_negotiated_buffer() -> None:
    node = make_node()
    host(node)
    client = Client(node)
    for fields in (b'{"output_buffer_size": 64}', b"{}"):
        assert client.ask(sized("IDENTIFY", fields)) == "OK"
    assert client.ask(b"SUB t ch 0\n") == "OK"
    assert client.session.settings.output_buffer_size == 64


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
    if limits.generation == "redesigned":
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
