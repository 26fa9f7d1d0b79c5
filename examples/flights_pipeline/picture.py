"""The delays as a heat map: who is late, and when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ("draw",)

_FEWEST = 30
"""Departures of a year below which a mean says more about one bad day than about the hour."""
_PER_YEAR = 300_000


def draw(day: pd.DataFrame, file: Path) -> None:
    """Draw the mean delay of departure by airline and scheduled hour; the latest airline on top.

    Args:
        day: columns ``airline``, ``hour`` (0 to 23), ``departed``, ``cancelled``, ``delay`` (minutes in all), ``mean``
            (minutes).
        file: path of the PNG file.
    """
    fewest = max(1, min(_FEWEST, _FEWEST * int(day["departed"].sum()) // _PER_YEAR))
    means = _means(day, fewest)
    figure = Figure(figsize=(11.5, 7), layout="constrained")
    axes = figure.subplots()
    # colours that are read alike with and without colour vision, and printed in grey
    image = axes.imshow(means, cmap=mpl.colormaps["viridis"], aspect="auto")
    figure.colorbar(image, ax=axes, label="mean delay of departure (minutes)", pad=0.01)
    least, most = image.get_clim()
    bright = means.gt(least + 0.55 * (most - least))
    for row in range(len(means)):
        for column in range(means.shape[1]):
            _write(axes, row, column, means.iat[row, column], "#111111" if bright.iat[row, column] else "#ffffff")
    _label(axes, [str(name) for name in means.index], list(means.columns))
    axes.set_title("Late departures from New York, by airline and hour", loc="left", pad=52, fontsize=15)
    note = axes.annotate(_note(day, means, fewest), (0, 1.01), xycoords="axes fraction", fontsize=10, va="bottom")
    note.set_in_layout(False)  # the space is the title's
    figure.savefig(file, dpi=100)


def _means(day: pd.DataFrame, fewest: int) -> pd.DataFrame:
    """Return a line for each airline and a column for each hour."""
    means = day[day["departed"] >= fewest].pivot(index="airline", columns="hour", values="mean").astype(float)
    totals = day.groupby("airline")[["delay", "departed"]].sum()
    order = (totals["delay"] / totals["departed"]).sort_values(ascending=False).index
    hours = range(int(means.columns.min()), int(means.columns.max()) + 1)
    return means.reindex(index=[name for name in order if name in means.index], columns=hours)


def _note(day: pd.DataFrame, means: pd.DataFrame, fewest: int) -> str:
    without = sorted(set(day["airline"]) - set(means.index))
    return (
        f"Mean delay of {int(day['departed'].sum()):,} departures, in minutes; negative is early.\n"
        f"{int(day['cancelled'].sum()):,} cancelled flights do not count.\n"
        f"White: {f'fewer than {fewest} departures' if fewest > 1 else 'no departure'}."
        f"{' Not shown for that reason: ' if without else ''}{', '.join(without)}"
    )


def _write(axes: Axes, row: int, column: int, value: float, colour: str) -> None:
    if pd.notna(value):
        text = str(round(value)).replace("-", "−")
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color=colour)


def _label(axes: Axes, airlines: Sequence[str], hours: Sequence[int]) -> None:
    axes.set_xticks(range(len(hours)), [f"{hour}:00" for hour in hours], rotation=45)
    axes.set_yticks(range(len(airlines)), airlines)
    axes.set_xlabel("scheduled hour of departure (New York time)")
    axes.set_ylabel("airline, the latest on top")
    axes.set_xticks([column - 0.5 for column in range(1, len(hours))], minor=True)
    axes.set_yticks([row - 0.5 for row in range(1, len(airlines))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
