"""Judge a service by the page that Prometheus reads: for ``nsqext doctor --metrics``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from nsqext.cli.admin.findings import Finding, judge_delays, judge_outbox
from nsqext.cli.connection import counted
from nsqext.http.client import HttpClient, HttpRequestFailed
from nsqext.settings_text import redact_url

if TYPE_CHECKING:
    from nsqext.delays import DelaySummary
    from nsqext.transactions.store import OutboxSummary

_TIMEOUT = 5.0
_MOST_REDELIVERED = 0.05  # of the handled messages
_LONGEST_LAG = 10_000  # messages of a relay

_OF_CHANNEL = ("topic", "channel")
SERIES: dict[str, tuple[tuple[str, ...], Callable[[float, float], float]]] = {
    **dict.fromkeys(
        (
            "consumer_dropped_messages_total",
            "consumer_dead_letters_total",
            "consumer_lost_messages_total",
            "consumer_connections",
            "consumer_starved_connections",
            "handled_messages_total",
            "redelivered_messages_total",
        ),
        (_OF_CHANNEL, float.__add__),
    ),
    "relay_lag_messages": ((*_OF_CHANNEL, "target"), max),
    **dict.fromkeys(
        (
            "outbox_published_messages_total",
            "outbox_waiting_messages",
            "outbox_oldest_seconds",
            "outbox_refused_messages",
            "outbox_relays",
            "delay_published_messages_total",
            "delay_waiting_messages",
            "delay_late_seconds",
            "delay_refused_records",
        ),
        ((), max),
    ),
}
"""The labels of each series, in the order of the keys of `Numbers`, and how two values of a key are combined."""
Numbers = Mapping[tuple[str, ...], float]
"""Values of a series, by its labels."""


async def examine_service(url: str, namespace: str) -> list[Finding]:
    """Read the page of a service, and judge it by its counters since the start and by its present state."""
    subject = f"metrics {redact_url(url)}"
    try:
        async with aclosing(HttpClient(_TIMEOUT)) as web:
            reply = await web.request("GET", url)
    except HttpRequestFailed as error:
        return [Finding("error", subject, error.text, "is the service running, and is it the address of its metrics?")]
    hint = "name the page that Prometheus reads, such as /metrics of nsqext run --http"
    if reply.status != 200:
        return [Finding("error", subject, f"responded with status {reply.status}", hint)]
    try:
        text = reply.content.decode()
        found = read_series(text, namespace)
    except ValueError as error:
        return [Finding("error", subject, f"is no page of metrics: {error}", hint)]
    if found:
        return list(judge(found))
    if any(line.removeprefix("# TYPE ").startswith(f"{namespace}_") for line in text.splitlines()):
        return [Finding("ok", subject, "has no consumer or relay yet that could be examined")]
    hint = "add the middleware Prometheus() to the clients, or name its namespace with --metrics-namespace"
    return [Finding("error", subject, f"has no series that begin with {namespace}_", hint)]


def read_series(text: str, namespace: str) -> dict[str, Numbers]:
    """Return the series that are judged, by their names without the namespace; combine further labels.

    Raises:
        ValueError: the text is not in the format of Prometheus.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(f"{namespace}_")
            if name == sample.name or name not in SERIES:
                continue
            labels, combine = SERIES[name]
            key = tuple(sample.labels.get(label, "") for label in labels)
            value = float(sample.value)
            values = found[name]
            values[key] = combine(values[key], value) if key in values else value
    return dict(found)


def judge(series: Mapping[str, Numbers]) -> Iterator[Finding]:
    """Return the findings about a service."""
    channels = sorted({key for name, numbers in series.items() if SERIES[name][0] == _OF_CHANNEL for key in numbers})
    connections = series.get("consumer_connections", {})
    for key in channels:
        findings = list(_judge_channel("/".join(key), partial(_value, series, key=key)))
        if connections.get(key) == 0:
            hint = "are the nodes up, and does the service reach them? Read its log"
            findings.append(Finding("error", f"service {'/'.join(key)}", "has no connection to a node", hint))
        yield from findings or [Finding("ok", f"service {'/'.join(key)}", "nothing dropped, no dead letters")]
    value = partial(_value, series, key=())
    if "outbox_waiting_messages" in series:
        yield judge_outbox(_outbox(value))
    elif "outbox_published_messages_total" in series:
        yield Finding("error", "outbox", "its relay cannot read the database", "is the database down? Read its log")
    if "delay_waiting_messages" in series:
        yield judge_delays(_delays(value))
    elif "delay_published_messages_total" in series:
        yield Finding("error", "delays", "their relay cannot read its store", "is the disk in order? Read its log")
    for key, lag in sorted(series.get("relay_lag_messages", {}).items()):
        topic, channel, target = key
        subject, text = f"relay {topic}/{channel} to {target}", f"{counted(int(lag), 'message')} behind"
        if lag > _LONGEST_LAG:
            yield Finding("warning", subject, text, "does the target store messages? Raise --concurrency")
        else:
            yield Finding("ok", subject, text)


def _value(series: Mapping[str, Numbers], name: str, *, key: tuple[str, ...]) -> int:
    return int(series.get(name, {}).get(key, 0))


def _judge_channel(name: str, value: Callable[[str], int]) -> Iterator[Finding]:
    subject = f"service {name}"
    if dropped := value("consumer_dropped_messages_total"):
        text = f"{counted(dropped, 'message')} failed and dropped since the start"
        yield Finding("error", subject, text, "set dead_letter, so that they are kept")
    if letters := value("consumer_dead_letters_total"):
        text = f"{counted(letters, 'message')} sent to the dead letters since the start"
        hint = "read their errors with nsqext tail; nsqext deadletters replay publishes them again"
        yield Finding("warning", subject, text, hint)
    handled, again = value("handled_messages_total"), value("redelivered_messages_total")
    if handled and again > _MOST_REDELIVERED * handled:
        text = f"{again} of {counted(handled, 'handled message')} were redeliveries ({again / handled:.0%})"
        text += f", {value('consumer_lost_messages_total')} after a timeout or a lost connection"
        hint = "do handlers fail, or take longer than msg_timeout? Raise it, or lower max_in_flight"
        yield Finding("warning", subject, text, hint)
    connections, starved = value("consumer_connections"), value("consumer_starved_connections")
    if connections and starved >= connections:
        text = f"all of {counted(connections, 'connection')} have used up their RDY counts"
        yield Finding("warning", subject, text, "raise max_in_flight and concurrency, or start more consumers")


def _outbox(value: Callable[[str], int]) -> OutboxSummary:
    from nsqext.transactions.store import OutboxSummary

    waiting = value("outbox_waiting_messages")
    return OutboxSummary(
        waiting=waiting,
        refused=value("outbox_refused_messages"),
        age=float(value("outbox_oldest_seconds")) if waiting else None,
        relays=value("outbox_relays"),
    )


def _delays(value: Callable[[str], int]) -> DelaySummary:
    from nsqext.delays import DelaySummary

    late = float(value("delay_late_seconds"))
    return DelaySummary(
        waiting=value("delay_waiting_messages"), late=late or None, refused=value("delay_refused_records")
    )
