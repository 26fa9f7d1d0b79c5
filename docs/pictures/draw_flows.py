"""Draw lanes, a redelivery, outbox and inbox, a trace: ``python -m docs.pictures.draw_flows`` writes SVG files here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

__all__ = ("PICTURES", "TRACE", "TraceSpan", "lanes", "outbox_inbox", "path_of", "redelivery", "trace")

_LADDER, _MARGIN = 760, 112
_BLUE, _RED, _YELLOW, _GREY, _INK = "#4477aa", "#cc6677", "#ddaa33", "#7f8c99", "#33404d"


def path_of(name: str) -> Path:
    """Return the file of a picture."""
    return Path(__file__).with_name(f"{name}.svg")


def _text(x: float, y: float, text: str, *, colour: str = _INK, anchor: str = "middle", size: int = 13) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, text: str, colour: str = _BLUE) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{colour}"/>' + _text(
        x + width / 2, y + height / 2 + 5, text, colour="#ffffff"
    )


def _line(x: float, y: float, to_x: float, to_y: float, *, colour: str = _INK, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" stroke-width="1.6"{dash} '
        'marker-end="url(#head)"/>'
    )


def _svg(label: str, width: int, height: int, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}" font-family="sans-serif">'
    )
    arrow = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{_INK}"/></marker></defs>'
    )
    paper = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, arrow, paper, *parts, "</svg>", ""])


def lanes() -> str:
    """Return the picture of lanes: messages of one key wait for each other, messages of other keys do not."""
    colours = {"a": _BLUE, "b": _RED, "c": _YELLOW, "d": _GREY}
    parts = [
        _text(10, 24, "received, in the order of the partition", anchor="start"),
        _text(470, 24, "concurrency=3: three lanes"),
    ]
    for number, name in enumerate(("a1", "b1", "a2", "c1", "d1", "a3")):
        parts.append(_box(10 + number * 36, 90, 32, 32, name, colours[name[0]]))
    parts.append(_text(118, 146, "newest on the right", size=11))
    for number, names in enumerate((("a1", "a2", "a3"), ("b1", "d1"), ("c1",))):
        y = 44 + number * 48
        parts.append(_line(232, 106, 312, y + 18))
        parts.append(f'<rect x="318" y="{y}" width="300" height="38" rx="6" fill="none" stroke="{_INK}"/>')
        parts.append(_text(330, y + 24, f"lane {number + 1}", anchor="start"))
        for place, name in enumerate(names):
            parts.append(_box(396 + place * 44, y + 4, 36, 30, name, colours[name[0]]))
        parts.append(_text(606, y + 24, names[0] + " runs", anchor="end", size=11))
    parts.append(
        _text(320, 208, "a2 starts when a1 is finished; if a1 fails, only its key waits: b, c and d continue.")
    )
    return _svg("Lanes: a key has one lane, and its messages are handled one after the other", 640, 224, parts)


def _ladder(names: Sequence[str], steps: Sequence[tuple[int, int, str, str]], height: int) -> list[str]:
    """Return actors with arrows between them; a step from an actor to itself is a note."""
    places = [_MARGIN + number * ((_LADDER - 2 * _MARGIN) / (len(names) - 1)) for number in range(len(names))]
    parts = []
    for place, name in zip(places, names, strict=True):
        parts.append(f'<line x1="{place:g}" y1="44" x2="{place:g}" y2="{height - 10}" stroke="{_GREY}"/>')
        parts.append(_box(place - 66, 10, 132, 34, name))
    for number, (source, target, text, colour) in enumerate(steps):
        y = 74 + number * 34
        if source == target:
            parts.append(
                f'<rect x="{places[source] - 104:g}" y="{y - 16}" width="208" height="24" rx="4" fill="{colour}"/>'
                + _text(places[source], y, text, colour="#ffffff", size=12)
            )
            continue
        parts.append(_line(places[source], y, places[target], y, colour=colour, dashed=colour == _RED))
        parts.append(_text((places[source] + places[target]) / 2, y - 5, text, colour=colour, size=12))
    return parts


def redelivery() -> str:
    """Return the picture of a redelivery after the connection of a consumer was lost."""
    steps = (
        (0, 1, "message, attempts 1", _INK),
        (1, 1, "handler runs", _GREY),
        (1, 0, "connection lost: FIN does not arrive", _RED),
        (0, 0, "not in flight any more", _GREY),
        (0, 2, "message, attempts 2", _INK),
        (2, 2, "handler runs again", _GREY),
        (2, 0, "FIN", _INK),
    )
    parts = _ladder(("nsqd (leader)", "consumer 1", "consumer 2"), steps, 320)
    return _svg("A redelivery: the first consumer handled the message, its FIN was lost", _LADDER, 320, parts)


def outbox_inbox() -> str:
    """Return the picture of outbox and inbox: two transactions, and a relay between them."""
    steps = (
        (0, 0, "commit: order and outbox row", _BLUE),
        (1, 0, "reads outbox rows", _INK),
        (1, 2, "publish", _INK),
        (2, 1, "stored", _INK),
        (1, 0, "deletes the row", _INK),
        (2, 3, "message, perhaps twice", _INK),
        (3, 3, "commit: inbox row and bill", _BLUE),
        (3, 2, "FIN", _INK),
    )
    parts = _ladder(("service, database", "relay", "nsqd", "handler, database"), steps, 350)
    label = "Outbox and inbox: each message is published after its transaction, and has its effect once"
    return _svg(label, _LADDER, 350, parts)


class TraceSpan(NamedTuple):
    """A span of the picture of a trace."""

    name: str
    process: str
    parent: str | None
    links: tuple[str, ...] = ()


TRACE: tuple[TraceSpan, ...] = (
    TraceSpan("POST /orders", "service", None),
    TraceSpan("create orders", "relay", "POST /orders"),
    TraceSpan("publish orders", "relay", None, ("create orders",)),
    TraceSpan("process orders", "worker", "create orders"),
    TraceSpan("bill", "worker", "process orders"),
)
"""The spans of a message that was added to an outbox, and handled with an inbox."""
_TIMES = {
    "POST /orders": (0, 210, "order, row of the outbox"),
    "create orders": (250, 20, "the header traceparent is written"),
    "publish orders": (250, 150, "batch, own trace"),
    "process orders": (420, 200, "inbox: begin … commit"),
    "bill": (460, 110, "handler"),
}
"""Begin and length of each span, as they are drawn, and what happens in it."""


def _arrow(x: float, y: float, right: float, row: float, *, dashed: bool) -> str:
    """Return an arrow down to a place, from a bar above it or, at a right angle, from its right end."""
    if x <= right:
        return _line(x, row + 24, x, y, dashed=dashed)
    return (
        f'<line x1="{right:g}" y1="{row + 12:g}" x2="{x:g}" y2="{row + 12:g}" stroke="{_INK}" stroke-width="1.6"/>'
        + (_line(x, row + 12, x, y, dashed=dashed))
    )


def trace() -> str:
    """Return the picture of a trace from a web request over outbox, relay and inbox to the handler."""
    colours = {"service": _BLUE, "relay": _YELLOW, "worker": _RED}
    rows = {span.name: 40 + number * 44 for number, span in enumerate(TRACE)}
    parts = []
    for span in TRACE:
        y, (begin, length, note) = rows[span.name], _TIMES[span.name]
        x = 190 + begin
        for other, dashed in ((span.parent, False), *((link, True) for link in span.links)):
            if other is not None:
                right = 190 + sum(_TIMES[other][:2])
                parts.append(_arrow(x + 10, y - 2, right, rows[other], dashed=dashed))
        parts.append(
            f'<rect x="{x}" y="{y}" width="{length}" height="24" rx="4" fill="{colours[span.process]}"/>'
            + _text(10, y + 16, span.name, anchor="start")
            + _text(128, y + 16, span.process, anchor="start", size=11, colour=colours[span.process])
        )
        if length > 100:
            parts.append(_text(x + length / 2, y + 16, note, size=11, colour="#ffffff"))
        else:
            parts.append(_text(x + length + 170, y + 16, note, anchor="start", size=11))
    parts.append(_text(10, 20, "spans", anchor="start", size=11) + _text(190, 20, "time →", anchor="start", size=11))
    parts.append(_text(10, 282, "Solid arrows lead from parent to child, the dashed arrow to a link.", anchor="start"))
    return _svg("A trace from a web request over outbox, relay and inbox to the handler", 840, 300, parts)


PICTURES: dict[str, Callable[[], str]] = {
    "lanes": lanes,
    "redelivery": redelivery,
    "outbox-inbox": outbox_inbox,
    "trace": trace,
}
"""The pictures by the name of their file."""

if __name__ == "__main__":
    for name, drawn in PICTURES.items():
        path_of(name).write_text(drawn(), encoding="utf-8")
