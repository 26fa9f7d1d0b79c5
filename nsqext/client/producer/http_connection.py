"""Publish over HTTP."""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING

import anyio
import orjson

from nsqext.client.producer.attempt_errors import delivery_unknown
from nsqext.errors import (
    ConnectionFailed,
    ConnectionLost,
    InvalidState,
    NegotiationFailed,
    NotSent,
    NsqError,
    ProtocolError,
    RequestTimeout,
    outside_text,
)
from nsqext.http.client import HttpClient, HttpRequestFailed
from nsqext.lookup.options import url_of
from nsqext.protocol.client.client_protocol import Reply
from nsqext.protocol.client.http_publish import HttpPublish, decode_reply, encode_publish
from nsqext.protocol.identify import Negotiated
from nsqext.waits import Waiters

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nsqext.protocol.client.commands import Command
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import Address

_HEADERS = {"Accept": "application/vnd.nsq; version=1.0", "Content-Type": "application/octet-stream"}
_HINTS = {"untrusted": "give the CA certificates of the node: tls=...", "invalid": "is its address right?"}
REQUESTS: int = 16
"""Concurrent requests to a node."""
_MOST_BYTES = 65536  # largest response
_clock = time.monotonic


class _HttpReply(Reply):
    __slots__ = ("posted",)

    def __init__(self, deadline: float) -> None:
        super().__init__(deadline)
        self.posted: bool = False  #: the request no longer waits for its turn


class HttpConnection:
    """Sends publish commands to a node as HTTP requests, in place of `nsqext.transport.connection.Connection`.

    A request runs in its own task, and ends with its response or ``request_timeout``. A cancelled caller does not cut
    it off: the redesigned server stores the received part of a message with headers or trace id.
    """

    def __init__(
        self, address: Address, node: str, options: ConnectionOptions, start_soon: Callable[..., None]
    ) -> None:
        self.error: NsqError | None = None  #: why it is unusable
        self.in_flight: int = 0  #: requests without a response
        self.received_at: float = _clock()  #: time of the last response
        self.on_request: Callable[[], None] | None = None  #: called before each request
        self.local_address: str = ""  #: empty, as requests use several connections
        self._url = url_of(address)
        self._node = node  # for errors
        self._start_soon = start_soon
        self._client = HttpClient(options.request_timeout, most=_MOST_BYTES, tls=options.tls_context)
        self._free = anyio.Semaphore(REQUESTS)
        self._answered = Waiters()

    @property
    def usable(self) -> bool:
        return self.error is None

    @property
    def busy(self) -> bool:
        return self.in_flight > 0

    @property
    def finished(self) -> bool:
        return not self.in_flight

    def request(self, data: Command, deadline: float = inf, *, breaks: bool = False) -> Awaitable[bytes]:
        """Send a publish command; return an awaitable for its response, as of TCP.

        ``breaks`` has no effect: an HTTP response concerns no other request. Raises NotSent, or OperationNotSupported
        for a command that HTTP lacks.
        """
        del breaks
        if self.error is not None:
            raise NotSent(f"not sent: {self.error.message}", node=self._node)
        publish = encode_publish(data)
        if self.on_request is not None:
            self.on_request()
        reply = _HttpReply(deadline)
        self._start_soon(self._exchange, publish, reply)
        self.in_flight += 1
        return self._wait(reply)

    async def _wait(self, reply: _HttpReply) -> bytes:
        if not reply.done:
            answered = anyio.Event()
            reply.wake = answered.set
            try:
                with anyio.move_on_after(max(0.0, reply.deadline - _clock())):
                    await answered.wait()
            except anyio.get_cancelled_exc_class():
                if reply.posted or _clock() < reply.deadline:
                    raise
                # the caller's time is over, too: say that it is not sent
            finally:
                reply.wake = None
        if reply.error is not None:
            raise reply.error
        if reply.data is None:
            reply.deadline = -inf  # not sent if it still waits
            if not reply.posted:
                raise NotSent(f"not sent before the timeout: {REQUESTS} requests are in flight", node=self._node)
            raise RequestTimeout("no response before the timeout", node=self._node)
        return reply.data

    async def _exchange(self, publish: HttpPublish, reply: _HttpReply) -> None:
        try:
            async with self._free:
                if self.error is not None or reply.deadline < _clock():
                    reply.error = NotSent(f"not sent: {self.error or 'the timeout has passed'}", node=self._node)
                    return
                reply.posted = True
                url = f"{self._url}{publish.path}?{publish.query}"
                answer = await self._client.request("POST", url, headers=_HEADERS, content=publish.content)
            self.received_at = _clock()
            reply.data = decode_reply(publish, answer.status, answer.content)
        except HttpRequestFailed as failure:
            reply.error = _error(failure, self._node)
            if isinstance(reply.error, (ConnectionFailed, ConnectionLost, RequestTimeout)):
                self.fail(reply.error)
        except NsqError as error:
            reply.error = error.at(node=self._node)
        except BaseException:
            reply.error = ConnectionLost("the producer was closed before the response", node=self._node)
            raise
        finally:
            self.in_flight -= 1
            self._answered.wake()
            if reply.wake is not None:
                reply.wake()

    def tick(self) -> None:
        """Do nothing: requests have their own timeouts, and there are no heartbeats."""

    def fail(self, error: NsqError) -> None:
        """Send no further requests; sent requests still receive their responses."""
        self.error = self.error or error

    async def drain(self) -> None:
        while self.in_flight:
            await self._answered.wait()

    def close(self) -> None:
        """Send no further requests; close the HTTP connections once the requests have ended."""
        self.fail(InvalidState("the connection is closed", node=self._node))
        try:
            self._start_soon(self._close)
        except InvalidState:
            return  # the producer has ended

    async def _close(self) -> None:
        try:
            await self.drain()
        finally:
            await self._client.aclose()

    async def identify(self) -> Negotiated:
        """Ask the node for its version; raises ConnectionFailed, or ProtocolError for another server."""
        try:
            reply = await self._client.request("GET", f"{self._url}/info", headers=_HEADERS)
        except HttpRequestFailed as failure:
            error = _error(failure, self._node)
            if isinstance(error, NegotiationFailed):
                raise error from failure
            raise ConnectionFailed(failure.text, node=self._node, hint="is the node up?") from failure
        hint = "is this nsqd's HTTP port, 4151 by default?"
        try:
            data = orjson.loads(reply.content)
            version = data.get("data", data)["version"]
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
            shown = outside_text(reply.content[:80].decode("utf-8", "replace"))
            if reply.status >= 500:
                raise ConnectionFailed(f"HTTP status {reply.status}: {shown}", node=self._node) from None
            raise ProtocolError(f"HTTP status {reply.status}: {shown}", node=self._node, hint=hint) from None
        return Negotiated(version=outside_text(str(version)))


async def open_http_connection(
    address: Address, node: str, options: ConnectionOptions, start_soon: Callable[..., None]
) -> tuple[HttpConnection, Negotiated]:
    """Check that a node responds to HTTP; return a connection and the server's version.

    Raises ConnectionFailed, NegotiationFailed (untrusted certificate), or ProtocolError (no nsqd).
    """
    connection = HttpConnection(address, node, options, start_soon)
    negotiated: Negotiated | None = None
    try:
        with anyio.move_on_after(options.connect_timeout):
            negotiated = await connection.identify()
    finally:
        if negotiated is None:
            connection.close()
    if negotiated is None:
        raise ConnectionFailed(f"no response for {options.connect_timeout:g} s", node=node, hint="is the node up?")
    return connection, negotiated


def _error(failure: HttpRequestFailed, node: str) -> NsqError:
    """Return the error of a publish without a usable response."""
    if failure.reason in _HINTS:
        return NegotiationFailed(failure.text, node=node, hint=_HINTS[failure.reason])
    if failure.reason in ("compressed", "too long"):
        return delivery_unknown(failure.text, node=node)
    if not failure.sent:
        return ConnectionFailed(failure.text, node=node)
    kind = RequestTimeout if isinstance(failure.__cause__, TimeoutError) else ConnectionLost
    error: NsqError = kind(failure.text, node=node)
    error.__cause__ = failure
    return error
