"""Parsing of command lines like the original programs."""

from __future__ import annotations

import pytest

from nsqext.golang.flags import FlagError, parse_flags, read_flags
from tests.support.tables import table

KINDS = {"f": "float", "m": "minutes", "v": "fives"} | {
    "a": "str",
    "n": "int",
    "d": "duration",
    "b": "bool",
    "s": "switch",
    "l": "list",
    "version": "bool",
}


@table(
    ("line", "found"),
    [
        ("-a x", {"a": "x"}),
        ("--a x", {"a": "x"}),
        ("-a=x=y", {"a": "x=y"}),
        ("--a=", {"a": ""}),
        ("-n 5 --n=0x10", {"n": 16}),
        ("-b", {"b": True}),
        ("-b=false -a x", {"b": False, "a": "x"}),
        ("-s -a x", {"s": "true", "a": "x"}),
        ("--s=tcp-https", {"s": "tcp-https"}),
        ("-l a,b --l c", {"l": ["a", "b", "c"]}),
        ("-d 1m30s", {"d": 90.0}),
        ("-d 1.5h", {"d": 5400.0}),
        ("-d 250ms", {"d": 0.25}),
        ("-d 0", {"d": 0.0}),
        ("-d=-2s", {"d": -2.0}),
        ("-b rest -n 5", {"b": True}),
        ("-b -- -n 5", {"b": True}),
        ("-f 0.25", {"f": 0.25}),
        ("-m 2 -v 2", {"m": 120.0, "v": 10.0}),
        ("-m 2s -v 2s", {"m": 2.0, "v": 2.0}),
        ("", {}),
    ],
)
def test_valid_command_lines(line: str, found: dict[str, object]) -> None:
    assert parse_flags(line.split(), KINDS) == found


@table(
    ("line", "text"),
    [
        ("-nope", "flag provided but not defined: -nope"),
        ("--nope=1", "flag provided but not defined: -nope"),
        ("-a", "flag needs an argument: -a"),
        ("---a x", "bad flag syntax: ---a"),
        ("-=x", "bad flag syntax: -=x"),
        ("-d 5sx", 'invalid value "5sx" for flag -d: parse error'),
        ("-n x", 'invalid value "x" for flag -n: parse error'),
        ("-n 9223372036854775808", 'invalid value "9223372036854775808" for flag -n: value out of range'),
        ("-b=maybe", 'invalid boolean value "maybe" for -b: parse error'),
        ("-f x", 'invalid value "x" for flag -f: parse error'),
        ("-d 5", 'invalid value "5" for flag -d: parse error'),
        ("-d 5x", 'invalid value "5x" for flag -d: parse error'),
    ],
)
def test_invalid_command_lines(line: str, text: str) -> None:
    with pytest.raises(FlagError) as error:
        parse_flags(line.split(), KINDS)
    assert str(error.value) == text


def test_help_and_errors_end_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    for words, status in ((["-h"], 0), (["-nope"], 2), (["-n", "5", "--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            read_flags("nsqd", words, KINDS)
        assert ended.value.code == status
    output = capsys.readouterr()
    assert output.err.startswith("Usage of nsqd:\n  -a string\n")
    assert "flag provided but not defined: -nope\nUsage of nsqd:" in output.err
