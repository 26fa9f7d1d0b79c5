"""Flushes of the output buffer, and the resulting writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.broker.nsqd.output_buffer import OutputBuffer
from nsqext.protocol.server.negotiate import ClientSettings
from tests.support.clock import Clock


def _buffer(*, ticking: bool, timeout: float = 0.25) -> tuple[Clock, OutputBuffer]:
    clock = Clock()
    settings = ClientSettings(output_buffer_size=16384, output_buffer_timeout=timeout)
    return clock, OutputBuffer(settings, clock, ticking=ticking)


def test_the_original_sends_the_first_message_after_an_idle_time_at_once() -> None:
    clock, buffer = _buffer(ticking=True)
    clock.now += 1.1
    assert not buffer.hold(b"first", full=False)
    assert (buffer.urgent, buffer.take()) == (True, b"first")
    clock.now += 0.1  # 1.2 s after the start: the next tick is at 1.25 s
    assert buffer.hold(b"second", full=False)
    assert (buffer.urgent, round(buffer.due - 1000, 6)) == (False, 1.25)
    assert not buffer.hold(b"third", full=False), "the same tick sends both"
    clock.now = 1001.25
    buffer.expire(clock.now)
    assert (buffer.urgent, buffer.take(), buffer.due) == (True, b"secondthird", 0.0)
    clock.now += 0.2
    assert buffer.hold(b"fourth", full=False), "that tick has passed"


def test_the_original_starts_its_ticks_at_identify() -> None:
    clock, buffer = _buffer(ticking=True)
    clock.now += 0.9
    buffer.restart_ticks()
    assert buffer.hold(b"message", full=False)
    assert round(buffer.due - 1000, 6) == 1.15


def test_the_redesigned_server_waits_the_timeout_from_the_first_message_on() -> None:
    clock, buffer = _buffer(ticking=False, timeout=0.05)
    clock.now += 10
    assert buffer.hold(b"first", full=False)
    clock.now += 0.03
    assert not buffer.hold(b"second", full=False)
    assert round(buffer.due - 1010, 6) == 0.05


@pytest.mark.parametrize("ticking", [False, True])
def test_without_a_timeout_messages_wait_for_a_full_buffer(ticking: bool) -> None:
    _, buffer = _buffer(ticking=ticking, timeout=0.0)
    assert not buffer.hold(b"message", full=False)
    assert (buffer.urgent, buffer.due) == (False, 0.0)


@pytest.mark.parametrize(("ticking", "due"), [(True, 0.25), (False, 0.35)])
def test_a_message_after_a_response_in_its_own_segment_waits_as_any_other(ticking: bool, due: float) -> None:
    clock, buffer = _buffer(ticking=ticking)
    clock.now += 0.1
    buffer.write(b"OK")
    buffer.end_segment()
    assert buffer.hold(b"message", full=False)
    assert (buffer.urgent, buffer.take()) == (True, b"OK")
    assert (buffer.urgent, round(buffer.due - 1000, 6)) == (False, due)
    clock.now = buffer.due
    buffer.expire(clock.now)
    assert (buffer.urgent, buffer.take(), buffer.urgent) == (True, b"message", False)


@pytest.mark.parametrize(
    ("sizes", "sent"), [((16383,), False), ((16384,), True), ((16000, 383), False), ((16000, 384), True)]
)
def test_a_buffer_is_sent_when_it_is_full(sizes: tuple[int, ...], sent: bool) -> None:
    _, buffer = _buffer(ticking=False)
    for size in sizes:
        buffer.hold(bytes(size), full=False)
    assert buffer.urgent is sent


def test_what_an_answer_takes_along_is_not_due_any_more() -> None:
    clock, buffer = _buffer(ticking=False)
    assert buffer.hold(b"message", full=False)
    buffer.write(b"OK")
    assert (buffer.take(), buffer.due) == (b"messageOK", 0.0)
    clock.now += 0.1
    assert buffer.hold(b"next", full=False)
    assert round(buffer.due - 1000, 6) == 0.35


_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 20000)),
        st.tuples(st.just("hold"), st.integers(1, 20000)),
        st.tuples(st.just("segment"), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 600)),
        st.tuples(st.just("take"), st.just(0)),
    ),
    max_size=40,
)


@given(_ACTIONS, st.booleans())
def test_every_byte_leaves_once_and_in_order(actions: list[tuple[str, int]], ticking: bool) -> None:
    clock, buffer = _buffer(ticking=ticking)
    given_, sent = b"", b""
    for number, (action, value) in enumerate(actions):
        frame = bytes([number % 256]) * value
        if action == "write":
            buffer.write(frame)
            given_ += frame
        elif action == "hold":
            buffer.hold(frame, full=False)
            given_ += frame
        elif action == "segment":
            buffer.end_segment()
        elif action == "wait":
            clock.now += value / 1000
            buffer.expire(clock.now)
        elif buffer.urgent:
            sent += buffer.take()
    clock.now += 1  # longer than the timeout: the buffer must be empty
    buffer.expire(clock.now)
    while buffer.urgent:
        sent += buffer.take()
    assert sent == given_
