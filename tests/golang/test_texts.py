"""JSON, times and lines of statistics, as Go prints them."""

from __future__ import annotations

from typing import Any

from nsqext.golang.config_values import statsd_prefix
from nsqext.golang.texts import channel_line, connected_text, dump, go_duration, go_time, positions_text, topic_line
from tests.support.tables import table

SECOND = 1_000_000_000


@table(
    ("nanoseconds", "text"),
    [
        (0, "0s"),
        (1_500_000_000, "1.5s"),
        (61 * SECOND, "1m1s"),
        (3600 * SECOND, "1h0m0s"),
        (3723 * SECOND + 5_000_000, "1h2m3.005s"),
    ],
)
def test_durations(nanoseconds: int, text: str) -> None:
    assert go_duration(nanoseconds) == text


@table(
    ("nanoseconds", "text"),
    [
        (0, "1970-01-01 00:00:00 +0000 UTC"),
        (SECOND + 1_000_000, "1970-01-01 00:00:01.001 +0000 UTC"),
        (SECOND + 500_000_000, "1970-01-01 00:00:01.5 +0000 UTC"),
    ],
)
def test_times_have_the_shortest_fraction(nanoseconds: int, text: str) -> None:
    assert go_time(nanoseconds) == text


def test_json_is_safe_in_html() -> None:
    assert dump({"a": "<&>"}) == b'{"a":"\\u003c\\u0026\\u003e"}'


def test_a_connection_lasts_since_its_start() -> None:
    assert connected_text({"connect_ts": 100}, 160 * SECOND) == "connected: 1m0s"


def test_positions_have_offset_and_count() -> None:
    assert positions_text(((356, 11),)) == ["&{{{0 356} 356} 11}"]


def test_what_is_paused_is_marked() -> None:
    numbers: dict[str, Any] = dict.fromkeys(
        ("depth", "backend_depth", "in_flight_count", "deferred_count", "requeue_count", "timeout_count"), 0
    )
    numbers["message_count"] = 0
    for paused, topic, channel in ((True, "*P [t ", "   *P [c "), (False, "   [t ", "      [c ")):
        assert topic_line(numbers | {"topic_name": "t", "paused": paused}).startswith(topic)
        assert channel_line(numbers | {"channel_name": "c", "paused": paused}).startswith(channel)
    assert topic_line(numbers | {"topic_name": "t"}).startswith("   [t ")


@table(("prefix", "text"), [("nsq.%s", "nsq.127_0_0_1_4151."), ("nsq.", "nsq."), ("nsq", "nsq.")])
def test_the_prefix_of_statistics_ends_with_a_dot(prefix: str, text: str) -> None:
    assert statsd_prefix(prefix, "127.0.0.1", 4151) == text
