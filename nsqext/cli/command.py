"""Declare and run commands: option objects, examples in the help, errors and ^C."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import anyio
import attrs
import typer

from nsqext.cli.output import printable
from nsqext.errors import NsqError

BRACKET = r"\["  # a literal bracket in a help text; rich parses other brackets as markup

F = TypeVar("F", bound=Callable[..., object])


def examples(*lines: str) -> Callable[[F], F]:
    """Return a decorator that appends examples to the help of a command."""

    def add(function: F) -> F:
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)  # typer wraps the lines
        shown = "\n".join(f"  {line.replace('[', BRACKET)}" for line in lines)
        function.__doc__ = f"{text}\n\n\b\nExamples:\n{shown}\n"
        return function

    return add


def option_objects(function: Callable[..., object]) -> Callable[..., object]:
    """Decorate a command: each parameter that is an attrs class becomes options, one for each attribute."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())
    classes = {one.name: one.annotation for one in own if attrs.has(one.annotation) and one.name != "connection"}

    @functools.wraps(function)
    def run(*words: Any, **values: Any) -> object:
        objects = {
            name: kind(**{field.name: values.pop(field.name) for field in _options(kind)})
            for name, kind in classes.items()
        }
        return function(*words, **values, **objects)

    def parameters() -> Iterator[inspect.Parameter]:
        for one in own:
            if one.name not in classes:
                keyword = one.name != "connection"
                yield one.replace(kind=inspect.Parameter.KEYWORD_ONLY) if keyword else one
                continue
            for field in _options(attrs.resolve_types(classes[one.name], include_extras=True)):
                yield inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
                )

    found = list(parameters())
    run.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in found}
    return run


def _options(kind: Any) -> list[attrs.Attribute[Any]]:
    return [field for field in attrs.fields(kind) if field.init]


class _SafeFormatter(logging.Formatter):
    """Escapes control characters: log messages may quote text sent by servers."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def perform(command: Callable[[], Awaitable[None]]) -> None:
    """Run a command; raise the first of several simultaneous errors.

    The process exits without a message if the reader has closed the pipe, and with code 130 on ^C.
    """
    from nsqext.client.tasks import first_error

    if logging.lastResort is not None:  # prints warnings where the program did not configure logging
        logging.lastResort.setFormatter(_SafeFormatter())
    try:
        anyio.run(command)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        _leave_the_pipe()
    except BaseExceptionGroup as group:
        matching, rest = group.split((NsqError, OSError, typer.Exit, SystemExit))
        if matching is None or rest is not None:
            raise
        first = first_error(matching)
        if isinstance(first, BrokenPipeError):
            _leave_the_pipe()
            return
        raise first from None


def _leave_the_pipe() -> None:
    # Python flushes standard output at exit, and would print an error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
