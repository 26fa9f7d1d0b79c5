"""Encoded commands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nsqext.errors import InvalidBody
from nsqext.protocol.client import batch_commands, commands
from tests.support.tables import table

_ID = bytes(range(5, 21))


@table(
    ("written", "expected"),
    [
        (lambda: commands.NOP, b"NOP\n"),
        (lambda: commands.CLS, b"CLS\n"),
        (lambda: commands.identify(b"{}"), b"IDENTIFY\n\x00\x00\x00\x02{}"),
        (lambda: commands.auth(b"secret"), b"AUTH\n\x00\x00\x00\x06secret"),
        (lambda: commands.publish_line("PUB", "t"), b"PUB t\n"),
        (lambda: commands.publish_line("PUB_EXT", "t", 0), b"PUB_EXT t 0\n"),
        (lambda: commands.publish_line("DPUB", "t", delay=1.5), b"DPUB t 1500\n"),
        (lambda: commands.publish_line("DPUB", "t", delay=0.0019), b"DPUB t 2\n"),
        (lambda: commands.sized(b"PUB t 3\n", b"body"), b"PUB t 3\n\x00\x00\x00\x04body"),
        (
            lambda: commands.publish_trace(b"PUB_TRACE t 0\n", (1 << 64) - 1, b"b"),
            b"PUB_TRACE t 0\n\0\0\0\x09" + b"\xff" * 8 + b"b",
        ),
        (lambda: commands.publish_ext(b"PUB_EXT t 0\n", b"{}", b"b"), b"PUB_EXT t 0\n\0\0\0\x05\0\x02{}b"),
        (
            lambda: batch_commands.multi_ext(b"MPUB_EXT t 0\n", [b"{}", b""], [b"b", b"c"]),
            b"MPUB_EXT t 0\n\0\0\0\x14\0\0\0\x02\0\0\0\x05\0\x02{}b\0\0\0\x03\0\0c",
        ),
        (
            lambda: batch_commands.multi(b"MPUB t 1\n", [b"a", b"bc"]),
            b"MPUB t 1\n\0\0\0\x0f\0\0\0\x02\0\0\0\x01a\0\0\0\x02bc",
        ),
        (lambda: batch_commands.multi(b"MPUB t\n", [b"a"], [1]), b"MPUB t\n\0\0\0\x09\0\0\0\x01\0\0\0\x01a"),
        (
            lambda: bytes(batch_commands.multi(b"MPUB t\n", [b"x" * 5000, b"a"]))[7:19],
            b"\0\0\x13\x95\0\0\0\x02\0\0\x13\x88",
        ),
        (
            lambda: batch_commands.multi_packed(
                b"MPUB t\n", [memoryview(b"\0\0\0\x01a\0\0\0\x01b"), b"\0\0\0\x01c"], 3
            ),
            b"MPUB t\n\0\0\0\x13\0\0\0\x03\0\0\0\x01a\0\0\0\x01b\0\0\0\x01c",
        ),
        (lambda: batch_commands.multi(b"MPUB t\n", []), b"MPUB t\n\0\0\0\x04\0\0\0\0"),
        (lambda: commands.sub("t", "c"), b"SUB t c\n"),
        (lambda: commands.sub("t", "c", 3, verb="SUB_ORDERED"), b"SUB_ORDERED t c 3\n"),
        (
            lambda: commands.sub("t", "c", 3, verb="SUB_ADVANCED", start="special:-1"),
            b"SUB_ADVANCED t c 3 special:-1\n",
        ),
        (lambda: commands.sub("t", "c", verb="SUB_ADVANCED", start="msgcount:7"), b"SUB_ADVANCED t c -1 msgcount:7\n"),
        (lambda: commands.rdy(0), b"RDY 0\n"),
        (lambda: commands.fin(_ID), b"FIN " + _ID + b"\n"),
        (lambda: commands.req(_ID, 1500), b"REQ " + _ID + b" 1500\n"),
        (lambda: commands.req(_ID), b"REQ " + _ID + b" 0\n"),
        (lambda: commands.touch(_ID), b"TOUCH " + _ID + b"\n"),
    ],
)
def test_commands_are_written_as_the_servers_read_them(
    written: Callable[[], bytes | bytearray], expected: bytes
) -> None:
    assert written() == expected


def test_a_valid_body_is_returned() -> None:
    assert commands.check_body(b"x" * 8, limit=16, overhead=8) == b"x" * 8


@pytest.mark.parametrize(
    ("body", "overhead", "text"),
    [
        (b"", 0, "cannot be empty"),
        (b"x" * 17, 0, "17 bytes .with 0 bytes of trace id and headers. is larger than 16"),
        (b"x" * 16, True, "16 bytes .with 1 bytes of trace id and headers. is larger than 16"),
        (b"x" * 9, 8, "9 bytes .with 8 bytes"),
        ("text", 0, "must be bytes, not str.*encode it first"),
        (bytearray(b"x"), 0, "not bytearray"),
        (None, 0, "not NoneType"),
    ],
)
def test_a_body_that_no_server_accepts_is_refused_before_it_is_sent(body: bytes, overhead: int, text: str) -> None:
    with pytest.raises(InvalidBody, match=text):
        commands.check_body(body, limit=16, overhead=overhead)
