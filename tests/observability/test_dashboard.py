"""The dashboard and the alert rules use exported metrics and labels."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
from prometheus_client import CollectorRegistry

from nsqext import Consumer, ConsumerStatistics, Producer, ProducerStatistics
from nsqext.client.middleware import Handling
from nsqext.delays import DelayRelay
from nsqext.errors import InvalidState
from nsqext.observability.prometheus import Prometheus
from nsqext.transactions import OutboxRelay
from tests.support.messages import RecordingOwner, make_message
from tests.support.series import all_series, exported

_FOLDER = files("nsqext.observability")
_DASHBOARD: dict[str, Any] = json.loads((_FOLDER / "grafana_dashboard.json").read_text(encoding="utf-8"))
_RULES = (_FOLDER / "alert_rules.yml").read_text(encoding="utf-8")
_GROUP = re.compile(r"\b(?:by|on) \(([^)]*)\)")
_ADDED = {"job", "instance", "le"}  # added by Prometheus

# the parts of Grafana's schema that the dashboard uses, all of them required here: the types Dashboard, Panel,
# RowPanel, VariableModel and the options of timeseries in the npm package @grafana/schema 13.2.3
_SOURCE = {"type": {"prometheus"}, "uid": {"${datasource}"}}
_ALL = {"text": [{"All"}], "value": [{"$__all"}]}
_BOX = {"h": int, "w": int, "x": int, "y": int}
_QUERY_VARIABLE = {
    **{"name": str, "label": str, "type": {"query"}, "datasource": _SOURCE, "query": {"query": str, "refId": str}},
    **{"includeAll": {True}, "multi": {True}, "allValue": {".*"}, "current": _ALL, "refresh": {1, 2}},
}
_SOURCE_VARIABLE = {"name": {"datasource"}, "label": str, "type": {"datasource"}, "query": {"prometheus"}}
_ROW = {"id": int, "type": {"row"}, "title": str, "collapsed": {False}, "panels": [], "gridPos": _BOX}
_PANEL = {
    **{"id": int, "type": {"timeseries"}, "title": str, "description": str},
    **{"datasource": _SOURCE, "gridPos": _BOX},
    "fieldConfig": {"defaults": {"unit": {"short", "s", "Bps"}, "min": {0}}, "overrides": []},
    "options": {
        "legend": {"calcs": [], "displayMode": {"list"}, "placement": {"bottom"}, "showLegend": {True}},
        "tooltip": {"mode": {"multi"}, "sort": {"none"}},
    },
    "targets": [{"refId": str, "expr": str, "legendFormat": str}],
}
_SHAPE = {
    **{"uid": str, "title": str, "tags": [str], "schemaVersion": {39}, "version": int, "editable": bool},
    **{"time": {"from": str, "to": str}, "refresh": str, "templating": {"list": list}, "annotations": {"list": []}},
    "panels": list,
}


def expressions() -> Iterator[str]:
    """Return every expression of the dashboard and of the rules."""
    for panel in _DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in _DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    yield from re.findall(r"^ +expr: (.+)$", _RULES, re.MULTILINE)


@pytest.mark.anyio
async def test_every_expression_names_exported_series_and_labels() -> None:
    known = await all_series()
    named = set[str]()
    for expression in expressions():
        series = re.findall(r"\b(?:nsqext|nsqd|channel)_\w+", expression)
        assert series, expression
        assert set(series) <= known.keys(), expression
        labels = set[str]().union(*(known[name] for name in series)) | _ADDED
        grouped = {label.strip() for group in _GROUP.findall(expression) for label in group.split(",")}
        matched = set(re.findall(r"[{,] ?(\w+)=~?\"", expression)) - {"__name__"}
        assert grouped | matched <= labels, expression
        named |= set(series)
    statistics = {name for name in exported() if re.match("nsqext_(producer|consumer|relay|outbox|delay)_", name)}
    assert statistics <= named, "the dashboard shows all statistics of clients and relays"


_ALARMING = {
    "nsqext_consumer_dead_letters_total",
    "nsqext_consumer_dropped_messages_total",
    "nsqext_consumer_starved_connections",
    "nsqext_redelivered_messages_total",
    *("nsqext_outbox_oldest_seconds", "nsqext_outbox_refused_messages"),
    *("nsqext_delay_late_seconds", "nsqext_delay_refused_records"),
    "nsqext_relay_lag_messages",
}


def test_panels_and_rules_show_what_an_operator_has_to_act_on() -> None:
    for text in (json.dumps(_DASHBOARD["panels"]), _RULES):
        assert set(re.findall(r"nsqext_\w+", text)) >= _ALARMING


def test_the_rule_for_handlers_counts_calls_on_both_sides() -> None:
    """A batch is one call of many messages: compared with messages, no batch handler would ever fail enough."""
    registry = CollectorRegistry()
    batch = Handling([make_message(RecordingOwner()) for _ in range(100)], "ch", batch=True)
    with suppress(ValueError), Prometheus(registry).handling(batch):
        raise ValueError
    (failed, all_of_them) = re.findall(
        r"rate\((\w+)\[", _RULES.partition("alert: NsqHandlersFail")[2].partition("for:")[0]
    )
    labels = {"topic": batch.messages[0].topic, "channel": "ch"}
    assert registry.get_sample_value(failed, {**labels, "error": "ValueError"}) == 1
    assert registry.get_sample_value(all_of_them, labels) == 1


@pytest.mark.parametrize(("kind", "name"), [(OutboxRelay, "Outbox"), (DelayRelay, "Delays")])
def test_a_relay_that_cannot_read_its_store_is_an_alert(kind: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits there is missing then, and the other alerts end."""

    def fail(_: object) -> None:
        raise InvalidState("the database is down")

    registry = CollectorRegistry()
    relay = kind(SimpleNamespace(name="s"))
    Prometheus(registry).attach(relay)
    given, missing = re.findall(r"nsqext_\w+", _RULES.partition(f"alert: Nsq{name}Unreadable")[2].partition("for:")[0])
    values = []
    for summary in (lambda _: SimpleNamespace(waiting=1, age=1, refused=0, relays=1, late=1), fail):
        monkeypatch.setattr(kind, "summary", summary)
        values.append([registry.get_sample_value(one) for one in (given, missing)])
    assert values == [[0, 1], [0, None]]


def test_legends_name_labels_of_their_series() -> None:
    for panel in _DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            (kept,) = _GROUP.findall(target["expr"])[:1] or [""]
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named == set(re.findall(r"\w+", kept)) - {"le"}, target


def test_the_statistics_of_clients_are_all_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attribute of the statistics is read by a series."""
    read = set[str]()

    class Statistics:
        def __init__(self, lists: tuple[str, ...]) -> None:
            self._lists = lists

        def __getattr__(self, name: str) -> Any:
            read.add(name)
            return () if name in self._lists else 0

    registry = CollectorRegistry()
    prometheus = Prometheus(registry)
    producer, consumer = Producer(nsqd="n:1"), Consumer("t", "ch", nsqd="n:1")
    monkeypatch.setattr(producer, "statistics", lambda: Statistics(()))
    monkeypatch.setattr(consumer, "statistics", lambda: Statistics(("connections", "blocked")))
    prometheus.attach(producer)
    prometheus.attach(consumer)
    assert list(registry.collect())
    assert read >= {*ProducerStatistics.__annotations__, *ConsumerStatistics.__annotations__}


def fits(value: object, shape: object, where: str) -> None:
    """Check a value: a type, the keys of a dictionary, the items of a list, or one of several values."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), where
        assert value.keys() == shape.keys(), where
        for key, part in shape.items():
            fits(value[key], part, f"{where}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        assert shape or not value, where
        for number, item in enumerate(value):
            fits(item, shape[0], f"{where}[{number}]")
    elif isinstance(shape, set):
        assert value in shape, where
    else:
        assert type(value) is shape, where


def test_the_dashboard_fits_the_schema_of_grafana() -> None:
    fits(_DASHBOARD, _SHAPE, "dashboard")
    first, *others = _DASHBOARD["templating"]["list"]
    fits(first, _SOURCE_VARIABLE, "datasource")
    for variable in others:
        fits(variable, _QUERY_VARIABLE, variable["name"])
    for panel in _DASHBOARD["panels"]:
        if panel["type"] == "row":
            fits(panel, _ROW, panel["title"])
        else:
            fits({"description": "", **panel}, _PANEL, panel["title"])


def test_panels_do_not_overlap() -> None:
    places = set[tuple[int, int]]()
    for panel in _DASHBOARD["panels"]:
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert not places & cells
        places |= cells
        assert box["x"] + box["w"] <= 24
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
    clients = ref(consumer), ref(producer)
    del consumer, producer
    gc.collect()
    assert [client() for client in clients] == [None, None]
