"""Checks of arguments and options."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeGuard, get_args, get_origin, get_type_hints

import attrs

from nsqext.errors import InvalidInput, InvalidSetting, UnknownSetting

if TYPE_CHECKING:
    from attrs import AttrsInstance

_SECRET_WORDS = ("secret", "password", "token", "credential")
_TYPO = 0.9  # similarity from which an unknown name is a typo of a known name


def is_secret_name(name: str) -> bool:
    """Return whether a setting of this name, even misspelt, is a secret."""
    return any(word in name.lower() for word in _SECRET_WORDS)


def suggest(name: str, known: Iterable[str]) -> str | None:
    """Return the most similar known name; None if no name is similar."""
    from difflib import get_close_matches

    names = list(known)
    wanted = name.lower().replace("-", "_")
    if typo := get_close_matches(wanted, names, 1, _TYPO):
        return typo[0]
    # with or without a prefix: request_timeout for lookup_request_timeout, connection_tls for tls
    inside = sorted((one for one in names if wanted.endswith(f"_{one}")), key=len)
    ends = inside[-1:] or [one for one in names if one.endswith(f"_{wanted}")]
    found = get_close_matches(wanted, names, 1, 0.6)
    return ends[0] if len(ends) == 1 else (found[0] if found else None)


def refuse_unknown(function: Callable[..., object], unknown: Iterable[str]) -> NoReturn:
    """Raise UnknownSetting for keyword arguments that a function does not have, with a suggestion."""
    kinds = inspect.signature(function).parameters.values()
    known = [one.name for one in kinds if one.name != "self" and one.kind is not inspect.Parameter.VAR_KEYWORD]
    name = next(iter(unknown))
    found = suggest(name, known)
    hint = f"its arguments are {', '.join(known)}" if found is None else f"did you mean {found}?"
    raise UnknownSetting(f"{function.__qualname__}: unknown argument {name!r}", hint=hint)


def check_groups(options: AttrsInstance) -> None:
    """Check that each option group has an object of its class; raises InvalidSetting."""
    for member in attrs.fields(type(options)):
        kind = getattr(member.default, "factory", None)
        value = getattr(options, member.name)
        if kind is not None and not isinstance(value, kind):
            raise InvalidSetting(f"{member.name}={value!r} is not a {kind.__name__}")


def is_number(value: object, least: float = 0, most: float = math.inf) -> TypeGuard[float]:
    """Return whether a value is a number within bounds; booleans are no numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def is_whole(value: object, least: float = 0, most: float = math.inf) -> TypeGuard[int]:
    """Return whether a value is a whole number within bounds."""
    return isinstance(value, int) and is_number(value, least, most)


def check_number(
    name: str, value: object, least: int = 0, most: float = math.inf, error: type[InvalidInput] = InvalidSetting
) -> int:
    """Return a whole number within bounds; raises InvalidInput."""
    if is_whole(value, least, most):
        return value
    if most < math.inf:
        raise error(f"{name}={value!r} is not within {least}..{most}", hint="give a whole number")
    what = "a positive number" if least == 1 else "a number" if least == 0 else f"{least} or more"
    raise error(f"{name}={value!r} is not {what}", hint=f"give a whole number of {least} or more")


def check_counts(options: object, *names: str) -> None:
    """Check members that are whole numbers from 1; raises InvalidSetting."""
    for name in names:
        check_number(name, getattr(options, name), 1)


def check_time(name: str, value: object, *, zero: bool = True) -> None:
    """Check that a setting is a time in seconds (infinity allowed, 0 if ``zero``). Raises InvalidSetting."""
    if is_number(value) and (zero or value):
        return
    if isinstance(value, (str, bytes)):
        raise InvalidSetting(
            f"{name}={value!r} is text", hint="give a number of seconds; only a URL and the environment have text"
        )
    raise InvalidSetting(f"{name}={value!r} is not a {'' if zero else 'positive '}time in seconds")


def check_times(options: object, *names: str, zero: bool = True) -> None:
    """Check members that are times in seconds, see `check_time`; raises InvalidSetting."""
    for name in names:
        check_time(name, getattr(options, name), zero=zero)


def check_texts(name: str, value: object) -> None:
    """Check that a setting is a tuple of texts, not a text, whose letters would count. Raises InvalidSetting."""
    if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
        raise InvalidSetting(f"{name}={value!r} is not a tuple of texts", hint=f"{name}=('first', 'second')")


def is_delay(value: object) -> bool:
    """Return whether a value is a delay of a message in seconds, up to 30 years."""
    return is_number(value) and value < 1e9


@cache
def _kinds_of(options: type[AttrsInstance]) -> dict[str, tuple[Any, ...]]:
    """Return the members that `check_kinds` checks, with types or allowed words."""
    found = {}
    for member in attrs.fields(options):
        with suppress(NameError):  # a type that only type checkers import
            kind = get_type_hints(SimpleNamespace(__annotations__={"": member.type}), {"Literal": Literal})[""]
            parts = get_args(kind) or (kind,)
            if get_origin(kind) is Literal or {*parts} <= {bool, str, NoneType}:
                found[member.name] = parts
    return found


def check_kinds(options: AttrsInstance) -> None:
    """Check options that are booleans, text or words: wrong values would fail late, if at all. Raises InvalidSetting.

    Text values are not shown: some are secrets.
    """
    for name, kinds in _kinds_of(type(options)).items():
        value = getattr(options, name)
        if isinstance(kinds[0], str):
            if value not in kinds:
                raise InvalidSetting(f"{name}={value!r} is neither {' nor '.join(map(repr, kinds))}")
        elif not isinstance(value, kinds):
            if bool in kinds:
                check_flags(**{name: value})
            raise InvalidSetting(f"{name} is a {type(value).__name__}", hint="give text")


def check_flags(**flags: object) -> None:
    """Check arguments that are True or False: text such as ``"no"`` would be true. Raises InvalidSetting."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidSetting(f"{name}={value!r} is not True or False", hint=f"{name}=True or {name}=False")


def check_plain_function(name: str, function: object) -> None:
    """Check that a setting is a function, and no coroutine function. Raises InvalidSetting."""
    if not callable(function):
        raise InvalidSetting(f"{name}={function!r} is not a function", hint="give a function, and do not call it")
    if is_coroutine_function(function):
        raise InvalidSetting(
            f"{name}={function!r} is a coroutine function, which would not be awaited", hint="declare it with 'def'"
        )


def is_coroutine_function(function: object) -> bool:
    """Return whether a function or callable object is declared with ``async def``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
