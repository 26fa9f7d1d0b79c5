"""Checks of constructor arguments: unknown keywords, and options of the wrong class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import attrs

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from attrs import AttrsInstance

__all__ = ("options_of", "suggest", "unknown_arguments")

Options = TypeVar("Options")


def suggest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to an unknown one; None where no name is similar."""
    from difflib import get_close_matches

    names = list(known)
    wanted = name.lower().replace("-", "_")
    # the member without its group counts as well: tls for connection_tls
    ends = [one for one in names if one.endswith(f"_{wanted}")]
    found = get_close_matches(wanted, names, 1, 0.6)
    return ends[0] if len(ends) == 1 else (found[0] if found else None)


def unknown_arguments(
    owner: str, unknown: Iterable[str], arguments: Iterable[str], options: type[AttrsInstance]
) -> TypeError:
    """Return the error for unknown keyword arguments of a constructor, which suggests the right ones.

    Args:
        owner: name of the class.
        unknown: the unknown arguments.
        arguments: arguments that the constructor has.
        options: the class of its ``options``.
    """
    name = next(iter(unknown))
    members = [member.name for member in attrs.fields(options)]
    known = [*arguments, *members]
    found = name if name in members else suggest(name, known)
    if found is None:
        hint = f"it has {', '.join(arguments)}; everything else is in options={options.__name__}(...)"
    elif found in members and found not in arguments:
        hint = f"did you mean options={options.__name__}({found}=...)?"
    else:
        hint = f"did you mean {found}=?"
    return TypeError(f"{owner}() has no argument {name!r}: {hint}")


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
