"""Start positions and the real server's refusals of bad ones."""

from __future__ import annotations

import pytest

from nsqext.broker.engine.storage.log import AT_END, Log, Refusal, StartPosition
from tests.support.engine_partition import START, Bench


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("count:3", "invalid consume offset:count:3"),
        ("virtual_queue", "invalid consume offset:virtual_queue"),
        (":", "invalid consume offset::"),
        ("virtual_queue:1:2", "invalid consume offset:virtual_queue:1:2"),
        ("virtual_queue:x", 'strconv.ParseInt: parsing "x": invalid syntax'),
        ("timestamp:abc", 'strconv.ParseInt: parsing "abc": invalid syntax'),
        ("msgcount:", 'strconv.ParseInt: parsing "": invalid syntax'),
        ("msgcount:1_0", 'strconv.ParseInt: parsing "1_0": invalid syntax'),
        ("msgcount:9223372036854775808", 'strconv.ParseInt: parsing "9223372036854775808": value out of range'),
    ],
)
def test_invalid_texts(text: str, refusal: str) -> None:
    with pytest.raises(Refusal) as caught:
        StartPosition.parse(text)
    assert caught.value.text == refusal


@pytest.fixture
def log() -> Log:
    bench = Bench()
    for second in range(4):
        bench.now = 1000.0 + second * 10
        bench.publish("m")
    return bench.partition.log


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("special:-1", 4),
        ("virtual_queue:0", 0),
        ("virtual_queue:-1", 0),
        ("virtual_queue:-999999", 0),
        ("msgcount:-999999", 0),
        ("virtual_queue:31", 1),
        ("virtual_queue:32", 2),
        ("virtual_queue:99999", 4),
        ("msgcount:0", 0),
        ("msgcount:1", 0),
        ("msgcount:3", 2),
        ("msgcount:99999", 4),
        (f"timestamp:{START // 1_000_000_000}", 0),
        (f"timestamp:{START // 1_000_000_000 + 1}", 1),
        (f"timestamp:{START // 1_000_000_000 + 3600}", 4),
        ("timestamp:0", 0),
        ("msgcount:+2", 1),
    ],
)
def test_positions(log: Log, text: str, count: int) -> None:
    assert StartPosition.parse(text).find(log) == (count * 31, count)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("special:5", "not supported offset type"),
        ("timestamp:-1", "Invalid timestamp -1"),
        ("virtual_queue:-1000000", "search commit log data not found"),
        ("msgcount:-9223372036854775808", "search commit log data not found"),
        ("timestamp:9999999999", "Invalid timestamp 9999999999"),
    ],
)
def test_positions_without_a_record(log: Log, text: str, refusal: str) -> None:
    with pytest.raises(Refusal) as caught:
        StartPosition.parse(text).find(log)
    assert caught.value.text == refusal


def test_an_empty_queue_only_has_an_end() -> None:
    assert AT_END.find(Log()) == (0, 0)
    for text in ("virtual_queue:0", "msgcount:1", "timestamp:1700000000"):
        with pytest.raises(Refusal, match=r"^commit log end of file$"):
            StartPosition.parse(text).find(Log())


def test_a_node_on_its_own_finds_only_the_end(log: Log) -> None:
    assert AT_END.find(log, clustered=False) == (124, 4)
    with pytest.raises(Refusal, match=r"^Not supported while coordinator disabled$"):
        StartPosition.parse("virtual_queue:0").find(log, clustered=False)
