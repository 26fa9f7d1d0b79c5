"""The page of errors shows the classes as they are."""

from __future__ import annotations

from docs import errors_table
from nsqext import errors


def test_the_table_is_up_to_date() -> None:
    """It is written by ``python -m docs.errors_table``."""
    assert errors_table.PAGE.read_text(encoding="utf-8") == errors_table.page()


def test_every_error_has_a_row() -> None:
    named = {name for name in errors.__all__ if name[0].isupper() and name not in ("NsqError", "SERVER_ERRORS")}
    assert {found.__name__ for found in errors_table.classes()} >= named
    assert all(f"| `{name}` |" in errors_table.page() for name in named)
