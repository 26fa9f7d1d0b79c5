"""What is fuzzed: a function of bytes for each parser of untrusted bytes, which raises only when a promise is broken.

A target catches the errors that its subject documents. Whatever else it raises is a finding, and so is an input that
takes too long or too much memory.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import orjson
from attrs import frozen

from nsqext.broker.coordinator.coordinator import Coordinator, CoordinatorOptions
from nsqext.broker.coordinator.members import Member
from nsqext.broker.coordinator.state_file import StateFile
from nsqext.broker.engine.filters.header_filter import compile_filter
from nsqext.broker.engine.storage.files import with_checksum, without_checksum
from nsqext.broker.lookupd.api import lookupd_app
from nsqext.broker.lookupd.classic import ClassicLookupd, classic_app
from nsqext.broker.lookupd.lookupd import Lookupd, LookupdGroup
from nsqext.broker.lookupd.registry import Registry
from nsqext.broker.lookupd.tcp_server import LookupSession
from nsqext.broker.nsqd.http.routes import application
from nsqext.broker.nsqd.node import Node
from nsqext.broker.nsqd.options import NodeOptions
from nsqext.broker.nsqd.server import dialect_of
from nsqext.broker.nsqd.session import Session
from nsqext.cli.files.message_files import read_entries
from nsqext.cli.message_record import outgoing_message
from nsqext.errors import (
    InvalidInput,
    InvalidSetting,
    LookupFailed,
    NsqError,
    ProtocolError,
    TopicNotFound,
    TopicNotReady,
)
from nsqext.lookup.responses import read_lookup, read_lookup_nodes, read_node, unwrap
from nsqext.protocol.client.body_compression import decompress_body
from nsqext.protocol.client.client_protocol import ClientProtocol, Reply
from nsqext.protocol.extjson import UnreadableHeader, read_header
from nsqext.protocol.frames import FrameType, encode_frame
from nsqext.protocol.headers import decode_headers, tag_of
from nsqext.protocol.identify import Negotiated
from nsqext.protocol.layers import DeflateLayer, SnappyLayer
from nsqext.protocol.lookupd_tcp import LookupdResponseParser, PeerInfo
from nsqext.protocol.messages import EXT_JSON, RawMessage, decode_into, encode_message
from nsqext.protocol.record import Record
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.protocol.trace_reply import decode_trace_reply
from nsqext.types import Address
from tests.support.nsqd_sessions import Client, Clock, host, make_node, sized

__all__ = ("TARGETS", "Target")

_HERE = Address("127.0.0.1", 4161)
_UNPACKED = 1 << 20


@frozen
class Target:
    """One parser of untrusted bytes.

    Attributes:
        run: gives it an input; raises what is a finding.
        seeds: inputs to begin with.
        words: parts of inputs.
    """

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()


def _pieces(data: bytes) -> Iterable[bytes]:
    """Return the input without its first byte, in pieces of the size that this byte says."""
    size, rest = max(1, data[0]) if data else 1, data[1:]
    return (rest[at : at + size] for at in range(0, len(rest), size)) if size < 250 else (rest,)


# --- what a client receives -------------------------------------------------------------------------------------------


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
            read_node(answer)


# --- what a server receives -------------------------------------------------------------------------------------------


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
            session.waited()
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
        for reply in LookupdResponseParser().feed(data):
            PeerInfo.decode(reply)


class _Addresses:
    tcp_address = "127.0.0.1:4150"
    http_address = "127.0.0.1:4151"
    https_address = None


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
    _serve(application(node, _Addresses()), data[1:])
    node.tick()


def _coordinator(folder: Path | None = None) -> Coordinator:
    coordinator = Coordinator(CoordinatorOptions(lease=0.05, join_pause=0.01))
    for number in (1, 2):
        path = folder / f"n{number}" if folder else None
        node = Node(f"n{number}", NodeOptions(hostname="h", data_path=path))
        addresses = Address("127.0.0.1", 1000 + number), Address("127.0.0.1", 2000 + number)
        coordinator.members[node.name] = Member(node.name, node, *addresses, number)
    return coordinator


def nsqlookupd_http(data: bytes) -> None:
    """Requests to nsqlookupd; the first byte chooses the generation."""
    if data[:1] == b"o":
        registry = Registry(lambda: 1)
        classic = ClassicLookupd(registry=registry, version="1.3.0", name="l1", tcp=_HERE, http=_HERE)
        session = LookupSession(registry, "127.0.0.1:9", classic.peer_info())
        session.receive(b"  V1" + sized("IDENTIFY", _NODE) + b"REGISTER t c\n")
        _serve(classic_app(classic), data[1:])
        return
    coordinator, group = _coordinator(), LookupdGroup()
    lookupd = Lookupd(coordinator, group, name="l1", tcp=_HERE, http=_HERE)
    group.nodes.append(lookupd)
    group.elect()
    app = lookupd_app(lookupd)
    _serve(app, b"POST /topic/create?topic=t&partition_num=1&replicator=2&extend=true")
    _serve(app, data[1:])


# --- what is read from disks ------------------------------------------------------------------------------------------

_QUEUE = "t/t-0.diskqueue.000000.dat"
_STATE = "t/t-0.channels.json"
_DELAYED = "t/t-0.delayed.jsonl"
_BASE = "t/t-0.diskqueue.000000.base.json"
_FILES = {b"q": _QUEUE, b"c": _STATE, b"d": _DELAYED, b"b": _BASE}


@cache
def _stored() -> dict[str, bytes]:
    """Return the files of a node with messages, a channel that has finished some of them, and a delayed message."""
    with tempfile.TemporaryDirectory() as folder:
        node = make_node(data_path=Path(folder))
        host(node, "t")
        client = Client(node)
        client.ask(b"SUB t c 0\n")
        client.send(b"RDY 2\n")
        client.send(b"".join(sized("PUB t 0", b"body %d" % number) for number in range(4)))
        first, second = [data for kind, data in client.receive() if kind == FrameType.MESSAGE][:2]
        client.send(b"FIN " + first[10:26] + b"\nREQ " + second[10:26] + b" 86400000\n")
        client.session.end()
        node.tick()
        node.unhost("t", 0)
        return {name: _bare(name, (Path(folder) / name).read_bytes()) for name in _FILES.values()}


def _bare(name: str, data: bytes) -> bytes:
    """Return the content of a file without checksums, behind which no damage would be read."""
    if name == _QUEUE:
        return data
    return b"\n".join(without_checksum(line) if line else line for line in data.split(b"\n"))


def _sealed(name: str, data: bytes) -> bytes:
    """Undo `_bare`."""
    if name == _QUEUE:
        return data
    if name != _DELAYED:
        return with_checksum(data)
    return b"\n".join(with_checksum(line) if line else line for line in data.split(b"\n"))


def disk(data: bytes) -> None:
    """Files of a node after a restart; the first byte chooses which of them is damaged."""
    files = _stored() | {_FILES.get(data[:1], _QUEUE): data[1:]}
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_memory()))
    try:
        (folder / "t").mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(_sealed(name, content))
        clock = Clock()
        node = make_node(clock, data_path=folder)
        with suppress(InvalidSetting):
            node.load()
            host(node, "t")
            client = Client(node)
            client.send(b"SUB t c 0\nRDY 100\n")
            client.send(sized("PUB t 0", b"after the restart"))
            clock.seconds += 100.0
            node.tick()
            client.receive()
            client.session.end()
        for topic, partition in list(node.hosted):
            node.unhost(topic, partition)
    finally:
        shutil.rmtree(folder)


@cache
def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def coordinator_state(data: bytes) -> None:
    """The coordinator's file of topics."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_memory()))
    try:
        path = folder / "cluster.json"
        path.write_bytes(with_checksum(data))
        coordinator = _coordinator(folder)
        with suppress(InvalidSetting):
            StateFile(coordinator, path).load()
        for member in coordinator.members.values():
            for topic, partition in list(member.node.hosted):
                member.node.unhost(topic, partition)
    finally:
        shutil.rmtree(folder)


def message_files(data: bytes) -> None:
    """Files of `nsqext record`, as `nsqext replay` reads them."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_memory()))
    try:
        path = folder / "t.jsonl.gz"
        path.write_bytes(data)
        with suppress(InvalidInput):
            for entry in read_entries(path):
                with suppress(InvalidInput):
                    outgoing_message(entry.record)
    finally:
        shutil.rmtree(folder)


# --- the table --------------------------------------------------------------------------------------------------------


def _message_frame() -> bytes:
    message = RawMessage()
    message.timestamp, message.attempts, message.id = 1, 1, bytes(16)
    message.body, message.header, message.version = b"body", b'{"##trace_id":"1"}', 4
    message.offset, message.size = 0, 50
    return encode_frame(FrameType.MESSAGE, encode_message(message, True, True))


_LOOKUP = orjson.dumps(
    {
        "channels": ["c"],
        "meta": {"partition_num": 1, "replica": 1, "extend_support": True},
        "partitions": {"0": {"broadcast_address": "h", "tcp_port": 1, "http_port": 2, "version": "HA"}},
        "producers": [{"broadcast_address": "h", "tcp_port": 1, "http_port": 2, "hostname": "h", "topics": ["t"]}],
        "lookupdnodes": [{"NodeIP": "h", "HttpPort": "1", "ID": "a", "Epoch": 1}],
        "lookupdleader": {"ID": "a"},
    }
)
_TOPICS = orjson.dumps(
    {
        "topics": {
            "t": {
                "spec": {"partition_num": 1, "replica": 1},
                "registered": [],
                "partitions": {"0": {"leader": "n1", "replicas": ["n1"], "in_sync": ["n1"], "epoch": 1}},
            }
        }
    }
)
_NODE = b'{"tcp_port":1,"http_port":2,"version":"1","broadcast_address":"b","hostname":"h"}'
_COMMANDS = (b"IDENTIFY\n", b"SUB t c 0\n", b"RDY 1\n", b"PUB t 0\n\0\0\0\1a", b"MPUB t 0\n\0\0\0\x0d\0\0\0\1\0\0\0\1a")
_VERBS = (b"PUB_TRACE", b"PUB_EXT x 0\n", b"MPUB_EXT", b"SUB_ADVANCED", b"SUB_ORDERED", b"DPUB", b"FIN ", b"REQ ")
_PATHS = (
    *(
        b"/pub?topic=",
        b"/pub_ext?topic=x",
        b"/mpub?topic=t&binary=true",
        b"/stats?format=json",
        b"/message/get?topic=t",
    ),
    *(b"/channel/create?topic=t&channel=", b"/channel/setoffset?topic=t&channel=c", b"/config/log_level", b"/pubtrace"),
    *(b"/message/stats", b"/channel/finishmemdelayed", b"/message/historystats", b"&partition=0", b"&search_mode=id"),
)
_LOOKUP_PATHS = (
    *(
        b"/lookup?topic=t",
        b"/topics",
        b"/channels?topic=t",
        b"/nodes",
        b"/topic/create?topic=",
        b"/topic/delete?topic=",
    ),
    *(b"/topic/partition/move?topic=t&partition=0", b"/topic/partition/expand", b"/topic/meta/update", b"/debug"),
    *(b"/channel/create?topic=t&channel=", b"/topic/tombstone?topic=t&node=", b"/cluster/stats", b"&partition_num=1"),
)

TARGETS: dict[str, Target] = {
    "client_frames": Target(
        client_frames,
        (b"\xff" + encode_frame(FrameType.RESPONSE, b"OK") + _message_frame(), b"\3" + _message_frame() * 2),
        (b"\0\0\0\x06\0\0\0\0OK", b"_heartbeat_", b"E_FIN_FAILED", b"##client_compress", b"\0\0\0\2"),
    ),
    "handshake": Target(
        handshake,
        (b'{"max_rdy_count":2500,"msg_timeout":60000}', b"OK" + bytes(28), b"\xff\xff\6\0\0sNaPpY\0\5\0\0\0\0\0\0a"),
        (b"max_rdy_count", b"snappy", b"deflate_level", b"sample_rate", b"1e400", b"sNaPpY"),
    ),
    "headers": Target(
        headers,
        (
            b'{"##trace_id":"1","a":"b"}',
            b'{"##client_compress":"1","##client_size":"4"}',
            b'{"a":{"b":[1,2.5e3,null]}}',
        ),
        (b"##key", b"##client_compress", b"\\ud800", b"1e400", b"[[[[", b'{"a":'),
    ),
    "filters": Target(
        filters,
        (b'1\na\nb\n{"a":"b"}', b'2\na.b\n^x.*[a-z]+$\n{"a":{"b":"xy"}}', b'3\na\n*{b,c}?\n{"a":"b"}'),
        (b"{", b"}", b"(?i)", b"[[:alpha:]]", b"\\pL", b"{1000}", b"a.b.", b"[0]", b"**", b"\\"),
    ),
    "lookup_responses": Target(
        lookup_responses,
        (b"2" + _LOOKUP, b'2{"status_code":200,"data":' + _LOOKUP + b"}", b'4{"message":"TOPIC_NOT_FOUND"}'),
        (b"1e400", b'"partitions"', b'"tcp_port"', b"-1", b"null", b'"tombstones"', b'"topics"', b'"meta"'),
    ),
    "nsqd_tcp": Target(
        nsqd_tcp,
        (
            b"\0\xff  V2" + b"".join(_COMMANDS),
            b"\1\xff  V2SUB t c\nRDY 1\n",
            b"\2\xff" + sized("PUB_EXT x 0", b"\0\2{}a"),
        ),
        (
            *_COMMANDS,
            *_VERBS,
            b"  V2",
            b"0000000000000001",
            b'{"ext_filter":{"type":1}}',
            b"TOUCH ",
            b"CLS\n",
            b"NOP\n",
        ),
    ),
    "nsqlookupd_tcp": Target(
        nsqlookupd_tcp,
        (b"\xff  V1" + sized("IDENTIFY", _NODE) + b"REGISTER t c\nPING\n",),
        (b"  V1", b"IDENTIFY\n", b"REGISTER ", b"UNREGISTER ", b"PING\n", b"broadcast_address", b"1e400"),
    ),
    "nsqd_http": Target(
        nsqd_http,
        tuple(
            kind + method + path for kind in (b"h", b"o") for method in (b"POST ", b"GET ", b"PUT ") for path in _PATHS
        ),
        (*_PATHS, b"content-length: 5", b"accept: application/vnd.nsq; version=1.0", b"%00", b"%ff", b"&channel=c"),
    ),
    "nsqlookupd_http": Target(
        nsqlookupd_http,
        tuple(
            kind + method + path for kind in (b"h", b"o") for method in (b"POST ", b"GET ") for path in _LOOKUP_PATHS
        ),
        (*_LOOKUP_PATHS, b"&replicator=2", b"&channel=c", b"&node=127.0.0.1:2001", b"move_leader=true", b"%00"),
    ),
    "disk": Target(
        disk,
        tuple(letter + _stored()[name] for letter, name in _FILES.items()),
        (
            b'"offset":',
            b'"intervals":',
            b"-1",
            b"1e400",
            b'"count":',
            b"null",
            b'"delayed":',
            b'"dispatch":"key_failover"',
        ),
    ),
    "coordinator_state": Target(
        coordinator_state,
        (_TOPICS,),
        (b'"partition_num":', b'"replicas":', b'"in_sync":', b'"epoch":', b"1e400", b"null", b'"../x"', b'"n2"'),
    ),
    "message_files": Target(
        message_files,
        (b'{"body":"a","headers":{"k":"v"},"trace_id":1}\n{"body_base64":"YQ=="}\n',),
        (b"\x1f\x8b\x08", b'"body_base64":', b'"key":', b'"trace_id":', b"-1", b"1e400"),
    ),
}
