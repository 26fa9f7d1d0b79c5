"""Keys of messages are read from a header or by a function, and are divided evenly among lanes."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest

from nsqext.client.consumer.handlers.message_keys import key_reader, lane_number
from nsqext.client.consumer.message import Message
from nsqext.key_ranges import position_of
from nsqext.protocol.messages import EXT_JSON


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (b'{"##key":"ann"}', b"ann"),
        (b'{"##key":7}', b"7"),
        (b'{"##key":true}', b"id"),
        (b'{"##key":""}', b"id"),
        (b'{"other":"x"}', b"id"),
        (b"[1]", b"id"),
        (b"broken", b"id"),
    ],
)
def test_the_key_in_a_header(header: bytes, key: bytes) -> None:
    message = Message(Mock())
    message.id, message.header, message.version = b"id", header, EXT_JSON
    assert key_reader("##key")(message) == key


@pytest.mark.parametrize(
    ("value", "key"), [("ä", "ä".encode()), ("\ud800", b"\xed\xa0\x80"), (b"x", b"x"), (None, b"id")]
)
def test_the_key_by_a_function(value: Any, key: bytes) -> None:
    message = Message(Mock())
    message.id = b"id"
    assert key_reader(lambda _: value)(message) == key


def test_lanes_divide_the_keys_of_one_consumer_evenly() -> None:
    """A consumer of a key_failover channel serves a part of the hash space, and uses all of its lanes."""
    keys = [b"key-%d" % number for number in range(4000)]
    mine = [key for key in keys if position_of(key) < 1 << 30]
    counts = Counter(lane_number(key, 8) for key in mine)
    assert len(counts) == 8
    assert max(counts.values()) < 1.4 * len(mine) / 8
