"""Draw the benchmarks: ``python -m docs.pictures.draw_benchmarks [RESULTS PICTURES]``.

Draws a picture for each curve and speed.svg for the front page, from benchmarks/results unless other folders are given.
In a run of all benchmarks it also writes the section "Curves" of their page. Lines and text are grey and the background
is transparent, so that the pictures are readable on light and dark pages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.curves.curve import RESULTS, Measured, load
from benchmarks.report import table, write_section

__all__ = ("draw_curve", "draw_speed", "section")

FOLDER = Path(__file__).parent
_GREY = "#7a838c"
_WIDE = 8
"""Ratio of the largest to the smallest figure above which the axis is logarithmic."""
_COLOURS = {
    "nsqext": "#3b82c4",
    "uvloop": "#7fb2e0",
    "go-nsq": "#2a9d8f",
    "asyncnsq": "#c8963e",
    "pynsq": "#c65b6b",
    "raw": "#8f8f8f",
}
_OTHERS = ("#3b82c4", "#c8963e", "#2a9d8f", "#c65b6b", "#8c6bb1", "#8f8f8f")
_BESIDE = frozenset(_COLOURS) - {"nsqext"}
"""Series that are in the picture only."""
_PICTURE_ONLY = frozenset(("connections", "handlers", "headers", "listed_nodes", "polling_bytes", "topics"))
"""Curves without a table."""
_NAMES = {"raw": "raw socket", "uvloop": "nsqext on uvloop"}
_MODES = {"pub": "one publish in flight", "pubc": "64 in flight", "mpub": "batches of 100", "sub": "consume and finish"}


def _style() -> None:
    mpl.rcParams.update({"svg.hashsalt": "nsqext", "svg.fonttype": "none", "font.size": 10, "text.color": _GREY})
    mpl.rcParams.update(dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY))
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "savefig.transparent": True})


def _short(value: float, _: object = None) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def draw_curve(measured: Measured, path: Path) -> None:
    """Draw one curve; axes are logarithmic where figures differ much."""
    _style()
    figure, axes = plt.subplots(figsize=(7, 3.6))
    everywhere = sorted({x for points in measured.series.values() for x, _ in points})
    for number, (name, points) in enumerate(measured.series.items()):
        colour = _COLOURS.get(name, _OTHERS[number % len(_OTHERS)])
        own = name in ("nsqext", "uvloop")
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            marker="o",
            ms=4,
            lw=2.2 if own else 1.4,
            label=_NAMES.get(name, name),
        )
    axes.set(xlabel=measured.x, ylabel=measured.y)
    values = [y for points in measured.series.values() for _, y in points]
    if max(values) > _WIDE * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.1 * max(values))
    if everywhere[0] > 0:
        axes.set_xscale("log")
    if len(everywhere) <= 8:
        axes.set_xticks(everywhere, [_short(x) for x in everywhere])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    axes.grid(axis="y", color=_GREY, alpha=0.25, lw=0.6)
    axes.legend(frameon=False, labelcolor=_GREY, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_speed(results: Path, path: Path) -> None:
    """Draw the CPU per message of all clients, as bars."""
    _style()
    found = json.loads(results.read_text(encoding="utf-8"))
    figure, places = plt.subplots(1, len(_MODES), figsize=(9, 2.3))
    for axes, (mode, title) in zip(places, _MODES.items(), strict=True):
        names = [name for name in _COLOURS if name in found[mode] and name not in ("raw", "uvloop")][::-1]
        values = [found[mode][name]["cpu"] for name in names]
        bars = axes.barh(names, values, color=[_COLOURS[name] for name in names], height=0.65)
        axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, color=_GREY, fontsize=9)
        axes.set_title(title, fontsize=10, color=_GREY)
        axes.set_xlim(0, max(values) * 1.3)
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(left=False)
        if axes is not places[0]:
            axes.set_yticks([])
    figure.suptitle("µs of client CPU per message of 200 bytes (less is better)", fontsize=10, color=_GREY)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def section(measured: Measured) -> str:
    """Return the text of one curve: its picture, what limits it, and the numbers of this package."""
    own = {name: points for name, points in measured.series.items() if name not in _BESIDE}
    everywhere = sorted({x for points in own.values() for x, _ in points})
    rows = []
    for name, points in own.items():
        at = dict(points)
        rows.append([_NAMES.get(name, name), *(f"{at[x]:,.{measured.digits}f}" if x in at else "" for x in everywhere)])
    numbers = table((measured.x, *(f"{x:,.0f}" for x in everywhere)), rows)
    if 2 * sum(len(points) for points in own.values()) < len(own) * len(everywhere):
        few = [
            [name, ", ".join(f"{y:,.{measured.digits}f} at {x:,.0f}" for x, y in points)]
            for name, points in own.items()
        ]
        numbers = table((f"by {measured.x}", measured.y), few)
    picture = f"bench-{measured.name.replace('_', '-')}.svg"
    unit = measured.y if measured.y.startswith("µ") else measured.y[:1].upper() + measured.y[1:]
    return (
        f"### {measured.title}\n\n{unit}. {measured.note}\n\n"
        f"```{{image}} ../pictures/{picture}\n:alt: {measured.title}\n```\n\n"
        f"{measured.limit}\n" + ("" if measured.name in _PICTURE_ONLY else f"\n{numbers}")
    )


def start_section(measured: Measured) -> str:
    """Return the table of imports."""
    rows = [[f"`{name}`", f"{points[0][1]:.0f}"] for name, points in measured.series.items()]
    return f"### {measured.title}\n\n{measured.note} {measured.limit}\n\n{table(('', measured.y), rows)}"


def main() -> None:
    """Draw all that was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("pictures", type=Path, nargs="?", default=FOLDER)
    given = parser.parse_args()
    texts, starts = [], []
    for file in sorted(given.results.glob("*.json")):
        if file.stem == "client":
            draw_speed(file, given.pictures / "speed.svg")
        elif file.stem == "start":
            starts.append(start_section(load(file)))
        else:
            measured = load(file)
            draw_curve(measured, given.pictures / f"bench-{measured.name.replace('_', '-')}.svg")
            texts.append(section(measured))
    head = (
        "How cost grows with one quantity. Points take turns in each round; figures are medians. Compare the lines of "
        "a plot, and no figures of different plots. Tables have the figures of nsqext only, `benchmarks/results` has "
        "all.\n\n"
    )
    write_section("Curves", head + "\n".join(texts + starts))


if __name__ == "__main__":
    main()
