"""``nsqext web``: serve the web page of a cluster until SIGTERM or Ctrl+C."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio

from nsqext.cli.command import examples
from nsqext.cli.connection import ServerAccess, Url, load_settings
from nsqext.cli.parameters import Option
from nsqext.errors import InvalidSetting
from nsqext.lookup.options import is_loopback
from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.web import WebOptions

logger: logging.Logger = logging.getLogger("nsqext.web")

WEB_PORT = 8171
AUTH_VARIABLE = "NSQEXT_WEB_BASIC_AUTH"

_USUAL = ("127.0.0.1:4161",)


@examples("nsqext web --lookupd 127.0.0.1:4161", "nsqext web --write --port 8000")
def run(
    lookupd: Annotated[
        str | None,
        Option(help="HOST:PORT of nsqlookupd's HTTP side, several with commas; or NSQEXT_LOOKUPD, or 127.0.0.1:4161."),
    ] = None,
    url: Url = None,
    context: Annotated[str | None, Option(help="A context of `nsqext config`, instead of --url.")] = None,
    write: Annotated[bool, Option("--write", help="Offer actions; by default the page is read-only.")] = False,
    host: Annotated[str, Option(help="Address to listen on; any except loopback needs a sign-in.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 for a free port.")] = WEB_PORT,
    http_host: Annotated[
        list[str] | None, Option(help="A host name under which browsers reach the page; repeat for each.")
    ] = None,
    basic_auth_file: Annotated[
        Path | None, Option(help=f"File with user:password; or the variable {AUTH_VARIABLE}.")
    ] = None,
    proxy_header: Annotated[
        str | None,
        Option(help="Header in which a reverse proxy names the signed-in user, such as X-Forwarded-User."),
    ] = None,
    interval: Annotated[float, Option(min=0.1, help="Seconds between two samples of the cluster.")] = 1.0,
    delay_store: Annotated[
        Path | None, Option(help="Store of `nsqext delay run` on this machine, whose messages are shown.")
    ] = None,
    app: Annotated[
        str | None,
        Option(help="MODULE:APP, or a file of `nsqext app schema`, whose page is shown."),
    ] = None,
) -> None:
    """Serve the web page of a cluster: topics, channels, consumers and nodes with live numbers.

    Example: nsqext web --lookupd 127.0.0.1:4161 --write
    """
    access = ServerAccess(lookupd, url=url, context=context)
    given = load_settings(access.chosen_url(), lookupd)
    servers = access.lookup() if given.lookupd or given.nsqd else _USUAL
    store = None
    if delay_store is not None:
        from nsqext.delays import DelayStore

        store = DelayStore(delay_store, create=False)
    document = None
    if app is not None:
        from nsqext.cli.apps import described

        document = described(app)
    options = web_options(
        host,
        basic_auth_file,
        write=write,
        http_hosts=tuple(http_host or ()),
        proxy_header=proxy_header,
        interval=interval,
        delay_store=store,
        app_document=document,
        settings=given.values,
    )
    anyio.run(_serve_until_signal, servers, options, Address(host, port))


def web_options(host: str, basic_auth_file: Path | None = None, **given: Any) -> WebOptions:
    """Return the page's options, with a password from the file or the environment."""
    try:
        from nsqext.web import WebOptions
    except ModuleNotFoundError as error:
        raise InvalidSetting(f"the page needs {error.name}", hint="pip install 'nsqext[web]'") from error
    auth = os.environ.get(AUTH_VARIABLE)
    if basic_auth_file is not None:
        try:
            auth = basic_auth_file.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise InvalidSetting(
                f"{basic_auth_file} is no text in UTF-8", hint="write user:password into it"
            ) from error
        if not auth:
            raise InvalidSetting(f"{basic_auth_file} is empty", hint="write user:password into it")
    if not (is_loopback(host) or auth or given.get("proxy_header")):
        raise InvalidSetting(
            f"{host} can be reached from other machines, and the page shows message bodies",
            hint=f"set {AUTH_VARIABLE} or give --basic-auth-file or --proxy-header",
        )
    return WebOptions(basic_auth=auth or None, **given)


async def _serve_until_signal(lookupd: str | Sequence[str], options: WebOptions, address: Address) -> None:
    from nsqext.client.signals import stop_on_signals
    from nsqext.http.uvicorn_server import listen
    from nsqext.web import WebPage
    from nsqext.web.app import serve

    page = WebPage(lookupd, options)
    with listen(address) as listener:
        bound = Address(address.host, listener.getsockname()[1])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_on_signals, tasks.cancel_scope.cancel, logger)
            await tasks.start(serve, page, listener)
            print(f"http://{bound}/ ({'write' if options.write else 'read only'})", flush=True)
