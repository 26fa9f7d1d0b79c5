"""Command lines that are read without typer: values are typer's, and everything unusual is left to typer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args
from unittest import mock

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsqext.cli import COMMANDS
from nsqext.cli.parameters import CommandGroup, Option, Parameter, parameters_of, read_words
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


def by_typer(function: Callable[..., object], words: Sequence[str]) -> dict[str, Any]:
    """Return the values of a command's parameters that typer parses."""
    parse, seen = parser_of(function)
    seen.clear()
    parse(words, standalone_mode=False)
    return seen.copy()


@cache
def parser_of(function: Callable[..., object]) -> tuple[Callable[..., object], dict[str, Any]]:
    """Return typer's parser of a command, and the values that its last call has found."""
    seen = dict[str, Any]()

    def run(**values: Any) -> None:
        seen.update(values)

    run.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(typer_function(run))
    return typer.main.get_command(app), seen


@cache
def functions() -> list[Callable[..., object]]:
    """Return the functions of all commands."""
    found = [getattr(import_module(path.partition(":")[0]), path.partition(":")[2]) for path, _ in COMMANDS.values()]
    return [
        function for one in found for function in (one.commands.values() if isinstance(one, CommandGroup) else [one])
    ]


UNREADABLE = "unreadable"
"""A file that exists; typer refuses it."""

ODD = (
    *(
        "",
        "-",
        "--",
        "-1",
        "-5",
        "-y",
        "-h",
        "--help",
        "--no",
        "=",
        "a=b",
        " 7",
        "7 ",
        "1_0",
        "+4",
        "1e3",
        "nan",
        "inf",
        ".5",
        "2.",
        "0x1",
        "0",
        "00",
        "007",
        "0.0",
        "1.0",
        "2.50",
        "0.001",
        "0.01",
        "0.05",
        "0.1",
        "1",
        "32",
        "33",
        "254",
        "255",
        "65535",
        "65536",
        "٣",
        "é",
        "\udcff",
        "a\nb",
        "True",
        "false",
        "@file",
        "~",
        "*",
        ".",
        "x,y",
        "-yy",
        "TCP",
        "tcp",
        "lines",
        "json",
        "error",
        "sqlite",
        "anchors",
        "list",
        "delete",
        "999999999999999999",
        "9999999999999999999",
        "0.1234567890123456789",
        "123456789012345.6",
    ),
    UNREADABLE,
)


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have a file that cannot be read, also as root."""
    access = os.access
    monkeypatch.chdir(tmp_path)
    Path(UNREADABLE).touch()
    monkeypatch.setattr(
        os, "access", lambda path, mode: access(path, mode) and not (str(path) == UNREADABLE and mode == os.R_OK)
    )
    monkeypatch.delenv("NSQEXT_OUTBOX", raising=False)


def one_of_each_kind() -> dict[str, Callable[..., object]]:
    """Return a command with a single parameter for each combination of type, limits and variable that commands have."""
    found = dict[str, Callable[..., object]]()
    for one in (parameter for function in functions() for parameter in parameters_of(function)):
        limits = [getattr(one.declared, name, None) for name in ("min", "max", "envvar")]
        has_default = one.default is not inspect.Parameter.empty

        def command(**values: Any) -> None:
            """Stand for a command."""

        kind: Any = one.type
        annotation: Any = Annotated[kind, one.declared]
        kept = inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=annotation)
        command.__signature__ = inspect.Signature([kept])  # type: ignore[attr-defined]
        found.setdefault(str((one.type, type(one.declared), has_default, limits)), command)
    return found


@pytest.mark.usefixtures("unreadable")
def test_every_accepted_text_of_every_kind_of_parameter_has_the_value_of_typer() -> None:
    accepted = set[str]()
    for kind, function in one_of_each_kind().items():
        (parameter,) = parameters_of(function)
        names = [name for name, _ in parameter.names()]
        lines = [[], *([name] for name in names), *([name, name] for name in names)]
        for text in ODD:
            lines += [[text], ["--", text]]
            lines += [line for name in names for line in ([name, text], [f"{name}={text}"])]
        for words in lines:
            found = read_words(function, words, {})
            if found is not None:
                accepted.add(kind)
                assert found == by_typer(function, words), words
        for value in ("", "sqlite:///shop.db"):
            with mock.patch.dict(os.environ, {"NSQEXT_OUTBOX": value}):
                found = read_words(function, [], os.environ)
                assert found is None or found == by_typer(function, [])
    assert accepted == one_of_each_kind().keys()


def texts(parameter: Parameter) -> st.SearchStrategy[str]:
    """Return values of an argument or an option; typer refuses some of them."""
    limits = [
        number + step
        for number in (getattr(parameter.declared, "min", None), getattr(parameter.declared, "max", None))
        if number is not None
        for step in (-1, -0.5, 0, 1)
    ]
    kinds = str(parameter.type)
    usual: st.SearchStrategy[Any]
    if "Literal" in kinds:
        usual = st.sampled_from([text for text in get_args(parameter.type) if isinstance(text, str)] or ["nsqd"])
    elif "int" in kinds:
        usual = st.integers(1, 10**6)
    elif "float" in kinds:
        usual = st.floats(1, 1e6).map(lambda number: round(number, 3))
    else:
        usual = st.sampled_from(["orders", "a=b", "127.0.0.1:4161", "nsq://h:1?tls=true"])
    unusual = st.sampled_from(ODD) | st.text(max_size=3) | st.integers(-1, 100).map(str)
    return st.integers(0, 9).flatmap(
        lambda digit: (
            usual.map(str) if digit < 8 else st.sampled_from(limits).map(str) if limits and digit < 9 else unusual
        )
    )


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[Callable[..., object], list[str], dict[str, str]]:
    """Draw a command, words behind it, and variables of the environment that its options read."""
    function = draw(st.sampled_from(functions()))
    parameters = parameters_of(function)
    options = [one for one in parameters if isinstance(one.declared, Option)]
    needed = [one for one in parameters if one.default is inspect.Parameter.empty]
    chosen = needed + draw(st.lists(st.sampled_from(parameters), max_size=5))
    groups = list[list[str]]()
    for one in draw(st.permutations(chosen)):
        names = [name for name, _ in one.names()]
        name = draw(st.sampled_from(names)) if names else ""
        if one.is_switch:
            groups.append([name])
            continue
        text = draw(texts(one))
        groups.append([text] if not names else draw(st.sampled_from([[name, text], [f"{name}={text}"]])))
    odd = [draw(st.sampled_from(ODD))] if draw(st.integers(0, 9)) == 9 else []
    words = [word for group in [*groups, odd] for word in group]
    variables = sorted({one.declared.envvar for one in options if isinstance(one.declared, Option)} - {None}, key=str)
    environ = {str(name): draw(st.sampled_from(["", "sqlite:///shop.db"])) for name in variables if draw(st.booleans())}
    return function, words, environ


@pytest.mark.usefixtures("unreadable")
def test_every_accepted_command_line_has_the_values_of_typer() -> None:
    accepted = 0

    @settings(
        max_examples=settings().max_examples * 6 // 10, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(command_lines())
    def compare(drawn: tuple[Callable[..., object], list[str], dict[str, str]]) -> None:
        nonlocal accepted
        function, words, environ = drawn
        found = read_words(function, words, environ)
        if found is None:
            return
        accepted += 1
        with mock.patch.dict(os.environ, environ):
            expected = by_typer(function, words)
        assert found == expected
        assert list(map(type, found.values())) == [type(expected[name]) for name in found]

    compare()
    assert accepted > 10


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
