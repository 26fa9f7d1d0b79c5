"""AUTH, and the check of the commands that need it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from nsqext.broker.nsqd.auth_server import query_auth
from nsqext.protocol.extjson import quote
from nsqext.protocol.server.request_error import RequestError
from nsqext.protocol.tls_layer import TlsLayer

if TYPE_CHECKING:
    from nsqext.broker.nsqd.auth_server import Authorizations
    from nsqext.broker.nsqd.node import ConnectedClient
    from nsqext.protocol.server.command_parser import Command


def auth(client: ConnectedClient, command: Command) -> Awaitable[None]:
    """Run AUTH; it is refused without an auth server, and to a client that has authorizations already."""
    if client.authorizations is not None:
        raise RequestError("E_INVALID", f"AUTH {_cased(client, 'Already')} set")
    if not client.node.limits.auth:
        raise RequestError("E_AUTH_DISABLED", f"AUTH {_cased(client, 'Disabled')}")
    return _log_in(client, command.body or b"")


def _cased(client: ConnectedClient, word: str) -> str:
    return word.lower() if client.node.options.original else word


async def _log_in(client: ConnectedClient, secret: bytes) -> None:
    found = await _query(client, secret)
    if found is None:
        client.refuse(RequestError("E_AUTH_FAILED", "AUTH failed"))
    elif not found.grants:
        client.refuse(RequestError("E_UNAUTHORIZED", f"AUTH {_cased(client, 'No')} authorizations found"))
    else:
        client.authorizations = found
        client.answer(found.reply())


async def _query(client: ConnectedClient, secret: bytes) -> Authorizations | None:
    tls = client.has_layer(TlsLayer)
    return await query_auth(client.node.options, secret, client.peer, tls=tls, common_name=client.common_name)


def check_auth(client: ConnectedClient, command: str, topic: str, channel: str) -> bool:
    """Refuse a command unless the client may subscribe to a channel, or publish if that is empty.

    Returns False when the authorizations have expired: then `recheck_auth` has to be awaited.
    """
    if not client.node.limits.auth:
        return True
    found = client.authorizations
    if found is None:
        raise RequestError("E_AUTH_FIRST", f"AUTH required before {command}")
    if found.expires < client.node.options.clock():
        return False
    if not found.allows(topic, channel):
        raise RequestError("E_UNAUTHORIZED", f"AUTH failed for {command} on {quote(topic)} {quote(channel)}")
    return True


def run_authorized(
    client: ConnectedClient, command: str, topic: str, channel: str, run: Callable[[], Awaitable[None] | None]
) -> Awaitable[None] | None:
    """Check a client, and run the rest of a command; what waits is returned."""
    if check_auth(client, command, topic, channel):
        return run()
    return recheck_auth(client, command, topic, channel, run)


async def recheck_auth(
    client: ConnectedClient, command: str, topic: str, channel: str, run: Callable[[], Awaitable[None] | None]
) -> None:
    """Ask the auth server again, check, and run the rest of a command; an error is sent as its answer."""
    try:
        await _renew(client)
        check_auth(client, command, topic, channel)
        waiting = run()
    except RequestError as error:
        client.refuse(error)
    else:
        if waiting is not None:
            await waiting


async def _renew(client: ConnectedClient) -> None:
    """Replace a client's authorizations; None if the auth server grants nothing any more."""
    found = await _query(client, client.authorizations.secret if client.authorizations else b"")
    if found is None:
        raise RequestError("E_AUTH_FAILED", "AUTH failed")
    client.authorizations = found if found.grants else None
