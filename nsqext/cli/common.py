"""What the client commands share: where the servers are, and how results are shown."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

import anyio
import orjson
import typer

from nsqext import LookupOptions, NsqError
from nsqext.client.from_url import load_producer
from nsqext.client.tasks import first_error
from nsqext.errors import InvalidSetting
from nsqext.lookup.client import LookupClient

__all__ = ("Lookupd", "Nsqd", "Url", "addresses", "body_fields", "lookup_addresses", "lookup_client", "perform", "show")

Lookupd = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of nsqlookupd's HTTP side, several with commas; or NSQEXT_LOOKUPD."),
]
Nsqd = Annotated[
    str | None, typer.Option(help="HOST:PORT of nsqd, to do without lookup; several with commas; or NSQEXT_NSQD.")
]
Url = Annotated[
    str | None, typer.Option(help="nsq://HOST:PORT,…?SETTING=VALUE&… with any setting of the client; or NSQEXT_URL.")
]

_PATIENT = LookupOptions(request_timeout=15.0)  # the real lookup service asks the nodes before it answers a change


def addresses(url: str | None, lookupd: str | None, nsqd: str | None) -> dict[str, Any]:
    """Return what was given besides the URL, as keywords of `from_url`.

    Raises:
        InvalidSetting: nobody says where the servers are.
    """
    given: dict[str, Any] = {name: value for name, value in (("lookupd", lookupd), ("nsqd", nsqd)) if value}
    found = load_producer(url, given)
    if not found.lookupd and not found.nsqd:
        raise InvalidSetting(
            "nobody says where the servers are", hint="give --lookupd, --nsqd or --url, or set NSQEXT_LOOKUPD"
        )
    return given


def lookup_addresses(url: str | None, lookupd: str | None, usual: Sequence[str] = ()) -> Sequence[str]:
    """Return the addresses of the lookup service.

    Args:
        url: what was given.
        lookupd: what was given besides.
        usual: where it is if nobody says so.

    Raises:
        InvalidSetting: nobody says where it is.
    """
    found: Sequence[str] = load_producer(url, {"lookupd": lookupd} if lookupd else {}).lookupd or usual
    if not found:
        raise InvalidSetting("nobody says where lookup is", hint="give --lookupd or --url, or set NSQEXT_LOOKUPD")
    return found


def lookup_client(url: str | None, lookupd: str | None) -> LookupClient:
    """Return a client of the lookup service.

    Raises:
        InvalidSetting: nobody says where it is.
    """
    return LookupClient(lookup_addresses(url, lookupd), _PATIENT)


def show(record: Mapping[str, Any], text: str) -> None:
    """Print a result: text for people at a terminal, a line of JSON for everything else."""
    if sys.stdout.isatty():
        print(text, flush=True)
    else:
        print(orjson.dumps(record, default=str).decode(), flush=True)


def body_fields(body: bytes) -> dict[str, str]:
    """Return a body for JSON: ``body`` where it is text, ``body_base64`` otherwise."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def perform(command: Callable[[], Awaitable[None]]) -> None:
    """Run a command; of several errors at the same time the first one stands for all.

    A reader that has closed the pipe ends it quietly.
    """
    try:
        anyio.run(command)
    except BrokenPipeError:
        _leave_the_pipe()
    except BaseExceptionGroup as group:
        matching, rest = group.split((NsqError, BrokenPipeError))
        if matching is None or rest is not None:
            raise
        first = first_error(matching)
        if isinstance(first, BrokenPipeError):
            _leave_the_pipe()
            return
        raise first from None


def _leave_the_pipe() -> None:
    # Python flushes standard output at its end, and would complain
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
