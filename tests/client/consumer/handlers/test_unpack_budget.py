"""The bound of unpacked bytes of compressed messages in flight, measured by the bodies in handlers."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext import Consumer, Message, OutgoingMessage, Producer
from nsqext.client.consumer.unpacking import UnpackBudget
from nsqext.protocol.client.body_compression import COMPRESS_HEADER, SIZE_HEADER, compress_body
from tests.support.consumers import eventually, quick, running
from tests.support.messages import RecordingOwner, make_message

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio

SIZE = 100_000
COUNT = 20
BOUND = 3 * SIZE


def compressed(number: int) -> OutgoingMessage:
    packed = compress_body("gzip", b"%06d" % number + bytes(SIZE - 6))
    assert packed is not None
    body, headers = packed
    return OutgoingMessage(body, headers=headers, key=f"key{number}")


async def fill(cluster: Cluster) -> str:
    """Return a fresh topic with compressed messages."""
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, partitions=2, extend=True, channels=["ch"])
    async with Producer(cluster.lookupd) as producer:
        await producer.publish_many(topic, [compressed(number) for number in range(COUNT)])
    return topic


def unpacking(cluster: Cluster, topic: str, bound: int = BOUND, **members: Any) -> Consumer:
    options = quick(max_unpacked_bytes=bound)
    return Consumer(topic, "ch", lookupd=cluster.lookupd, **options, **members)


class Meter:
    """Counts the bytes of the bodies in handlers."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.seen: set[bytes] = set()

    async def hold(self, *messages: Message) -> None:
        """Hold bodies until no other task can run."""
        size = sum(len(message.body) for message in messages)
        self.now += size
        self.most = max(self.most, self.now)
        await anyio.sleep(0.02)
        self.now -= size
        self.seen |= {message.body[:6] for message in messages}


async def test_a_message_waits_for_the_budget_unless_it_has_reserved_its_bytes() -> None:
    owner, budget = RecordingOwner(), UnpackBudget(10)
    one, two, free = (make_message(owner, number, b"x" * 9) for number in range(3))
    one.budget = two.budget = budget
    assert [one.try_unpack(), two.try_unpack(), one.try_unpack(), free.try_unpack()] == [True, False, True, True]
    assert (budget.holds(one), budget.holds(two), budget.used) == (True, False, 9)


@pytest.mark.parametrize("members", [{}, {"key": lambda message: message.body[:6]}])
async def test_handlers_have_no_more_unpacked_bytes_than_the_bound(cluster: Cluster, members: dict[str, Any]) -> None:
    topic, meter = await fill(cluster), Meter()
    consumer = unpacking(cluster, topic, concurrency=COUNT, **members)

    @consumer.handler
    async def handle(message: Message) -> None:
        await meter.hold(message)

    await running(consumer, lambda: eventually(lambda: len(meter.seen) == COUNT, 30.0))
    assert SIZE < meter.most <= BOUND


async def test_a_damaged_body_stays_compressed_and_counts_with_its_size() -> None:
    budget, owner = UnpackBudget(1000), RecordingOwner()
    message = make_message(owner, body=b"no gzip", headers={"nsq.client.compress": "1", "nsq.msg.size": "900"})
    message.budget = budget
    assert message.try_unpack()
    assert (message.body, budget.used) == (b"no gzip", 7)
    await message.finish()
    assert budget.used == 0


def test_a_body_of_unknown_size_waits_until_no_other_is_unpacked() -> None:
    budget, owner, sent = UnpackBudget(BOUND), RecordingOwner(), compressed(1)
    headers = {name: value for name, value in (sent.headers or {}).items() if name != SIZE_HEADER}
    other, message = make_message(owner, 1), make_message(owner, 2, sent.body, headers=headers)
    other.budget = message.budget = budget
    assert (other.try_unpack(), message.try_unpack()) == (True, False)
    budget.release(other)
    assert message.try_unpack()
    assert (len(message.body), budget.used) == (SIZE, SIZE)


def test_a_body_whose_header_no_server_stores_is_handed_out_as_it_is() -> None:
    budget, message = UnpackBudget(1000), make_message(RecordingOwner(), headers={COMPRESS_HEADER: "1"})
    message.header, message.budget = message.header[:-1], budget
    assert message.try_unpack()
    assert (message.body, budget.used) == (b"body", 4)


@pytest.mark.parametrize("fails", [True, False])
async def test_messages_that_wait_for_their_next_attempt_in_lanes_are_packed(cluster: Cluster, fails: bool) -> None:
    topic, seen, sizes = await fill(cluster), list[Message](), list[int]()
    delay = 300.0
    consumer = unpacking(cluster, topic, key=lambda message: message.body[:6], requeue_delay=delay, requeue_jitter=0.0)

    @consumer.handler
    async def handle(message: Message) -> None:
        seen.append(message)
        sizes.append(len(message.body))
        if fails:
            raise ValueError("it waits in its lane")
        await message.requeue(delay)

    def packed() -> bool:
        return len(seen) == COUNT and sum(len(message.body) for message in seen) < SIZE

    await running(consumer, lambda: eventually(packed))
    assert sizes == [SIZE] * COUNT


def test_the_stored_body_stays_when_a_key_was_read_from_the_unpacked_one() -> None:
    budget, sent = UnpackBudget(SIZE), compressed(1)
    message = make_message(RecordingOwner(), 1, sent.body, headers=dict(sent.headers or {}))
    assert budget.call_unpacked(lambda one: one.body[:6], message) == b"000001"
    assert (message.body, message.stored_body) == (sent.body, sent.body)
    message.budget = budget
    assert message.try_unpack()
    assert (len(message.body), message.stored_body) == (SIZE, sent.body)


def test_a_packed_message_is_unpacked_for_its_next_attempt() -> None:
    budget, sent = UnpackBudget(SIZE), compressed(1)
    message = make_message(RecordingOwner(), 1, sent.body, headers=dict(sent.headers or {}))
    message.budget = budget
    for _ in range(2):
        assert message.try_unpack()
        budget.pack(message)
        assert (len(message.body), budget.used, message.headers) == (SIZE, SIZE, {}), "it is in use"
        message.mark_answered()
        budget.pack(message)
        assert (message.body, budget.used) == (sent.body, 0)
        message.mark_unanswered()
