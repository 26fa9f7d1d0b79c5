"""HTTP of both generations of NSQ: answer forms, their errors, and bounded request bodies.

A handler is a function, plain or async, of a `Call` that returns the real handler's result, or raises `HttpFault`. The
route's `Form` decides what reaches the wire:

- ``Form.NEGOTIATED``: ``{"status_code", "status_txt", "data"}``, every error as HTTP 500; the second form where the
  client sends ``Accept: application/vnd.nsq; version=1.0``.
- ``Form.V1``: the bare value, an empty body for None, errors as ``{"message": "…"}`` with their status, and unescaped:
  some are no JSON (captured: topic_create_errors).
- ``Form.TEXT``: the bare text.

Every form sends a string or bytes unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cached_property
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

from attrs import define
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from nsqext.golang.http_heads import BROKEN_BODY
from nsqext.golang.http_redirects import redirect
from nsqext.golang.texts import dump
from nsqext.protocol.names import is_valid_channel, is_valid_topic
from nsqext.protocol.server.go_format import parse_int

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_MAX_BODY = 10 * 1024 * 1024  # of a form, as in the real servers
_JSON = "application/json; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_V1 = {"X-NSQ-Content-Type": "nsq; version=1.0"}
_ACCEPT_V1 = "application/vnd.nsq; version=1.0"
_BAD_QUERY = re.compile(r"%(?![0-9a-fA-F]{2})|;")


class Form(Enum):
    """How a route answers."""

    NEGOTIATED = "negotiated"
    V1 = "v1"
    TEXT = "text"


class HttpFault(Exception):
    """An error answer.

    Attributes:
        status: HTTP status of the second form; the first form always has 500.
        text: the error's text.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text


class HttpPanic(Exception):
    """A request that crashes the real server's handler; the second form answers INTERNAL_ERROR."""


@define(slots=False)
class Call:
    """A request."""

    request: Request

    @cached_property
    def args(self) -> Mapping[str, str]:
        """The arguments of the query, of each name the first; raises `HttpFault` for a malformed query."""
        query = self.request.scope["query_string"].decode("latin-1")
        if _BAD_QUERY.search(query):
            raise HttpFault(400, "INVALID_REQUEST")
        return first_values(query)

    @cached_property
    def readable_args(self) -> Mapping[str, str]:
        """`args` without malformed pairs, which some real handlers ignore."""
        query = self.request.scope["query_string"].decode("latin-1")
        pairs = "&".join(pair for pair in query.split("&") if not _BAD_QUERY.search(pair))
        return first_values(pairs)

    def arg(self, name: str, missing: str | None = None) -> str:
        """Return an argument, empty if not given.

        Args:
            missing: text of the fault (status 400) of an empty argument.
        """
        value = self.args.get(name, "")
        if not value and missing is not None:
            raise HttpFault(400, missing)
        return value

    def given(self, name: str, missing: str) -> str:
        """Return an argument that may be empty, for the original servers; see `arg`."""
        if name not in self.args:
            raise HttpFault(400, missing)
        return self.args[name]

    def number(
        self, name: str, fault: str = "", *, missing: str | None = None, default: str = "", function: str = "Atoi"
    ) -> int:
        """Return an argument as a signed 64-bit number; ``default`` if it is empty.

        Args:
            fault: text of the fault (status 400) for anything else; by default Go's text.
            missing: see `arg`.
        """
        try:
            return parse_int(self.arg(name, missing) or default, function)
        except ValueError as error:
            raise HttpFault(400, fault or str(error)) from None

    @property
    def headers(self) -> Mapping[str, str]:
        return self.request.headers

    @property
    def path(self) -> Mapping[str, str]:
        return self.request.path_params

    async def body(self, limit: int = _MAX_BODY, too_big: str = "BODY_TOO_BIG", *, partial: bool = False) -> bytes:
        """Return the body; keep at most ``limit`` bytes and a chunk in memory.

        Args:
            too_big: text of the fault (status 413) of a longer body.
            partial: return the received part of a body that ended early; else that is a fault (status 500).
        """
        announced = self.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise HttpFault(413, too_big)
        chunks: list[bytes] = []
        size = 0
        async for chunk in self.request.stream():
            size += len(chunk)
            if size > limit:
                raise HttpFault(413, too_big)
            chunks.append(chunk)
        if BROKEN_BODY in self.request.scope and not partial:
            raise HttpFault(500, "INTERNAL_ERROR")
        return b"".join(chunks)


def valid_topic(name: str, fault: str = "INVALID_ARG_TOPIC") -> str:
    """Return a topic's name; an invalid name is a fault (status 400)."""
    if not is_valid_topic(name):
        raise HttpFault(400, fault)
    return name


def valid_channel(name: str) -> str:
    """Return a channel's name; an invalid name is a fault (status 400)."""
    if not is_valid_channel(name):
        raise HttpFault(400, "INVALID_ARG_CHANNEL")
    return name


def first_values(query: str) -> dict[str, str]:
    """Return the values of a query or form, of each name the first."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True, errors="surrogateescape"):
        found.setdefault(name, value)
    return found


Handler = Callable[[Call], Any]
"""Takes a `Call`; returns the result, an awaitable of it, or a whole Starlette response."""


def _raw(value: str | bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(value, media_type=_TEXT if value else None, headers=dict(headers or {}))


def _answer_v1(status: int, value: object) -> Response:
    if status != 200:
        body = b'{"message":"' + str(value).encode("utf-8", "surrogateescape") + b'"}'
        return Response(body, status, media_type=_JSON, headers=_V1)
    if value is None:
        return Response(b"", headers=_V1)
    if isinstance(value, (str, bytes)):
        return _raw(value, _V1)
    return Response(dump(value), media_type=_JSON, headers=_V1)


def null() -> Response:
    """Return the second form of a null; None stands for no value."""
    return Response(b"null", media_type=_JSON, headers=_V1)


def _answer_wrapped(status: int, text: str, value: object) -> Response:
    if isinstance(value, (str, bytes)):
        return _raw(value)
    body = dump({"status_code": status, "status_txt": text, "data": value})
    return Response(body, status, media_type=_JSON)


def _answer(form: Form, request: Request, value: object, fault: HttpFault | None) -> Response:
    if form is Form.TEXT:
        return Response(str(value) if fault is None else fault.text, fault.status if fault else 200, media_type=_TEXT)
    if form is Form.V1 or request.headers.get("accept") == _ACCEPT_V1:
        return _answer_v1(fault.status, fault.text) if fault else _answer_v1(200, value)
    return _answer_wrapped(500, fault.text, None) if fault else _answer_wrapped(200, "OK", value)


def route(method: str, path: str, handler: Handler, form: Form = Form.V1) -> Route:
    """Return a route."""

    async def endpoint(request: Request) -> Response:
        value: Any = None
        fault: HttpFault | None = None
        try:
            value = handler(Call(request))
            if isawaitable(value):
                value = await value
        except HttpFault as error:
            fault = error
        except HttpPanic:
            return _answer_v1(500, "INTERNAL_ERROR")
        except ClientDisconnect:
            return Response()  # not sent: the client has closed its connection
        return value if isinstance(value, Response) else _answer(form, request, value, fault)

    made = Route(path, endpoint, methods=[method])
    made.methods = {method}  # Starlette adds HEAD to GET, unlike the real servers
    return made


def application(routes: Iterable[Route], *, original: bool = False) -> Starlette:
    """Return a server's application; unknown paths and wrong methods are answered as captured (wrong_routes).

    Args:
        original: puts OPTIONS among the other methods in ``Allow``, as the original generation, not behind them.
    """
    table = list(routes)

    async def refuse(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if request.method == "OPTIONS" and request.scope["path"] == "*":
            return Response()  # OPTIONS of the whole server
        if status == 404:
            return redirect(table, request) or _answer_v1(404, "NOT_FOUND")
        if status != 405:
            return _answer_v1(500, "INTERNAL_ERROR")
        fitting = [known for known in table if known.path_regex.match(request.scope["path"])]
        methods = sorted({method for known in fitting for method in known.methods or ()})
        allowed = sorted([*methods, "OPTIONS"]) if original else [*methods, "OPTIONS"]
        answer = Response() if request.method == "OPTIONS" else _answer_v1(405, "METHOD_NOT_ALLOWED")
        answer.headers["Allow"] = ", ".join(allowed)
        return answer

    app = Starlette(routes=table, exception_handlers={404: refuse, 405: refuse, Exception: refuse})
    app.router.redirect_slashes = False
    return app


def at_first_request(make: Callable[[], Starlette]) -> ASGIApp:
    """Return an application that is made at its first request: most nodes of a test get none."""
    made: list[Starlette] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if not made:
            made.append(make())
        await made[0](scope, receive, send)

    return app


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABEL_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Metric(NamedTuple):
    name: str
    kind: str  #: ``gauge`` or ``counter``
    text: str  #: what it counts, in a line
    samples: Sequence[tuple[Mapping[str, str], float]]  #: labels and value


def render_metrics(metrics: Iterable[Metric]) -> str:
    """Return metrics in Prometheus' text format, without metrics that have no samples."""
    lines: list[str] = []
    for metric in metrics:
        if metric.samples:
            lines += [f"# HELP {metric.name} {metric.text}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value in metric.samples:
            inner = ",".join(f'{name}="{text.translate(_LABEL_ESCAPES)}"' for name, text in labels.items())
            lines.append(f"{metric.name}{{{inner}}} {value}" if inner else f"{metric.name} {value}")
    return "\n".join([*lines, ""])
