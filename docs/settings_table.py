"""Writes the table of settings, from what the typed dictionaries say about their members."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docs.generated_section import with_section
from nsqext import ConnectionSettings, ConsumerSettings, HandlerSettings, LookupSettings, ProducerSettings
from nsqext.client.settings import consumer_settings, producer_settings
from nsqext.settings import PREFIX, Setting

PAGE = Path(__file__).parent / "reference" / "settings.md"

_SHARED = (ConnectionSettings, LookupSettings)
_SHARES = ("jitter",)
_SIZES = ("size", "compression_min", "_bytes")


def descriptions(*documented: Any) -> dict[str, str]:
    """Return what typed dictionaries say about each member, in one line."""
    found = {}
    for one in documented:
        (body,) = ast.parse(inspect.getsource(one)).body
        members = body.body if isinstance(body, ast.ClassDef) else []
        for member, text in itertools.pairwise(members):
            if isinstance(member, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(member.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def unit(setting: Setting) -> str:
    """Return the unit of a setting."""
    if "float" in setting.kind:
        return "share" if setting.member.endswith(_SHARES) else "s"
    return "bytes" if "int" in setting.kind and setting.name.endswith(_SIZES) else ""


def row(setting: Setting, said: str) -> str:
    """Return the line of a setting."""
    name = f"`{setting.name}`" + ("" if setting.read is not None else " (keyword only)")
    default = ("" if setting.default is None else f"`{setting.default}` ") + unit(setting)
    return f"| {name} | {default.strip()} | {said.replace('|', chr(92) + '|')} |"


def section(title: str, settings: Iterable[Setting], *documented: Any) -> list[str]:
    """Return the table of some settings below a title."""
    said = descriptions(*documented)
    rows = [row(one, said[one.name]) for one in settings]
    return [f"## {title}", "", "| setting | default | meaning |", "| --- | --- | --- |", *rows, ""]


def table() -> str:
    """Return all tables."""
    own, others = producer_settings(), consumer_settings()
    both = [one for name, one in own.items() if name in others and others[name].owner is one.owner]
    producer = [one for one in own.values() if one not in both]
    consumer = [one for name, one in others.items() if name not in {one.name for one in both}]
    lines = section("Connections and lookup", both, *_SHARED)
    lines += section("Producers", producer, ProducerSettings)
    lines += section("Consumers", consumer, HandlerSettings, ConsumerSettings)
    return "\n".join(lines)


def page() -> str:
    """Return the page with the table as it has to be."""
    return with_section(PAGE, table())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}, whose variables begin with {PREFIX}\n")
