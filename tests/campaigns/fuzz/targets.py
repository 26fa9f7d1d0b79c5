"""What is fuzzed: a function of bytes for each parser of untrusted bytes, which raises only when a promise is broken.

A target catches the errors that its subject documents. Whatever else it raises is a finding, and so is an input that
takes too long or too much memory.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson
from attrs import frozen

from nsqext.protocol.frames import FrameType, encode_frame
from nsqext.protocol.messages import RawMessage
from tests.campaigns.fuzz.file_targets import LETTERS, coordinator_state, disk, message_files, stored_files
from tests.campaigns.fuzz.wire_targets import (
    NODE_INFO,
    client_frames,
    delay_records,
    filters,
    handshake,
    headers,
    lookup_responses,
    nsqd_http,
    nsqd_tcp,
    nsqlookupd_http,
    nsqlookupd_tcp,
)
from tests.support.message_frames import encode_message
from tests.support.nsqd_sessions import sized

__all__ = ("TARGETS", "Target")


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
    "delay_records": Target(
        delay_records,
        (
            b'{"nsqext":"delay","identity":"a","topic":"t","due":1000,"headers":{"a":"b"},"tag":"x"}\nbody',
            b'{"nsqext":"delay","identity":"a","topic":"t","due":1000,"trace_id":7,"key":"aw==","partition":1}\nbody',
            b'{"nsqext":"delay","identity":"a","topic":"t","due":1000,"header":"e30="}\nbody',
            b'{"nsqext":"cancel","identity":"a","time":1000}\n',
        ),
        (b"9223372036854775808", b"253402300799999", b"1e400", b"-1", b"\\ud800", b"\\u0000", b'"due":', b'"key":""'),
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
        (b"\xff  V1" + sized("IDENTIFY", NODE_INFO) + b"REGISTER t c\nPING\n",),
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
        tuple(letter + stored_files()[name] for letter, name in LETTERS.items()),
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
