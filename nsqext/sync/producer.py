"""The blocking producer."""

from __future__ import annotations

import atexit
import functools
import logging
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Never, Self, Unpack

from nsqext.arguments import refuse_unknown
from nsqext.client.producer.batcher import Batcher as AsyncBatcher
from nsqext.client.producer.producer import Producer as AsyncProducer
from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.errors import InvalidState
from nsqext.sync.direct import DirectPublisher
from nsqext.sync.loop import BlockingClient, Method, Same, call, shared_loop

if TYPE_CHECKING:
    from nsqext.client.events import ClientEvent
    from nsqext.client.middleware import Middleware
    from nsqext.client.producer.settings import ProducerSettings
    from nsqext.client.producer.statistics import ProducerStatistics
    from nsqext.lookup.lookup import Lookup
    from nsqext.types import Receipt

logger: logging.Logger = logging.getLogger("nsqext.sync")


class Producer(BlockingClient[AsyncProducer]):
    """Publishes messages to their partitions' leaders, with the arguments and errors of `nsqext.Producer`.

    Use it as a context manager, whose exit waits for pending publishes and closes the connections. A producer serves
    any number of topics and threads. Middleware runs in the event loop's thread.
    """

    _what = "producer"
    _direct: DirectPublisher | None = None

    def __init__(
        self,
        lookupd: str | Sequence[str] | Lookup = (),
        *,
        nsqd: str | Sequence[str] = (),
        env: str | None = None,
        middleware: Sequence[Middleware] = (),
        **settings: Unpack[ProducerSettings],
    ) -> None:
        super().__init__(AsyncProducer(lookupd, nsqd=nsqd, env=env, middleware=middleware, **settings))

    settings: Same[Mapping[str, object]] = Same()

    def start(self) -> Self:
        """Open the producer, as ``with`` does; `close` closes it, in any thread.

        Raises:
            InvalidState: it was opened before.
            NsqError: with ``connect``, as for `nsqext.Producer.start`.
        """
        self._enter()
        portal, closing = self._portal, self._closing
        if portal is not None and closing is not None:
            self._direct = direct = self._run_now(lambda: DirectPublisher(self._original, portal))
            closing.callback(direct.close)
        return self

    def close(self) -> None:
        """Close as `nsqext.Producer.aclose`; without effect before `start` and when called again."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        direct = self._direct  # its counters stay
        if direct is not None and self._portal in shared_loop.orphaned:
            direct.close()
        super().__exit__(kind, error, trace)

    ping: Final = Method(AsyncProducer.ping)
    meta: Final = Method(AsyncProducer.meta)
    cancel_delayed: Final = Method(AsyncProducer.cancel_delayed)

    def statistics(self) -> ProducerStatistics:
        """See `nsqext.Producer.statistics`."""
        statistics, direct = self._original.statistics(), self._direct
        return statistics if direct is None else direct.add_to(statistics)

    def on_event(self, callback: Callable[[ClientEvent], object]) -> Callable[[ClientEvent], object]:
        """Decorator: call a function in the event loop's thread on events; see `nsqext.Producer.on_event`."""
        return self._original.on_event(callback)

    def publish(
        self,
        topic: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        tag: str | None = None,
        trace_id: int | None = None,
        key: str | bytes | int | None = None,
        partition: int | None = None,
        delay: float | None = None,
        via: Literal["consumer", "relay"] | None = None,
        identity: str | None = None,
        header: bytes | None = None,
        **unknown: Never,
    ) -> Receipt:
        """Publish a message and wait until it is stored; see `nsqext.Producer.publish`.

        After an exception in the waiting thread, such as KeyboardInterrupt, the message may be stored or not.
        """
        if unknown:
            refuse_unknown(Producer.publish, unknown)
        direct = self._direct
        rare = delay is not None or via is not None or identity is not None or header is not None
        if direct is not None and key is None and not rare:
            receipt = direct.publish(topic, OutgoingMessage(body, headers, tag, trace_id), partition)
            if receipt is not None:
                return receipt
        return self._run(
            self._original.publish,
            topic,
            body,
            headers=headers,
            tag=tag,
            trace_id=trace_id,
            key=key,
            partition=partition,
            delay=delay,
            via=via,
            identity=identity,
            header=header,
        )

    def publish_many(
        self,
        topic: str,
        messages: Iterable[bytes | OutgoingMessage],
        *,
        key: str | bytes | int | None = None,
        partition: int | None = None,
        trace_ids: Sequence[int] = (),
        headers: Mapping[str, Sequence[str]] | None = None,
        **unknown: Never,
    ) -> list[Receipt]:
        """Publish messages in batches, much faster than single publishes; see `nsqext.Producer.publish_many`."""
        if unknown:
            refuse_unknown(Producer.publish_many, unknown)
        # the caller's iterable may block, which the event loop's thread must not
        from nsqext.client.producer.batch import check_arguments  # few programs publish batches

        listed = list(check_arguments(messages, topic, trace_ids, headers or {}))
        direct = self._direct
        if direct is not None and key is None and not headers:
            receipts = direct.publish_many(topic, listed, partition, trace_ids)
            if receipts is not None:
                return receipts
        return self._run(
            self._original.publish_many,
            topic,
            listed,
            key=key,
            partition=partition,
            trace_ids=trace_ids,
            headers=headers,
        )

    def batcher(
        self,
        topic: str,
        *,
        linger: float = 0.005,
        max_count: int = 1000,
        max_bytes: int = 1 << 20,
        max_pending: int = 10_000,
        drain_at_exit: bool = False,
    ) -> Batcher:
        """Return a batcher, which publishes single messages in batches in the background.

        Use it as a context manager inside the producer's; see `nsqext.Producer.batcher`.

        Args:
            drain_at_exit: if the program ends without closing the batcher, publish what is pending, for at most the
                producer's ``close_timeout``. A warning counts the rest.
        """
        make = functools.partial(
            self._original.batcher,
            topic,
            linger=linger,
            max_count=max_count,
            max_bytes=max_bytes,
            max_pending=max_pending,
        )
        batcher = self._run_now(make)
        return Batcher(batcher, self, self._original.aclose if drain_at_exit else None)


class Batcher(BlockingClient[AsyncBatcher]):
    """Publishes single messages in batches; see `nsqext.Batcher`. Made by `Producer.batcher`."""

    _what = "batcher"

    def __init__(
        self,
        batcher: AsyncBatcher,
        producer: Producer,
        drain: Callable[[], Coroutine[Any, Any, None]] | None,
    ) -> None:
        super().__init__(batcher)
        self._producer = producer
        self._shared = producer._portal
        self._drain = drain

    def __enter__(self) -> Self:
        if self._portal is not None:
            raise InvalidState("the batcher is open already")
        # no task that lasts until the exit: the producer, which may be closed before, would wait for it
        call(self._shared, self._what, self._original.__aenter__)
        self._portal = self._shared
        atexit.register(self._exit_of_program)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        portal, self._portal = self._portal, None
        atexit.unregister(self._exit_of_program)
        if portal not in shared_loop.orphaned:  # otherwise the parent process closes it
            call(portal, self._what, self._original.__aexit__, kind, error, trace)

    def _exit_of_program(self) -> None:
        """Publish what is pending, if requested; warn about lost messages."""
        if self._portal in shared_loop.orphaned:
            return
        if self._drain is not None and self.pending:
            with suppress(InvalidState):  # its event loop has ended
                call(self._portal, self._what, self._drain)
        lost = self.pending + len(self._original.take_failed())
        if lost:
            text = f"{lost} messages of a batcher were not published, because the program ended before it was closed"
            logger.warning("%s", text)
            warnings.warn(text, ResourceWarning, source=self, stacklevel=1)
        self._portal = self._producer._portal = None  # nothing to warn about any more

    pending: Same[int] = Same()
    add: Final = Method(AsyncBatcher.add)
    publish: Final = Method(AsyncBatcher.publish)
    flush: Final = Method(AsyncBatcher.flush)
    take_failed: Final = Method(AsyncBatcher.take_failed)
