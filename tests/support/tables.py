"""Tables of cases that are one test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest
from _pytest.mark import ParameterSet

__all__ = ("table",)

_LONGEST = 200  # characters of a name


def table(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each row, as ``pytest.mark.parametrize`` does, but as one test that names all rows that fail.

    A test of pytest costs 10 ms: workers collect it six times. Fixtures are shared by the rows.

    Args:
        names: names of the parameters.
        rows: a value for each name; values themselves if there is one name.
    """
    words = names.replace(",", " ").split() if isinstance(names, str) else [*names]
    given = [_row(row, len(words)) for row in rows]
    assert given, "a table needs rows"

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @wraps(check)
        def test(**fixtures: Any) -> None:
            errors: list[BaseException] = []
            for name, values in given:
                try:
                    check(**dict(zip(words, values, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"row {name}")
                    errors.append(error)
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} of {len(given)} rows failed", errors)

        signature = inspect.signature(check)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in words]
        test.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return test

    return decorate


def _row(row: Any, size: int) -> tuple[str, tuple[Any, ...]]:
    """Return name and values of a row."""
    if isinstance(row, ParameterSet):
        return str(row.id or row.values), tuple(row.values)
    return repr(row)[:_LONGEST], tuple(row) if size > 1 else (row,)
