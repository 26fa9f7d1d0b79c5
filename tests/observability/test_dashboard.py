"""The dashboard and the alert rules use exported metrics and labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from nsqext import Consumer, Producer
from nsqext.observability.prometheus import _CONSUMER, _PRODUCER, Prometheus

_FOLDER = files("nsqext.observability")
_DASHBOARD: dict[str, Any] = json.loads((_FOLDER / "grafana_dashboard.json").read_text(encoding="utf-8"))
_RULES = (_FOLDER / "alert_rules.yml").read_text(encoding="utf-8")
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_ADDED = {"job", "le"}  # added by Prometheus


def exported() -> dict[str, set[str]]:
    """Return the labels of every series by its name."""
    registry = CollectorRegistry()
    metrics = Prometheus(registry=registry)
    found: dict[str, set[str]] = {}
    for collector in tuple(registry._collector_to_names):
        for family in collector.describe():  # type: ignore[attr-defined]
            labels = set(getattr(family, "_labelnames", ())) | set(getattr(collector, "_labelnames", ()))
            for suffix in _SUFFIXES[family.type]:
                found[family.name + suffix] = labels
    assert metrics is not None
    return found


def expressions() -> Iterator[str]:
    """Return every expression of the dashboard and of the rules."""
    for panel in _DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in _DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    yield from re.findall(r"^ +expr: (.+)$", _RULES, re.MULTILINE)


def test_every_expression_names_exported_series_and_labels() -> None:
    known = exported()
    named = set[str]()
    for expression in expressions():
        series = re.findall(r"\bnsqext_\w+", expression)
        assert series, expression
        assert set(series) <= known.keys(), expression
        labels = set[str]().union(*(known[name] for name in series)) | _ADDED
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        matched = set(re.findall(r"[{,] ?(\w+)=~?\"", expression)) - {"__name__"}
        assert grouped | matched <= labels, expression
        named |= set(series)
    statistics = {
        f"nsqext_{one.name}" + ("_total" if one.kind == "counter" else "") for one in (*_PRODUCER, *_CONSUMER)
    }
    assert statistics <= named, "the dashboard shows all statistics of clients"


def test_the_statistics_of_clients_are_all_exported() -> None:
    """Each attribute of the statistics is read by a series."""
    read = set[str]()

    class Statistics:
        def __getattr__(self, name: str) -> Any:
            read.add(name)
            return () if name == "connections" and reading is _CONSUMER else 0

    for reading in (_PRODUCER, _CONSUMER):
        for series in reading:
            series.read(Statistics())
    from nsqext import ConsumerStatistics, ProducerStatistics

    assert read >= {*ProducerStatistics.__annotations__, *ConsumerStatistics.__annotations__}


def test_panels_do_not_overlap_and_have_units() -> None:
    places = set[tuple[int, int]]()
    for panel in _DASHBOARD["panels"]:
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert not places & cells
        places |= cells
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"] in ("short", "s", "Bps")
    identifiers = [panel["id"] for panel in _DASHBOARD["panels"]]
    assert len(set(identifiers)) == len(identifiers)


@pytest.mark.anyio
async def test_clients_that_are_not_open_export_nothing_wrong() -> None:
    registry = CollectorRegistry()
    metrics = Prometheus(registry=registry)
    consumer, producer = Consumer("t", "ch", nsqd="127.0.0.1:1"), Producer(nsqd="127.0.0.1:1")
    metrics.attach(consumer)
    metrics.attach(producer)
    assert registry.get_sample_value("nsqext_consumer_connections", {"topic": "t", "channel": "ch"}) is None
    assert registry.get_sample_value("nsqext_producer_connections") == 0
    assert registry.get_sample_value("nsqext_producer_messages_total", {"outcome": "unknown"}) == 0
    del consumer, producer
