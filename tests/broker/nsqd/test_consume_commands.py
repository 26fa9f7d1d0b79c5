"""SUB, RDY, FIN and REQ, and what subscribers receive."""

from __future__ import annotations

from collections.abc import Callable

import orjson
import pytest

from nsqext.protocol.frames import FrameType
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.nsqd_sessions import Client, Clock, host, make_node, ready_client, sized


def _identify(client: Client, **fields: object) -> None:
    assert client.ask(sized("IDENTIFY", orjson.dumps(fields))) == "OK"


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


@pytest.mark.parametrize(("channel", "left"), [("ch", ["ch"]), ("ch#ephemeral", [])])
def test_a_client_whose_start_position_is_refused_leaves_no_ephemeral_channel(channel: str, left: list[str]) -> None:
    """Without a client, nothing would delete it, and it would keep all later messages."""
    node = make_node()
    hosted = host(node)
    client = Client(node)
    assert client.ask(f"SUB_ADVANCED t {channel} 0 special:0\n".encode()) == "!E_INVALID not supported offset type"
    assert not client.open
    assert list(hosted.partition.channels) == left


@pytest.mark.parametrize("limits", [ServerLimits, ServerLimits.original], ids=["redesigned", "original"])
def test_a_delay_is_bounded(limits: Callable[..., ServerLimits]) -> None:
    clock = Clock()
    node = make_node(clock, limits=limits(max_req_timeout=600.0))
    host(node)
    client = ready_client(node, ready=1, channel="ch#ephemeral")  # which keeps it in memory
    client.send(sized("PUB t", b"one"))
    ((_, data),) = [frame for frame in client.receive() if frame[0] == FrameType.MESSAGE]
    client.send(b"REQ " + data[10:26] + b" 800000\n")
    for seconds, redelivered in ((599, 0), (2, 1)):
        clock.seconds += seconds
        node.tick()
        assert sum(kind == FrameType.MESSAGE for kind, _ in client.receive()) == redelivered
