"""Writes the table of settings, from what the typed dictionaries say about their members."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
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


def row(setting: Setting, who: str, said: str) -> str:
    """Return the line of a setting."""
    name = f"`{setting.name}`" + ("" if setting.read is not None else " (keyword only)")
    default = "" if setting.default is None else f"`{setting.default}`"
    return f"| {name} | {default} | {unit(setting)} | {who} | {said.replace('|', chr(92) + '|')} |"


def table() -> str:
    """Return the whole table."""
    own, others = producer_settings(), consumer_settings()
    lines = ["| setting | default | unit | of | meaning |", "| --- | --- | --- | --- | --- |"]
    both = {name for name, one in own.items() if name in others and others[name].owner is one.owner}
    said = descriptions(*_SHARED, ProducerSettings)
    lines += [row(one, "both" if name in both else "producer", said[name]) for name, one in own.items()]
    said = descriptions(*_SHARED, HandlerSettings, ConsumerSettings)
    lines += [row(one, "consumer", said[name]) for name, one in others.items() if name not in both]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with the table as it has to be."""
    return with_section(PAGE, table())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}, whose variables begin with {PREFIX}\n")
