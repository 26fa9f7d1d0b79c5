"""Tests of an app: call handlers directly or on a test cluster, and record publishes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import count
from struct import pack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from anyio.lowlevel import current_token
from attrs import evolve, frozen

from nsqext.app.health import unready
from nsqext.arguments import check_flags, check_number, suggest
from nsqext.client.consumer.handlers.forgotten_await import check_awaited, requeue_not_awaited
from nsqext.client.consumer.message import KeySharing, Message, Owner
from nsqext.client.consumer.typed.body import decode_body, encode_body
from nsqext.client.middleware import Middleware, SendNext
from nsqext.client.producer.delayed_request import delayed
from nsqext.client.producer.request import check_choice, key_bytes
from nsqext.errors import BatchFailed, InvalidBody, InvalidInput, InvalidSetting, InvalidState
from nsqext.protocol.headers import decode_headers, encode_headers
from nsqext.protocol.messages import EXT_JSON, EXT_NONE, KEY_HEADER, RESERVED_PREFIX, header_text, tag_of
from nsqext.protocol.names import check_partition, check_topic, check_trace_id, is_topic_pattern
from nsqext.protocol.record import Record
from nsqext.types import Receipt
from nsqext.waits import Waiters

if TYPE_CHECKING:
    from nsqext.app.router import HandlerSpec, LifespanManager
    from nsqext.client.consumer.consumer import Consumer
    from nsqext.client.consumer.handlers.workers import Handler
    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.publishing import OutgoingMessage, Publishing
    from nsqext.protocol.identify import ExtFilter

T = TypeVar("T")

# ids of all tests' messages; from the clock, because an inbox may remember an earlier process
_numbers = count(time.time_ns())
_MOST_ATTEMPTS = 2**16 - 1  # servers count no more
_MESSAGE_SIZE = 1000  # bytes between two messages in a test's log
# a channel's next offset, by topic, channel and partition; it stays while a handler with ordered=True fails
_offsets: defaultdict[tuple[str, str, int], int] = defaultdict(time.time_ns)


@frozen
class Published:
    """A message that the app published."""

    topic: str
    message: OutgoingMessage  #: body, headers, tag, trace id and key
    delay: float | None = None  #: seconds
    partition: int | None = None  #: chosen by the publish

    @property
    def body(self) -> bytes:
        """The body."""
        return self.message.body

    @property
    def key(self) -> str | bytes | int | None:
        """The key."""
        return self.message.key if self.message.key is not None else header_text(self._stored, KEY_HEADER)

    @property
    def headers(self) -> Mapping[str, Any]:
        """The extend headers; empty if there are no headers."""
        if self.message.header is None:
            return self.message.headers or {}
        return {name: value for name, value in self._stored.items() if not name.startswith(RESERVED_PREFIX)}

    @property
    def tag(self) -> str | None:
        """The tag."""
        return self.message.tag if self.message.header is None else tag_of(self._stored)

    @property
    def _stored(self) -> dict[str, Any]:
        """What bytes of an extend header contain that are published as they are."""
        return decode_headers(self.message.header or b"{}")

    @property
    def trace_id(self) -> int | None:
        """The trace id."""
        return self.message.trace_id

    def decode(self, kind: type[T]) -> T:
        """Return the decoded body; see `nsqext.app.decode_body`."""
        return decode_body(self.message.body, kind)


class _Recorder(Middleware):
    """Records publishes, as the innermost middleware."""

    def __init__(self, app: TestedApp, *, send: bool) -> None:
        self._app = app
        self.published: list[Published] = []
        self.changed: Waiters = Waiters()
        self._send = send

    async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
        """Record stored messages; direct tests check the messages and send nothing."""
        if self._send:
            try:
                receipts = await send_next(publishing)
            except BatchFailed as error:
                self._record(publishing, error.outcomes)
                raise
        else:
            for message in publishing.messages:
                self._check(publishing, message)
            receipt = Receipt(publishing.topic, publishing.partition or 0, _TestOwner.node)
            publishing.receipts = receipts = [receipt] * len(publishing.messages)
        self._record(publishing, receipts)
        return receipts

    def _record(self, publishing: Publishing, outcomes: Sequence[object]) -> None:
        for message, outcome in zip(publishing.messages, outcomes, strict=True):
            if isinstance(outcome, Receipt):
                own = message if message.key is not None else evolve(message, key=publishing.key)
                self.published.append(Published(publishing.topic, own, publishing.delay, publishing.partition))
        self.changed.wake()

    def _check(self, publishing: Publishing, message: OutgoingMessage) -> None:
        """Raise the error of a producer for a message that no topic accepts, by the app's settings."""
        key = publishing.key if message.key is None else message.key
        check_choice(publishing.key if publishing.batch else message.key, publishing.partition)
        given = None if key is None else key_bytes(key)
        choice = "key=" if key is not None else "partition=" if publishing.partition is not None else None
        if choice and not self._app.knows_partitions:
            raise InvalidSetting(
                f"{choice} needs the partitions of a topic, and the app has no lookup service",
                topic=publishing.topic,
                hint=f"give the app lookupd=..., or publish without {choice}",
            )
        options = self._app.publish_options
        delayed(options, publishing.topic, message, publishing.delay, key=given).check()


class TestedApp(Protocol):
    """An app's methods for tests."""

    specs: list[HandlerSpec]
    lifespans: list[LifespanManager]

    @property
    def publish_options(self) -> ProducerOptions:
        """See `App.publish_options`."""

    @property
    def knows_partitions(self) -> bool:
        """See `App.knows_partitions`."""

    def tested_handler_of(self, spec: HandlerSpec, called: Callable[[], object]) -> Handler:
        """See `App.tested_handler_of`."""

    def options_of(self, spec: HandlerSpec) -> ConsumerOptions:
        """See `App.options_of`."""

    def use_test(self, test: AppTest | None) -> None:
        """See `App.use_test`."""

    def check_publishers(self) -> None:
        """See `App.check_publishers`."""

    async def start_middleware(self) -> None:
        """See `App.start_middleware`."""

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """See `App.consumers`."""

    async def start(self) -> object:
        """See `App.start`."""

    async def aclose(self) -> None:
        """See `App.aclose`."""


class AppTest:
    """A test of an app, from `App.test`, as an asynchronous context manager. The app can run again afterwards.

    Without addresses, lifespans are entered, `deliver` calls handlers directly, with middleware, decoding and
    publishers, and publishes are recorded instead of sent. On a test cluster the app runs, and publishes are recorded
    and sent.

    Args:
        lookupd: lookup addresses of a test cluster.

    Raises:
        InvalidSetting: an empty address.
    """

    def __init__(self, app: TestedApp, lookupd: str | Sequence[str] = ()) -> None:
        if not lookupd and lookupd != ():
            raise InvalidSetting(
                f"lookupd={lookupd!r} has no address of a test cluster",
                hint="call app.test() without an argument to call handlers directly",
            )
        self.recorder: _Recorder = _Recorder(app, send=bool(lookupd))
        self._app = app
        self._lookupd = lookupd
        self._stack = AsyncExitStack()
        self._entered = False
        self._app_ended = False
        self._loop: object = None
        self._failure: BaseException | None = None  # of a lifespan

    @property
    def lookupd(self) -> str | Sequence[str]:
        """The clients' lookup addresses; direct tests never connect."""
        return self._lookupd or "127.0.0.1:1"

    @property
    def direct(self) -> bool:
        """Whether handlers are called without a server."""
        return not self._lookupd

    @property
    def published(self) -> list[Published]:
        """Messages published since the test was entered, in order."""
        return self.recorder.published

    async def __aenter__(self) -> Self:
        self._app.use_test(self)
        self.recorder.published = []
        self._failure = None
        self._loop = current_token().native_token
        try:
            self._entered, self._app_ended = True, False
            if self._lookupd:
                await self._start()
            else:
                self._app.check_publishers()
                for lifespan in self._app.lifespans:
                    self._stack.push(self._note)  # lifespans around it may hide its error
                    await self._stack.enter_async_context(lifespan(self._app))
                await self._app.start_middleware()
        except BaseException:
            self._entered = False
            try:
                await self._stack.aclose()
            finally:
                self._app.use_test(None)
            raise
        return self

    async def _start(self) -> None:
        """Run the app; raises InvalidState if a handler would receive nothing."""
        await self._app.start()
        named = (one for one in self._app.consumers if not any(map(is_topic_pattern, one.topics)))
        reasons = [reason for consumer in named if (reason := unready(consumer))]
        if reasons:
            await self._app.aclose()
            raise InvalidState(
                f"handlers of the app would receive nothing: {'; '.join(reasons)}",
                hint="create their topics in the test cluster before: cluster.create_topic(TOPIC, channels=[CHANNEL])",
            )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        self.recorder.changed.wake()
        try:
            await self._stack.__aexit__(kind, error, trace)
            await self._app.aclose()
        finally:
            self._app.use_test(None)
        failure, self._failure = self._failure, None
        if failure is not None and error is None:
            raise failure

    def _note(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            self._failure = error

    async def deliver(
        self,
        topic: str,
        value: object,
        *,
        channel: str | None = None,
        headers: Mapping[str, str] | None = None,
        tag: str | None = None,
        key: str | None = None,
        partition: int = 0,
        trace_id: int = 0,
        attempts: int = 1,
        handled: bool = True,
    ) -> list[object]:
        """Call a topic's handlers with a message; return their results in the order of registration.

        On each channel, as on topics with extend support, the handlers with the message's tag are called, or the
        handlers without a tag if no handler has this tag. A handler with ``partitions`` receives messages of these
        partitions, a handler with ``ext_filter`` messages that match, which needs the extra ``broker``.

        Ids and offsets are unique in a process. With ``ordered=True`` a message has the offset of the failed message
        before it. Messages with equal headers ``nsqext_id`` are one message to an inbox.

        Args:
            value: the body, see `nsqext.app.encode_body`.
            channel: call only this channel's handlers.
            partition: number of the message's partition.
            attempts: number of deliveries of the message.
            handled: False if middleware must finish the message without a handler.

        Raises:
            InvalidInput: the app has no handler that receives it, or an invalid part of the message.
            InvalidSetting: a handler has ``ext_filter``, and the extra ``broker`` is not installed.
            InvalidState: a handler was not called, did not await a requeue, or was called despite ``handled=False``;
                the test has not begun, has ended, or runs on a cluster: publish the message instead.
            BaseException: of a handler, also `nsqext.Requeue` and `nsqext.Reject`.
        """
        if self._lookupd:
            raise InvalidState("deliver() is for tests without a cluster", hint="publish the message with app.publish")
        if not self._entered:
            raise InvalidState("the test has not begun, or has ended", hint="use 'async with app.test() as test'")
        check_flags(handled=handled)
        check_number("attempts", attempts, 1, _MOST_ATTEMPTS)
        check_partition(partition)
        check_trace_id(trace_id)
        if key is not None and not isinstance(key, str):
            raise InvalidInput(f"a key is received as text, not as {type(key).__name__}", topic=topic)
        specs = self._receivers(topic, channel, tag, partition)
        for spec in specs:
            options = self._app.options_of(spec)
            most = options.failure.max_attempts
            if 0 < most < attempts and (options.failure.reject_ordered or not options.ordered):
                raise InvalidInput(
                    f"no handler of channel {spec.channel} receives the message: it has max_attempts={most}",
                    topic=topic,
                )
        body = encode_body(value)
        if not body:
            raise InvalidBody("a body cannot be empty: no server delivers such a message", topic=topic)
        extended = bool(headers or tag is not None or key is not None)
        reserved = {} if key is None else {KEY_HEADER: key}
        header = encode_headers(headers, tag=tag, reserved=reserved) if extended else b""
        results = []
        for spec in self._matching(topic, specs, header):
            number = next(_numbers)
            options = self._app.options_of(spec)
            in_order = bool(options.ordered)
            message = Message(_TestOwner(topic, partition, in_order=in_order))  # type: ignore[abstract]
            message.id = pack(">QQ", number, trace_id)
            message.timestamp = time.time_ns()
            message.attempts = attempts
            message.version, message.header = EXT_JSON if extended else EXT_NONE, header
            message.offset, message.size = -1, 0
            place = topic, spec.channel, partition
            if options.queue_position or in_order:
                message.offset, message.size = _offsets[place], _MESSAGE_SIZE
            message.body = body
            if not in_order:
                _offsets[place] += _MESSAGE_SIZE
            results.append(await self._call(spec, message, handled=handled))
            if in_order:
                _offsets[place] += _MESSAGE_SIZE
        return results

    async def _call(self, spec: HandlerSpec, message: Message, *, handled: bool) -> object:
        """Call a handler, and check that its middleware did."""
        calls: list[None] = []
        result = await self._app.tested_handler_of(spec, lambda: calls.append(None))(message)
        check_awaited(result)
        if message.requeue_called and not message.answered and spec.auto_finish:
            raise requeue_not_awaited()
        if bool(calls) is handled:
            return result
        name = getattr(spec.function, "__qualname__", type(spec.function).__qualname__)
        if handled:
            raise InvalidState(
                f"the handler {name} of channel {spec.channel} was not called: its middleware has finished the message",
                topic=message.topic,
                hint="deliver(..., handled=False) expects that",
            )
        raise InvalidState(
            f"the handler {name} of channel {spec.channel} was called, despite handled=False", topic=message.topic
        )

    def _receivers(self, topic: str, channel: str | None, tag: str | None, partition: int) -> list[HandlerSpec]:
        """Return the handlers that receive messages of a partition with this tag; None is for no tag."""
        specs = [spec for spec in self._app.specs if spec.topics.matches(topic) and channel in (None, spec.channel)]
        if not specs:
            raise self._no_handler(topic, channel)
        options = [(spec, self._app.options_of(spec)) for spec in specs]
        tagged = [(spec, own.tag) for spec, own in options if own.partitions is None or partition in own.partitions]
        if not tagged:
            hint = "give partition=, of the handlers' setting partitions"
            raise InvalidInput(f"no handler receives messages of partition {partition}", topic=topic, hint=hint)
        with_tag = {spec.channel for spec, own in tagged if own == tag}
        found = [spec for spec, own in tagged if own == (tag if spec.channel in with_tag else None)]
        if not found:
            received = ", ".join(sorted({str(own) for _, own in tagged}))
            raise InvalidInput(
                f"no handler receives a message {'without a tag' if tag is None else f'with the tag {tag}'}",
                topic=topic,
                hint=f"tags of handlers: {received}; a consumer with a tag receives no other message",
            )
        return found

    def _matching(self, topic: str, specs: list[HandlerSpec], header: bytes) -> list[HandlerSpec]:
        """Return the handlers whose filter matches an extend header; empty bytes are no header."""
        filters = [(spec, self._app.options_of(spec).ext_filter) for spec in specs]
        found = [spec for spec, wanted in filters if wanted is None or _matches(wanted, header)]
        if not found:
            listed = ", ".join(repr(wanted) for _, wanted in filters)
            raise InvalidInput(
                "no handler receives a message with these headers", topic=topic, hint=f"filters of handlers: {listed}"
            )
        return found

    def _no_handler(self, topic: str, channel: str | None) -> InvalidInput:
        specs = self._app.specs
        channels = sorted({spec.channel for spec in specs if spec.topics.matches(topic)})
        known = channels or sorted({name for spec in specs for name in spec.topics.given})
        likely = suggest((channel or "") if channels else topic, known)
        guess = f"did you mean {likely!r}? " if likely else ""
        listed = f"{'channels' if channels else 'topics'} with handlers: {', '.join(known) or 'not any'}"
        return InvalidInput(f"the app has no handler of {topic}/{channel or '*'}", topic=topic, hint=guess + listed)

    def app_ended(self) -> None:
        """Note that the app has ended: there are no further publishes."""
        self._app_ended = True
        self.recorder.changed.wake()

    async def wait_published(self, topic: str, count: int = 1) -> list[Published]:
        """Return the publishes to a topic as soon as there are ``count``; bound it with `anyio.fail_after`.

        Raises:
            InvalidInput: an invalid topic or count.
            InvalidState: the app or the test has ended with fewer, or another event loop runs the test.
        """
        check_topic(topic)
        check_number("count", count, 1)
        if self._entered and current_token().native_token is not self._loop:
            raise InvalidState("another event loop runs the test", topic=topic, hint="wait in the loop that entered it")
        while True:
            found = [one for one in self.published if one.topic == topic]
            if len(found) >= count:
                return found
            if self._app_ended or not self._entered:
                ended = "the app" if self._app_ended else "the test"
                raise InvalidState(f"{ended} has ended with {len(found)} of {count} publishes", topic=topic)
            await self.recorder.changed.wait()


def _matches(wanted: ExtFilter, header: bytes) -> bool:
    """Return whether servers deliver a message with an extend header to a consumer with a filter."""
    try:
        from nsqext.broker.engine.header_filter import compile_filter
    except ModuleNotFoundError as error:
        raise InvalidSetting(f"ext_filter in a test needs {error.name}", hint="pip install 'nsqext[broker]'") from error
    matches = compile_filter(wanted.as_json())
    return matches is None or matches(Record(0, 0, 0, b"", EXT_JSON if header else EXT_NONE, header))


class _TestOwner(Owner):
    """A message's subscription, which ignores FIN, REQ and TOUCH."""

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

    def __init__(self, topic: str, partition: int, *, in_order: bool) -> None:
        self.topic = topic
        self.partition = partition
        self.in_order = in_order

    def expired(self, message: Message) -> bool:
        return False
