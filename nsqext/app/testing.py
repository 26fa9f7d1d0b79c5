"""Tests of an app: call handlers directly or on a test cluster, and record their publishes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from struct import pack
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from attrs import frozen

from nsqext.arguments import check_number
from nsqext.client.consumer.message import KeySharing, Message, Owner
from nsqext.client.consumer.typed.body import decode_body, encode_body
from nsqext.client.middleware import Middleware, SendNext
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.request import MessageRequest, Publishing
from nsqext.errors import InvalidInput, InvalidState
from nsqext.protocol.headers import KEY_HEADER, encode_headers
from nsqext.protocol.messages import EXT_JSON, EXT_NONE
from nsqext.protocol.names import check_trace_id
from nsqext.types import Receipt
from nsqext.waits import Waiters

if TYPE_CHECKING:
    from nsqext.app.router import HandlerSpec, LifespanManager
    from nsqext.client.consumer.handlers.workers import Handler
    from nsqext.client.producer.request import OutgoingMessage

T = TypeVar("T")

_OPTIONS = ProducerOptions()


@frozen
class Published:
    """A message that the app published."""

    topic: str
    message: OutgoingMessage  # body, headers, tag, trace id and key

    @property
    def body(self) -> bytes:
        """The body."""
        return self.message.body

    def decode(self, kind: type[T]) -> T:
        """Return the body decoded; see `nsqext.app.decode_body`."""
        return decode_body(self.message.body, kind)


class _Recorder(Middleware):
    """The innermost middleware, which records publishes."""

    def __init__(self, *, send: bool) -> None:
        self.published: list[Published] = []
        self.changed: Waiters = Waiters()
        self._send = send

    async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
        """Record the messages once they are stored; in direct tests they are checked and not sent."""
        if self._send:
            receipts = await send_next(publishing)
        else:
            for message in publishing.messages:
                MessageRequest(_OPTIONS, publishing.topic, message, delay=publishing.delay).check()
            receipts = [Receipt(publishing.topic, 0, "test") for _ in publishing.messages]
        self.published += [Published(publishing.topic, message) for message in publishing.messages]
        self.changed.wake()
        return receipts


class TestedApp(Protocol):
    """The methods of an app that a test uses."""

    specs: list[HandlerSpec]
    lifespans: list[LifespanManager]

    def handler_of(self, spec: HandlerSpec) -> Handler:
        """Return a handler of messages, middleware included."""

    def use_test(self, test: AppTest | None) -> None:
        """Create the clients for a test; with None, those of the app."""

    async def start_middleware(self) -> None:
        """Start the middleware of the app and its handlers."""

    async def start(self) -> object:
        """Run in the background."""

    async def aclose(self) -> None:
        """Drain and close."""


class AppTest:
    """A test of an app, as an asynchronous context manager; `App.test` creates it. The app can run again afterwards.

    Without addresses, lifespans are entered, `deliver` calls handlers directly, with middleware, decoding and
    publishers, and their publishes are recorded instead of sent. With the addresses of a test cluster the app runs on
    it, and its publishes are recorded and sent.

    Args:
        app: the app.
        lookupd: lookup addresses of a test cluster.
    """

    def __init__(self, app: TestedApp, lookupd: str | Sequence[str] = ()) -> None:
        self.recorder: _Recorder = _Recorder(send=bool(lookupd))
        self._app = app
        self._lookupd = lookupd
        self._stack = AsyncExitStack()
        self._number = 0
        self._entered = False

    @property
    def lookupd(self) -> str | Sequence[str]:
        """Lookup addresses of the clients; direct tests never connect."""
        return self._lookupd or "127.0.0.1:1"

    @property
    def direct(self) -> bool:
        """Whether handlers are called without a server."""
        return not self._lookupd

    @property
    def published(self) -> list[Published]:
        """Published messages, in order."""
        return self.recorder.published

    async def __aenter__(self) -> Self:
        self._app.use_test(self)
        try:
            self._entered = True
            if self._lookupd:
                await self._app.start()
            else:
                for lifespan in self._app.lifespans:
                    await self._stack.enter_async_context(lifespan(self._app))
                await self._app.start_middleware()
        except BaseException:
            self._entered = False
            await self._stack.aclose()
            self._app.use_test(None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        try:
            await self._stack.__aexit__(kind, error, trace)
            await self._app.aclose()
        finally:
            self._app.use_test(None)

    async def deliver(
        self,
        topic: str,
        value: object,
        *,
        channel: str | None = None,
        headers: Mapping[str, str] | None = None,
        tag: str | None = None,
        key: str | None = None,
        trace_id: int = 0,
        attempts: int = 1,
    ) -> list[object]:
        """Call the handlers of a topic with a message and return their results, in the order of registration.

        Args:
            topic: name of the topic.
            value: the body, see `nsqext.app.encode_body`.
            channel: call the handlers of this channel only.
            headers: extend headers.
            tag: tag.
            key: key.
            trace_id: trace id.
            attempts: number of deliveries of the message.

        Raises:
            InvalidInput: the app has no such handler, or a part of the message is not valid.
            InvalidState: the test has not begun or has ended, or runs on a cluster; publish the message instead.
            BaseException: an exception of a handler, `nsqext.Requeue` and `nsqext.Reject` included.
        """
        if self._lookupd:
            raise InvalidState("deliver() is for tests without a cluster", hint="publish the message with app.publish")
        if not self._entered:
            raise InvalidState("the test has not begun, or has ended", hint="use 'async with app.test() as test'")
        check_number("attempts", attempts, 1)
        check_trace_id(trace_id)
        if key is not None and not isinstance(key, str):
            raise InvalidInput(f"a key is received as text, not as {type(key).__name__}", topic=topic)
        specs = [spec for spec in self._app.specs if spec.topics.matches(topic) and channel in (None, spec.channel)]
        if not specs:
            raise InvalidInput(f"the app has no handler of {topic}/{channel or '*'}", topic=topic)
        results = []
        for spec in specs:
            self._number += 1
            message = Message(_TestOwner(topic))  # type: ignore[abstract]
            message.id = pack(">QQ", self._number, trace_id)
            message.timestamp = time.time_ns()
            message.attempts = attempts
            extended = bool(headers or tag is not None or key is not None)
            message.version = EXT_JSON if extended else EXT_NONE
            reserved = {} if key is None else {KEY_HEADER: key}
            message.header = encode_headers(headers, tag=tag, reserved=reserved) if extended else b""
            message.offset, message.size = -1, 0
            message.body = encode_body(value)
            results.append(await self._app.handler_of(spec)(message))
        return results

    async def wait_published(self, topic: str, count: int = 1) -> list[Published]:
        """Wait until the app has published messages to a topic, and return them; bound it with `anyio.fail_after`."""
        while True:
            found = [one for one in self.published if one.topic == topic]
            if len(found) >= count:
                return found
            await self.recorder.changed.wait()


class _TestOwner(Owner):
    """Replaces the subscription of a message: FIN, REQ and TOUCH do nothing, as the methods of the protocol."""

    partition = 0
    node = "test:4150"
    in_order = False
    moved = False
    number = 1
    ready = 1
    horizon = float("-inf")
    msg_timeout = 60.0
    max_msg_timeout = 900.0
    ignore_lost = False
    taking_over = False
    key_sharing = KeySharing.NONE

    def __init__(self, topic: str) -> None:
        self.topic = topic

    def expired(self, message: Message) -> bool:
        """Return False."""
        return False
