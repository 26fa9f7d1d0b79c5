"""`WebPage`: the ASGI application that serves the pages and their updates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import orjson
from anyio.from_thread import start_blocking_portal
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from nsqext._version import __version__
from nsqext.admin import Admin
from nsqext.admin.options import admin_settings
from nsqext.client.producer.producer import Producer
from nsqext.client.settings import app_schema, producer_settings, settings_for
from nsqext.errors import InvalidInput, InvalidSetting, NsqError, TopicNotFound
from nsqext.http.api import Call, HttpFault, first_values
from nsqext.http.uvicorn_server import HttpServer, listen
from nsqext.protocol.headers import header_json
from nsqext.settings import unknown_setting
from nsqext.settings_text import redact_url
from nsqext.types import Address
from nsqext.web.actions import ACTIONS, Action, ActionForm, ActionTarget, path_of, topic_page
from nsqext.web.monitor import Monitor, Snapshot
from nsqext.web.pages import Page, Pages, age, count, key_ranges, moment, per_second, seconds_since, size, sparkline
from nsqext.web.security import Refused, Security, WebOptions

if TYPE_CHECKING:
    import socket

    from anyio.abc import TaskStatus

    from nsqext.broker import Cluster

_HERE = Path(__file__).parent
_MOST_STREAMS = 64
_MOST_WATCHES = 8
_UNREAD = 20.0  # seconds
_MOST_FORM = 4 * 1024 * 1024  # bytes; a message of 1 MiB triples when a form encodes it
_RETRY = "check that the cluster is up"
_RETRIED = 3  # seconds until an unreadable page is loaded again
_ADMIN_TIMEOUT = 15.0  # seconds

_Build = Callable[[Snapshot, Mapping[str, str], Mapping[str, str]], Awaitable[Page]]


class _EventStream(StreamingResponse):
    """An event stream that ends if the browser, which reconnects later, does not read it."""

    def __init__(self, events: AsyncIterator[bytes], ended: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._ended = ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()

    async def stream_response(self, send: Any) -> None:
        async def send_in_time(message: Any) -> None:
            with anyio.fail_after(_UNREAD):
                await send(message)

        with suppress(TimeoutError):
            await super().stream_response(send_in_time)


def _environment() -> Environment:
    found = Environment(
        autoescape=True,
        loader=FileSystemLoader(_HERE / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        shown.__name__: shown for shown in (age, count, header_json, moment, path_of, per_second, seconds_since, size)
    }
    found.globals |= {"sparkline": sparkline, "key_ranges": key_ranges, "version": __version__}
    found.globals["ui"] = found.get_template(
        "parts.html"
    ).module  # blocks are also rendered alone, where the template's imports have no effect
    return found


def _is_text(text: str) -> bool:
    """Return whether a text of a form had no bytes that are not UTF-8, which no page could show."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class WebPage:
    """The page of a cluster of either generation, as an ASGI application.

    `run` must run while requests are handled, in any event loop of anyio. The page is served at the root of a host:
    mounted below a path, it answers each request with status 500, because its links would lead elsewhere.

    Args:
        lookupd: ``host:port`` of nsqlookupd's HTTP side; a list, or text with commas.
        options: settings.
        cluster: an embedded cluster with these addresses; the page can kill, freeze and restart its nodes.

    Raises:
        InvalidSetting: no address, or an invalid address or setting.
    """

    def __init__(
        self, lookupd: str | Sequence[str], options: WebOptions | None = None, *, cluster: Cluster | None = None
    ) -> None:
        if options is not None and not isinstance(options, WebOptions):
            raise InvalidSetting(f"options={options!r} is not a WebOptions")
        self._options = options or WebOptions()
        known = {**app_schema().own, **admin_settings()}
        for name in self._options.settings:
            if name not in known:
                raise unknown_setting("settings of the page", name, known)
        self._lookupd = lookupd if isinstance(lookupd, str) else ", ".join(lookupd)
        self._shown = redact_url(self._lookupd)  # a URL may have a secret
        self._security = Security(self._options)
        settings = {**self._options.settings, "lookup_request_timeout": _ADMIN_TIMEOUT}
        self._monitor = Monitor(lookupd, self._options.interval, self._options.settings)
        self._admin = Admin(lookupd, **settings_for(admin_settings(), settings))
        self._producer = Producer(lookupd, **settings_for(producer_settings(), self._options.settings))
        self._cluster = cluster
        self._environment = _environment()
        self._streams = 0
        self._watches = 0
        self._pages = pages = Pages(self._monitor, self._admin, self._options, cluster)
        # Starlette declares handlers of any exception
        pages_of_errors: dict[Any, Any] = {
            HTTPException: self._unknown_page,
            NsqError: self._nsq_error_page,
            Refused: self._refused_page,
        }
        self._routes = Starlette(
            routes=[
                self._route("/", pages.overview),
                self._route("/topics/{topic}", pages.topic),
                self._route("/topics/{topic}/messages", pages.messages, live=False),
                self._route("/topics/{topic}/channels/{channel}", pages.channel),
                self._route("/nodes/{node}", pages.node),
                *([self._route("/delayed", pages.delayed)] if self._options.delay_store else []),
                *([self._route("/app", pages.app)] if self._options.app_document is not None else []),
                *([Route("/app/asyncapi.json", self._document)] if self._options.app_document is not None else []),
                Route("/topics/{topic}/messages", self._watch, methods=["POST"]),
                Route("/actions/{name}", self._act, methods=["POST"]),
                Mount("/static", StaticFiles(directory=_HERE / "static")),
            ],
            exception_handlers=pages_of_errors,
        )

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Sample the cluster until cancelled, then close the connections."""
        async with self._admin, self._producer, anyio.create_task_group() as tasks:
            tasks.start_soon(self._monitor.run)
            task_status.started()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        send = self._security.with_headers(send, static=scope["path"].startswith("/static/"))
        if root := scope.get("root_path"):
            text = (
                f"the page is mounted at {root}, and its links need the root of a host: serve it alone, as nsqext web\n"
            )
            await Response(text, 500, media_type="text/plain")(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            scope["user_name"] = self._security.check(scope["method"], Headers(scope=scope))
        except Refused as refused:
            response = await self._refused_page(request, refused)
            await response(scope, receive, send)
        else:
            await self._routes(scope, receive, send)

    # Pages

    def _route(self, path: str, build: _Build, *, live: bool = True) -> Route:
        async def endpoint(request: Request) -> Response:
            if live and "text/event-stream" in request.headers.get("accept", ""):
                return self._events(request, build)
            snapshot = await self._monitor.current(newest="done" in request.query_params)
            page = await build(snapshot, request.path_params, request.query_params)
            return Response(self._render(request, snapshot, page, live=live), media_type="text/html")

        return Route(path, endpoint, methods=["GET"])

    def _values(self, request: Request, snapshot: Snapshot | None) -> dict[str, Any]:
        user = request.scope.get("user_name", "")
        return {
            "snapshot": snapshot,
            "lookupd": self._shown,
            "write": self._options.write,
            "user": user,
            "token": self._security.token(user) if self._options.write else "",
            "embedded": self._cluster is not None,
            "delayed": self._options.delay_store is not None,
            "described": self._options.app_document is not None,
            "path": request.url.path,
            "done": ACTIONS[done].done if (done := request.query_params.get("done")) in ACTIONS else "",
        }

    def _render(self, request: Request, snapshot: Snapshot, page: Page, *, live: bool) -> str:
        template = self._environment.get_template(page.template)
        return template.render(self._values(request, snapshot), title=page.title, live=live, **page.values)

    async def _document(self, request: Request) -> Response:
        return Response(orjson.dumps(self._options.app_document), media_type="application/json")

    def _events(self, request: Request, build: _Build) -> Response:
        if self._streams >= _MOST_STREAMS:
            return Response("too many pages are open\n", 503, media_type="text/plain")
        self._streams += 1  # counted early: many requests may be handled before the stream starts
        return _EventStream(self._stream(request, build), self._ended)

    def _ended(self) -> None:
        self._streams -= 1

    async def _stream(self, request: Request, build: _Build) -> AsyncIterator[bytes]:
        sent = ""
        yield b"retry: 2000\n\n"
        while True:
            try:
                snapshot = await self._monitor.following()
                page = await build(snapshot, request.path_params, request.query_params)
            except NsqError as error:
                yield b"event: gone\ndata: " + orjson.dumps(str(error)) + b"\n\n"
                continue
            template = self._environment.get_template(page.template)
            context = template.new_context({**self._values(request, snapshot), **page.values})
            text = "".join(template.blocks["live"](context))
            if text != sent:
                sent = text
                yield b"data: " + orjson.dumps(text) + b"\n\n"
            else:
                yield b": unchanged\n\n"

    # Actions

    async def _form(self, request: Request) -> dict[str, str]:
        try:
            fields = first_values((await Call(request).body(_MOST_FORM)).decode("latin-1"))
        except HttpFault as fault:
            raise Refused(fault.status, "the form is too large", "send less at once") from fault
        for name, text in fields.items():
            if not _is_text(name if name == "body" else name + text):  # a body may be any bytes
                raise Refused(400, f"the field {name!r} is no text", "write it in UTF-8")
        self._security.check_change(request.scope["user_name"], fields.pop("token", ""))
        return fields

    @contextmanager
    def _watching(self) -> Iterator[None]:
        if self._watches >= _MOST_WATCHES:
            raise Refused(503, "too many pages wait for messages", "try again in five seconds")
        self._watches += 1
        try:
            yield
        finally:
            self._watches -= 1

    async def _watch(self, request: Request) -> Response:
        await self._form(request)
        snapshot = await self._monitor.current()
        with self._watching():
            page = await self._pages.next_messages(snapshot, request.path_params, self._lookupd)
        return Response(self._render(request, snapshot, page, live=False), media_type="text/html")

    async def _act(self, request: Request) -> Response:
        """Perform a form's action, or ask if it cannot be undone."""
        name = request.path_params["name"]
        fields = await self._form(request)
        action = ACTIONS.get(name)
        if action is None:
            raise Refused(404, f"the action {name} does not exist", "use the buttons of the page")
        if action.question and fields.pop("sure", "") != "yes":
            return self._question(request, name, action, fields)
        page = await action.perform(ActionTarget(self._admin, self._producer, self._cluster), ActionForm(fields))
        return Response(status_code=303, headers={"Location": f"{page}?done={name}"})

    def _question(self, request: Request, name: str, action: Action, fields: Mapping[str, str]) -> Response:
        topic = fields.get("topic", "")
        values = {
            "name": name,
            "action": action,
            "fields": {field: value for field, value in fields.items() if value},
            "back": topic_page(topic) if topic else "/",
        }
        template = self._environment.get_template("confirm.html")
        html = template.render(self._values(request, None), title=action.button, live=False, **values)
        return Response(html, media_type="text/html")

    # Errors

    async def _refused_page(self, request: Request, error: Refused) -> Response:
        response = self._error_page(request, error.status, error.text, error.hint)
        if error.status == 401:
            response.headers["WWW-Authenticate"] = 'Basic realm="nsqext", charset="UTF-8"'
        return response

    async def _nsq_error_page(self, request: Request, error: NsqError) -> Response:
        status = 404 if isinstance(error, TopicNotFound) else 400 if isinstance(error, InvalidInput) else 503
        where = {"topic": error.topic, "partition": error.partition, "node": error.node}
        hint = error.hint or (_RETRY if status == 503 else "")
        again = _RETRIED if status == 503 and request.method == "GET" else 0
        return self._error_page(request, status, error.message, hint, where, type(error).__name__, again)

    def _error_page(
        self,
        request: Request,
        status: int,
        text: str,
        hint: str,
        where: Mapping[str, object] | None = None,
        kind: str = "",
        again: int = 0,
    ) -> Response:
        known = {name: value for name, value in (where or {}).items() if value is not None}
        values = self._values(request, None) | {"status": status, "text": text, "hint": hint, "where": known}
        html = self._environment.get_template("error.html").render(
            values, title=f"Error {status}", live=False, kind=kind, again=again
        )
        return Response(html, status, media_type="text/html")

    async def _unknown_page(self, request: Request, error: HTTPException) -> Response:
        status = error.status_code
        text = "the page does not exist" if status == 404 else "the address does not allow this method"
        return self._error_page(request, status, text, "the overview has links to all pages")


async def serve(
    page: WebPage, listener: socket.socket, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serve on asyncio until cancelled, then close all connections and the listening socket, which it owns."""
    async with anyio.create_task_group() as tasks:
        await tasks.start(page.run)
        await tasks.start(HttpServer(page).serve, listener)
        task_status.started()


@contextmanager
def served(page: WebPage, address: Address) -> Iterator[Address]:
    """Serve in a thread during the block; yield the address with its port."""
    listener = listen(address)
    bound = Address(address.host, listener.getsockname()[1])
    with listener, start_blocking_portal("asyncio") as portal:
        serving, _ = portal.start_task(serve, page, listener)
        try:
            yield bound
        finally:
            serving.cancel()
