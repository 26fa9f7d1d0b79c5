"""Remove secrets from text that is logged or shown."""

from __future__ import annotations

import re

__all__ = ("is_secret_name", "redact_url")

_SECRET_WORDS = ("secret", "password", "token", "credential")
_PARAMETER = re.compile(r"([?&;])([^=&;#\s]*)=([^&;#\s]*)")
_MASK = "***"


def is_secret_name(name: str) -> bool:
    """Return whether a setting or parameter of this name holds a secret, also if it is misspelt."""
    return any(word in name.lower() for word in _SECRET_WORDS)


def redact_url(url: str) -> str:
    """Return a URL or address without user, password and secret parameters.

    Everything before the last ``@`` is removed, because a password may contain any character.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    if "@" in rest:
        rest = f"{_MASK}@{rest.rpartition('@')[2]}"

    def masked(match: re.Match[str]) -> str:
        value = _MASK if is_secret_name(match[2]) else match[3]
        return f"{match[1]}{match[2]}={value}"

    return f"{scheme}{separator}{_PARAMETER.sub(masked, rest)}"
