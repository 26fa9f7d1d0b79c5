"""Strategies of hypothesis: streams in pieces, commands, headers, damaged and hostile bytes."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from nsqext.protocol.client import commands
from nsqext.protocol.headers import encode_headers
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.commands import ext_body, internal_create_topic, multi_body, trace_body

__all__ = (
    "BODIES",
    "COMMANDS",
    "FRAMES",
    "HEADERS",
    "IDS",
    "JSON",
    "NAMES",
    "PARTITIONS",
    "SMALL",
    "U32",
    "U64",
    "damaged",
    "hostile",
    "odd_headers",
    "pieces_of",
)

SMALL = ServerLimits(max_msg_size=60, max_body_size=200)
U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)
NAMES = st.from_regex(r"[.a-zA-Z0-9_-]{1,20}(#ephemeral)?", fullmatch=True)
PARTITIONS = st.none() | st.integers(0, 1023)
PLACES = st.none() | st.integers(0, 1023)  # of a publish; None on the original NSQ
IDS = st.binary(min_size=16, max_size=16)
BODIES = st.binary(min_size=1, max_size=40)
HEADERS = st.dictionaries(
    st.from_regex(r"[a-zA-Z_.-][0-9a-zA-Z_.#-]{0,8}", fullmatch=True), st.text(max_size=8), max_size=3
)
FRAMES = st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=60)), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


_NAMES = ("##key", "##client_dispatch_tag", "dead-letter-error", "dead-letter-topic", "x-first", "x-last", "nsqext_id")
_VALUES = (
    b"NaN",
    b"1e400",
    b"01",
    b'"caf\xe9"',
    b'"cut \\ud83d"',
    b'"line\nbreak"',
    b"[1, {}]",
    b"18446744073709551616",
)
_SPACES = st.sampled_from([b"", b"", b" ", b"\r\n\t"])


@st.composite
def odd_headers(draw: st.DrawFn) -> bytes:
    """Return an extend header as servers store it: with spaces, equal names, and values that are not JSON."""
    members = []
    for _ in range(draw(st.integers(0, 4))):
        name = json.dumps(draw(st.sampled_from(_NAMES) | st.text(max_size=3)), ensure_ascii=draw(st.booleans()))
        value = draw(st.sampled_from(_VALUES) | JSON.map(lambda found: json.dumps(found).encode()))
        parts = [draw(_SPACES) for _ in range(4)]
        members.append(parts[0] + name.encode("utf-8", "replace") + parts[1] + b":" + parts[2] + value + parts[3])
    if draw(st.booleans()):
        members.append(b'"##trace_id":"%d"' % draw(U64))
    return draw(_SPACES) + b"{" + b",".join(members) + b"}" + draw(_SPACES)


@st.composite
def pieces_of(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """Return the data split at random positions."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def hostile(*starts: bytes) -> st.SearchStrategy[bytes]:
    """Return arbitrary bytes, some of them with a valid start."""
    return st.binary(max_size=120) | st.builds(bytes.__add__, st.sampled_from(starts), st.binary(max_size=80))


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """Return the data with a byte changed, or truncated."""
    return st.builds(
        lambda at, byte, end: (data[:at] + bytes((byte,)) + data[at + 1 :])[:end],
        st.integers(0, max(0, len(data) - 1)),
        st.integers(0, 255),
        st.integers(0, len(data)),
    )


COMMANDS: st.SearchStrategy[bytes] = st.one_of(
    st.sampled_from([commands.NOP, commands.CLS]),
    st.builds(commands.identify, st.binary(min_size=1, max_size=30)),
    st.builds(commands.auth, st.binary(min_size=1, max_size=30)),
    st.builds(
        lambda verb, topic, partition, body: commands.sized(commands.publish_line(verb, topic, partition), body),
        st.just("PUB"), NAMES, PLACES, BODIES,
    ),
    st.builds(
        lambda topic, partition, trace_id, body: commands.sized(
            commands.publish_line("PUB_TRACE", topic, partition), trace_body(trace_id, body)
        ),
        NAMES, PLACES, U64, BODIES,
    ),
    st.builds(
        lambda topic, partition, headers, body: commands.sized(
            commands.publish_line("PUB_EXT", topic, partition), ext_body(encode_headers(headers), body)
        ),
        NAMES, PLACES, HEADERS, BODIES,
    ),
    st.builds(
        lambda topic, partition, bodies: commands.sized(
            commands.publish_line("MPUB", topic, partition), multi_body(bodies)
        ),
        NAMES, PLACES, st.lists(BODIES, min_size=1, max_size=5),
    ),
    st.builds(
        lambda topic, partition, bodies: commands.sized(
            commands.publish_line("MPUB_TRACE", topic, partition),
            multi_body([trace_body(trace_id, body) for trace_id, body in bodies]),
        ),
        NAMES, PLACES, st.lists(st.tuples(U64, BODIES), min_size=1, max_size=5),
    ),
    st.builds(
        lambda topic, partition, bodies: commands.sized(
            commands.publish_line("MPUB_EXT", topic, partition),
            multi_body(
                [ext_body(encode_headers(headers) if headers else b"", body) for headers, body in bodies]
            ),
        ),
        NAMES, PLACES, st.lists(st.tuples(HEADERS, BODIES), min_size=1, max_size=4),
    ),
    st.builds(
        lambda topic, channel, partition, verb: commands.sub(topic, channel, partition, verb=verb),
        NAMES, NAMES, PARTITIONS, st.sampled_from(["SUB", "SUB_ADVANCED", "SUB_ORDERED"]),
    ),
    st.builds(
        lambda topic, channel, partition, start: commands.sub(
            topic, channel, partition, verb="SUB_ADVANCED", start=start
        ),
        NAMES, NAMES, PARTITIONS, st.sampled_from(["special:-1", "timestamp:5", "msgcount:0", "virtual_queue:99"]),
    ),
    st.builds(commands.rdy, st.integers(0, 2500)),
    st.builds(commands.fin, IDS),
    st.builds(commands.touch, IDS),
    st.builds(commands.req, IDS, st.integers(0, 10**9)),
    st.builds(internal_create_topic, NAMES, st.integers(0, 254), st.booleans()),
)  # fmt: skip
