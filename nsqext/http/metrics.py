"""The text format of Prometheus, for the servers' ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the format."""

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Metric(NamedTuple):
    """A metric and its samples.

    Attributes:
        name: its name.
        kind: ``gauge`` or ``counter``.
        text: what it counts; one line.
        samples: labels and value.
    """

    name: str
    kind: str
    text: str
    samples: Sequence[tuple[Mapping[str, str], float]]


def render_metrics(metrics: Iterable[Metric]) -> str:
    """Return the metrics as text; one without samples is left out."""
    lines: list[str] = []
    for metric in metrics:
        if metric.samples:
            lines += [f"# HELP {metric.name} {metric.text}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value in metric.samples:
            inner = ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items())
            lines.append(f"{metric.name}{{{inner}}} {value}" if inner else f"{metric.name} {value}")
    return "\n".join([*lines, ""])
