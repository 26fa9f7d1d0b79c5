"""The blocking consumer."""

from __future__ import annotations

import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext, suppress
from contextvars import copy_context
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, SupportsFloat, TypeVar, Unpack, overload

from nsqext.arguments import is_coroutine_function
from nsqext.client.consumer.blocking import LeftThreads, in_thread
from nsqext.client.consumer.consume_port import ConsumePort
from nsqext.client.consumer.consumer import Consumer as AsyncConsumer
from nsqext.client.consumer.handler_functions import check_handler_function, stand_in
from nsqext.client.consumer.handlers.forgotten_await import check_awaited
from nsqext.client.consumer.handlers.unused_result import UnusedResult
from nsqext.client.consumer.message import Message as AsyncMessage
from nsqext.client.consumer.message import requeue_unanswered
from nsqext.client.signals import stopping_on_signals, takes_signals
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.sync.loop import BlockingClient, Method, OpenLoop, Same, shared_loop
from nsqext.sync.message import AnswerQueue, Message, MessageBatch

if TYPE_CHECKING:
    from nsqext import ConsumerConnection
    from nsqext.client.consumer.handlers.batches import MessageBatch as AsyncMessageBatch
    from nsqext.client.consumer.handlers.batches import MessageBatches
    from nsqext.client.consumer.handlers.workers import MessageQueue, Slot
    from nsqext.client.consumer.settings import ConsumerSettings
    from nsqext.client.events import ClientEvent
    from nsqext.client.middleware import Middleware
    from nsqext.lookup.lookup import Lookup

Result = Sized | SupportsFloat | None
"""Results of handlers, which are ignored; types cannot say "anything but a coroutine"."""

H = TypeVar("H", bound=Callable[..., Result])
B = TypeVar("B", bound=Callable[[MessageBatch], Result])


class Consumer(BlockingClient[AsyncConsumer]):
    """Consumes topics through a channel, with the arguments and errors of `nsqext.Consumer`.

    Register a handler and `run` it, or use it as a context manager and iterate over it. Middleware, and a coroutine
    function for dead letters, run in the event loop's thread. With an inbox or positions, a close waits for running
    handlers beyond ``close_timeout``.
    """

    _what = "consumer"

    def __init__(
        self,
        topics: str | Sequence[str],
        channel: str,
        lookupd: str | Sequence[str] | Lookup = (),
        *,
        nsqd: str | Sequence[str] = (),
        env: str | None = None,
        middleware: Sequence[Middleware] = (),
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        super().__init__(AsyncConsumer(topics, channel, lookupd, nsqd=nsqd, env=env, middleware=middleware, **settings))
        self._port = ConsumePort(self._original)
        # a handler that is left running would use a connection that is rolled back, and then belongs to others
        self._threads = None if any(one.opens_transaction for one in middleware) else LeftThreads()
        if self._threads is not None:
            self._port.when_cancelled(self._threads.leave)  # after `close_timeout`
        self._fetched = threading.local()  # the batches of each thread that may be in flight, while the thread runs
        self._running = False
        self._answers: AnswerQueue | None = None

    @property
    def topics(self) -> tuple[str, ...]:
        """Names and patterns of the topics; changeable at any time, see `nsqext.Consumer.topics`."""
        return self._original.topics

    @topics.setter
    def topics(self, topics: str | Sequence[str]) -> None:
        self._set("topics", topics)

    channel: Same[str] = Same()
    tag: Same[str | None] = Same()
    settings: Same[Mapping[str, object]] = Same()
    paused: Same[bool] = Same()
    paused_topics: Same[frozenset[str]] = Same()
    is_starved: Same[bool] = Same()
    subscribed: Same[bool] = Same()

    @overload
    def handler(self, function: H, /) -> H: ...

    @overload
    def handler(self, /, *, auto_finish: bool = True) -> Callable[[H], H]: ...

    def handler(self, function: H | None = None, /, *, auto_finish: bool = True) -> H | Callable[[H], H]:
        """Decorator: register a handler of messages, run in worker threads; see `nsqext.Consumer.handler`.

        With ``auto_finish=False`` any thread answers a message later.

        Raises:
            InvalidSetting: a coroutine function, a generator, a parameter without known source, or a second handler.
            InvalidState: the consumer was opened before.
        """

        def register(function: H) -> H:
            in_thread = self._in_thread(function)

            @functools.wraps(function)  # annotations select the arguments
            async def handle(*arguments: object, **named: object) -> object:
                return await in_thread(
                    *map(self._blocking, arguments), **{name: self._blocking(value) for name, value in named.items()}
                )

            stand_in(handle, in_thread)
            self._original.handler(auto_finish=auto_finish)(handle)
            self._port.handle_bursts(handle, self._bursts(function, auto_finish))
            return function

        return register if function is None else register(function)

    def batch_handler(self, *, max_count: int = 500, max_wait: float = 0.2) -> Callable[[B], B]:
        """Decorator: register a handler of batches, run in worker threads; see `nsqext.Consumer.batch_handler`."""
        decorate = self._original.batch_handler(max_count=max_count, max_wait=max_wait)

        def register(function: B) -> B:
            in_thread = self._in_thread(function)

            @functools.wraps(function)
            async def handle(batch: AsyncMessageBatch) -> object:
                return await in_thread(MessageBatch(batch, self._opened()))

            stand_in(handle, in_thread)
            decorate(handle)
            return function

        return register

    def _blocking(self, argument: object) -> object:
        """Return a handler's argument, a message in its blocking form."""
        return Message(argument, self._opened()) if isinstance(argument, AsyncMessage) else argument

    def _in_thread(self, function: Callable[..., object]) -> Callable[..., Coroutine[Any, Any, object]]:
        """Return a coroutine function that calls a handler in a worker thread."""
        if not callable(function):
            raise InvalidSetting(f"the handler {function!r} is not a function", hint="declare it with 'def'")
        if is_coroutine_function(function):
            raise InvalidSetting(f"the handler {function!r} is a coroutine function", hint="use nsqext.Consumer for it")
        check_handler_function(function)
        return in_thread(function, self._threads)

    def _bursts(self, function: Callable[..., object], auto_finish: bool) -> Callable[..., Awaitable[object]]:
        """Return a coroutine function that handles a queue's messages in a worker thread, until a call fails.

        A hand-over to the thread per message would cost twenty times an empty handler.
        """

        unused = UnusedResult(function)

        def handle(slot: Slot, queue: MessageQueue) -> None:
            answers, context = self._opened(), copy_context()
            message = slot.message
            while message is not None:
                result = context.copy().run(function, Message(message, answers))
                if result is not None:
                    check_awaited(result)
                    unused(result)
                if not (message.answered or auto_finish):
                    return
                following = queue.take_ready()
                if following is None:
                    return
                slot.message, finished = following, message
                if not finished.answered:
                    answers.finish_now(finished)
                message = following

        return self._in_thread(handle)

    def _opened(self) -> AnswerQueue:
        portal, answers = self._portal, self._answers
        if portal is None:
            raise InvalidState("the consumer is not open", topic=",".join(self.topics))
        if answers is None:  # a consumer is opened once
            answers = self._answers = AnswerQueue(portal, self._port)
        return answers

    def run(self, *, signals: bool | None = None) -> None:
        """Consume with the handler until SIGTERM or SIGINT, or until `stop`; then drain and close.

        Args:
            signals: see `nsqext.Consumer.serve`.

        Raises the errors of `nsqext.Consumer.serve`, and `InvalidState` if the consumer is open already.
        """
        if self._portal is not None:
            raise InvalidState("the consumer is open already", topic=",".join(self.topics))
        with OpenLoop() as portal:
            self._portal = portal
            self._running = True
            try:
                with stopping_on_signals(self.stop) if takes_signals(signals) else nullcontext():
                    self._run(self._original.serve, signals=False)
            finally:
                self._portal = None
                self._running = False

    def stop(self) -> None:
        """Make `run` drain and return, or end the iteration; does not wait, for handlers and any thread."""
        portal = self._portal
        if portal is None:
            self._original.stop()
            return
        # RuntimeError: the event loop has ended
        with suppress(RuntimeError):
            portal.start_task_soon(self._original.stop)

    pause: Final = Method(AsyncConsumer.pause)
    resume: Final = Method(AsyncConsumer.resume)

    @property
    def max_in_flight(self) -> int:
        """See `nsqext.Consumer.max_in_flight`."""
        return self._original.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self._set("max_in_flight", count)

    def _set(self, name: str, value: object) -> None:
        change = functools.partial(setattr, self._original, name, value)
        if self._portal is None:
            change()
        else:
            self._run_now(change)

    @property
    def connections(self) -> tuple[ConsumerConnection, ...]:
        """The open connections."""
        return self._run_now(lambda: self._original.connections)

    statistics: Final = Method(AsyncConsumer.statistics)
    seek: Final = Method(AsyncConsumer.seek)

    def on_event(self, callback: Callable[[ClientEvent], object]) -> Callable[[ClientEvent], object]:
        """Decorator: call a function in the event loop's thread on events; see `nsqext.Consumer.on_event`."""
        return self._original.on_event(callback)

    def start(self) -> Self:
        """Open the consumer, as ``with`` does, with a handler in the background; `close` closes it, in any thread.

        Raises:
            InvalidState: it was opened before.
            NsqError: it cannot start, as for `nsqext.Consumer.serve`.
        """
        self._enter()
        return self

    def close(self) -> None:
        """Drain and close, see `nsqext.Consumer.aclose`; in a handler call `stop`, which does not wait.

        Without effect before `start` and when called again. During `run` it is `stop`.
        """
        if self._running:
            self.stop()
            return
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # this thread cannot answer messages while it waits for the close
        unanswered = [message for batch in vars(self._fetched).pop("batches", ()) for message in batch.unanswered]
        if unanswered and self._portal is not None:
            with suppress(InvalidState):
                # RDY 0 first: otherwise the server redelivers them to this consumer
                self._run_now(self._original.pause)
                self._run_now(functools.partial(requeue_unanswered, unanswered))
        super().__exit__(kind, error, trace)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        """Return the next message, as `nsqext.Consumer.__anext__`; raises StopIteration if it was stopped."""
        portal = self._portal
        if portal is not None and portal not in shared_loop.orphaned:
            ready = self._port.take_ready()
            if ready is not None:
                return Message(ready, self._opened())
        try:
            message = self._run(self._original.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None
        return Message(message, self._opened())

    def batches(self, *, max_count: int = 500, max_wait: float = 0.2) -> Iterator[MessageBatch]:
        """Iterate over batches of messages; see `nsqext.Consumer.batches`.

        ``break`` or an exception in the loop requeues the unanswered messages of its batch.
        """
        return self._iterate(self._original.batches(max_count=max_count, max_wait=max_wait))

    def _iterate(self, batches: MessageBatches) -> Iterator[MessageBatch]:
        try:
            while True:
                try:
                    batch = self._run(batches.__anext__)
                except StopAsyncIteration:
                    return
                yield MessageBatch(batch, self._opened())
        finally:
            if self._portal is not None and self._portal not in shared_loop.orphaned:
                with suppress(InvalidState):  # the closed consumer has requeued them
                    self._run(batches.aclose)

    def fetch(self, n: int, timeout: float | None = None) -> MessageBatch:
        """Return at most ``n`` messages; see `nsqext.Consumer.fetch`.

        An exception in the waiting thread, such as KeyboardInterrupt, requeues the messages that arrive at this moment.
        """
        arrived: list[AsyncMessageBatch] = []
        interrupted = False

        async def fetch() -> AsyncMessageBatch:
            batch = await self._original.fetch(n, timeout)
            arrived.append(batch)
            if interrupted:
                requeue_unanswered(batch)
            return batch

        try:
            batch = self._run(fetch)
        except BaseException:
            interrupted = True
            for lost in arrived:
                self._run_now(functools.partial(requeue_unanswered, lost))
            raise
        earlier: list[AsyncMessageBatch] = getattr(self._fetched, "batches", [])
        kept = [one for one in earlier if any(message.in_flight for message in one)]
        self._fetched.batches = [*kept, batch]
        return MessageBatch(batch, self._opened())
