"""Text from servers, as errors, logs and terminals show it: escaped and bounded."""

from __future__ import annotations

MAX_TEXT = 500
"""Characters of a text that are kept."""


def outside_text(text: str, most: int = MAX_TEXT) -> str:
    """Return a text of at most ``most`` characters and an ellipsis, with escapes for characters that are not printable.

    Line ends would forge lines of a log, escape sequences control a terminal, and marks of direction hide names.
    """
    shown = text[: most + 1]
    if not shown.isprintable():
        shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in shown)
    return shown if len(shown) <= most else f"{shown[:most]}…"
