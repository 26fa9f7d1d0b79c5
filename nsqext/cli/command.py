"""Declare and run commands: arguments, option objects, examples in the help, errors and ^C."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import anyio
import attrs

from nsqext.cli.connection import ServerAccess, confirm
from nsqext.cli.parameters import Argument, Option
from nsqext.errors import InvalidSetting, NsqError, escaped
from nsqext.settings_text import redact_url

if TYPE_CHECKING:
    from nsqext import Position

_MESSAGE_ID = re.compile("[0-9A-Fa-f]{32}")

Topic = Annotated[str, Argument(help="The topic.")]
Channel = Annotated[str, Argument(help="The channel.")]
Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask; needed without a terminal.")]
Json = Annotated[bool, Option("--json", help="Print JSON lines at a terminal too.")]
UntilEnd = Annotated[bool, Option("--until-end", help="Exit when the channel has no messages left.")]


def parse_time(text: str) -> int:
    """Parse ISO form, seconds since 1970, or an age (``90m``); return nanoseconds since 1970."""
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    try:
        if unit is not None and not text.startswith("-"):
            return int((time.time() - float(text[:-1]) * unit) * 1e9)
        if text.replace(".", "", 1).isdecimal():
            return int(float(text) * 1e9)
        return int(datetime.fromisoformat(text).timestamp() * 1e9)
    except (OverflowError, ValueError):
        raise InvalidSetting(
            f"the time {text!r} cannot be parsed", hint="write 2026-05-01T12:00:00, seconds since 1970, or 30s, 5m, 2h"
        ) from None


def check_http_url(option: str, url: str, example: str) -> None:
    """Raise InvalidSetting if an option is not the URL of an HTTP server."""
    import httpx  # few commands need it

    try:
        httpx.URL(url)  # each of the two accepts addresses that the other one refuses
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        known = False
    if not known or not url.isprintable() or " " in url:
        raise InvalidSetting(f"{option} {redact_url(url)!r} is not an HTTP URL", hint=f"write {example}")


def parse_message_id(text: str) -> bytes | int:
    """Parse a message id of 32 hexadecimal digits (16 bytes), or an internal or trace id."""
    if _MESSAGE_ID.fullmatch(text):
        return bytes.fromhex(text)
    if text.isascii() and text.isdecimal():
        return int(text)
    raise InvalidSetting(f"{text!r} is no message id", hint="give a message id of 32 hexadecimal digits, or a number")


def parse_headers(given: Sequence[str] | None) -> dict[str, str]:
    """Return the options --header NAME=VALUE as a mapping."""
    pairs = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidSetting(f"--header {text!r} is not NAME=VALUE")
        if name in pairs:
            raise InvalidSetting(f"--header {name} is given twice", hint="a message has one value of a header")
        pairs[name] = value
    return pairs


def parse_position(text: str) -> Position:
    """Parse a position, or a time in ISO form, which is local without a zone."""
    from nsqext import Position
    from nsqext.client.consumer.position import read_position

    if text[:1].isdecimal():
        try:
            moment = datetime.fromisoformat(text).astimezone()
        except (OverflowError, ValueError):
            pass
        else:
            return Position.at(moment)
    try:
        return read_position(text)
    except ValueError as error:
        raise InvalidSetting(f"the position {text!r} cannot be parsed: {error}, or a time in ISO form") from None


def help_is_markup() -> bool:
    """Return whether the help is for a terminal, where rich parses it."""
    return sys.stdout.isatty()


F = TypeVar("F", bound=Callable[..., object])


def examples(*lines: str) -> Callable[[F], F]:
    """Return a decorator that appends examples to a command's help."""

    def add(function: F) -> F:
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)  # typer wraps lines
        bracket = r"\[" if help_is_markup() else "["  # a literal bracket, which rich would parse as markup
        shown = "\n".join(f"  {line.replace('[', bracket)}" for line in lines)
        function.__doc__ = f"{text}\n\n\b\nExamples:\n{shown}\n"
        return function

    return add


def command(function: Callable[..., Any]) -> Callable[..., None]:
    """Decorate a command: attributes of a parameter that is an attrs class become options, of `ServerAccess` last.

    A coroutine function runs in an event loop.
    """
    own = list(inspect.signature(function, eval_str=True).parameters.values())
    own.sort(key=lambda one: one.annotation is ServerAccess)
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
    run.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in found}
    return run


def _options(kind: Any) -> list[attrs.Attribute[Any]]:
    return [field for field in attrs.fields(kind) if field.init]


Result = str | tuple[Mapping[str, Any], str] | None
"""What a change has done (a word, or a record and a text); None for the decorator's word."""


def changes(
    done: str = "", question: str = "", *, reads_without: str | None = None
) -> Callable[[Callable[..., Awaitable[Result]]], Callable[..., None]]:
    """Decorate a command that changes the cluster: `command` with an open `Admin` as the first argument, and --yes.

    Args:
        done: printed about the topic or channel.
        question: asked at a terminal before a change that cannot be undone, with the arguments in its braces.
        reads_without: name of the argument without which the command changes nothing.
    """

    def decorate(function: Callable[..., Awaitable[Result]]) -> Callable[..., None]:
        summary = inspect.cleandoc(function.__doc__ or "").partition("\n")[0].rstrip(".")

        def run(connection: ServerAccess, *, yes: bool = False, **values: Any) -> None:
            if reads_without is None or values[reads_without] is not None:
                confirm(question.format(**values) or summary, yes=yes, ask=bool(question))

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
        for name, kind in {"yes": Yes, "connection": ServerAccess}.items():
            own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind))
        run.__doc__, run.__module__ = function.__doc__, function.__module__
        run.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        return command(run)

    return decorate


class _SafeFormatter(logging.Formatter):
    """Escapes control characters: log messages may quote text from servers."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(escaped, super().format(record).split("\n")))


def perform(command: Callable[[], Awaitable[None]]) -> None:
    """Run a command; exit with 130 on ^C, silently with 1 on a closed pipe; raise the first of simultaneous errors."""
    from nsqext.client.tasks import first_error

    if logging.lastResort is not None:  # prints warnings where the program did not configure logging
        logging.lastResort.setFormatter(_SafeFormatter())
    try:
        anyio.run(command)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BaseExceptionGroup as group:
        matching, rest = group.split((NsqError, OSError, SystemExit))
        if matching is None or rest is not None:
            raise
        raise first_error(matching) from None
