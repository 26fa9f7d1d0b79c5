"""Writes the reference of commands, from what the program says in its helps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from docs.generated_section import with_section
from nsqext.cli import COMMANDS
from nsqext.cli.parameters import CommandGroup
from nsqext.cli.typer_app import typer_function, typer_group

PAGE = Path(__file__).parent / "reference" / "commands.md"

SHARED = frozenset(("--lookupd", "--nsqd", "--url", "--context", "--json", "--yes", "--help"))
"""Options that the page describes once."""

_EXAMPLES = "\n\n\b\nExamples:\n"


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name."""
    for name, (path, _) in COMMANDS.items():
        module, _, member = path.partition(":")
        found = getattr(import_module(module), member)
        if not isinstance(found, CommandGroup):
            single = typer.Typer(add_completion=False)
            single.command(name)(typer_function(found))
            yield name, typer.main.get_command(single)
            continue
        group: Any = typer.main.get_command(typer_group(found))
        for part, command in group.commands.items():
            yield f"{name} {part}", command


def examples(command: Any) -> list[str]:
    """Return the examples of a command's help."""
    text = (command.help or "").partition(_EXAMPLES)[2].replace(r"\[", "[")
    return [line.strip() for line in text.splitlines() if line.strip()]


def section(name: str, command: Any) -> list[str]:
    """Return the lines of a command."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not SHARED & set(one.opts)]
    text = (command.help or "").partition(_EXAMPLES)[0]
    words = " ".join([name, *(_usage(one) for one in arguments)])
    lines = [f"## `{words}`", "", *text.replace("\f", "").strip().splitlines(), ""]
    lines += ["```text", *examples(command), "```", ""]
    if options:
        lines += [f"- `{', '.join(one.opts)}`: {_meaning(one)}" for one in options]
        lines += [""]
    return lines


def _usage(argument: Any) -> str:
    name = str(argument.metavar or argument.name).upper()
    name = f"{name}…" if argument.nargs == -1 or getattr(argument, "multiple", False) else name
    return name if argument.required else f"[{name}]"


def _meaning(option: Any) -> str:
    said = " ".join((option.help or "").split())
    default = option.default
    if default is None or isinstance(default, bool) or callable(default) or default in ((), [], ""):
        return said
    return f"{said} Default: `{getattr(default, 'value', default)}`."


def reference() -> str:
    """Return the generated part of the page."""
    lines = list[str]()
    for name, command in commands():
        lines += section(name, command)
    return "\n".join(lines)


def page() -> str:
    """Return the page as it has to be."""
    return with_section(PAGE, reference(), "commands")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
