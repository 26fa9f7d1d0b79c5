"""Checks of commands: AUTH, and the redesigned server's checks while a body is read, in its order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NoReturn

from nsqext.broker.nsqd.auth_server import Authorizations, query_auth
from nsqext.protocol.extjson import quote
from nsqext.protocol.server.command_parser import (
    BATCH_VERBS,
    BatchReader,
    Command,
    CommandTarget,
    check_publish_size,
    check_room,
    check_state,
)
from nsqext.protocol.server.go_format import decode, parse_int, word_lists
from nsqext.protocol.server.request_error import RequestError
from nsqext.protocol.tls_layer import TlsLayer

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import ConnectedClient, Hosted

_SMALL = frozenset((b"IDENTIFY", b"AUTH"))  # no publishes


def auth(client: ConnectedClient, command: Command) -> Awaitable[None]:
    """Run AUTH."""
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
    """Refuse a command unless the client may subscribe to a channel, or with an empty channel publish.

    Returns False for expired authorizations, for `recheck_auth`.
    """
    if not client.node.limits.auth:
        return True
    found = client.authorizations
    if found is None or not found.grants:
        raise RequestError("E_AUTH_FIRST", f"AUTH required before {command}")
    if found.expires < client.node.options.clock():
        return False
    _check_grants(found, command, topic, channel)
    return True


def _check_grants(found: Authorizations, command: str, topic: str, channel: str) -> None:
    if not found.allows(topic, channel):
        raise RequestError("E_UNAUTHORIZED", f"AUTH failed for {command} on {quote(topic)} {quote(channel)}")


def run_authorized(
    client: ConnectedClient, command: str, topic: str, channel: str, run: Callable[[], Awaitable[None] | None]
) -> Awaitable[None] | None:
    """Check a client and run the rest of a command; return what must be awaited."""
    if check_auth(client, command, topic, channel):
        return run()
    return recheck_auth(client, command, topic, channel, run)


async def recheck_auth(
    client: ConnectedClient, command: str, topic: str, channel: str, run: Callable[[], Awaitable[None] | None]
) -> None:
    """Ask the auth server again, check, and run the rest of a command; answer an error."""
    try:
        # a client without any authorization left is asked for AUTH only from the next command on
        _check_grants(await _renew(client), command, topic, channel)
        waiting = run()
    except RequestError as error:
        client.refuse(error)
    else:
        if waiting is not None:
            await waiting


async def _renew(client: ConnectedClient) -> Authorizations:
    found = await _query(client, client.authorizations.secret if client.authorizations else b"")
    if found is None:
        raise RequestError("E_AUTH_FAILED", "AUTH failed")
    client.authorizations = found
    return found


def read_partition(word: bytes) -> int:
    """Return the number of a partition."""
    try:
        return parse_int(decode(word))
    except ValueError as error:
        raise RequestError("E_BAD_PARTITION", f"topic partition is not valid: {error}") from None


class CommandValidator:
    """The redesigned server's checks for a session."""

    def __init__(self, client: ConnectedClient) -> None:
        self._client = client
        self._node = client.node
        self._limits = client.node.limits
        #: only IDENTIFY is allowed before the TLS handshake
        self.tls_missing: bool = self._limits.tls_required
        self.hosted: Hosted | None = None  #: partition of the publish being read
        self.target: CommandTarget = CommandTarget("")
        self.topic: str = ""  #: of the publish (original generation)
        self.delay: float = 0.0  #: seconds, of DPUB
        self.stale_auth: bool = False  #: ask the auth server again before storing
        self._partition = -1

    def refuse_unknown(self, words: list[bytes]) -> NoReturn:
        raise RequestError("E_INVALID", f"invalid command {word_lists(words)}")

    def check_tls(self, words: list[bytes]) -> None:
        if self.tls_missing and words[0] != b"IDENTIFY":
            raise RequestError("E_INVALID", f"cannot {decode(words[0])} in current state (TLS required)")

    def check_line(self, words: list[bytes]) -> None:
        if self.tls_missing:
            self.check_tls(words)
        verb = words[0]
        if verb not in _SMALL:
            self._check_publish(words)
            return
        check_state(verb.decode(), self._client.state)
        if verb == b"AUTH" and len(words) != 1:
            raise RequestError("E_INVALID", "AUTH invalid number of parameters")

    def _check_publish(self, words: list[bytes]) -> None:
        if words[0] == b"DPUB":
            raise RequestError("E_INVALID", f"invalid command {word_lists(words)}")
        if len(words) < 2:
            raise RequestError("E_INVALID", "insufficient number of parameters")
        self._partition = -1
        # with more than three words the partition is ignored (captured: pub_extra_params)
        if len(words) == 3:
            self._partition = read_partition(words[2])

    def check_size(self, words: list[bytes], size: int) -> BatchReader | None:
        """Check the announced size; choose how to read the body."""
        verb = words[0]
        if verb not in _SMALL:
            check_publish_size(verb, size, self._limits)
            return self._reader(words, size)
        name, largest = verb.decode(), self._limits.max_body_size
        # captured: identify_errors
        if size > largest:
            raise RequestError("E_BAD_BODY", f"{name} body too big {size} > {largest}")
        if size <= 0:
            raise RequestError("E_BAD_BODY", f"{name} invalid body size {size}")
        return None

    def check_end(self, words: list[bytes], batch: BatchReader | None, *, sized: bool) -> None:
        if batch is not None:
            batch.check_end()
        small = words[0] in _SMALL
        name = f"{words[0].decode()} " if small else ""
        if not sized:
            raise RequestError("E_BAD_BODY", f"{name}failed to read body size")
        if small:
            raise RequestError("E_BAD_BODY", f"{name}failed to read body")
        raise RequestError("E_BAD_MESSAGE", "failed to read message body")

    def _reader(self, words: list[bytes], size: int) -> BatchReader | None:
        """Find the partition of a publish; choose how to read the body."""
        verb = words[0]
        topic = decode(words[1])
        hosted = self._node.find(topic, self._partition)
        if hosted is None:
            raise RequestError("E_TOPIC_NOT_EXIST")
        if self._partition == -1 and hosted.partition.ordered:
            raise RequestError("E_BAD_PARTITION", "topic partition is not valid for multi partition: -1")
        self.stale_auth = not check_auth(self._client, "PUB", topic, "")
        check_room(verb, size)
        waiting = hosted.waiting + size
        if waiting > self._node.switches.max_pub_waiting:
            raise RequestError("E_PUB_TOO_MUCH_WAITING", f"pub too much waiting in the queue: {waiting}")
        self.hosted = hosted
        self.target = CommandTarget(topic, hosted.partition.extend, self._node.switches.allow_ext_compatible)
        return BatchReader(verb, self._limits, self.target) if verb in BATCH_VERBS else None
