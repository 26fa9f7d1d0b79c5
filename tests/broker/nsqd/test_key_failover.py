"""key_failover on the wire: requested in IDENTIFY or over HTTP, refused if not applicable, reported in stats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from nsqext.protocol.messages import KEY_HEADER
from tests.support.commands import ext_body
from tests.support.nsqd_sessions import Client, host, make_node, sized, web

if TYPE_CHECKING:
    import httpx

    from nsqext.broker.nsqd.node import Node

pytestmark = pytest.mark.anyio


async def _http(node: Node, method: str, path: str) -> httpx.Response:
    return await web(node).request(method, path)


def _client(node: Node, **members: Any) -> Client:
    client = Client(node, f"127.0.0.1:{3000 + len(node.sessions)}")
    asked = {"feature_negotiation": True, "extend_support": True, "output_buffer_timeout": -1, **members}
    reply = orjson.loads(client.ask(sized("IDENTIFY", orjson.dumps(asked))))
    assert reply.get("dispatch", "") == members.get("dispatch", "")
    return client


def _consume(node: Node, ready: int = 10, **members: Any) -> Client:
    client = _client(node, **members)
    assert client.ask(b"SUB t ch 0\n") == "OK"
    client.send(b"RDY %d\n" % ready)
    return client


def _publish(node: Node, *keys: str) -> None:
    client = Client(node, "127.0.0.1:2999")
    for key in keys:
        assert client.ask(sized("PUB_EXT t 0", ext_body(orjson.dumps({KEY_HEADER: key}), b"x"))) == "OK"


async def test_the_first_subscriber_sets_the_type_and_others_are_refused() -> None:
    node = make_node()
    host(node, extend=True)
    first = _consume(node, dispatch="key_failover")
    other = _client(node, dispatch="shared")
    assert other.ask(b"SUB t ch 0\n") == ("!E_INVALID channel ch of topic t is dispatched by key_failover, not shared")
    assert not other.open
    second = _consume(node)  # requests no type, so it joins the existing one
    keys = [f"key-{number % 20}" for number in range(60)]
    _publish(node, *keys)
    first.session.output.urgent = second.session.output.urgent = True
    got = [{data[29:-1] for data in client.messages()} for client in (first, second)]
    assert got[0] and got[1]
    assert not got[0] & got[1]


async def test_identify_refuses_an_unknown_type() -> None:
    client = Client(make_node())
    asked = orjson.dumps({"feature_negotiation": True, "dispatch": "exclusive"})
    assert client.ask(sized("IDENTIFY", asked)) == "!E_BAD_BODY IDENTIFY dispatch (exclusive) is invalid"


async def test_an_ordered_subscriber_is_refused() -> None:
    node = make_node()
    host(node, extend=True)
    client = _client(node, dispatch="key_failover")
    assert client.ask(b"SUB_ORDERED t ch 0\n").startswith("!E_INVALID channel ch is dispatched by key_failover")


async def test_created_over_http_and_shown_in_stats() -> None:
    node = make_node()
    host(node, extend=True)
    created = await _http(node, "POST", "/channel/create?topic=t&channel=ch&dispatch=key_failover&key_header=user")
    assert created.status_code == 200
    _consume(node, 0)
    second = _client(node, dispatch="key_failover")
    assert second.ask(b"SUB t ch 0\n").startswith("!E_INVALID")  # it reads the key from another header
    _publish(node, "k")
    [topic] = (await _http(node, "GET", "/stats?format=json&topic=t")).json()["data"]["topics"]
    [channel] = topic["channels"]
    assert (channel["dispatch"], channel["key_header"], channel["replay_count"]) == ("key_failover", "user", 0)
    [found] = channel["key_ranges"]
    assert (found["low"], found["high"], found["tag"], found["waiting"]) == (0.0, 1.0, "", 0)
    assert found["remote_address"].startswith("127.0.0.1:")


async def test_http_refusals() -> None:
    node = make_node()
    host(node, extend=True)
    _consume(node, dispatch="shared")
    for arguments, text in (
        ("dispatch=key_failover", "channel ch of topic t is dispatched by shared, not key_failover"),
        ("dispatch=exclusive", "dispatch type exclusive is unknown, use shared or key_failover"),
    ):
        answer = await _http(node, "POST", f"/channel/create?topic=t&channel=ch&{arguments}")
        assert (answer.status_code, answer.json()) == (400, {"message": text})
    await _http(node, "POST", "/channel/create?topic=t&channel=keyed&dispatch=key_failover")
    answer = await _http(node, "POST", "/channel/setorder?topic=t&channel=keyed&order=true")
    assert answer.status_code == 500
    assert "cannot be consumed in order" in answer.text


async def test_other_channels_show_what_the_real_server_shows() -> None:
    node = make_node()
    host(node, extend=True)
    _consume(node)
    [topic] = (await _http(node, "GET", "/stats?format=json&topic=t")).json()["data"]["topics"]
    assert "key_ranges" not in topic["channels"][0]
