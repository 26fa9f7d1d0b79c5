"""Positions in a queue; `test_seek.py` tests how a consumer moves to them."""

from __future__ import annotations

import datetime
import time

import pytest

from nsqext import Position
from nsqext.client.consumer.position import check_position, read_position
from nsqext.errors import InvalidInput
from tests.support.messages import RecordingOwner, make_message


def test_positions_in_the_text_of_the_protocol() -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    positions = [
        Position.earliest(),
        Position.latest(),
        Position.at(moment),
        Position.at(7.9),
        Position.at(0),
        Position.offset(35),
        Position.message(3),
    ]
    assert [str(position) for position in positions] == [
        "msgcount:0",
        "special:-1",
        f"timestamp:{int(moment.timestamp())}",
        "timestamp:7",
        "timestamp:0",
        "virtual_queue:35",
        "msgcount:3",
    ]


def test_positions_as_text_of_settings() -> None:
    texts = ["earliest", "latest", "timestamp:7.9", "offset:35", "message:3"]
    positions = [Position.earliest(), Position.latest(), Position.at(7), Position.offset(35), Position.message(3)]
    assert [read_position(text) for text in texts] == positions
    for text in ("", "Earliest", "offset", "offset:", "offset:1.5", "message:x", "time:7", "earliest:1"):
        with pytest.raises(ValueError, match=r"invalid literal|write earliest, latest"):
            read_position(text)


def test_invalid_positions() -> None:
    for number in (-1, True, 1.5, "1"):
        with pytest.raises(InvalidInput):
            Position.offset(number)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            Position.message(number)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="zone"):
        Position.at(datetime.datetime(2026, 1, 1))
    for moment in (-1.0, time.time() * 1000):
        with pytest.raises(InvalidInput, match="is not the time"):
            Position.at(moment)


def test_comparison_with_a_position() -> None:
    owner = RecordingOwner()
    assert not Position.offset(50).reached_by(make_message(owner, offset=49))
    assert not Position.offset(50).reached_by(make_message(owner, offset=0))
    assert Position.offset(50).reached_by(make_message(owner, offset=50))
    assert Position.offset(50).reached_by(make_message(owner)), "offset unknown"
    assert not Position.at(10).reached_by(make_message(owner, timestamp=9_999_999_999))
    assert Position.at(10).reached_by(make_message(owner, timestamp=10_000_000_000))
    assert not Position.offset(1).reached_by(make_message(owner, offset=0))
    assert Position.earliest().reached_by(make_message(owner))


def test_other_values_are_no_positions() -> None:
    check_position(Position.latest())
    with pytest.raises(InvalidInput, match="'earliest' is not a position"):
        check_position("earliest")
