"""The pages of the API list what is public: names that exist, each for one thing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from nsqext import sync
from tests.support.tables import table

API = Path(__file__).parents[2] / "docs" / "reference" / "api"
_SKIPPED = ("arrow", "index", "spark")  # need extras that the test environment may leave out
_MODULE = re.compile(r"^\.\. (?:currentmodule|automodule):: (\S+)$", re.MULTILINE)
_LISTS = re.compile(r"^\.\. autosummary::\n(?:   :.*\n)*\n((?:   \S+\n)+)", re.MULTILINE)
_MOST = 262
"""Public names: raise it when users need one more."""


def listed() -> Iterator[tuple[str, str]]:
    """Name the module and the name of everything that is listed; names of listed modules are those of `__all__`."""
    for page in sorted(API.glob("*.md")):
        if page.stem in _SKIPPED:
            continue
        text = page.read_text(encoding="utf-8")
        module = ""
        for found in re.finditer(f"{_MODULE.pattern}|{_LISTS.pattern}", text, re.MULTILINE):
            module = found[1] or module
            whole = [module] if "automodule" in found[0] else []
            for entry in (found[2] or "").split():
                if entry.startswith("nsqext."):
                    whole.append(entry)
                else:
                    yield module, entry
            for name in whole:
                yield from ((name, one) for one in import_module(name).__all__)


LISTED = list(listed())


@table("page", sorted(page.stem for page in API.glob("*.md") if page.stem != "index"))
def test_the_index_lists_every_page(page: str) -> None:
    assert f"\n{page}\n" in (API / "index.md").read_text(encoding="utf-8")


def test_the_listed_names_exist() -> None:
    missing = [(module, name) for module, name in LISTED if not hasattr(import_module(module), name.partition(".")[0])]
    assert missing == []


def test_a_public_name_stands_for_one_thing() -> None:
    """The blocking classes have the names of the asynchronous ones on purpose."""
    things: dict[str, set[int]] = {}
    for module, name in LISTED:
        if module != sync.__name__:
            things.setdefault(name, set()).add(id(getattr(import_module(module), name)))
    assert [name for name, found in things.items() if len(found) > 1] == []


def test_the_public_surface_grows_on_purpose() -> None:
    assert 100 < len(LISTED) <= _MOST
