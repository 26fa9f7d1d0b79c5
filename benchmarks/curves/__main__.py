"""Measure curves: ``python -m benchmarks.curves [NAME…]``; all of them by default.

In a run of all benchmarks (`benchmarks.run`) the numbers are written to files, from which
``python -m docs.pictures.draw_benchmarks`` draws pictures and a section of the page.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.curves import lookup, memory, messages, redesigned, start
from benchmarks.curves.curve import Curve, measure

CURVES: dict[str, Curve] = {
    curve.name: curve for room in (messages, redesigned, lookup, memory, start) for curve in room.CURVES
}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CURVES))
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for name in given.names or CURVES:
        began = time.monotonic()
        measured = measure(CURVES[name], given.rounds)
        print(f"{measured.title} ({measured.y}), {time.monotonic() - began:.0f} s")
        for series, points in measured.series.items():
            print(f"  {series:24}", "  ".join(f"{x:g}: {y:.{measured.digits}f}" for x, y in points))


if __name__ == "__main__":
    main()
