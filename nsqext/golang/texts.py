"""JSON, times and the text of ``/stats``, as the real servers print them; times in nanoseconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import orjson

from nsqext.protocol.server.go_format import NANOSECONDS, build

NO_LATENCY: dict[str, int | None] = {"count": 0, "percentiles": None}
"""Of a server that measures no latency."""
MEMORY = dict.fromkeys(
    (
        "heap_objects",
        "heap_idle_bytes",
        "heap_in_use_bytes",
        "heap_released_bytes",
        "gc_pause_usec_100",
        "gc_pause_usec_99",
        "gc_pause_usec_95",
        "next_gc_bytes",
        "gc_total_runs",
    ),
    0,
)
"""Counters of Go's memory; 0 here except ``gc_total_runs``."""
_ESCAPES = ((b"<", b"\\u003c"), (b">", b"\\u003e"), (b"&", b"\\u0026"))


def dump(value: object) -> bytes:
    """Return JSON with ``<``, ``>`` and ``&`` escaped."""
    data = orjson.dumps(value)
    for plain, escaped in _ESCAPES:
        if plain in data:
            data = data.replace(plain, escaped)
    return data


def go_time(nanoseconds: int) -> str:
    """Return a time as ``1970-01-01 00:00:00 +0000 UTC``, with the shortest exact fraction."""
    seconds, fraction = divmod(nanoseconds, NANOSECONDS)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    digits = f".{fraction:09d}".rstrip("0") if fraction else ""
    return f"{text}{digits} +0000 UTC"


def go_duration(nanoseconds: int) -> str:
    """Return a duration as ``1h2m3.5s``."""
    hours, rest = divmod(nanoseconds, 3600 * NANOSECONDS)
    minutes, rest = divmod(rest, 60 * NANOSECONDS)
    seconds = f"{rest / NANOSECONDS:.9f}".rstrip("0").rstrip(".")
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{seconds}s"


def heading(version: str, begun: int, now: int) -> list[str]:
    """Return the first lines of /stats as text; times in nanoseconds since 1970."""
    started = datetime.fromtimestamp(begun // NANOSECONDS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return [f"nsqd v{build(version)}", f"start_time {started}", f"uptime {go_duration(now - begun)}"]


def topic_line(topic: dict[str, Any]) -> str:
    """Return a topic line of /stats; the redesigned generation does not pause topics."""
    return (
        f"{'*P ' if topic.get('paused') else '   '}[{topic['topic_name']:<15}] depth: {topic['depth']:<5} "
        f"be-depth: {topic['backend_depth']:<5} msgs: {topic['message_count']:<8} e2e%: "
    )


def channel_line(channel: dict[str, Any]) -> str:
    """Return a channel line of /stats."""
    return (
        f"{'   *P ' if channel['paused'] else '      '}[{channel['channel_name']:<25}] "
        f"depth: {channel['depth']:<5} be-depth: {channel['backend_depth']:<5} "
        f"inflt: {channel['in_flight_count']:<4} def: {channel['deferred_count']:<4} "
        f"re-q: {channel['requeue_count']:<5} timeout: {channel['timeout_count']:<5} "
        f"msgs: {channel['message_count']:<8} e2e%: "
    )


def consumer_text(client: dict[str, Any]) -> str:
    """Return a consumer's state and counters in the text of /stats."""
    return (
        f"state: {client['state']} inflt: {client['in_flight_count']:<4} "
        f"rdy: {client['ready_count']:<4} fin: {client['finish_count']:<8} re-q: {client['requeue_count']:<8} "
        f"msgs: {client['message_count']:<8}"
    )


def connected_text(client: dict[str, Any], now: int) -> str:
    """Return the duration of a connection; ``now`` in nanoseconds since 1970."""
    return f"connected: {go_duration((now // NANOSECONDS - client['connect_ts']) * NANOSECONDS)}"


def positions_text(positions: tuple[tuple[int, int], ...]) -> list[str]:
    """Return positions (offset, messages before it) as Go prints their structures."""
    return [f"&{{{{{{0 {offset}}} {offset}}} {count}}}" for offset, count in positions]
