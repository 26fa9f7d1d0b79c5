"""Access control: host names, origins, sign-in, form tokens, and headers of responses."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from nsqext.arguments import check_kinds, check_texts, is_number
from nsqext.errors import InvalidSetting
from nsqext.http.uvicorn_server import HttpGuard

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from nsqext.delays import DelayStore

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # not no-referrer: browsers would send "Origin: null" with forms, which is refused as cross-site
    "Referrer-Policy": "same-origin",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]


@frozen
class WebOptions:
    """Settings of the page."""

    write: bool = False  #: offer actions; otherwise the page is read-only
    interval: float = 1.0  #: seconds between samples
    #: host names of the page, besides addresses, ``localhost`` and the machine's name
    http_hosts: tuple[str, ...] = ()
    #: ``user:password`` for HTTP basic authentication; never shown
    basic_auth: str | None = field(default=None, repr=False)
    #: header in which a reverse proxy names the signed-in user; requests without it are refused. Only safe if no
    #: request can bypass the proxy.
    proxy_header: str | None = None
    delay_store: DelayStore | None = None  #: store of a relay, to show its waiting messages
    #: document of `nsqext.app.asyncapi_document`, to show what an app receives and sends
    app_document: Mapping[str, Any] | None = field(default=None, repr=False)
    #: settings of connections and the lookup client, by name
    settings: Mapping[str, Any] = field(factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        check_kinds(self)
        check_texts("http_hosts", self.http_hosts)
        if not is_number(self.interval, 0.1, 3600):
            raise InvalidSetting(f"interval={self.interval!r} is not within 0.1..3600 seconds")
        if self.basic_auth is not None:
            user, colon, password = self.basic_auth.partition(":")
            if not (user and colon and password):
                raise InvalidSetting("basic_auth is not of the form user:password")
        if self.proxy_header is not None and not self.proxy_header.replace("-", "").isalnum():
            raise InvalidSetting(f"proxy_header={self.proxy_header!r} is not the name of a header")


class Refused(Exception):
    """A refused request."""

    def __init__(self, status: int, text: str, hint: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text
        self.hint = hint


class Security:
    """Checks every request; adds headers to every response."""

    def __init__(self, options: WebOptions) -> None:
        self._options = options
        self._guard = HttpGuard(options.http_hosts)
        self._secret = secrets.token_bytes(32)

    def check(self, method: str, headers: Headers) -> str:
        """Return the signed-in user's name, empty without sign-in."""
        host = headers.get("host", "")
        refusal = self._guard.refusal(method, host, headers.get("origin", ""), headers.get("sec-fetch-site", "")) or (
            "" if host else "the request has no Host header"
        )
        if refusal:
            raise Refused(403, refusal, "open the page by its own address, and use its own forms")
        return self._user(headers)

    def _user(self, headers: Headers) -> str:
        user = ""
        if self._options.proxy_header is not None:
            users = headers.getlist(self._options.proxy_header)
            user = users[0] if len(users) == 1 else ""  # of two headers, the browser may have sent one
            if not user:
                raise Refused(
                    403,
                    f"the request must have exactly one header {self._options.proxy_header}",
                    "open the page through the reverse proxy that signs users in",
                )
        if self._options.basic_auth is not None:
            given = _credentials(headers.get("authorization", ""))
            if not hmac.compare_digest(given.encode(), self._options.basic_auth.encode()):
                raise Refused(
                    401, "wrong user name or password", "use the name and password that the page was started with"
                )
            user = user or given.partition(":")[0]
        return user

    def token(self, user: str) -> str:
        return hmac.new(self._secret, user.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()

    def check_change(self, user: str, token: str) -> None:
        if not self._options.write:
            raise Refused(403, "this page is read-only", "start it with --write to make changes")
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token(user).encode()):
            raise Refused(403, "the form has no valid token", "reload its page and send it again")

    def with_headers(self, send: _Send, *, static: bool = False) -> _Send:
        """Return a ``send`` that adds the headers.

        Args:
            static: the response is a package file and may be cached.
        """

        async def sending(message: _Message) -> None:
            if message["type"] == "http.response.start":
                added = {**_HEADERS, "Cache-Control": "max-age=300"} if static else _HEADERS
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name.lower().encode(), value.encode()) for name, value in added.items()),
                ]
            await send(message)

        return sending


def _credentials(header: str) -> str:
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(encoded.strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
