"""The blocking consumer."""

from __future__ import annotations

import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from nsqext.client.consumer.consumer import Consumer as AsyncConsumer
from nsqext.client.tasks import takes_signals
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.sync.loop import Opened, shared_loop
from nsqext.sync.message import Message

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message as AsyncMessage
    from nsqext.client.consumer.options import ConsumerOptions, KeyOf
    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.statistics import ConsumerConnection, ConsumerEvent, ConsumerStatistics
    from nsqext.lookup.metadata import Lookup

__all__ = ("Consumer",)

H = TypeVar("H", bound=Callable[[Message], object])

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Consumer(Opened):
    """Consumes a topic through a channel; see `nsqext.Consumer`.

    Either give it a handler and `run` it, or use it as a context manager and iterate over it.

    Args:
        topic: name of the topic.
        channel: name of the channel.
        lookupd: lookup addresses, ``host:port`` of nsqlookupd's HTTP side; a list, or text with commas. Or a
            `nsqext.Lookup` that others use as well.
        nsqd: nsqd addresses (TCP) to consume from without lookup; fine for the original NSQ.
        tag: messages with this tag come here rather than to consumers without it, and no others do; on topics without
            extend support all messages come.
        max_in_flight: messages that may be here unanswered, over all connections.
        concurrency: handlers that run at the same time, each in a thread of its own.
        options: everything else. A function that takes dead letters is a coroutine function here, too.
        key: overrides ``options.key``.
        dispatch: overrides ``options.dispatch``.

    Raises:
        InvalidName: a topic, channel or tag that no server takes.
        InvalidSetting: neither or both kinds of addresses, or a bad option.
    """

    _what = "consumer"

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        lookupd: str | Sequence[str] | Lookup = (),
        nsqd: str | Sequence[str] = (),
        tag: str | None = None,
        max_in_flight: int = 200,
        concurrency: int = 1,
        options: ConsumerOptions | None = None,
        key: str | KeyOf | None = None,
        dispatch: str | None = None,
    ) -> None:
        super().__init__()
        self._consumer = AsyncConsumer(
            topic,
            channel,
            lookupd=lookupd,
            nsqd=nsqd,
            tag=tag,
            max_in_flight=max_in_flight,
            concurrency=concurrency,
            options=options,
            key=key,
            dispatch=dispatch,
        )

    @classmethod
    def from_url(cls, topic: str, channel: str, url: str | None = None, **settings: Any) -> Self:
        """Return a consumer with settings from keywords, a URL and the environment; see `nsqext.Consumer.from_url`."""
        return cls.of(AsyncConsumer.from_url(topic, channel, url, **settings))

    @classmethod
    def of(cls, consumer: AsyncConsumer) -> Self:
        """Return a blocking consumer that consumes through an asynchronous one, which nobody may have opened."""
        made = cls.__new__(cls)
        Opened.__init__(made)
        made._consumer = consumer
        return made

    @property
    def topic(self) -> str:
        """The topic that is consumed."""
        return self._consumer.topic

    @property
    def channel(self) -> str:
        """The channel that it is consumed through."""
        return self._consumer.channel

    @property
    def options(self) -> ConsumerOptions:
        """The options it was made with."""
        return self._consumer.options

    def handler(self, function: H) -> H:
        """Decorator: let a function handle the messages, in worker threads.

        When it returns, the message is finished, unless it was answered by hand; when it raises, the message is
        requeued, see `nsqext.Consumer.handler`.

        Raises:
            InvalidSetting: it is a coroutine function, or there is a handler already.
        """
        call = type(function).__call__
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
            raise InvalidSetting(f"the handler {function!r} is a coroutine function", hint="use nsqext.Consumer for it")
        limiter: list[anyio.CapacityLimiter] = []

        @functools.wraps(function)
        async def handle(message: AsyncMessage) -> None:
            if self._portal is None:
                raise InvalidState("the consumer is not open", topic=message.topic)
            if not limiter:
                # the workers of the consumer limit how many there are
                limiter.append(anyio.CapacityLimiter(float("inf")))
            given = Message(message, self._portal)
            # a thread cannot be cancelled: one that outlives `close_timeout` is abandoned
            await anyio.to_thread.run_sync(function, given, abandon_on_cancel=True, limiter=limiter[0])

        self._consumer.handler(handle)
        return function

    def run(self, *, signals: bool | None = None) -> None:
        """Consume with the handler until SIGTERM or SIGINT, or until `stop`; then drain and close.

        Args:
            signals: whether to react to SIGTERM and SIGINT. By default, if this is the main thread and the program has
                no handler for SIGTERM. After the first signal both have their usual effect again.

        Errors are those of `nsqext.Consumer.run`; `InvalidState` as well where it is open already.
        """
        if self._portal is not None:
            raise InvalidState("the consumer is open already", topic=self.topic)
        with shared_loop.entered() as portal:
            self._portal = portal
            try:
                with self._signals() if takes_signals(signals) else nullcontext():
                    self._run(functools.partial(self._consumer.run, signals=False))
            finally:
                self._portal = None

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def restore() -> None:
            for number, action in before.items():
                signal.signal(number, action)

        def received(number: int, frame: FrameType | None) -> None:
            restore()
            self.stop()

        for number in _SIGNALS:
            signal.signal(number, received)
        try:
            yield
        finally:
            restore()

    def stop(self) -> None:
        """Let `run` drain and return, or end the iteration. May be called from handlers, and from any thread.

        Returns at once.
        """
        portal = self._portal
        if portal is None:
            self._consumer.stop()
            return
        # it has ended by itself where the loop takes nothing more
        with suppress(RuntimeError):
            portal.start_task_soon(self._consumer.stop)

    def pause(self) -> None:
        """Ask for no further messages, until `resume`; those that are here go on."""
        self._run_now(self._consumer.pause)

    def resume(self) -> None:
        """Ask for messages again."""
        self._run_now(self._consumer.resume)

    @property
    def paused(self) -> bool:
        """Whether no further messages are asked for."""
        return self._consumer.paused

    @property
    def max_in_flight(self) -> int:
        """Messages that may be here unanswered, over all connections; may be changed."""
        return self._consumer.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        if self._portal is None:
            self._consumer.max_in_flight = count
        else:
            self._run_now(lambda: setattr(self._consumer, "max_in_flight", count))

    @property
    def connections(self) -> tuple[ConsumerConnection, ...]:
        """The connections that work at the moment."""
        return self._run_now(lambda: self._consumer.connections)

    def statistics(self) -> ConsumerStatistics:
        """Return the open connections and the counters since the consumer was opened."""
        return self._run_now(self._consumer.statistics)

    def on_event(self, callback: Callable[[ConsumerEvent], object]) -> Callable[[ConsumerEvent], object]:
        """Decorator: call a function in the event loop's thread on events; see `nsqext.Consumer.on_event`."""
        return self._consumer.on_event(callback)

    def seek(self, position: Position, partitions: Sequence[int] | None = None) -> None:
        """Let the channel read on from a place, for all its consumers; see `nsqext.Consumer.seek`."""
        self._run(self._consumer.seek, position, partitions)

    def start(self) -> Self:
        """Open the consumer, as ``with`` does; `close` closes it, from any thread.

        With a handler it consumes in the background.

        Raises:
            InvalidState: it was opened before.
        """
        self._enter(self._consumer)
        return self

    def close(self) -> None:
        """Drain and close, see `nsqext.Consumer.aclose`; in a handler call `stop` instead, which does not wait for it.

        Does nothing before `start` and when called again.
        """
        self._exit(None, None, None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit(kind, error, trace)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        """Return the next message; the caller answers it.

        Raises:
            StopIteration: the consumer was stopped.
            InvalidState: the consumer is not open.
            NsqError: nothing further will come.
        """
        try:
            message = self._run(self._consumer.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None
        portal = self._portal
        if portal is None:
            raise InvalidState("the consumer was closed meanwhile", topic=self.topic)
        return Message(message, portal)
