"""SUB, RDY, FIN and REQ, and what subscribers receive."""

from __future__ import annotations

from collections.abc import Callable
from struct import pack

import orjson
import pytest

from nsqext.protocol.frames import FrameType
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.nsqd_sessions import Client, Clock, host, make_node, ready_client, sized


def test_ready_is_a_window() -> None:
    node = make_node()
    host(node)
    consumer, producer = ready_client(node, 1), Client(node)
    for body in (b"a", b"b"):
        assert producer.ask(sized("PUB t 0", body)) == "OK"
    (first,) = consumer.messages()
    consumer.send(b"FIN " + first[10:26] + b"\n")
    (second,) = consumer.messages()
    assert first.endswith(b"a")
    assert second.endswith(b"b")


def test_a_session_sends_each_type_of_frame() -> None:
    node = make_node()
    host(node)
    client = Client(node)
    client.send(b"SUB t ch 0\nRDY 1\n")
    assert Client(node).ask(sized("PUB t 0", b"a")) == "OK"
    client.send(b"NONSENSE\n")
    assert {kind for kind, _ in client.receive()} == {*FrameType}


def test_messages_of_a_client_are_delivered_to_the_next() -> None:
    node = make_node()
    host(node)
    consumer, producer = ready_client(node, 1), Client(node)
    producer.ask(sized("PUB t 0", b"a"))
    assert len(consumer.messages()) == 1
    consumer.session.end()
    (again,) = ready_client(node, 1).messages()
    assert again[8:10] == b"\0\x01"


def test_a_deleted_channel_closes_its_clients_without_an_error_frame() -> None:
    node = make_node()
    hosted = host(node)
    consumer = ready_client(node)
    hosted.partition.delete_channel("ch")
    assert consumer.session.closed
    assert consumer.receive() == []


def test_a_removed_partition_closes_its_clients() -> None:
    node = make_node()
    host(node)
    consumer, producer = ready_client(node), Client(node)
    node.unhost("t", 0)
    assert consumer.session.closed
    assert producer.ask(sized("PUB t 0", b"x")) == "!E_TOPIC_NOT_EXIST "


def test_fin_errors_of_a_standalone_node_lack_the_coordinators_text() -> None:
    node = make_node(clustered=False)
    host(node)
    client = ready_client(node)
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
    assert [data[26:] for data in ready_client(node, 1).messages()] == [b"fresh"]
    assert ready_client(node, 1, "second").messages() == []


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


def test_a_tag_has_no_effect_in_topics_without_tags_and_no_follower_takes_answers() -> None:
    node = make_node()
    hosted = host(node)
    host(node, partition=1)
    assert node.default_partition("t") == 0
    client = Client(node)
    _identify(client, desired_tag="canary")
    assert client.ask(b"SUB t ch 0\n") == "OK"
    assert client.session.settings.desired_tag == ""
    client.send(b"RDY 1\n" + sized("PUB t 0", b"one"))
    (message,) = [data for kind, data in client.receive() if kind == FrameType.MESSAGE]
    hosted.leader = False
    assert client.ask(b"FIN " + message[10:26] + b"\n").startswith("!")


def test_revoked_sampling_does_not_forbid_order() -> None:
    node = make_node()
    host(node)
    client = Client(node)
    _identify(client, sample_rate=1)
    _identify(client, sample_rate=0)
    assert client.ask(b"SUB_ORDERED t ch 0\n") == "OK"


@pytest.mark.parametrize(("channel", "left"), [("ch", ["ch"]), ("ch#ephemeral", [])])
def test_an_ordered_client_with_a_sample_rate_is_refused_and_leaves_its_channel(channel: str, left: list[str]) -> None:
    """As by the real server, where it collects messages."""
    node = make_node()
    hosted = host(node)
    client = Client(node)
    _identify(client, sample_rate=0)
    _identify(client, sample_rate=1)
    refusal = "!E_INVALID order consume is not allowed while sample rate is not 0"
    assert client.ask(f"SUB_ORDERED t {channel} 0\n".encode()) == refusal
    assert not client.open
    assert list(hosted.partition.channels) == left


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


@pytest.mark.parametrize("limits", [ServerLimits, ServerLimits.original], ids=["redesigned", "original"])
def test_a_delay_is_bounded(limits: Callable[..., ServerLimits]) -> None:
    clock = Clock()
    node = make_node(clock, limits=limits(max_req_timeout=600.0))
    host(node)
    client = ready_client(node, ready=1)
    client.send(sized("PUB t", b"one"))
    ((_, data),) = [frame for frame in client.receive() if frame[0] == FrameType.MESSAGE]
    client.send(b"REQ " + data[10:26] + b" 800000\n")
    for seconds, redelivered in ((599, 0), (2, 1)):
        clock.seconds += seconds
        node.tick()
        assert sum(kind == FrameType.MESSAGE for kind, _ in client.receive()) == redelivered


def test_a_delay_counts_in_64_bits() -> None:
    clock = Clock()
    node = make_node(clock)
    host(node)
    client = ready_client(node, ready=1)
    client.send(sized("PUB t 0", b"one"))
    (message,) = [data for kind, data in client.receive() if kind == FrameType.MESSAGE]
    client.send(b"REQ " + message[10:26] + b" 18446744073710\n")
    clock.seconds += 0.01
    node.tick()
    (again,) = client.messages()
    assert again[8:10] == b"\0\x02"
