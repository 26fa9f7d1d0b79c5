"""Mistakes in the web page."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "a read-only page makes changes",
        "web/security.py",
        "        if not self._options.write:\n",
        "        if False:\n",
    ),
    Mistake(
        "a form without a token is accepted",
        "web/security.py",
        '        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token(user).encode()):\n',
        '        if token and not hmac.compare_digest(token.encode("utf-8", "replace"), self.token(user).encode()):\n',
    ),
    Mistake(
        "the token of another user is accepted",
        "web/security.py",
        'hmac.new(self._secret, user.encode("utf-8", "surrogateescape"), hashlib.sha256)',
        'hmac.new(self._secret, b"", hashlib.sha256)',
    ),
    Mistake(
        "two headers of the proxy are accepted",
        "web/security.py",
        'users[0] if len(users) == 1 else ""',
        'users[0] if users else ""',
    ),
    Mistake(
        "a request without a host is accepted",
        "web/security.py",
        '            "" if host else "the request has no Host header"\n',
        '            ""\n',
    ),
    Mistake(
        "static files have no headers of security",
        "web/security.py",
        '{**_HEADERS, "Cache-Control": "max-age=300"} if static else _HEADERS',
        '{"Cache-Control": "max-age=300"} if static else _HEADERS',
    ),
    Mistake(
        "the password may be empty",
        "web/security.py",
        "if not (user and colon and password):",
        "if not (user and colon):",
    ),
    Mistake(
        "the name of a signed-in user is that of the browser",
        "web/security.py",
        'user = user or given.partition(":")[0]',
        'user = given.partition(":")[0]',
    ),
)
