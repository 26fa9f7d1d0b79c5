"""Replies of auth servers, read as both real servers read them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from nsqext.broker.engine.options import NodeOptions
from nsqext.broker.nsqd.auth_server import Authorizations, query_auth
from nsqext.http import connections
from nsqext.http.given_transport import GivenTransport
from nsqext.protocol.server.negotiate import ServerLimits

pytestmark = pytest.mark.anyio

_ALL = {"topic": ".*", "channels": [".*"], "permissions": ["subscribe", "publish"]}


async def _ask(
    monkeypatch: pytest.MonkeyPatch,
    *replies: httpx.Response | Exception,
    method: str = "get",
    servers: int = 1,
    peer: str = "127.0.0.1:5",
) -> list[Any]:
    """Return the authorizations that the replies grant, and the requests."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        reply = replies[min(len(asked), len(replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply

    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    transport = GivenTransport(httpx.MockTransport(answer))
    monkeypatch.setattr(transport, "aclose", close)
    monkeypatch.setattr(connections, "Connections", lambda _: transport)
    limits = ServerLimits.original(auth=True)
    addresses = tuple(f"127.0.0.1:{port}" for port in range(1, servers + 1))
    options = NodeOptions(limits=limits, auth_addresses=addresses, auth_method=method, clock=lambda: 7.0)
    found = await query_auth(options, b"secret", peer, tls=False)
    assert closed
    return [found, asked]


def _reply(**members: Any) -> bytes:
    return json.dumps({"ttl": 60, "authorizations": [_ALL]} | members).encode()


_NO_NAMES: tuple[Any, ...] = (1, True, [], {})
_NO_GRANTS: tuple[Any, ...] = ({}, "x", [1], [_ALL | {"channels": ".*"}])
_NOT_GO = ("[", "a**", "(?=t)", r"t\Z", "x{1001}", r"(t)\1")
_ONLY_GO = ("no", r"\pL+", "[[:alpha:]]", r"\Qt\E", r"t\z")


@pytest.mark.parametrize(
    "body",
    [
        *(_reply(ttl=ttl) for ttl in (0, -1, True, 1.0, "60", None, 1 << 63)),
        *(_reply(identity=name) for name in _NO_NAMES),
        _reply(identity_url=1),
        *(_reply(authorizations=grants) for grants in _NO_GRANTS),
        *(_reply(authorizations=[_ALL | {"permissions": names}]) for names in (["admin"], ["PUBLISH"], "publish")),
        *(_reply(authorizations=[_ALL | {"topic": topic}]) for topic in _NOT_GO),
        _reply(authorizations=[_ALL | {"channels": ["["]}]),
        _reply() + b"x",
        b"",
        b"null",
        b"[]",
    ],
)
async def test_invalid_replies_are_ignored(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    found, _ = await _ask(monkeypatch, httpx.Response(200, content=body))
    assert found is None


@pytest.mark.parametrize(
    ("body", "identity", "publish", "subscribe"),
    [
        (_reply(identity=None), "", True, True),
        (b'{"TTL":60,"Authorizations":[{"Topic":"","CHANNELS":[""],"Permissions":["publish"]}],"IDENTITY":"x"}',
         "x", True, False),
        (_reply(identity="name").replace(b"name", b"\xff"), "\ufffd", True, True),
        (_reply(identity="name").replace(b"name", b"\\ud800"), "\ufffd", True, True),
        (_reply(authorizations=[None]), "", False, False),
        (_reply(authorizations=[_ALL | {"channels": [None]}]), "", True, True),
        (_reply(authorizations=[_ALL | {"channels": ["^ch$"]}]), "", False, True),
        (_reply(authorizations=[_ALL | {"topic": topic} for topic in _ONLY_GO]), "", True, True),
    ],
)  # fmt: skip
async def test_replies_that_grant(
    monkeypatch: pytest.MonkeyPatch, body: bytes, identity: str, publish: bool, subscribe: bool
) -> None:
    found, _ = await _ask(monkeypatch, httpx.Response(200, content=body))
    assert isinstance(found, Authorizations)
    assert (found.identity, found.allows("t", ""), found.allows("t", "ch")) == (identity, publish, subscribe)


@pytest.mark.parametrize(("status", "method"), [(301, "GET"), (302, "GET"), (303, "GET"), (307, "POST"), (308, "POST")])
async def test_redirects_are_followed_as_by_go(monkeypatch: pytest.MonkeyPatch, status: int, method: str) -> None:
    moved = httpx.Response(status, headers={"Location": "/other?a=b"})
    found, asked = await _ask(monkeypatch, moved, httpx.Response(200, content=_reply()), method="post")
    assert found is not None
    assert [(request.method, request.url.path) for request in asked] == [("POST", "/auth"), (method, "/other")]
    assert (asked[1].content != b"") == (method == "POST")


async def test_an_endless_redirect_ends_after_ten_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = await _ask(monkeypatch, httpx.Response(302, headers={"Location": "/auth"}))
    assert (found, len(asked)) == (None, 10)


@pytest.mark.parametrize(
    "first",
    [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), httpx.Response(200, content=b"{}"), httpx.Response(500)],
)
async def test_a_server_without_an_answer_leaves_the_decision_to_the_next(
    monkeypatch: pytest.MonkeyPatch, first: httpx.Response | Exception
) -> None:
    found, asked = await _ask(monkeypatch, first, httpx.Response(200, content=_reply()), servers=2)
    assert isinstance(found, Authorizations)
    assert (len({request.url.port for request in asked}), found.expires) == (2, 67.0)


@pytest.mark.parametrize(("peer", "ip"), [("127.0.0.1:5", "127.0.0.1"), ("[::1]:5", "::1")])
async def test_the_auth_server_gets_the_address_of_the_client(
    monkeypatch: pytest.MonkeyPatch, peer: str, ip: str
) -> None:
    _, (request,) = await _ask(monkeypatch, httpx.Response(200, content=_reply()), peer=peer)
    assert request.url.params["remote_ip"] == ip


async def test_a_redirect_without_a_location_is_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await _ask(monkeypatch, httpx.Response(302, content=_reply())))[0] is None
