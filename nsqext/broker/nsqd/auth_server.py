"""Requests to HTTP auth servers, and what these allow a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urljoin

from attrs import field, frozen

from nsqext.broker.engine.header_filter import InvalidExpression, compile_regexp
from nsqext.golang.texts import dump
from nsqext.http.client import HttpClient, HttpReply, HttpRequestFailed
from nsqext.protocol.json_fields import Schema, UnreadableFields, read_fields
from nsqext.protocol.server.go_format import decode
from nsqext.waits import chance

if TYPE_CHECKING:
    from nsqext.broker.engine.options import NodeOptions

_TIMEOUT = 5.0  # seconds of a request
_OK = 200
_ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}
_JSON = {**_ACCEPT, "Content-Type": "application/json"}
_PERMISSIONS = frozenset(("subscribe", "publish"))
_GRANT: Schema = {"topic": str, "channels": [str], "permissions": [str]}
_REPLY: Schema = {"ttl": int, "authorizations": [_GRANT], "identity": str, "identity_url": str}
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_KEEP_METHOD = frozenset((307, 308))
_MOST_REQUESTS = 10  # with redirects, as Go's client

_Matcher = Callable[[str], bool]


class _BadReply(Exception): ...


@frozen
class _Grant:
    topic: _Matcher
    channels: tuple[_Matcher, ...]
    permissions: frozenset[str]

    def allows(self, topic: str, channel: str) -> bool:
        needed = "subscribe" if channel else "publish"
        if needed not in self.permissions or not self.topic(topic):
            return False
        # a publisher's channel is empty, and a pattern must match that (captured: auth)
        return any(matches(channel) for matches in self.channels)


@frozen
class Authorizations:
    """What a client may do."""

    secret: bytes = field(repr=False)  #: of AUTH; never shown
    identity: str
    identity_url: str
    grants: tuple[_Grant, ...]
    expires: float  #: clock time at which to ask the auth server again

    def allows(self, topic: str, channel: str) -> bool:
        """Return whether a client may subscribe to a channel, or with an empty channel publish."""
        return any(grant.allows(topic, channel) for grant in self.grants)

    def summary(self) -> dict[str, Any]:
        members = {"auth_identity": self.identity, "auth_identity_url": self.identity_url}
        return {"authed": bool(self.grants)} | {name: text for name, text in members.items() if text}

    def reply(self) -> bytes:
        count = len(self.grants)
        return dump({"identity": self.identity, "identity_url": self.identity_url, "permission_count": count})


def _read(data: bytes, secret: bytes, now: float) -> Authorizations:
    try:
        reply = read_fields(data, _REPLY)
        grants = tuple(map(_grant, reply.get("authorizations", ())))
    except (UnreadableFields, InvalidExpression) as error:
        raise _BadReply(str(error)) from error
    ttl = reply.get("ttl", 0)
    if ttl <= 0 or any(grant.permissions - _PERMISSIONS for grant in grants):
        raise _BadReply("the time to live or a permission is not valid")
    return Authorizations(secret, reply.get("identity", ""), reply.get("identity_url", ""), grants, now + ttl)


def _grant(members: Mapping[str, Any]) -> _Grant:
    channels = tuple(map(compile_regexp, members.get("channels", ())))
    return _Grant(compile_regexp(members.get("topic", "")), channels, frozenset(members.get("permissions", ())))


async def _request(client: HttpClient, method: str, url: str, content: bytes = b"") -> HttpReply:
    """Send a request and follow redirects as Go's client."""
    for _ in range(_MOST_REQUESTS):
        headers = _JSON if method == "POST" else _ACCEPT
        reply = await client.request(method, url, headers=headers, content=content)
        location = reply.headers.get("location", "")
        if reply.status not in _REDIRECTS or not location:
            return reply
        url = urljoin(url, location)
        if reply.status not in _KEEP_METHOD:
            method, content = "GET", b""
    raise HttpRequestFailed("invalid", "too many redirects")


async def query_auth(
    options: NodeOptions, secret: bytes, peer: str, *, tls: bool, common_name: str = ""
) -> Authorizations | None:
    """Ask auth servers in turn until an answer; None without an answer. The original begins with a random server."""
    host = peer.rpartition(":")[0].strip("[]")
    values = {"remote_ip": host, "secret": decode(secret), "tls": "true" if tls else "false"}
    addresses = list(options.auth_addresses)
    if options.original:
        values = {"common_name": common_name} | values  # both servers sort the arguments by name
        start = chance.randrange(len(addresses))
        addresses = addresses[start:] + addresses[:start]
    client = HttpClient(_TIMEOUT)
    try:
        for address in addresses:
            url = address if "://" in address else f"http://{address}/auth"
            try:
                if options.auth_method == "post":
                    # lists, as in the original server's POST
                    texts = {name: text.encode("utf-8", "surrogateescape") for name, text in values.items()}
                    body = dump({name: [text.decode("utf-8", "replace")] for name, text in texts.items()})
                    reply = await _request(client, "POST", url, body)
                else:
                    reply = await _request(client, "GET", f"{url}?{urlencode(values, errors='surrogateescape')}")
                if reply.status == _OK:
                    return _read(reply.content, secret, options.clock())
            except (HttpRequestFailed, _BadReply):
                continue
        return None
    finally:
        await client.aclose()
