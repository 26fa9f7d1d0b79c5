"""Write the table of errors from the classes, their flags and their codes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from docs.generated_section import with_section
from nsqext.errors import NsqError
from nsqext.errors.server import SERVER_ERRORS

PAGE = Path(__file__).parent / "reference" / "errors.md"

_FLAGS = ("retryable", "refresh_lookup", "overload", "closes_connection", "maybe_stored")


def classes(base: type[NsqError] = NsqError) -> Iterator[type[NsqError]]:
    """Yield the classes of the tree, each before its subclasses."""
    for found in base.__subclasses__():
        yield found
        yield from classes(found)


def row(found: type[NsqError]) -> str:
    """Return the row of a class, with a link to its section of the troubleshooting page."""
    codes = ", ".join(f"`{code}`" for code, of in SERVER_ERRORS.items() if of is found)
    flags = ", ".join(f"`{flag}`" for flag in _FLAGS if getattr(found, flag))
    return f"| [`{found.__name__}`](../troubleshooting.md#{found.__name__.lower()}) | {codes} | {flags} |"


def table() -> str:
    """Return the whole table."""
    lines = ["| error | code | flags |", "| --- | --- | --- |"]
    lines += [row(found) for found in classes() if found.__module__.partition(".server")[0] == NsqError.__module__]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with the current table."""
    return with_section(PAGE, table())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
