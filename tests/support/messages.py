"""Messages: received from a consumer with a deadline, or created without a connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from struct import pack
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import anyio

from nsqext.client.consumer.handlers.iteration import MessageIteration
from nsqext.client.consumer.handlers.workers import ConsumerState, MessageQueue
from nsqext.client.consumer.message import KeySharing, Message
from nsqext.protocol.headers import encode_headers
from nsqext.protocol.messages import DUE_HEADER, EXT_JSON, EXT_NONE, KEY_HEADER

if TYPE_CHECKING:
    from nsqext import Consumer, Receipt
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup

__all__ = (
    "DEADLINE",
    "RecordingOwner",
    "finish_all",
    "iteration",
    "make_message",
    "nothing_for",
    "placed",
    "share_of_a_late_consumer",
    "subscribed",
    "take",
)

DEADLINE = 25.0
"""Seconds; the real server may deliver the last message of a partition some seconds late."""


def placed(receipt: Receipt) -> tuple[int, int, int]:
    """Return message id, offset and size of the receipt of a traced publish."""
    assert receipt.message_id is not None
    assert receipt.offset is not None
    assert receipt.size is not None
    return receipt.message_id, receipt.offset, receipt.size


async def take(consumer: Consumer, count: int) -> list[Message]:
    """Return the next messages without finishing them."""
    messages: list[Message] = []
    with anyio.fail_after(DEADLINE):
        while len(messages) < count:
            messages.append(await anext(consumer))
    return messages


async def finish_all(consumer: Consumer, count: int) -> list[Message]:
    """Receive and finish messages one by one; return them."""
    messages: list[Message] = []
    for _ in range(count):
        messages += await take(consumer, 1)
        await messages[-1].finish()
    return messages


async def nothing_for(consumer: Consumer, seconds: float) -> bool:
    """Return whether no message is received for some seconds."""
    with anyio.move_on_after(seconds):
        await anext(consumer)
        return False
    return True


@asynccontextmanager
async def subscribed(*consumers: Consumer) -> AsyncIterator[None]:
    """Open consumers, so that their channels start at the current end of the topic."""
    if not consumers:
        yield
        return
    async with consumers[0], subscribed(*consumers[1:]):
        yield


async def share_of_a_late_consumer(
    make: Callable[[], Consumer], publish: Callable[[list[bytes]], Awaitable[object]]
) -> int:
    """Start a second consumer after the first has handled 15 of 150 messages (20 ms each); return its share.

    The first one waits until the second one has subscribed: how long that takes does not change the share.

    Args:
        make: creates a consumer of the channel.
        publish: publishes messages.
    """
    counts = [0, 0]
    consumers = [make(), make()]
    late, joined = anyio.Event(), anyio.Event()

    def handler_of(position: int) -> Callable[[Message], Awaitable[None]]:
        async def handle(message: Message) -> None:
            await anyio.sleep(0.02)
            counts[position] += 1
            if not position and counts[0] >= 15:
                late.set()
                await joined.wait()
            if sum(counts) >= 150:
                for consumer in consumers:
                    consumer.stop()

        return handle

    for position, consumer in enumerate(consumers):
        consumer.handler(handler_of(position))
    with anyio.fail_after(DEADLINE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consumers[0].serve)
            while not consumers[0].connections:  # noqa: ASYNC110 - there is no event for an open consumer
                await anyio.sleep(0.01)
            await publish([b"x"] * 150)
            await late.wait()
            tasks.start_soon(consumers[1].serve)
            while not consumers[1].connections:  # noqa: ASYNC110 - as above
                await anyio.sleep(0.01)
            joined.set()
    return counts[1]


class RecordingOwner:
    """Fake subscription that records the commands for its messages."""

    topic: str = "t"
    partition: int | None = 3
    node: str = "127.0.0.1:4150"

    def __init__(self, *, in_order: bool = False) -> None:
        self.in_order: bool = in_order
        self.original: bool = False
        self.moved: bool = False
        self.taking_over: bool = False
        self.key_sharing: KeySharing = KeySharing.NONE
        self.number: int = 1
        self.ready: int = 1
        self.horizon: float = float("-inf")
        self.msg_timeout: float = 60.0
        self.max_msg_timeout: float = 900.0
        self.ignore_lost: bool = False
        self.commands: list[str] = []
        self.refusal: Exception | None = None

    def _record(self, line: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.commands.append(line)

    def finish(self, message: Message) -> None:
        """Record FIN."""
        self._record(f"FIN {message.internal_id}")

    def requeue(self, message: Message, delay: float, *, backoff: bool | None) -> None:
        """Record REQ, with ``!`` after a failed handler."""
        self._record(f"REQ {message.internal_id} {delay:g}{'!' if backoff else ''}")

    def touch(self, message: Message) -> None:
        """Record TOUCH."""
        self._record(f"TOUCH {message.internal_id}")

    def record_outcome(self, failed: bool) -> None:
        """Record the outcome of a handler."""
        self._record("failed" if failed else "passed")

    def expired(self, message: Message) -> bool:
        """Return whether the message was received before the horizon."""
        return message.received < self.horizon

    def reset(self, reason: str) -> None:
        """Record a request to close the connection."""
        self._record("reset")


def iteration() -> MessageIteration:
    """Return the iteration over a consumer without connections, which holds messages."""
    parts = {"backoff": SimpleNamespace(state="running"), "flow": SimpleNamespace(paused=False), "subscriptions": []}
    group = cast("SubscriptionGroup", SimpleNamespace(tasks=None, fit_windows=list, flush=list, **parts))
    return MessageIteration(ConsumerState(opened=True), MessageQueue(), group, lambda: 0)


def make_message(
    owner: RecordingOwner,
    number: int = 1,
    body: bytes = b"body",
    *,
    attempts: int = 1,
    offset: int = -1,
    headers: dict[str, str] | None = None,
    tag: str | None = None,
    key: str | None = None,
    trace_id: int = 0,
    timestamp: int = 0,
    due: int | str | None = None,
) -> Message:
    """Return a received message."""
    message = Message(owner)
    message.id = pack(">QQ", number, trace_id)
    message.timestamp = timestamp
    message.attempts = attempts
    reserved = {} if key is None else {KEY_HEADER: key}
    if due is not None:
        reserved[DUE_HEADER] = str(due)
    extended = bool(headers or tag or reserved)
    message.version = EXT_JSON if extended else EXT_NONE
    message.header = encode_headers(headers, tag=tag, reserved=reserved) if extended else b""
    message.offset, message.size = offset, 0 if offset < 0 else 30 + len(body)
    message.body = body
    return message
