"""Whatever order messages come in, out comes a dense run, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import ProtocolError, RangeIncomplete
from nsqext.protocol.messages import RawMessage
from nsqext.spark.read.reassembly import Block, Blocks, Reassembler


def made(offset: int, size: int, number: int = 0) -> RawMessage:
    """A message at a place of the queue."""
    message = RawMessage()
    message.timestamp, message.attempts = number, 1
    message.id = number.to_bytes(16)
    message.version, message.header, message.body = 0, b"", b"%d" % number
    message.offset, message.size = offset, size
    return message


def queue(sizes: Sequence[int]) -> list[RawMessage]:
    """Neighbouring messages, numbered by their time stamps."""
    messages: list[RawMessage] = []
    offset = 0
    for number, size in enumerate(sizes):
        messages.append(made(offset, size, number))
        offset += size
    return messages


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[RawMessage], int, int, list[list[RawMessage]], bool]:
    """A queue, a range of it, and pieces in which it is delivered; whether every message of the range is in them."""
    stored = queue(draw(st.lists(st.integers(min_value=1, max_value=50), min_size=1, max_size=30)))
    start = draw(st.integers(min_value=0, max_value=len(stored) - 1))
    end = draw(st.integers(min_value=start, max_value=len(stored)))
    lost = draw(st.sets(st.integers(min_value=start, max_value=max(start, end - 1)), max_size=2))
    delivered = [message for message in stored if message.timestamp not in lost]
    delivered += draw(st.lists(st.sampled_from(stored), max_size=20))  # again, among them what was lost
    delivered = draw(st.permutations(delivered))
    cuts = sorted(draw(st.lists(st.integers(min_value=0, max_value=len(delivered)), max_size=4)))
    edges = [0, *cuts, len(delivered)]
    pieces = [delivered[first:last] for first, last in pairwise(edges)]
    return stored, start, end, pieces, set(stored[start:end]) <= set(delivered)


@given(deliveries())
def test_a_dense_run_comes_out(
    given: tuple[list[RawMessage], int, int, list[list[RawMessage]], bool],
) -> None:
    stored, start, end, pieces, whole = given
    placer = Reassembler(start, end, 1000)
    assert placer.begin(stored[start].offset)
    placed: list[RawMessage] = []
    for piece in pieces:
        placed += placer.take(piece)
        assert placed == stored[start : start + len(placed)]
        assert placer.count == start + len(placed)
        if not placer.done:
            assert placer.offset == stored[placer.count].offset
    assert placer.done == (placer.count == end)
    if whole:
        assert placer.done


@given(deliveries(), st.integers(min_value=1, max_value=5))
def test_after_an_error_nothing_is_lost_or_doubled(
    given: tuple[list[RawMessage], int, int, list[list[RawMessage]], bool], window: int
) -> None:
    """A reader that gets an error begins again at the first missing message."""
    stored, start, end, pieces, _ = given
    placer = Reassembler(start, end, window)
    assert placer.begin(stored[start].offset)
    placed: list[RawMessage] = []
    for piece in pieces:
        try:
            placed += placer.take(piece)
        except RangeIncomplete:
            break
    assert placed == stored[start : start + len(placed)]
    assert placer.done or placer.begin(stored[placer.count].offset)
    placed += placer.take(stored[placer.count :])
    assert (placed, placer.done) == (stored[start:end], True)


def test_too_many_ahead_of_a_gap() -> None:
    stored = queue([10] * 6)
    placer = Reassembler(0, 6, 3)
    placer.begin(0)
    assert placer.take(stored[1:4]) == []
    with pytest.raises(RangeIncomplete, match="left out behind number 0: 4 messages from behind it came"):
        placer.take(stored[4:])
    assert placer.take(stored) == stored


def test_another_beginning_is_told() -> None:
    placer = Reassembler(5, 6, 3)
    assert placer.take([made(0, 10)]) == [], "nothing is placed before it is known where"
    assert placer.begin(70)
    assert placer.begin(70)
    assert not placer.begin(71)


@pytest.mark.parametrize("message", [made(-1, 0), made(0, 0), made(0, -5)])
def test_messages_without_a_place(message: RawMessage) -> None:
    placer = Reassembler(0, 6, 3)
    placer.begin(0)
    with pytest.raises(ProtocolError):
        placer.take([message])
    assert placer.count == 0


@given(
    st.lists(st.lists(st.integers(min_value=1, max_value=40), max_size=9), max_size=9),
    st.integers(min_value=1, max_value=7),
    st.integers(min_value=1, max_value=100),
)
def test_blocks_hold_everything_in_order(pieces: list[list[int]], rows: int, size: int) -> None:
    stored = queue([one for piece in pieces for one in piece])
    blocks = Blocks(100, rows, size, 2)
    rest = list(stored)
    for piece in pieces:
        blocks.add(rest[: len(piece)])
        del rest[: len(piece)]
    blocks.close()
    blocks.close()
    full = blocks.full
    found: list[Block] = []
    while (block := blocks.pop()) is not None:
        found.append(block)
    assert full == (len(found) >= 2)
    assert [message for block in found for message in block.messages] == stored
    number = 100
    for block in found:
        assert block.first == number
        assert 1 <= len(block) <= rows
        held = sum(message.size for message in block.messages)
        assert held - block.messages[-1].size < size, "it could have been closed before"
        number += len(block)
    for block in found[:-1]:
        assert len(block) == rows or sum(message.size for message in block.messages) >= size
