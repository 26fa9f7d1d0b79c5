"""Parse command lines as the original programs: ``-flag value``, ``--flag=value``, bare booleans.

Configuration files are TOML with the flags' names, with underscores for hyphens.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nsqext.errors import InvalidSetting

_DURATION = re.compile(r"([0-9]*\.?[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
# seconds per unit of a number without unit (``-msg-timeout 5`` of the redesigned nsqd is five minutes)
_INTERVALS = {"minutes": 60.0, "fives": 5.0}
_TRUE = frozenset(("1", "t", "T", "true", "TRUE", "True"))
_FALSE = frozenset(("0", "f", "F", "false", "FALSE", "False"))


class FlagError(Exception):
    """A command line that the original program refuses, with its text."""


def _duration(text: str) -> float:
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    if rest == "0":
        return 0.0
    parts = _DURATION.findall(rest)
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        raise ValueError("parse error")
    return sign * sum(float(number) * _UNITS[unit] for number, unit in parts)


def _boolean(text: str) -> bool:
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("parse error")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("parse error") from None


def _integer(text: str) -> int:
    try:
        value = int(text, 0)
    except ValueError:
        raise ValueError("parse error") from None
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError("value out of range")
    return value


_PARSERS: dict[str, Callable[[str], Any]] = {
    "duration": _duration,
    **dict.fromkeys(_INTERVALS, _duration),
    "float": _number,
    "int": _integer,
    "bool": _boolean,
}


def parse_value(kind: str, text: str) -> Any:
    """Parse a value of any kind except ``list``; raises ValueError with the original's text."""
    if kind in _INTERVALS and text.isascii() and text.isdecimal():
        return int(text) * _INTERVALS[kind]
    return _PARSERS[kind](text) if kind in _PARSERS else text


def parse_flags(arguments: Sequence[str], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Parse a command line; return the values of the given flags.

    Args:
        kinds: type of each flag: ``str``, ``int``, ``float``, ``duration`` (returned in seconds), ``minutes`` and
            ``fives`` (a duration, or a number of minutes or of five seconds), ``bool`` (needs no value), ``switch`` (a
            text; ``true`` without a value), ``list`` (repeated, or separated by commas).
    """
    found: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word in ("-", "--"):
            break  # the original ignores the rest
        name, equals, text = word.removeprefix("-").removeprefix("-").partition("=")
        if not name or name.startswith(("-", "=")):
            raise FlagError(f"bad flag syntax: {word}")
        kind = kinds.get(name)
        if kind is None:
            raise FlagError(f"flag provided but not defined: -{name}")
        if not equals:
            if kind in ("bool", "switch"):
                text = "true"
            elif words:
                text = words.pop(0)
            else:
                raise FlagError(f"flag needs an argument: -{name}")
        _take(found, name, kind, text)
    return found


def _take(found: dict[str, Any], name: str, kind: str, text: str) -> None:
    if kind == "list":
        found.setdefault(name, []).extend(filter(None, text.split(",")))
        return
    try:
        found[name] = parse_value(kind, text)
    except ValueError as error:
        what = "boolean value" if kind == "bool" else "value"
        raise FlagError(f'invalid {what} "{text}" for {"" if kind == "bool" else "flag "}-{name}: {error}') from error


def read_flags(
    program: str,
    arguments: Sequence[str],
    kinds: Mapping[str, str],
    check: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Parse a program's command line; exit after ``--help`` or a `FlagError`, also of ``check``."""
    if any(word in ("-h", "-help", "--help", "--h") for word in arguments):
        _usage(program, kinds)
        raise SystemExit(0)
    try:
        found = parse_flags(arguments, kinds)
        check(found)
    except FlagError as error:
        sys.stderr.write(f"{error}\n")
        _usage(program, kinds)
        raise SystemExit(2) from None
    return found


_SHOWN = {"bool": "", "switch": "", "str": " string", "list": " value", "minutes": " string", "fives": " string"}


def _usage(program: str, kinds: Mapping[str, str]) -> None:
    sys.stderr.write(f"Usage of {program}:\n")
    for name, kind in sorted(kinds.items()):
        shown = _SHOWN.get(kind, f" {kind}")
        sys.stderr.write(f"  -{name}{shown}\n")


_NAMES = {
    "id": "node-id",
    "nsqlookupd_tcp_addresses": "lookupd-tcp-address",
    "auth_http_addresses": "auth-http-address",
    "e2e_processing_latency_percentiles": "e2e-processing-latency-percentile",
}


def with_config_file(flags: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return the flags, completed by the configuration file (``-config``), whose other names are ignored."""
    path = flags.get("config")
    if not path:
        return dict(flags)
    found: dict[str, Any] = {}
    for key, value in _load(path).items():
        name = _NAMES.get(key, key.replace("_", "-"))
        meant = key in _NAMES or name not in _NAMES.values()
        if meant and name in kinds:
            try:
                found[name] = _read(kinds[name], value)
            except ValueError as error:
                raise InvalidSetting(f"option resolution failed to coerce {value} for {key} - {error}") from error
    return found | dict(flags)


def _load(path: str) -> dict[str, Any]:
    import tomllib  # few programs have a file

    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise InvalidSetting(f"failed to load config file {path} - open {path}: {reason}") from error
    except ValueError as error:
        raise InvalidSetting(f"failed to load config file {path} - {error}") from error


def _read(kind: str, value: Any) -> Any:
    """Convert a value of the file; a duration without unit is in milliseconds."""
    if kind == "list":
        return list(value) if isinstance(value, list) else str(value).split(",")
    if (kind == "duration" or kind in _INTERVALS) and type(value) is int:
        return value / 1000
    if isinstance(value, bool):
        value = str(value).lower()
    return parse_value(kind, str(value))
