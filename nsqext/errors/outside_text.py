"""Text from servers, escaped and bounded for errors, logs and terminals."""

from __future__ import annotations

MAX_TEXT = 500
"""Most characters of a text."""


def outside_text(text: str, most: int = MAX_TEXT) -> str:
    """Return at most ``most`` characters of a text and an ellipsis, with escapes for unprintable characters.

    Line ends would forge log lines, escape sequences control a terminal, and direction marks hide names.
    """
    shown = text[: most + 1]
    if not shown.isprintable():
        shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in shown)
    return shown if len(shown) <= most else f"{shown[:most]}…"
