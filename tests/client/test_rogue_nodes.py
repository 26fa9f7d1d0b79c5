"""A lookup node of an attacker names a rogue node: what that receives, and what logs and errors show of its texts."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import pytest
import trustme
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream
from attrs import define, field

from nsqext import Consumer, Producer
from nsqext.errors import NegotiationFailed, NsqError
from tests.support.fake_nsqd import (
    PLAIN,
    REDESIGNED,
    Peer,
    ScriptedNode,
    error,
    obey,
    ok,
    scripted_lookup,
    scripted_node,
)

pytestmark = pytest.mark.anyio

SECRET = "open-sesame"
GENERATIONS = pytest.mark.parametrize("granted", [REDESIGNED, PLAIN], ids=["redesigned", "original"])


@define
class _Recorded(ByteStream):
    """A stream that records what is received."""

    stream: ByteStream
    received: list[bytes]

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await self.stream.receive(max_bytes)
        self.received.append(data)
        return data

    async def send(self, item: bytes) -> None:
        await self.stream.send(item)

    async def send_eof(self) -> None:
        await self.stream.send_eof()

    async def aclose(self) -> None:
        await self.stream.aclose()


@define
class _Rogue:
    """Accepts AUTH, and records all bytes of its sockets, those inside of TLS in clear."""

    granted: Mapping[str, Any]
    tls: ssl.SSLContext | None = None  # with a certificate of the attacker
    received: list[bytes] = field(factory=list)

    async def serve(self, peer: Peer) -> None:
        peer.stream = _Recorded(peer.stream, self.received)
        await peer.handshake(self.granted)
        if self.tls is not None:
            with suppress(ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream):
                inner = await TLSStream.wrap(
                    peer.stream, server_side=True, ssl_context=self.tls, standard_compatible=False
                )
                peer.stream = _Recorded(inner, self.received)
                await peer.raw(ok())
        if self.granted.get("tls_v1") and self.tls is None:
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                while True:  # no certificate: TLS of the client is read as it is
                    await peer.stream.receive()
        await obey()(peer)

    @property
    def has_secret(self) -> bool:
        return SECRET.encode() in b"".join(self.received)


async def _use(rogue: _Rogue, client: str, **settings: Any) -> tuple[ScriptedNode, NsqError | None]:
    """Use a client whose lookup node names a rogue node only; return the node and the error of the client."""
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(scripted_node(rogue.serve, granted=None))
        lookup = await stack.enter_async_context(scripted_lookup())
        if "HA" in rogue.granted["version"]:
            lookup.set_leaders({0: node}, num=1)
        else:
            lookup.set_leaders(nodes=[node])
        chosen: dict[str, Any] = {"auth_secret": SECRET, "connect_timeout": 0.5, **settings}
        try:
            if client == "producer":
                async with Producer([str(lookup)], timeout=1.0, **chosen) as producer:
                    await producer.publish("t", b"body")
            else:
                async with Consumer("t", "ch", lookupd=[str(lookup)], start_timeout=1.0, **chosen):
                    pass
        except NsqError as caught:
            return node, caught
        return node, None


CLIENTS = pytest.mark.parametrize("client", ["producer", "consumer"])


@GENERATIONS
@CLIENTS
async def test_without_a_remedy_a_rogue_node_receives_the_secret(granted: Mapping[str, Any], client: str) -> None:
    rogue = _Rogue(granted)
    with anyio.fail_after(25):
        await _use(rogue, client)
    assert rogue.has_secret


@CLIENTS
@pytest.mark.parametrize(
    ("granted", "certificate"),
    [
        (PLAIN, "none"),
        (REDESIGNED, "refused"),
        (PLAIN, "of another authority"),
        (REDESIGNED, "of another name"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
async def test_with_tls_a_rogue_node_does_not_receive_the_secret(
    granted: Mapping[str, Any], client: str, certificate: str
) -> None:
    authority = trustme.CA()
    trusting, presented = ssl.create_default_context(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.configure_trust(trusting)
    if certificate == "of another name":
        authority.issue_cert("elsewhere.example").configure_cert(presented)
    else:
        trustme.CA().issue_cert("127.0.0.1").configure_cert(presented)
    answer = dict(granted) | ({} if certificate == "refused" else {"tls_v1": True})
    rogue = _Rogue(answer, None if certificate in ("none", "refused") else presented)
    with anyio.fail_after(25):
        node, caught = await _use(rogue, client, tls=trusting)
    assert node.peers
    assert rogue.received
    assert not rogue.has_secret
    assert caught is not None or client == "consumer"
    assert certificate == "none" or client == "consumer" or isinstance(caught, NegotiationFailed)


@GENERATIONS
@CLIENTS
async def test_a_node_that_node_filter_leaves_out_is_not_connected_to(granted: Mapping[str, Any], client: str) -> None:
    asked: list[str] = []

    def mine(node: str) -> bool:
        asked.append(node)
        return node.startswith("10.0.0.")

    rogue = _Rogue(granted)
    with anyio.fail_after(25):
        node, _ = await _use(rogue, client, node_filter=mine)
    assert str(node) in asked
    assert node.peers == []


@pytest.mark.parametrize(
    "text", ["one\ntwo", "\x1b[2Jcleared", "\u202ereversed", "\x85\u2028lines", "x" * 100_000], ids=ascii
)
@CLIENTS
async def test_texts_of_nodes_are_printable_and_bounded_in_logs_and_errors(
    text: str, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    granted = {**REDESIGNED, "version": f"0.3.7-HA.{text}", "desired_tag": text}
    refusals = {name: error(f"{code} {text}") for name, code in (("PUB", "E_BAD_MESSAGE"), ("SUB", "E_BAD_CHANNEL"))}
    settings: dict[str, Any] = {"tls": False}
    async with scripted_node(obey(refusals), granted=granted) as node, scripted_lookup() as lookup:
        lookup.set_leaders({0: node}, num=1)
        with anyio.fail_after(25), pytest.raises(NsqError) as caught:
            if client == "producer":
                async with Producer([str(lookup)], timeout=1.0, **settings) as producer:
                    await producer.publish("t", b"body")
            else:
                async with Consumer("t", "ch", lookupd=[str(lookup)], **settings):
                    pass
        lookup.refuse(500, text)
        with anyio.fail_after(25), pytest.raises(NsqError) as refused:
            async with Producer([str(lookup)], timeout=0.5, **settings) as producer:
                await producer.publish("other", b"body")
    shown = [str(caught.value), str(refused.value), *(record.getMessage() for record in caplog.records)]
    assert [one for one in shown if not one.isprintable() or len(one) > 1500] == []
