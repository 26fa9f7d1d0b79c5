"""The address of a database, without its secrets in errors and logs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from nsqext.errors import InvalidSetting
from nsqext.settings_text import redact_url

if TYPE_CHECKING:
    from nsqext.transactions.schema import Dialect

_HINT = "write postgresql://user:password@host/name, or sqlite:///path"
_URL = re.compile(r"(?P<kind>[A-Za-z0-9]+)(\+\w+)?:(?P<rest>.*)", re.DOTALL)
_PARTS = re.compile(r"[\s:/?#@&=,;%'\"]+")
_SHORTEST = 3  # characters of the shortest part of a secret that is hidden: shorter parts occur in the words of errors


class DatabaseAddress(NamedTuple):
    """Where a database is.

    Attributes:
        dialect: kind of the database.
        target: path of the file, or connection string of libpq.
    """

    dialect: Dialect
    target: str

    def shown(self, error: BaseException) -> str:
        """Return the text of an error without parts of the password."""
        text = str(error)
        if self.dialect == "sqlite":
            return text
        for part in sorted(_secrets(self.target), key=len, reverse=True):
            text = text.replace(part, "***")
        return text


def parse_address(database: str) -> DatabaseAddress:
    """Return the address of a database; URLs of SQLAlchemy are read too, such as ``sqlite+aiosqlite:///…``.

    Raises:
        InvalidSetting: it is of another kind, or cannot be read; the text does not contain the password.
    """
    if not isinstance(database, str):
        raise InvalidSetting(f"the address of the database is a {type(database).__name__}, not text", hint=_HINT)
    url = _URL.fullmatch(database.strip())
    kind = "" if url is None else url["kind"].lower()
    rest = "" if url is None else url["rest"]
    if kind == "sqlite":
        if not rest.startswith("///") or len(rest) == len("///"):
            raise InvalidSetting("the address of a SQLite database has no path", hint=_HINT)
        return DatabaseAddress("sqlite", rest.removeprefix("///"))
    if kind in ("postgresql", "postgres") and rest.startswith("//"):
        return DatabaseAddress("postgresql", _checked(f"postgresql:{rest}"))
    if "=" not in database or re.match(r"\s*[A-Za-z0-9+]+:", database):
        name = f"the scheme {kind!r}" if "://" in database and kind else "no scheme that is known"
        raise InvalidSetting(f"the address of the database has {name}", hint=_HINT)
    return DatabaseAddress("postgresql", _checked(database))


def _checked(target: str) -> str:
    """Return a connection string if libpq can read it; its own error would show the password."""
    shown = redact_url(target, ()) if "://" in target else "the text of words NAME=VALUE"
    userinfo = target.partition("://")[2].rpartition("@")[0]
    if re.search(r"[/?#@]|%(?![0-9A-Fa-f]{2})", userinfo):
        raise InvalidSetting(
            f"the address of the database cannot be read: {shown}",
            hint="percent-encode %, /, ?, # and @ in the password",
        )
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as error:
        raise InvalidSetting("PostgreSQL needs psycopg", hint='pip install "nsqext[transactions]"') from error
    try:
        conninfo_to_dict(target)
    except (ProgrammingError, UnicodeError, ValueError):
        raise InvalidSetting(f"libpq cannot read the address of the database: {shown}", hint=_HINT) from None
    return target


def _secrets(target: str) -> set[str]:
    """Return the password of an address, and parts of it that an error may contain."""
    found: set[str] = set()
    userinfo = target.partition("://")[2].rpartition("@")[0]
    values = [userinfo.partition(":")[2], *re.findall(r"password\s*=\s*('(?:[^'\\]|\\.)*'|[^\s&]+)", target)]
    for value in values:
        for text in (value.strip("'"), unquote(value.strip("'"))):
            found.update((text, *_PARTS.split(text)))
    return {part for part in found if len(part) >= _SHORTEST}
