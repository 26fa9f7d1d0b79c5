"""Deliveries in any order give a run without gaps, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import ProtocolError, RangeIncomplete
from nsqext.protocol.messages import RawMessage
from nsqext.spark.read.frames import Block, Blocks, MessageColumns, Reassembler, from_messages


def made(offset: int, size: int, number: int = 0) -> RawMessage:
    """Return a message at a position of the queue."""
    message = RawMessage()
    message.timestamp, message.attempts = number, 1
    message.id = number.to_bytes(16)
    message.version, message.header, message.body = 0, b"", b"%d" % number
    message.offset, message.size = offset, size
    return message


def taken(reassembler: Reassembler, messages: Sequence[RawMessage]) -> list[tuple[int, int]]:
    """Deliver messages; returns what continues the range."""
    return [place for run in reassembler.take(from_messages(messages)) for place in places(run)]


def places(found: MessageColumns | Sequence[RawMessage]) -> list[tuple[int, int]]:
    """Return number and offset of messages."""
    if not isinstance(found, MessageColumns):
        return [(message.timestamp, message.offset) for message in found]
    assert found.bodies == [b"%d" % number for number in found.heads["timestamp"].tolist()]
    return list(zip(found.heads["timestamp"].tolist(), found.heads["offset"].tolist(), strict=True))


def queue(sizes: Sequence[int]) -> list[RawMessage]:
    """Return consecutive messages, numbered by their time stamps."""
    messages: list[RawMessage] = []
    offset = 0
    for number, size in enumerate(sizes):
        messages.append(made(offset, size, number))
        offset += size
    return messages


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[RawMessage], int, int, list[list[RawMessage]], bool]:
    """Return a queue, a range of it, deliveries, and whether they contain every message of the range."""
    stored = queue(draw(st.lists(st.integers(min_value=1, max_value=50), min_size=1, max_size=30)))
    start = draw(st.integers(min_value=0, max_value=len(stored) - 1))
    end = draw(st.integers(min_value=start, max_value=len(stored)))
    lost = draw(st.sets(st.integers(min_value=start, max_value=max(start, end - 1)), max_size=2))
    delivered = [message for message in stored if message.timestamp not in lost]
    delivered += draw(st.lists(st.sampled_from(stored), max_size=20))  # duplicates, also of lost messages
    delivered = draw(st.permutations(delivered))
    cuts = sorted(draw(st.lists(st.integers(min_value=0, max_value=len(delivered)), max_size=4)))
    edges = [0, *cuts, len(delivered)]
    pieces = [delivered[first:last] for first, last in pairwise(edges)]
    return stored, start, end, pieces, set(stored[start:end]) <= set(delivered)


@given(deliveries())
def test_a_run_without_gaps(
    given: tuple[list[RawMessage], int, int, list[list[RawMessage]], bool],
) -> None:
    stored, start, end, pieces, whole = given
    reassembler = Reassembler(start, end, 1000)
    assert reassembler.begin(stored[start].offset)
    ordered: list[tuple[int, int]] = []
    for piece in pieces:
        ordered += taken(reassembler, piece)
        assert ordered == places(stored[start : start + len(ordered)])
        assert reassembler.count == start + len(ordered)
        if not reassembler.done:
            assert reassembler.offset == stored[reassembler.count].offset
    assert reassembler.done == (reassembler.count == end)
    if whole:
        assert reassembler.done


@given(deliveries(), st.integers(min_value=1, max_value=5))
def test_no_message_is_lost_or_duplicated_after_an_error(
    given: tuple[list[RawMessage], int, int, list[list[RawMessage]], bool], window: int
) -> None:
    """A reader continues at the first missing message."""
    stored, start, end, pieces, _ = given
    reassembler = Reassembler(start, end, window)
    assert reassembler.begin(stored[start].offset)
    ordered: list[tuple[int, int]] = []
    for piece in pieces:
        try:
            ordered += taken(reassembler, piece)
        except RangeIncomplete:
            break
    assert ordered == places(stored[start : start + len(ordered)])
    assert reassembler.done or reassembler.begin(stored[reassembler.count].offset)
    ordered += taken(reassembler, stored[reassembler.count :])
    assert (ordered, reassembler.done) == (places(stored[start:end]), True)


def test_too_many_ahead_of_a_gap() -> None:
    stored = queue([10] * 6)
    reassembler = Reassembler(0, 6, 3)
    reassembler.begin(0)
    assert taken(reassembler, stored[1:4]) == []
    with pytest.raises(RangeIncomplete, match="message 0 was not received, but 5 messages after it"):
        taken(reassembler, stored[4:])
    assert taken(reassembler, stored[1:4]) == [], "the next connection has the same patience"
    assert taken(reassembler, stored) == places(stored)


def test_messages_before_a_gap_are_returned_with_any_number_behind_it() -> None:
    stored = queue([10] * 7)
    reassembler = Reassembler(0, 7, 3)
    reassembler.begin(0)
    assert taken(reassembler, [stored[0], *stored[2:]]) == places(stored[:1])
    assert taken(reassembler, stored[1:2]) == places(stored[1:])


def test_a_delivery_that_continues_the_range_is_returned_without_a_copy() -> None:
    reassembler = Reassembler(0, 4, 3)
    reassembler.begin(0)
    for delivery in (from_messages(queue([10] * 4)[:2]), from_messages(queue([10] * 4)[2:])):
        assert reassembler.take(delivery) == [delivery]
    assert (reassembler.done, reassembler.offset) == (True, 40)


def test_another_offset_is_detected() -> None:
    reassembler = Reassembler(5, 6, 3)
    assert taken(reassembler, [made(0, 10)]) == [], "the offset is unknown"
    assert reassembler.begin(70)
    assert reassembler.begin(70)
    assert not reassembler.begin(71)


@pytest.mark.parametrize("message", [made(-1, 5), made(0, 0)])
def test_messages_without_a_position(message: RawMessage) -> None:
    reassembler = Reassembler(0, 6, 3)
    reassembler.begin(0)
    with pytest.raises(ProtocolError):
        taken(reassembler, [message])
    assert reassembler.count == 0


@given(
    st.lists(st.lists(st.integers(min_value=1, max_value=40), max_size=9), max_size=9),
    st.integers(min_value=1, max_value=7),
    st.integers(min_value=1, max_value=100),
)
def test_blocks_contain_every_message_in_order(pieces: list[list[int]], rows: int, size: int) -> None:
    stored = queue([one for piece in pieces for one in piece])
    blocks = Blocks(100, rows, size, 2)
    rest = list(stored)
    for piece in pieces:
        blocks.add(from_messages(rest[: len(piece)]))
        del rest[: len(piece)]
    blocks.close()
    blocks.close()
    full = blocks.full
    found: list[Block] = []
    while (block := blocks.pop()) is not None:
        found.append(block)
    assert full == (len(found) >= 2)
    assert [place for block in found for place in places(block.columns)] == places(stored)
    number = 100
    for block in found:
        assert block.first == number
        assert 1 <= len(block) <= rows
        sizes = block.columns.heads["size"].tolist()
        assert sum(sizes) - sizes[-1] < size, "the block is larger than necessary"
        number += len(block)
    for block in found[:-1]:
        assert len(block) == rows or int(block.columns.heads["size"].sum()) >= size


@pytest.mark.parametrize(
    ("sizes", "expected"), [([19, 5, 19, 5], [2, 2]), ([20, 5, 15], [1, 2]), ([1] * 5, [3, 2]), ([30], [1])]
)
def test_where_blocks_end(sizes: list[int], expected: list[int]) -> None:
    blocks = Blocks(0, 3, 20, 2)
    blocks.add(from_messages(queue(sizes)))
    blocks.close()
    found = [blocks.pop() for _ in expected]
    assert [None if block is None else len(block) for block in found] == expected
