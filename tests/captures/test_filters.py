"""Header filters: the broker delivers the same messages as the real server."""

from __future__ import annotations

import json

import pytest

from nsqext.broker.engine.header_filter import compile_filter
from nsqext.protocol.messages import EXT_JSON
from nsqext.protocol.record import Record
from tests.captures import RecordedFilter, recorded_filters
from tests.support.tables import table

RECORDED = [pytest.param(one, id=json.dumps(one.wanted)) for one in recorded_filters()]


@table("recorded", RECORDED)
def test_a_filter_passes_the_same_messages_as_the_real_server(recorded: RecordedFilter) -> None:
    matches = compile_filter(recorded.wanted)
    passed = []
    for header, name in recorded.messages:
        record = Record(0, 0, 0, b"") if header is None else Record(0, 0, 0, b"", EXT_JSON, header.encode())
        if matches is None or matches(record):
            passed.append(name)
    assert passed == recorded.passed
