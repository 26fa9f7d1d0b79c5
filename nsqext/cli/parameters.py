"""Parameters of commands: `Argument`, `Option` and `CommandGroup`; and a reader of usual command lines.

Typer's import takes longer than a command's request. It serves help, completion, errors, and command lines that
`read_words` does not accept; see `nsqext.cli.typer_app`.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from attrs import field, frozen

__all__ = ("Argument", "CommandGroup", "Option", "Parameter", "parameters_of", "read_words")

COMPLETE = "_NSQEXT_COMPLETE"
"""Set by the shell while it completes a command line."""

F = TypeVar("F", bound=Callable[..., object])

_NUMBERS = {int: re.compile("[0-9]{1,18}"), float: re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?")}


class Argument:
    """Argument of a command, in the annotation of a parameter."""

    def __init__(self, *, help: str, metavar: str | None = None) -> None:
        self.help: str = help
        self.metavar: str | None = metavar


class Option:
    """Option of a command, in the annotation of a parameter.

    Args:
        names: ``--name``, or ``--on/--off`` of a switch; by default the parameter's name.
        help: a sentence.
        min: the lowest number.
        max: the highest number.
        envvar: environment variable with the value.
        panel: title of its part of the help.
    """

    def __init__(
        self,
        *names: str,
        help: str,
        min: float | None = None,
        max: float | None = None,
        envvar: str | None = None,
        panel: str | None = None,
    ) -> None:
        self.names: tuple[str, ...] = names
        self.help: str = help
        self.min: float | None = min
        self.max: float | None = max
        self.envvar: str | None = envvar
        self.panel: str | None = panel


@frozen
class CommandGroup:
    """Commands below the name of a command."""

    commands: dict[str, Callable[..., object]] = field(factory=dict)

    def command(self, name: str) -> Callable[[F], F]:
        def add(function: F) -> F:
            self.commands[name] = function
            return function

        return add


@frozen
class Parameter:
    """A declared parameter of a command."""

    name: str
    type: Any  #: without Annotated
    declared: Argument | Option
    default: Any  #: or inspect.Parameter.empty

    @property
    def several(self) -> bool:
        return get_origin(self._kind()) is list

    def _kind(self) -> Any:
        if get_origin(self.type) not in (Union, UnionType):
            return self.type
        first, *others = (one for one in get_args(self.type) if one is not NoneType)
        return self.type if others else first

    @property
    def is_switch(self) -> bool:
        """Whether it has no value in the command line."""
        return self._kind() is bool

    def names(self) -> Iterator[tuple[str, bool]]:
        """Yield the names of an option, with the value of a switch."""
        if not isinstance(self.declared, Option):
            return
        usual = self.name.replace("_", "-")
        for name in self.declared.names or (f"--{usual}/--no-{usual}" if self.is_switch else f"--{usual}",):
            on, _, off = name.partition("/")
            yield on, True
            if off:
                yield off, False

    def parse(self, text: str) -> Any:
        """Parse a value; raises ValueError for a text that typer has to examine."""
        kind = self._kind()
        if get_origin(kind) is list:
            (kind,) = get_args(kind)
        text.encode()  # refuses bytes that are not UTF-8
        if kind is str:
            return text
        if kind is Path and (os.access(text, os.R_OK) or not os.access(text, os.F_OK)):
            return Path(text)
        if get_origin(kind) is Literal and text in get_args(kind):
            return text
        if kind in _NUMBERS and _NUMBERS[kind].fullmatch(text):
            value, limits = kind(text), self.declared
            if not isinstance(limits, Option) or (
                (limits.min is None or limits.min <= value) and (limits.max is None or value <= limits.max)
            ):
                return value
        raise ValueError(text)


def parameters_of(function: Callable[..., object]) -> list[Parameter]:
    """Return the declared parameters of a command."""
    found = []
    for one in inspect.signature(function, eval_str=True).parameters.values():
        kind, declared = get_args(one.annotation)
        found.append(Parameter(one.name, kind, declared, one.default))
    return found


def read_words(
    function: Callable[..., object], words: Sequence[str], environ: Mapping[str, str]
) -> dict[str, Any] | None:
    """Return the values of a command's parameters, equal to typer's; None for help, errors and unusual words."""
    parameters = parameters_of(function)
    try:
        values, rest = _read_options(parameters, words)
        values |= _read_arguments([one for one in parameters if isinstance(one.declared, Argument)], rest)
    except ValueError:
        return None
    for one in parameters:
        if one.name not in values:
            variable = one.declared.envvar if isinstance(one.declared, Option) else None
            if one.default is inspect.Parameter.empty or (variable is not None and variable in environ):
                return None
            values[one.name] = one.default
    return values


def _read_options(parameters: Sequence[Parameter], words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    options = {name: (one, on) for one in parameters for name, on in one.names()}
    values: dict[str, Any] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        if not word.startswith("-"):
            rest.append(word)
            continue
        name, equals, text = word.partition("=")
        if name not in options or (equals and not name.startswith("--")):
            raise ValueError(word)
        one, on = options[name]
        if one.name in values and not one.several:
            raise ValueError(word)
        if one.is_switch:
            if equals:
                raise ValueError(word)
            values[one.name] = on
            continue
        if not equals:
            text = next(left, "")
            if text.startswith("-"):
                raise ValueError(word)
        value = _parse(one, text)
        values[one.name] = [*values.get(one.name, ()), value] if one.several else value
    return values, rest


def _read_arguments(arguments: Sequence[Parameter], words: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for place, one in enumerate(arguments):
        if one.several:
            if one is not arguments[-1]:
                raise ValueError(one.name)
            if words[place:]:
                values[one.name] = [_parse(one, word) for word in words[place:]]
            return values
        if place < len(words):
            values[one.name] = _parse(one, words[place])
    if len(words) > len(arguments):
        raise ValueError(words[-1])
    return values


def _parse(parameter: Parameter, text: str) -> Any:
    if not text:
        raise ValueError(parameter.name)
    return parameter.parse(text)
