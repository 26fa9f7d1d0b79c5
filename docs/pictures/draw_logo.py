"""Draw the logo: ``python -m docs.pictures.draw_logo`` writes logo.svg.

Three partitions of a queue, and the messages of one key in their order.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ("PATH", "logo")

PATH = Path(__file__).with_name("logo.svg")

_SIZE, _CELL, _GAP = 128, 26, 8
_QUEUE, _KEY = "#4477aa", "#ddaa33"
_ROWS = ("qqk", "kqq", "qkq")


def logo() -> str:
    """Return the logo as SVG."""
    step = _CELL + _GAP
    offset = (_SIZE - len(_ROWS) * step + _GAP) // 2
    cells = [
        f'<rect x="{offset + column * step}" y="{offset + row * step}" width="{_CELL}" height="{_CELL}" rx="6" '
        f'fill="{_KEY if kind == "k" else _QUEUE}"/>'
        for row, kinds in enumerate(_ROWS)
        for column, kind in enumerate(kinds)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE} {_SIZE}" role="img" aria-label="nsqext">'
    return "\n".join([head, *cells, "</svg>"]) + "\n"


if __name__ == "__main__":
    PATH.write_text(logo(), encoding="utf-8")
