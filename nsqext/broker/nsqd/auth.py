"""AUTH: what an HTTP auth server allows a client, and asking it."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import orjson
from attrs import frozen

from nsqext.broker.http_api import dump
from nsqext.broker.nsqd.go_format import decode, quote
from nsqext.broker.outgoing import load_http_client
from nsqext.protocol.server.request_error import Fault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nsqext.broker.nsqd.options import NodeOptions
    from nsqext.broker.nsqd.session import Session

__all__ = ("Authorizations", "check_auth", "log_in", "query", "rechecked")

_TIMEOUT = 5.0
_JSON = {"Content-Type": "application/json"}
_PERMISSIONS = frozenset(("subscribe", "publish"))


class _Unusable(Exception):
    """The auth server gave no answer, or one that cannot be used."""


@frozen
class _Grant:
    topic: re.Pattern[str]
    channels: tuple[re.Pattern[str], ...]
    permissions: frozenset[str]

    def allows(self, topic: str, channel: str) -> bool:
        needed = "subscribe" if channel else "publish"
        if needed not in self.permissions or not self.topic.search(topic):
            return False
        # a publisher's channel is empty, and one of the patterns has to match that (captured: auth)
        return any(pattern.search(channel) for pattern in self.channels)


@frozen
class Authorizations:
    """What a client may do.

    Attributes:
        secret: what it authenticated with.
        identity: who it is, as the auth server says.
        identity_url: where to read about that.
        grants: what it may do.
        expires: clock time at which the auth server has to be asked again.
    """

    secret: bytes
    identity: str
    identity_url: str
    grants: tuple[_Grant, ...]
    expires: float

    def allows(self, topic: str, channel: str) -> bool:
        """Return whether it may subscribe to a channel, or publish to a topic when the channel is empty."""
        return any(grant.allows(topic, channel) for grant in self.grants)

    def summary(self) -> dict[str, Any]:
        """Return the members that a client with authorizations adds to ``/stats``."""
        members = {"auth_identity": self.identity, "auth_identity_url": self.identity_url}
        return {"authed": True} | {name: text for name, text in members.items() if text}

    def reply(self) -> bytes:
        """Return the reply to AUTH."""
        count = len(self.grants)
        return dump({"identity": self.identity, "identity_url": self.identity_url, "permission_count": count})


def _read(data: bytes, secret: bytes, now: float) -> Authorizations:
    try:
        answer = orjson.loads(data)
        grants = tuple(
            _Grant(
                re.compile(grant.get("topic") or ""),
                tuple(map(re.compile, grant.get("channels") or ())),
                frozenset(grant.get("permissions") or ()),
            )
            for grant in answer.get("authorizations") or ()
        )
        ttl = answer.get("ttl", 0)
        names = (str(answer.get("identity") or ""), str(answer.get("identity_url") or ""))
    except (orjson.JSONDecodeError, AttributeError, TypeError, re.error) as error:
        raise _Unusable(str(error)) from error
    if not isinstance(ttl, int) or ttl <= 0 or any(grant.permissions - _PERMISSIONS for grant in grants):
        raise _Unusable("the time to live or a permission is not valid")
    return Authorizations(secret, *names, grants, now + ttl)


def _post_body(values: dict[str, str]) -> bytes:
    """Return JSON with a list for each value, which is how the original server posts its question."""
    readable = {
        name: text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name, text in values.items()
    }
    return dump({name: [readable[name]] for name in sorted(readable)})


async def query(options: NodeOptions, secret: bytes, peer: str, *, tls: bool) -> Authorizations | None:
    """Ask the auth servers, one after the other until one answers; None when none does.

    Args:
        options: addresses and clock.
        secret: what the client gave.
        peer: ``host:port`` of the client.
        tls: the client's connection is encrypted.
    """
    await load_http_client()  # only nodes with an auth server need it
    import httpx

    values = {"remote_ip": peer.rpartition(":")[0].strip("[]"), "tls": "true" if tls else "false"}
    values["secret"] = decode(secret)
    if options.original:
        values["common_name"] = ""
    addresses = list(options.auth_addresses)
    if options.original:
        random.shuffle(addresses)
    async with httpx.AsyncClient(timeout=_TIMEOUT, headers={"Accept": "application/vnd.nsq; version=1.0"}) as client:
        for address in addresses:
            url = address if "://" in address else f"http://{address}/auth"
            try:
                if options.auth_method == "post":
                    answer = await client.post(url, content=_post_body(values), headers=_JSON)
                else:
                    answer = await client.get(f"{url}?{urlencode(values, errors='surrogateescape')}")
                if answer.status_code == httpx.codes.OK:
                    return _read(answer.content, secret, options.clock())
            except (httpx.HTTPError, _Unusable):
                continue  # the next one may know
    return None


async def log_in(session: Session, secret: bytes) -> None:
    """AUTH: ask who the client is and what it may do, and tell it."""
    found = await query(session.node.options, secret, session.peer, tls=session.settings.tls)
    if found is None:
        session.refuse(Fault("E_AUTH_FAILED", "AUTH failed"))
    elif not found.grants:
        word = "no" if session.node.options.original else "No"
        session.refuse(Fault("E_UNAUTHORIZED", f"AUTH {word} authorizations found"))
    else:
        session.authorizations = found
        session.answer(found.reply())


def check_auth(session: Session, command: str, topic: str, channel: str) -> bool:
    """Check what a client wants to do.

    Args:
        session: the client.
        command: name of its command, for the error.
        topic: where it wants to publish or subscribe.
        channel: empty for publishing.

    Returns:
        False when its authorizations have expired: then `rechecked` has to be awaited.

    Raises:
        Fault: it may not.
    """
    if not session.node.limits.auth:
        return True
    found = session.authorizations
    if found is None:
        raise Fault("E_AUTH_FIRST", f"AUTH required before {command}")
    if found.expires < session.clock():
        return False
    if not found.allows(topic, channel):
        raise Fault("E_UNAUTHORIZED", f"AUTH failed for {command} on {quote(topic)} {quote(channel)}")
    return True


async def rechecked(
    session: Session, command: str, topic: str, channel: str, run: Callable[[], Awaitable[None] | None]
) -> None:
    """Ask the auth server again, check, and run the command that had to wait for it; a fault is its answer.

    Args:
        session: the client.
        command: name of its command, for the error.
        topic: where it wants to publish or subscribe.
        channel: empty for publishing.
        run: the rest of the command.
    """
    try:
        await _ask_again(session)
        check_auth(session, command, topic, channel)
        waiting = run()
    except Fault as fault:
        session.refuse(fault)
    else:
        if waiting is not None:
            await waiting


async def _ask_again(session: Session) -> None:
    secret = session.authorizations.secret if session.authorizations else b""
    found = await query(session.node.options, secret, session.peer, tls=session.settings.tls)
    if found is None:
        raise Fault("E_AUTH_FAILED", "AUTH failed")
    session.authorizations = found if found.grants else None
