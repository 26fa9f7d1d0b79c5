"""The metrics in the production checklist exist."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry

from nsqext.observability.prometheus import Prometheus
from tests.support.programs import ROOT

_PAGE = (ROOT / "docs" / "howto" / "production-checklist.md").read_text(encoding="utf-8")


def test_the_metrics_of_the_alerts_exist() -> None:
    registry = CollectorRegistry()
    Prometheus(registry=registry)
    suffixes = {"counter": "_total", "histogram": "_bucket", "gauge": ""}
    known = {metric.name + suffixes[metric.type] for metric in registry.collect()}
    named = set(re.findall(r"\bnsqext_\w+", _PAGE))
    assert len(named) >= 5
    assert named <= known
