"""Text from servers, escaped and bounded for errors, logs and terminals."""

from __future__ import annotations

MAX_TEXT = 500
"""Most characters of a text."""


def escaped(text: str) -> str:
    r"""Return a text with escapes such as \x1b for characters that are not printable.

    Line ends would forge log lines, escape sequences control a terminal, and direction marks hide names.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def outside_text(text: str, most: int = MAX_TEXT) -> str:
    """Return a text of at most ``most`` characters and an ellipsis; see `escaped`."""
    shown = escaped(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[:most]}…"
