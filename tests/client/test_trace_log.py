"""The trace log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from nsqext import Receipt, trace_log
from nsqext.client.events import tracing
from nsqext.client.trace_log import TraceLog
from nsqext.errors import InvalidName
from tests.support.messages import RecordingOwner, make_message

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    trace_log.off()


def test_topics_are_switched_on_and_off() -> None:
    log = TraceLog()
    assert (tracing.log, log.wants("a")) == (None, False)
    log.on("a")
    assert (tracing.log, log.wants("a"), log.wants("b")) == (log, True, False)
    log.on()
    assert log.wants("b")
    log.off("a")
    assert (tracing.log, log.wants("a")) == (log, True)
    log.off()
    assert (tracing.log, log.wants("a")) == (None, False)
    log.on("a")
    log.on()
    log.off()
    assert (tracing.log, log.wants("a")) == (None, False)
    log.on("a")
    log.off("a")
    assert tracing.log is None
    with pytest.raises(InvalidName):
        log.on("no topic")


def test_memory_of_a_publish(caplog: pytest.LogCaptureFixture) -> None:
    log = TraceLog()
    log.on("a")
    with caplog.at_level(logging.INFO, "nsqext.trace"):
        log.published([Receipt("a", 0, "n:1", 5, 7, 100, 35), Receipt("b", 1, "n:1")], "me:2")
    (record,) = caplog.records
    expected = {
        "event": "published",
        "topic": "a",
        "partition": 0,
        "internal_id": 5,
        "trace_id": 7,
        "queue_offset": 100,
        "queue_size": 35,
        "local": "me:2",
        "node": "n:1",
    }
    assert {name: record.__dict__[name] for name in expected} == expected
    assert record.message.startswith("published a[0] internal_id=5 ")


def test_memory_of_a_delivery(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nsqext.trace"):
        TraceLog().consumed([make_message(RecordingOwner(), 5, offset=40, trace_id=7, timestamp=99)], "ch", "me:2")
    (record,) = caplog.records
    expected = {
        "event": "consumed",
        "topic": "t",
        "channel": "ch",
        "partition": 3,
        "internal_id": 5,
        "trace_id": 7,
        "queue_offset": 40,
        "queue_size": 34,
        "timestamp": 99,
        "attempts": 1,
        "local": "me:2",
        "node": "127.0.0.1:4150",
    }
    assert {name: record.__dict__[name] for name in expected} == expected
    assert "internal_id=5 trace_id=7 queue_offset=40 queue_size=34 timestamp=99 local=me:2" in record.message
