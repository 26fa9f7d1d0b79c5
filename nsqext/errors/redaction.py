"""Remove secrets from text that is logged or shown."""

from __future__ import annotations

import re
from collections.abc import Container
from urllib.parse import unquote_plus

__all__ = ("is_secret_name", "redact_url")

_SECRET_WORDS = ("secret", "password", "token", "credential")
_PARAMETER = re.compile(r"([?&;])([^=&;#\s]*)=([^&;#\s]*)")
_MASK = "***"


def is_secret_name(name: str) -> bool:
    """Return whether a setting or parameter of this name holds a secret, also if it is misspelt."""
    return any(word in name.lower() for word in _SECRET_WORDS)


def redact_url(url: str, known: Container[str] | None = None) -> str:
    """Return a URL or address without user, password and secret parameters.

    Everything before the last ``@`` is removed, because a password may contain any character. Only the values of
    ``known`` parameters are shown, because a misspelt name may hold a secret; None shows every parameter whose name is
    not that of a secret.
    """

    def masked(match: re.Match[str]) -> str:
        name = unquote_plus(match[2])
        hidden = is_secret_name(name) or (known is not None and name not in known)
        return f"{match[1]}{match[2]}={_MASK if hidden else match[3]}"

    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    # parameters first: the @ in a secret parameter must not show what follows it
    rest = _PARAMETER.sub(masked, rest)
    if "@" in rest:
        rest = f"{_MASK}@{rest.rpartition('@')[2]}"
    elif rest.startswith(":"):
        rest = _MASK  # a secret without a host
    return f"{scheme}{separator}{rest}"
