"""Format numbers as text or SVG: counts, rates, sizes, ages, sparklines and key ranges."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsqext.admin import KeyRange
    from nsqext.web.monitor import Rate

_WIDTH, _HEIGHT = 96, 22
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SHADES = 6


def count(value: int) -> str:
    """Return a count with thin spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def per_second(value: float) -> str:
    """Return a rate, with one decimal below 100."""
    return f"{value:.1f}" if 0 < value < 100 else count(round(value))


def size(value: int | None) -> str:
    """Return a number of bytes in binary units; a dash for an unknown one."""
    if value is None:
        return "–"
    amount, unit = float(value), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{value} B" if not unit else f"{amount:.1f} {_UNITS[unit]}"


def age(since: float) -> str:
    """Return the time since ``since`` (seconds since 1970), in the largest unit that fits."""
    seconds = max(time.time() - since, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(nanoseconds: int) -> str:
    """Return a time in nanoseconds since 1970 as ISO text with milliseconds, in UTC."""
    try:
        text = datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(sep=" ", timespec="milliseconds")
    except (OverflowError, OSError, ValueError):
        return str(nanoseconds)
    return text.removesuffix("+00:00")


def sparkline(rate: Rate, label: str) -> Markup:
    """Draw the points of a rate."""
    points = rate.points if len(rate.points) > 1 else (0.0, 0.0)
    highest = max(points) or 1.0
    step = _WIDTH / (len(points) - 1)
    places = [f"{at * step:.1f},{_HEIGHT - 2 - value / highest * (_HEIGHT - 4):.1f}" for at, value in enumerate(points)]
    line = " ".join(places)
    return Markup(
        '<svg class="spark" viewBox="0 0 {w} {h}" role="img" aria-label="{label}" preserveAspectRatio="none">'
        '<polygon points="0,{h} {line} {w},{h}"/><polyline points="{line}"/></svg>'
    ).format(w=_WIDTH, h=_HEIGHT, line=line, label=f"{label}: {per_second(rate.now)} a second")


def key_ranges(ranges: Sequence[KeyRange], clients: Sequence[str]) -> Markup:
    """Draw the key ranges of consumers on the hash space from 0 to 1; the index in all clients selects the shade."""
    rect = Markup(
        '<rect class="shade-{shade}" x="{x:.2f}" width="{width:.2f}" y="0" height="28"><title>{title}</title></rect>'
    )
    shapes = Markup("").join(
        rect.format(
            shade=clients.index(found.client) % _SHADES,
            x=found.low * 1000,
            width=max((found.high - found.low) * 1000, 2),
            title=f"{found.low:.3f} to {found.high:.3f}: {found.client}",
        )
        for found in ranges
    )
    label = "; ".join(f"{found.low:.3f} to {found.high:.3f} {found.client}" for found in ranges) or "no consumer"
    return Markup(
        '<svg class="ranges" viewBox="0 0 1000 28" role="img" aria-label="{label}" preserveAspectRatio="none">'
        '<rect class="empty" x="0" width="1000" y="0" height="28"/>{shapes}</svg>'
    ).format(label=label, shapes=shapes)
