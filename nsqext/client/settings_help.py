"""The settings of a client in `help`: names, defaults and meanings, from the typed dictionaries."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nsqext.settings import Setting

TITLE = "Settings, as keyword arguments:"
"""First line of the section."""
_WIDTH = 100
_SHARES = ("jitter",)
_SIZES = ("size", "compression_min", "_bytes")


def descriptions(*documented: Any) -> dict[str, str]:
    """Return the descriptions of typed dictionaries' members, in one line each."""
    found = {}
    for one in documented:
        (body,) = ast.parse(inspect.getsource(one)).body
        members = body.body if isinstance(body, ast.ClassDef) else []
        for member, text in itertools.pairwise(members):
            if isinstance(member, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(member.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def default_of(setting: Setting) -> str:
    """Return the default of a setting with its unit; empty for None."""
    return "" if setting.default is None else f"{setting.default} {_unit(setting)}".strip()


def _unit(setting: Setting) -> str:
    if "float" in setting.kind:
        return "share" if setting.member.endswith(_SHARES) else "s"
    return "bytes" if "int" in setting.kind and setting.name.endswith(_SIZES) else ""


def _documented(settings: Iterable[Setting]) -> list[type]:
    """Return the typed dictionaries that describe settings: in ``settings``, beside ``options``."""
    owners = dict.fromkeys(one.owner.__module__ for one in settings)
    modules = [import_module(f"{owner.rpartition('.')[0]}.settings") for owner in owners]
    return [
        kind
        for module in modules
        for name, kind in vars(module).items()
        if name.endswith("Settings") and kind.__module__ == module.__name__
    ]


def with_settings(text: str | None, settings: Mapping[str, Setting]) -> str | None:
    """Return a docstring with the settings below; the docstring alone where Python cannot read the sources."""
    if text is None:  # python -OO
        return None
    try:
        said = descriptions(*_documented(settings.values()))
    except OSError:
        return text
    lines = [inspect.cleandoc(text), "", TITLE, ""]
    for name, setting in settings.items():
        default = default_of(setting)
        first = f"    {name} ({default}): " if default else f"    {name}: "
        lines += textwrap.wrap(first + said[name], _WIDTH, subsequent_indent=" " * 8)
    return "\n".join(lines)
