"""The consumer."""

from __future__ import annotations

import inspect
import logging
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import anyio
from anyio.abc import TaskGroup

from nsqext.client.flow import ReadyFlow
from nsqext.client.keeper import Keeper
from nsqext.client.message import Message
from nsqext.client.options import ConsumerOptions
from nsqext.client.subscription import Subscription
from nsqext.errors import InvalidSetting, InvalidState, MessageNotInFlight, NsqError
from nsqext.lookup.directory import Directory
from nsqext.protocol.names import check_channel, check_tag, check_topic

__all__ = ("Consumer",)

logger = logging.getLogger("nsqext.consumer")

Handler = Callable[[Message], Awaitable[object]]
H = TypeVar("H", bound=Handler)


class Consumer:
    """Consumes a topic through a channel, from the leaders of all its partitions.

    Either give it a handler and `run` it, or use it as an asynchronous context manager and iterate over it. Both work in
    asyncio and trio.

    Args:
        topic: name of the topic.
        channel: name of the channel.
        lookupd: lookup addresses, ``host:port`` of nsqlookupd's HTTP side; a list, or text with commas.
        nsqd: nsqd addresses (TCP) to consume from without lookup; fine for the original NSQ.
        tag: messages with this tag come here rather than to consumers without it, and no others do; on topics without extend
            support all messages come.
        max_in_flight: messages that may be here unanswered, over all connections.
        concurrency: handlers that run at the same time.
        options: everything else.

    Raises:
        InvalidName: a topic, channel or tag that no server takes.
        InvalidSetting: neither or both kinds of addresses, or a bad option.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        lookupd: str | Sequence[str] = (),
        nsqd: str | Sequence[str] = (),
        tag: str | None = None,
        max_in_flight: int = 200,
        concurrency: int = 1,
        options: ConsumerOptions | None = None,
    ) -> None:
        self.topic = check_topic(topic)
        self.channel = check_channel(channel)
        self.tag = None if tag is None else check_tag(tag)
        self.options = options or ConsumerOptions()
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise InvalidSetting(f"concurrency={concurrency!r} is not a positive number")
        self._concurrency = concurrency
        self._flow = ReadyFlow[Subscription](max_in_flight)
        self._directory = Directory(lookupd=lookupd, nsqd=nsqd, options=self.options.lookup)
        self._handler: Handler | None = None
        self._queue: deque[Message] = deque()
        self._wake = anyio.Event()
        self._error: NsqError | None = None
        self._stopping = False
        self._used = False
        self._keeper: Keeper | None = None
        self._tasks: TaskGroup | None = None
        self._scopes: list[anyio.CancelScope] = []
        self._workers = 0
        self._idle = anyio.Event()

    def handler(self, function: H) -> H:
        """Decorator: let a coroutine function handle the messages.

        When it returns, the message is finished, unless it was answered by hand; when it raises, the message is requeued
        with a delay that grows with its attempts.

        Raises:
            InvalidSetting: it is no coroutine function, or there is a handler already.
        """
        if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))):
            raise InvalidSetting(f"the handler {function!r} is not a coroutine function", hint="declare it with 'async def'")
        if self._handler is not None:
            raise InvalidSetting("the consumer has a handler already", topic=self.topic)
        self._handler = function
        return function

    async def run(self, *, signals: bool = True) -> None:
        """Consume with the handler until cancelled, until SIGTERM or SIGINT, or until `stop`; then drain and close.

        Args:
            signals: listen for SIGTERM and SIGINT, where this is the main thread.

        Raises:
            InvalidState: there is no handler, or the consumer was used before.
            LookupFailed: no lookup address gives a usable answer.
            ServerError: the server refuses the subscription for good.

        When it is cancelled, handlers that run may go on for ``options.grace`` seconds.
        """
        if self._handler is None:
            raise InvalidState("the consumer has no handler", hint="decorate a function with @consumer.handler")
        async with self:
            assert self._tasks is not None
            for _ in range(self._concurrency):
                self._workers += 1
                self._tasks.start_soon(self._shielded, self._work)
            if signals:
                self._tasks.start_soon(self._listen)
            while not self._stopping and self._error is None:
                await self._idle.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Let `run` drain and return, or end the iteration. May be called from handlers."""
        self._stopping = True
        self._idle.set()
        self._wake.set()

    # Iteration

    async def __aenter__(self) -> Self:
        if self._used:
            raise InvalidState("a consumer is used once", topic=self.topic, hint="make a new one")
        self._used = True
        self._keeper = Keeper(
            self.topic,
            self.channel,
            self.tag,
            self._flow,
            self._directory,
            self.options,
            self._arrived,
            self._fail,
        )
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._shielded, self._subscribe)
        self._tasks.start_soon(self._shielded, self._directory.run)
        try:
            with anyio.move_on_after(self.options.start_timeout):
                await self._keeper.started.wait()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        if self._error is not None:
            await self.__aexit__(None, None, None)
            raise self._error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        assert self._keeper is not None
        self._stopping = True
        try:
            with anyio.CancelScope(shield=True):
                await self._drain(self._keeper)
        finally:
            for scope in self._scopes:
                scope.cancel()
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Return the next message; the caller answers it.

        Raises:
            StopAsyncIteration: the consumer was stopped.
            InvalidState: the consumer is not open.
            NsqError: nothing further will come.
        """
        if self._tasks is None:
            raise InvalidState("the consumer is not open", hint="use it inside 'async with Consumer(...) as consumer'")
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self._stopping:
                raise StopAsyncIteration
            self._wake = anyio.Event()
            await self._wake.wait()
        return self._queue.popleft()

    # Inside

    async def _shielded(self, function: Callable[[], Awaitable[object]]) -> None:
        """Run a task that only `_drain` and its end may cancel, so that leaving is orderly."""
        with anyio.CancelScope(shield=True) as scope:
            self._scopes.append(scope)
            await function()

    async def _subscribe(self) -> None:
        assert self._keeper is not None
        try:
            async with anyio.create_task_group() as tasks:
                await self._keeper.run(tasks)
        except* NsqError as errors:
            self._fail(_first(errors))

    def _arrived(self, messages: list[Message]) -> None:
        if not self._stopping:
            self._queue.extend(messages)
            self._wake.set()

    def _fail(self, error: NsqError) -> None:
        if self._error is None:
            self._error = error
        if self._keeper is not None:
            self._keeper.started.set()
        self._wake.set()
        self._idle.set()

    async def _work(self) -> None:
        assert self._handler is not None
        assert self._keeper is not None
        handler, queue, keeper = self._handler, self._queue, self._keeper
        try:
            while not self._stopping:
                if not queue:
                    keeper.flush()
                    if self._wake.is_set():
                        self._wake = anyio.Event()
                    await self._wake.wait()
                    continue
                message = queue.popleft()
                try:
                    await handler(message)
                except Exception as error:
                    self._handler_failed(message, error)
                else:
                    if not message.answered:
                        message.finish_now()
        finally:
            self._workers -= 1
            self._idle.set()

    def _handler_failed(self, message: Message, error: Exception) -> None:
        where = {"topic": message.topic, "partition": message.partition, "attempts": message.attempts}
        logger.error("the handler failed on %r: %s", message, error, exc_info=error, extra=where)
        if message.answered or message.expired:
            return
        delay = min(self.options.requeue_delay * message.attempts, self.options.max_requeue_delay)
        assert self._tasks is not None
        if message.in_order and delay:
            self._tasks.start_soon(self._requeue_later, message, delay)
        else:
            message.requeue_now(delay)

    async def _requeue_later(self, message: Message, delay: float) -> None:
        """Wait here, because servers ignore the delay of a requeue on an ordered channel (captured: sub_ordered_requeue)."""
        await anyio.sleep(delay)
        try:
            await message.requeue()
        except MessageNotInFlight:
            logger.info("a message came back before its delay had passed: %r", message)

    async def _listen(self) -> None:
        try:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
                async for number in received:
                    logger.info("stopping on %s", signal.Signals(number).name)
                    self.stop()
        except (NotImplementedError, RuntimeError, ValueError):
            logger.debug("no signals outside of the main thread")

    async def _drain(self, keeper: Keeper) -> None:
        """RDY 0; handlers end; answers go out; CLS; then the sockets."""
        self._flow.paused = True
        keeper.level()
        keeper.flush()
        self._queue.clear()
        self._wake.set()
        with anyio.move_on_after(self.options.grace) as scope:
            while self._workers:
                self._idle = anyio.Event()
                if self._workers:
                    await self._idle.wait()
        if scope.cancelled_caught:
            logger.warning("handlers did not end within %g s", self.options.grace, extra={"topic": self.topic})
        await keeper.close()
        await self._directory.aclose()


def _first(errors: BaseExceptionGroup[NsqError]) -> NsqError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, NsqError)
    return error
