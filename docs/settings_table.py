"""Writes the table of settings, from the option classes and what their docstrings say."""

from __future__ import annotations

import re
import sys
from inspect import cleandoc
from pathlib import Path

from docs.generated_section import with_section
from nsqext.client.consumer.consumer import Consumer
from nsqext.client.from_url import consumer_settings, producer_settings
from nsqext.settings import PREFIX, Setting

PAGE = Path(__file__).parent / "reference" / "settings.md"

_MEMBER = re.compile(r"^    (\w+): ((?:.+\n?)(?:^ {8}.+\n?)*)", re.MULTILINE)
_SHARES = ("jitter",)
_SIZES = ("size", "compression_min", "_bytes")


def descriptions(documented: type) -> dict[str, str]:
    """Return what a docstring says about each member, in one line."""
    text = cleandoc(documented.__doc__ or "")  # from Python 3.13 on, the compiler does it
    return {name: " ".join(said.split()) for name, said in _MEMBER.findall(text)}


def unit(setting: Setting) -> str:
    """Return the unit of a setting."""
    if "float" in setting.kind:
        return "share" if setting.member.endswith(_SHARES) else "s"
    return "bytes" if "int" in setting.kind and setting.name.endswith(_SIZES) else ""


def row(setting: Setting, who: str) -> str:
    """Return the line of a setting."""
    said = descriptions(setting.owner or Consumer)[setting.member].replace("|", "\\|")
    name = f"`{setting.name}`" + ("" if setting.read is not None else " (keyword only)")
    default = "" if setting.default is None else f"`{setting.default}`"
    return f"| {name} | {default} | {unit(setting)} | {who} | {said} |"


def table() -> str:
    """Return the whole table."""
    own, others = producer_settings(), consumer_settings()
    lines = ["| setting | default | unit | of | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, setting in own.items():
        lines.append(row(setting, "both" if others.get(name) == setting else "producer"))
    for name, setting in others.items():
        if own.get(name) != setting:
            lines.append(row(setting, "consumer"))
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with the table as it has to be."""
    return with_section(PAGE, table())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}, whose variables begin with {PREFIX}\n")
