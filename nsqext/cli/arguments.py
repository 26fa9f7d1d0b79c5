"""Arguments and options that several commands accept, and how times, positions and pairs are parsed."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from nsqext import Position

_MESSAGE_ID = re.compile("[0-9A-Fa-f]{32}")

Topic = Annotated[str, typer.Argument(help="The topic.")]
Channel = Annotated[str, typer.Argument(help="The channel.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
UntilEnd = Annotated[bool, typer.Option("--until-end", help="Exit when the channel has no messages left.")]


def parse_time(text: str) -> int:
    """Return a time in nanoseconds since 1970, from ISO form, seconds since 1970, or a duration ago such as ``90m``."""
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


def parse_message_id(text: str) -> bytes | int:
    """Return a message id: 16 bytes from 32 hexadecimal digits, or a number: its own or its trace id."""
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
        pairs[name] = value
    return pairs


def parse_position(text: str) -> Position:
    """Parse a position, or a time in ISO form; a time without zone is local."""
    from nsqext import Position
    from nsqext.client.consumer.position import read_position

    if text[:1].isdecimal():
        try:
            return Position.at(datetime.fromisoformat(text).astimezone())
        except ValueError:
            pass
    try:
        return read_position(text)
    except ValueError as error:
        raise InvalidSetting(f"the position {text!r} cannot be parsed: {error}, or a time in ISO form") from None
