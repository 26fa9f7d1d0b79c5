"""Messages and batches of a blocking consumer; the event loop sends the answers of threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from nsqext.client.consumer.handlers.batches import MessageBatch as AsyncMessageBatch
from nsqext.client.consumer.handlers.batches import MessageSequence
from nsqext.client.consumer.message import Message as AsyncMessage
from nsqext.errors import InvalidInput, InvalidState
from nsqext.sync.loop import Method, Same, call, shared_loop

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from nsqext.client.consumer.consume_port import ConsumePort

T = TypeVar("T")


class AnswerQueue:
    """Finished messages of all threads; several wake the event loop once."""

    __slots__ = ("_due", "_finished", "_port", "portal")

    def __init__(self, portal: BlockingPortal, port: ConsumePort) -> None:
        self.portal: BlockingPortal = portal
        self._port = port
        self._finished: deque[AsyncMessage] = deque()
        self._due = False

    def finish(self, message: AsyncMessage) -> None:
        """Finish a message as `nsqext.Message.finish`, without waiting for the event loop."""
        if message.answered or message.expired or self.portal in shared_loop.orphaned:
            call(self.portal, "consumer", message.finish)  # raises, or ignores it
        else:
            self.finish_now(message)

    def finish_now(self, message: AsyncMessage) -> None:
        """Finish a message after its handler returned, in flight or not; raises InvalidState."""
        message.answered = True
        self._finished.append(message)
        if not self._due:
            self._due = True
            try:
                self._port.call_soon(self._send)
            except RuntimeError as error:
                raise InvalidState(f"the consumer cannot be used: {error}", hint="it was closed") from error

    def _send(self) -> None:
        self._due = False  # first: a thread that adds a message from now on calls again
        finished = self._finished
        while finished:
            finished.popleft().finish_now()


class Message:
    """A received message, with the members of `nsqext.Message`."""

    __slots__ = ("_answers", "_original")

    def __init__(self, message: AsyncMessage, answers: AnswerQueue) -> None:
        self._original = message
        self._answers = answers

    topic: Same[str] = Same()
    partition: Same[int] = Same()
    node: Same[str] = Same()
    in_order: Same[bool] = Same()
    body: Same[bytes] = Same()
    headers: Same[Mapping[str, Any]] = Same()
    reserved_headers: Same[Mapping[str, Any]] = Same()
    key: Same[str | None] = Same()
    tag: Same[str | None] = Same()
    attempts: Same[int] = Same()
    timestamp: Same[int] = Same()
    id: Same[bytes] = Same()
    internal_id: Same[int] = Same()
    trace_id: Same[int] = Same()
    offset: Same[int] = Same()
    size: Same[int] = Same()
    expired: Same[bool] = Same()
    in_flight: Same[bool] = Same()

    @property
    def answered(self) -> bool:
        """See `nsqext.Message.answered`."""
        return self._original.answered

    def header_value(self, name: str) -> str | None:
        """See `nsqext.Message.header_value`."""
        return self._original.header_value(name)

    def finish(self) -> None:
        """See `nsqext.Message.finish`."""
        self._answers.finish(self._original)

    requeue: Final = Method(AsyncMessage.requeue)
    touch: Final = Method(AsyncMessage.touch)

    def _run(self, function: Callable[..., Coroutine[Any, Any, T]], /, *args: object, **keywords: object) -> T:
        return call(self._answers.portal, "consumer", function, *args, **keywords)

    def __repr__(self) -> str:
        return repr(self._original)


class MessageBatch(MessageSequence[Message]):
    """Messages handled together, in the order received; see `nsqext.MessageBatch`."""

    __slots__ = ("_original", "_portal")

    def __init__(self, batch: AsyncMessageBatch, answers: AnswerQueue) -> None:
        super().__init__([Message(message, answers) for message in batch])
        self._original = batch
        self._portal = answers.portal

    finish: Final = Method(AsyncMessageBatch.finish)

    def _run(self, function: Callable[..., Coroutine[Any, Any, T]], /, *args: object, **keywords: object) -> T:
        return call(self._portal, "consumer", function, *args, **keywords)

    def finish_up_to(self, last: Message | int) -> None:
        """See `nsqext.MessageBatch.finish_up_to`."""
        self._run(self._original.finish_up_to, last._original if isinstance(last, Message) else last)

    def requeue(self, messages: Iterable[Message] | None = None, delay: float = 0.0, *, backoff: bool = False) -> None:
        """See `nsqext.MessageBatch.requeue`."""
        chosen = None if messages is None else [_asynchronous(message) for message in messages]
        self._run(self._original.requeue, chosen, delay, backoff=backoff)

    def __repr__(self) -> str:
        return repr(self._original)


def _asynchronous(message: object) -> AsyncMessage:
    if not isinstance(message, Message):
        raise InvalidInput(f"{message!r} is not a message of the batch")
    return message._original
