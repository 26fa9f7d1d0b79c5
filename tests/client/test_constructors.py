"""Constructors: what a call passes is read from its names, not from its order."""

from __future__ import annotations

import inspect
from importlib import import_module
from pkgutil import walk_packages

from nsqext import client

_MOST = 5


def _positional(kind: type) -> int:
    parameters = inspect.signature(kind).parameters.values()
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


def test_no_constructor_takes_more_than_five_positional_arguments() -> None:
    modules = [import_module(found.name) for found in walk_packages(client.__path__, "nsqext.client.")]
    kinds = {
        kind
        for module in modules
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and not name.startswith("_")
        if not issubclass(kind, (dict, Exception))
    }
    assert len(kinds) > 60
    assert sorted(kind.__qualname__ for kind in kinds if _positional(kind) > _MOST) == []
