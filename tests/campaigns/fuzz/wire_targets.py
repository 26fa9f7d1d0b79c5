"""Targets: what clients and servers receive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from typing import Any

from nsqext.broker.engine.header_filter import compile_filter
from nsqext.broker.lookupd.api import lookupd_app
from nsqext.broker.lookupd.lookupd import Lookupd, LookupdGroup
from nsqext.broker.lookupd.original import OriginalLookupd, original_app
from nsqext.broker.lookupd.registry import LookupSession, Registry
from nsqext.broker.nsqd.server import application, dialect_of
from nsqext.broker.nsqd.session import Session
from nsqext.errors import LookupFailed, NsqError, ProtocolError, TopicNotFound, TopicNotReady
from nsqext.lookup.responses import read_lookup, read_lookup_nodes, read_node, unwrap
from nsqext.protocol.client.body_compression import decompress_body
from nsqext.protocol.client.client_protocol import ClientProtocol, Reply
from nsqext.protocol.delay_record import DelayedMessage, decode_delay, encode_delay
from nsqext.protocol.extjson import UnreadableHeader, read_header
from nsqext.protocol.frames import decode_trace_reply
from nsqext.protocol.headers import decode_headers
from nsqext.protocol.identify import Negotiated
from nsqext.protocol.layers import DeflateLayer, SnappyLayer
from nsqext.protocol.lookupd_tcp import PeerInfo, response_size
from nsqext.protocol.messages import EXT_JSON, RawMessage, decode_into, tag_of
from nsqext.protocol.record import Record
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.types import Address
from tests.support.coordinators import make_coordinator
from tests.support.nsqd_sessions import Client, host, make_node, sized

__all__ = (
    "NODE_INFO",
    "client_frames",
    "delay_records",
    "filters",
    "handshake",
    "headers",
    "lookup_responses",
    "nsqd_http",
    "nsqd_tcp",
    "nsqlookupd_http",
    "nsqlookupd_tcp",
)

_HERE = Address("127.0.0.1", 4161)
_UNPACKED = 1 << 20
NODE_INFO = b'{"tcp_port":1,"http_port":2,"version":"1","broadcast_address":"b","hostname":"h"}'


def _pieces(data: bytes) -> Iterable[bytes]:
    """Return the input without its first byte, in pieces of the size that this byte says."""
    size, rest = max(1, data[0]) if data else 1, data[1:]
    return (rest[at : at + size] for at in range(0, len(rest), size)) if size < 250 else (rest,)


def client_frames(data: bytes) -> None:
    """Frames of a server, and the messages in them."""
    client, replies = ClientProtocol("n:1"), [Reply() for _ in range(3)]
    for reply in replies:
        client.expect(reply)
    for piece in _pieces(data):
        for payload in client.receive_data(piece):
            for extend in (False, True):
                message = RawMessage()
                with suppress(ProtocolError):
                    decode_into(message, payload, extend, detail=True)
                    decompress_body(decode_headers(message.header), message.body, _UNPACKED)
    assert client.error is None or isinstance(client.error, NsqError)
    assert all(isinstance(notice, NsqError) for notice in client.notices)


def handshake(data: bytes) -> None:
    """Responses to IDENTIFY and to traced publishes, and compressed streams behind them."""
    with suppress(ProtocolError):
        assert Negotiated.decode(data).max_rdy_count > 0
    with suppress(ProtocolError):
        decode_trace_reply(data, 1)
    for layer in (SnappyLayer(max_decoded=_UNPACKED), DeflateLayer(max_decoded=_UNPACKED)):
        with suppress(ProtocolError):
            for piece in _pieces(data):
                assert len(layer.decode(piece)) <= _UNPACKED


def headers(data: bytes) -> None:
    """Extend headers of a message, at a client and in a server's filter."""
    with suppress(ProtocolError):
        found = decode_headers(data)
        tag_of(found)
        with suppress(ProtocolError):
            decompress_body(found, data, _UNPACKED)
    with suppress(UnreadableHeader):
        read_header(data, "##trace_id")


def filters(data: bytes) -> None:
    """A client's filter on headers: its type, key, expression, and the header of a message, on a line each."""
    kind, key, expression, header = (data.split(b"\n", 3) + [b""] * 4)[:4]
    texts = key.decode("utf-8", "replace"), expression.decode("utf-8", "replace")
    wanted = {"type": kind[0] % 5 if kind else 0, "filter_ext_key": texts[0], "filter_data": texts[1]}
    wanted["filter_data_list"] = [{"filter_ext_key": texts[0], "filter_data": texts[1]}]
    matches = compile_filter(wanted)
    if matches is not None:
        assert matches(Record(1, 2, 3, b"body", EXT_JSON, header)) in (True, False)


def lookup_responses(data: bytes) -> None:
    """Responses of nsqlookupd over HTTP; the first byte chooses the status."""
    status = {b"4": 404, b"5": 500}.get(data[:1], 200)
    with suppress(LookupFailed, TopicNotFound, TopicNotReady):
        answer = unwrap(status, data[1:], _HERE)
        for read in (read_lookup, read_lookup_nodes):
            with suppress(LookupFailed, TopicNotFound, TopicNotReady):
                read(answer, _HERE)
        with suppress(TypeError, ValueError, KeyError, AttributeError):  # its callers catch these
            read_node(answer, _HERE)


def _execute(session: Session, data: bytes) -> None:
    """Give bytes to a session, as its connection does."""
    try:
        session.receive(data)
        waiting = session.step()
    except NsqError:
        session.fail()
        return
    for _ in range(10_000):
        if waiting is not None:
            waiting.close()  # type: ignore[attr-defined]
            session.command_done()
            return
        if not session.pending or session.closing or session.closed or not session.has_room:
            return
        waiting = session.step()


def nsqd_tcp(data: bytes) -> None:
    """Commands of a client; the first byte chooses the generation and whether IDENTIFY was sent before."""
    kind = data[0] if data else 0
    node = make_node(limits=ServerLimits.original() if kind & 1 else ServerLimits())
    if kind & 1:
        node.create_topic("t")
    else:
        host(node, "t")
        host(node, "x", extend=True)
        host(node, "o", ordered=True)
    session = Session(node, "127.0.0.1:1", dialect_of(node))
    if kind & 2:
        _execute(session, b"  V2" + sized("IDENTIFY", b'{"extend_support":true}') + b"SUB x c 0\nRDY 10\n")
        _execute(session, sized("PUB x 0", b"body"))
    for piece in _pieces(data[1:]):
        _execute(session, piece)
        while session.output.urgent:
            session.take()
    node.tick()
    session.end()


def nsqlookupd_tcp(data: bytes) -> None:
    """Commands of a node at nsqlookupd, and nsqlookupd's responses at a node."""
    session = LookupSession(Registry(lambda: 1), "127.0.0.1:9", PeerInfo("b", 1, 2, "1", "h"), bool(data[:1] > b"m"))
    for piece in _pieces(data):
        session.receive(piece)
    session.end()
    with suppress(ProtocolError):
        if len(data) >= 4:
            PeerInfo.decode(data[4 : 4 + response_size(data[:4])])


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


async def _request(app: Any, data: bytes) -> int:
    """Send a request: its method and target in the first line, headers, an empty line, a body."""
    head, _, body = data.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    method, _, target = first.partition(b" ")
    path, _, query = target.partition(b"?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method.decode("latin-1").upper() or "GET",
        "path": "/" + path.decode("utf-8", "replace").lstrip("/"),
        "raw_path": b"/" + path,
        "query_string": query,
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
        "headers": [tuple(line.lower().partition(b": ")[::2]) for line in lines],
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)  # an error of a handler is raised again after the response with status 500
    return int(sent[0]["status"])


def _serve(app: Any, data: bytes) -> None:
    async def bounded() -> int:
        return await asyncio.wait_for(_request(app, data), 30.0)

    assert 200 <= _loop().run_until_complete(bounded()) < 600


def nsqd_http(data: bytes) -> None:
    """Requests to nsqd; the first byte chooses the generation."""
    original = data[:1] == b"o"
    node = make_node(limits=ServerLimits.original() if original else ServerLimits())
    if original:
        node.create_topic("t").partition.channel("c")
    else:
        for name, flags in (("t", {}), ("x", {"extend": True}), ("o", {"ordered": True})):
            host(node, name, **flags).partition.channel("c")
    client = Client(node)
    client.send(sized("PUB t", b"body"))
    _serve(application(node, {"tcp": "127.0.0.1:4150", "http": "127.0.0.1:4151"}), data[1:])
    node.tick()


def nsqlookupd_http(data: bytes) -> None:
    """Requests to nsqlookupd; the first byte chooses the generation."""
    if data[:1] == b"o":
        registry = Registry(lambda: 1)
        original = OriginalLookupd(registry=registry, version="1.3.0", name="l1", tcp=_HERE, http=_HERE)
        session = original.session("127.0.0.1:9")
        session.receive(b"  V1" + sized("IDENTIFY", NODE_INFO) + b"REGISTER t c\n")
        _serve(original_app(original), data[1:])
        return
    coordinator, group = make_coordinator(2), LookupdGroup()
    lookupd = Lookupd(coordinator, group, name="l1", tcp=_HERE, http=_HERE)
    group.nodes.append(lookupd)
    group.elect()
    app = lookupd_app(lookupd)
    _serve(app, b"POST /topic/create?topic=t&partition_num=1&replicator=2&extend=true")
    _serve(app, data[1:])


def delay_records(data: bytes) -> None:
    """Records in the topic of delayed messages, which any client may publish there."""
    try:
        record, body = decode_delay(data)
    except ProtocolError:
        return
    time = record.due if isinstance(record, DelayedMessage) else record.time
    datetime.fromtimestamp(time / 1000, UTC)  # for `nsqext delay list`
    if decode_delay(encode_delay(record, body)) != (record, body):
        raise AssertionError(f"{record!r} is another record after it was encoded")
