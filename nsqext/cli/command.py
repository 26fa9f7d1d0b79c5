"""Declare and run commands: option objects, examples in the help, errors and ^C."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import anyio
import attrs
import typer
from typer.models import ArgumentInfo

from nsqext.cli.arguments import Yes
from nsqext.cli.connection import Connection, complete_topics
from nsqext.cli.output import confirm, printable
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


def command(function: Callable[..., Any]) -> Callable[..., None]:
    """Decorate a command: each parameter that is an attrs class becomes options, one for each attribute.

    The options of a `Connection` are the last ones. A coroutine function runs in an event loop.
    """
    own = list(inspect.signature(function, eval_str=True).parameters.values())
    own.sort(key=lambda one: one.annotation is Connection)
    classes = {one.name: one.annotation for one in own if attrs.has(one.annotation)}

    @functools.wraps(function)
    def run(**values: Any) -> None:
        for name, kind in classes.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in _options(kind)})
        if inspect.iscoroutinefunction(function):
            perform(functools.partial(function, **values))
        else:
            function(**values)

    def parameters() -> Iterator[inspect.Parameter]:
        for one in own:
            if one.name not in classes:
                yield one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                continue
            for field in _options(attrs.resolve_types(classes[one.name], include_extras=True)):
                yield inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
                )

    found = list(parameters())
    for info in (info for one in found if one.name == "topic" for info in getattr(one.annotation, "__metadata__", ())):
        if isinstance(info, ArgumentInfo):
            info.autocompletion = complete_topics
    run.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in found}
    return run


def _options(kind: Any) -> list[attrs.Attribute[Any]]:
    return [field for field in attrs.fields(kind) if field.init]


Result = str | tuple[Mapping[str, Any], str] | None
"""What a change has done, in one word; or a record and a text; None for the word of the decorator."""


def changes(done: str = "", question: str = "") -> Callable[[Callable[..., Awaitable[Result]]], Callable[..., None]]:
    """Decorator of a command that changes the cluster: like `command`, with an open `Admin` as the first argument.

    Args:
        done: what is printed about the topic, or about its channel.
        question: asked before the change, with the arguments in its braces; adds --yes.
    """

    def decorate(function: Callable[..., Awaitable[Result]]) -> Callable[..., None]:
        def run(connection: Connection, *, yes: bool = False, **values: Any) -> None:
            if question:
                confirm(question.format(**values), yes=yes)

            async def act() -> None:
                async with connection.admin() as admin:
                    result = await function(admin, **values) or done
                if isinstance(result, str):
                    where = {name: values[name] for name in ("topic", "channel") if values.get(name) is not None}
                    subject = f"channel {where['channel']} of {where['topic']}" if len(where) > 1 else where["topic"]
                    result = {**where, result: True}, f"{subject} is {result}"
                connection.show(*result)

            perform(act)

        # Admin is not imported for --help
        _, *own = inspect.signature(function, eval_str=True, locals={"Admin": object}).parameters.values()
        added = {"yes": Yes, "connection": Connection} if question else {"connection": Connection}
        for name, kind in added.items():
            own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind))
        run.__doc__, run.__module__ = function.__doc__, function.__module__
        run.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        return command(run)

    return decorate


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
