"""Which changes are drawn."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests.campaigns.mutation.operators import mutants_of, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterable


def texts(source: str) -> Iterable[str]:
    """Return the source of each mutant."""
    return [ast.unparse(tree_of(mutant, source)) for mutant in mutants_of("m.py", source)]


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("a < b", ["a <= b"]),
        ("a.count >= 2", ["a.count > 2", "a.count >= 3"]),
        ("x = not f(a, True)", ["x = f(a, True)", "x = not f(a, False)"]),
        ("await stop()", ["pass"]),
        ("while f():\n    x += y", ["while not f():\n    x += y", "while f():\n    pass"]),
        ("x = [a] + b if c and d else e", ["x = [a] - b if c and d else e", "x = [a] + b if c or d else e"]),
    ],
)
def test_places_are_changed_one_at_a_time(source: str, changed: list[str]) -> None:
    assert sorted(texts(source)) == sorted(changed)


@pytest.mark.parametrize(
    "source",
    [
        "now >= due",
        "if self._clock() > self.began_at:\n    raise E",
        "x = a < max(b.rest_until, c)",
        "self._log(1, text)",
        "if count > 1:\n    logger.info('%d', count)",
        "logger.info('%s', x + 1)",
        "_MOST = 100",
        "@lru_cache(maxsize=16)\ndef f() -> bytes:\n    ...",
        "def f(a: int = 0) -> None:\n    raise E(a + 1)",
    ],
)
def test_what_has_no_effect_is_not_drawn(source: str) -> None:
    assert texts(source) == []


def test_a_moment_that_never_comes_is_a_rule() -> None:
    assert texts("horizon < inf") == ["horizon <= inf"]
