"""Checks of arguments and options: unknown keywords, options of the wrong class, numbers, handler functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import TYPE_CHECKING, TypeVar

import attrs

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from attrs import AttrsInstance

__all__ = (
    "check_groups",
    "check_handler_function",
    "check_kinds",
    "check_positive",
    "check_time",
    "is_coroutine_function",
    "options_of",
    "suggest",
    "unknown_arguments",
)

Options = TypeVar("Options")


def suggest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to an unknown one; None where no name is similar."""
    from difflib import get_close_matches

    names = list(known)
    wanted = name.lower().replace("-", "_")
    # the name without its group counts as well: poll_interval for lookup_poll_interval
    ends = [one for one in names if one.endswith(f"_{wanted}")]
    found = get_close_matches(wanted, names, 1, 0.6)
    return ends[0] if len(ends) == 1 else (found[0] if found else None)


def unknown_arguments(call: Callable[..., object], unknown: Iterable[str], **options: type[AttrsInstance]) -> TypeError:
    """Return the error for unknown keyword arguments of a constructor or decorator, which suggests the right ones.

    Args:
        call: the class or function.
        unknown: the unknown arguments.
        options: the classes of its arguments that hold options, by argument.
    """
    name = next(iter(unknown))
    parameters = inspect.signature(call).parameters.values()
    arguments = [one.name for one in parameters if one.default is not one.empty]
    members = {member.name: argument for argument, kind in options.items() for member in attrs.fields(kind)}
    found = name if name in members else suggest(name, (*arguments, *members))
    if found is None:
        others = " or ".join(f"{argument}={kind.__name__}(...)" for argument, kind in options.items())
        hint = f"it has {', '.join(arguments)}; everything else is in {others}"
    elif found in members and found not in arguments:
        argument = members[found]
        hint = f"did you mean {argument}={options[argument].__name__}({found}=...)?"
    else:
        hint = f"did you mean {found}=?"
    return TypeError(f"{call.__name__}() has no argument {name!r}: {hint}")


def options_of(given: Options | None, kind: type[Options], argument: str = "options") -> Options:
    """Return the options that a constructor was given; the default ones for None.

    Args:
        given: the options.
        kind: their class.
        argument: name of the argument, for the error.

    Raises:
        InvalidSetting: they are of another class.
    """
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise InvalidSetting(
            f"{argument} is a {type(given).__name__}", hint=f"give {argument}=nsqext.{kind.__name__}(...)"
        )
    return given


def check_groups(options: AttrsInstance) -> None:
    """Check that each member for a group of options holds an object of its class.

    Raises:
        InvalidSetting: a member holds another object.
    """
    for member in attrs.fields(type(options)):
        kind = getattr(member.default, "factory", None)
        value = getattr(options, member.name)
        if kind is not None and not isinstance(value, kind):
            raise InvalidSetting(f"{member.name}={value!r} is not a {kind.__name__}")


def check_positive(name: str, value: object) -> None:
    """Check that a setting is a whole number of 1 or more.

    Raises:
        InvalidSetting: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidSetting(f"{name}={value!r} is not a positive number", hint="give a whole number of 1 or more")


def check_time(name: str, value: object, *, zero: bool = True) -> None:
    """Check that a setting is a time in seconds; infinity is one.

    Args:
        name: name of the setting, for the error.
        value: its value.
        zero: whether it may be 0.

    Raises:
        InvalidSetting: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value >= 0 if zero else value > 0):
        raise InvalidSetting(f"{name}={value!r} is not a {'' if zero else 'positive '}time in seconds")


_KINDS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "bool | None": (bool, NoneType),
    "str | None": (str, NoneType),
}


def check_kinds(options: AttrsInstance) -> None:
    """Check the members of options that are True or False, or text: other values fail late, or count as True.

    Values of text are not shown: some are secrets.

    Raises:
        InvalidSetting: a member has a value of another kind.
    """
    for member in attrs.fields(type(options)):
        kinds, value = _KINDS.get(str(member.type)), getattr(options, member.name)
        if kinds is None or isinstance(value, kinds):
            continue
        if bool in kinds:
            raise InvalidSetting(f"{member.name}={value!r} is not True or False")
        raise InvalidSetting(f"{member.name} is a {type(value).__name__}", hint="give text")


def is_coroutine_function(function: object) -> bool:
    """Return whether a function, or an object that can be called, is declared with ``async def``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_handler_function(function: object) -> None:
    """Check that a handler is a coroutine function, and not a method without its object.

    Raises:
        InvalidSetting: it is not a coroutine function, or its first parameter is ``self``.
    """
    if not is_coroutine_function(function):
        raise InvalidSetting(
            f"the handler {function!r} is not a coroutine function", hint="declare it with 'async def'"
        )
    if callable(function):
        plain = inspect.unwrap(function, stop=inspect.ismethod)
        if inspect.isfunction(plain) and next(iter(inspect.signature(plain).parameters), "") == "self":
            raise InvalidSetting(
                f"the handler {plain.__qualname__} is a method without its object",
                hint="register the method of an object: consumer.handler(service.handle)",
            )
