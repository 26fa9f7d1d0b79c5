"""A table runs every row, and names those that fail."""

from __future__ import annotations

import inspect

import pytest

from tests.support.tables import table


def test_every_row_is_called_and_those_that_fail_are_named() -> None:
    seen: list[tuple[int, int, str]] = []

    @table(("number", "square"), [(1, 1), pytest.param(2, 5, id="two"), (3, 9), (4, 0)])
    def check(number: int, square: int, tmp_path: str) -> None:
        seen.append((number, square, tmp_path))
        if number == 4:
            pytest.fail("four")
        assert number**2 == square

    assert list(inspect.signature(check).parameters) == ["tmp_path"]
    with pytest.raises(BaseExceptionGroup, match="2 of 4 rows failed") as caught:
        check(tmp_path="folder")
    assert [error.__notes__ for error in caught.value.exceptions] == [["row two"], ["row (4, 0)"]]
    assert seen == [(1, 1, "folder"), (2, 5, "folder"), (3, 9, "folder"), (4, 0, "folder")]


def test_one_name_takes_values_themselves() -> None:
    seen: list[object] = []
    table("value", [(1, 2), b"x"])(lambda value: seen.append(value))()
    assert seen == [(1, 2), b"x"]


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="a table needs rows"):
        table("value", [])
