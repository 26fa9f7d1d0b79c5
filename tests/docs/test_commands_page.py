"""The reference of commands equals the program's help, and every command has an example."""

from __future__ import annotations

import shlex

from docs import commands_table
from nsqext.cli import COMMANDS
from tests.support.tables import table

ALL = dict(commands_table.commands())


def test_the_page_is_up_to_date() -> None:
    written = commands_table.PAGE.read_text(encoding="utf-8")
    assert written == commands_table.page(), "run python -m docs.commands_table"


@table("name", ALL)
def test_every_command_has_examples_that_call_it(name: str) -> None:
    found = commands_table.examples(ALL[name])
    assert any(f"nsqext {name}" in example for example in found), found
    for example in found:
        assert shlex.split(example)
        assert len(example) <= 76, "a terminal of 80 columns breaks it"


def test_the_list_of_commands_has_a_sentence_for_each() -> None:
    assert {name.partition(" ")[0] for name in ALL} == COMMANDS.keys()
    assert [name for name, (_, said) in COMMANDS.items() if not said.endswith(".") or len(said) >= 100] == []
    assert [name for name, command in ALL.items() if not (command.help or "").strip()] == []


def test_who_comes_from_kafka_finds_the_mirror_and_the_lag() -> None:
    page = (commands_table.PAGE.parents[1] / "howto" / "coming-from-kafka.md").read_text(encoding="utf-8")
    (mirror,) = [line for line in page.splitlines() if line.startswith("| MirrorMaker |")]
    assert mirror.split("|")[2].strip() == "`nsqext relay`"
    (lag,) = [line for line in page.splitlines() if line.startswith("- Consumer lag")]
    assert "`nsqext lag`" in lag
    assert "--max" in {name for one in ALL["lag"].params for name in one.opts}
    assert "--to-lookupd" in {name for one in ALL["relay"].params for name in one.opts}
