"""Writes the table of log messages, from the logging calls in the package."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from docs.generated_section import with_section

PAGE = Path(__file__).parent / "reference" / "logs.md"
PACKAGE = Path(__file__).parent.parent / "nsqext"

_LEVELS = {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR", "exception": "ERROR"}
_SHOWN = ("ERROR", "WARNING", "INFO, WARNING")
_LOGGER = re.compile(r"""getLogger\((?:"([\w.]+)"|(__name__))\)""")
_PLACEHOLDER = re.compile(r"%(?:\.\d)?[srdgf]")
# clients, apps, relays and Spark source; commands and servers print for a person at a terminal
_CLIENT = ("app", "client", "delays", "lookup", "observability", "partitions", "spark", "sync", "transactions")


def messages() -> Iterator[tuple[str, str, str]]:
    """Yield logger, level and text of each logging call of the rooms of `_CLIENT`, in the order of the files."""
    for room in _CLIENT:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if name := _LOGGER.search(source):
                for call in ast.walk(ast.parse(source)):
                    if isinstance(call, ast.Call) and (found := _message(call)):
                        yield (name[1], *found)


def _message(call: ast.Call) -> tuple[str, str] | None:
    """Return level and text of a logging call; None for other calls and for texts that are made elsewhere."""
    method = call.func
    if not isinstance(method, ast.Attribute) or ast.unparse(method.value) != "logger":
        return None
    texts = [arg.value for arg in call.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    if not texts or texts[0] == "%s":
        return None
    # Logger.log is called with the level of an event: INFO, and WARNING for what repeats or fails
    return _LEVELS.get(method.attr, "INFO, WARNING"), _PLACEHOLDER.sub("…", texts[0])


def table() -> str:
    """Return the lists of messages that ask for attention."""
    lines = list[str]()
    shown = sorted({message for message in messages() if message[1] in _SHOWN})
    for logger, rows in groupby(shown, key=itemgetter(0)):
        lines += [f"## `{logger}`", ""]
        for level, found in groupby(rows, key=itemgetter(1)):
            lines += [f"{level}:", "", *(f"- {text}" for _, _, text in found), ""]
    return "\n".join(lines)


def page() -> str:
    """Return the page with the table as it has to be."""
    return with_section(PAGE, table())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
