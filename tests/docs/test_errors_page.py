"""The pages of errors: a table from the classes, and a section of the troubleshooting page for each class."""

from __future__ import annotations

import re

from docs import errors_table
from nsqext import errors
from nsqext.errors import server
from tests.support.programs import ROOT

_TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
_SECTIONS = re.findall(r"^### `(\w+)`\n\n(.+?)(?=^##|\Z)", _TROUBLESHOOTING, re.MULTILINE | re.DOTALL)


def _public_errors() -> set[str]:
    """Return the names of the public error classes."""
    public = {name: getattr(module, name) for module in (errors, server) for name in module.__all__}
    return {name for name, found in public.items() if isinstance(found, type) and issubclass(found, errors.NsqError)}


def test_the_table_is_up_to_date() -> None:
    """``python -m docs.errors_table`` writes it."""
    assert errors_table.PAGE.read_text(encoding="utf-8") == errors_table.page()


def test_every_error_has_a_row() -> None:
    assert {found.__name__ for found in errors_table.classes()} | {"NsqError"} >= _public_errors()
    assert all(f"| [`{name}`]" in errors_table.page() for name in _public_errors() - {"NsqError"})


def test_every_error_has_one_section_with_causes_and_remedies() -> None:
    assert sorted(name for name, _ in _SECTIONS) == sorted(_public_errors())
    assert [name for name, text in _SECTIONS if len(text.split()) < 5] == []
