"""Command lines that are read without typer: values are typer's, and everything unusual is left to typer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import typer

from nsqext.cli import COMMANDS
from nsqext.cli.parameters import CommandGroup, read_words
from nsqext.cli.typer_app import typer_function


def command(line: str) -> tuple[Callable[..., object], list[str]]:
    """Return the function of a command line, and the words after the command."""
    name, *words = line.split(" ")
    module, _, member = COMMANDS[name][0].partition(":")
    found = getattr(import_module(module), member)
    if isinstance(found, CommandGroup):
        name, *words = words
        found = found.commands[name]
    return found, words


def by_typer(function: Callable[..., object], words: list[str]) -> dict[str, Any]:
    """Return the values of a command's parameters that typer parses."""
    seen = dict[str, Any]()

    def run(**values: Any) -> None:
        seen.update(values)

    run.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    app = typer.Typer()
    app.command()(typer_function(run))
    app(words, standalone_mode=False)
    return seen


@pytest.mark.parametrize(
    "line",
    [
        "topic list",
        "topic list --lookupd 127.0.0.1:4161,127.0.0.1:4163 --json",
        "topic create orders --partitions 4 --extend --channel a --channel=b --wait 2.5",
        "topic create orders --if-not-exists",
        "topic delete orders -y",
        "topic set orders --any-channel --retention-days 7 --yes",
        "channel seek orders billing message:1000 --partition 0 --partition 1 --yes",
        "pub orders hello",
        "pub --nsqd=127.0.0.1:4150 orders one two three --key 4711 --header user=42 --header a==b",
        "pub orders --file orders.csv --format csv --key-column customer --rate 0.5",
        "pub orders hello --transport http --trace-id 17 --delay 1",
        "tail orders --count 10 --until-end",
        "lag orders --max 100",
        "spark anchors list orders --url nsq://h:1?tls=true",
        "run shop:app --workers 4 --no-reload --ready-file ready",
        "config use prod",
        "outbox status --database sqlite:///shop.db",
    ],
)
def test_usual_words_have_the_values_of_typer(line: str) -> None:
    function, words = command(line)
    assert read_words(function, words, {}) == by_typer(function, words)


@pytest.mark.parametrize(
    "line",
    [
        "topic create",  # a missing argument
        "topic create orders more",  # too many arguments
        "topic create orders --partitions",
        "topic create orders --partitions many",
        "topic create orders --partitions 1_0",
        "topic create orders --partitions 1 --partitions 2",
        "topic create orders --extend=1",
        "topic list --jso",
        "topic list --help",
        "topic list -h",
        "pub orders --format xml",
        "pub orders --rate -1",
        "pub orders -- --hello",
        "pub orders -1",
        "pub orders ",
        "run shop:app --workers 0",
        "outbox status",
    ],
)
def test_unusual_words_are_left_to_typer(line: str) -> None:
    assert read_words(*command(line), {}) is None


def test_values_of_the_environment_are_left_to_typer() -> None:
    assert read_words(*command("outbox status"), {"NSQEXT_OUTBOX": "sqlite:///shop.db"}) is None
    found = read_words(*command("doctor"), {"NSQEXT_LOOKUPD": "127.0.0.1:4161"})
    assert found is not None
    assert read_words(*command("doctor"), {"NSQEXT_OUTBOX": "sqlite:///shop.db"}) is None
