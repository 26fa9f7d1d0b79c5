"""Add members to a header of any client, and remove them again, without changing other bytes."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

import orjson

from nsqext.errors import InvalidHeader
from nsqext.protocol.extjson import UnreadableHeader, members_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsqext.protocol.extjson import Member

__all__ = ("add_members", "without_members")


def add_members(header: bytes, members: Mapping[str, str], *, original: str) -> bytes:
    """Return a header with members of text behind its own.

    Args:
        header: bytes that a server stored, or empty.
        members: names and texts; `without_members` finds them by the first name.
        original: name of a further member with the Base64 of a header without members (empty, ``{}`` or ``[1]``).
    """
    try:
        own = members_of(header) if header else []
    except UnreadableHeader:
        own = []
    if not own:
        return orjson.dumps({**members, original: b64encode(header).decode()})
    last = own[-1].stop
    return b"%b,%b%b" % (header[:last], orjson.dumps(members)[1:-1], header[last:])


def without_members(header: bytes, first: str, prefix: str, *, original: str) -> bytes:
    """Return a header without the members that `add_members` added last.

    Args:
        header: bytes that a server stored.
        first: name of the first added member.
        prefix: beginning of all their names.
        original: as for `add_members`.

    Raises:
        InvalidHeader: the original header is not Base64.
    """
    try:
        members = members_of(header) if header else []
    except UnreadableHeader:
        return header
    added = [index for index, member in enumerate(members) if member.name.startswith(prefix)]
    begin = max((index for index in added if members[index].name == first), default=0)
    added = [index for index in added if index >= begin]
    for index in added:
        if members[index].name == original:
            return _decoded(members[index])
    if len(added) == len(members):
        return b""
    # from the last member on: the places of earlier members stay
    for index in reversed(added):
        before, after = index > 0, index + 1 < len(members)
        if before:
            header = header[: members[index - 1].stop] + header[members[index].stop :]
        elif after:
            header = header[: members[index].start] + header[members[index + 1].start :]
    return header


def _decoded(member: Member) -> bytes:
    try:
        return b64decode(member.value.strip(b'"'), validate=True)
    except ValueError as error:
        raise InvalidHeader(f"the header {member.name} is not Base64") from error
