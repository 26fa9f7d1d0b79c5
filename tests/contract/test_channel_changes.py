"""Changes of channels by an administrator have an effect, embedded and real."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Admin, Consumer, Message, Producer, sync
from nsqext.errors import InvalidInput, OperationNotSupported
from tests.support.cluster import REAL

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest, Original

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """What channels do does not depend on the event loop of a client."""
    return "asyncio"


HOUR = 3600.0


@pytest.fixture(scope="module")
def topic(cluster_under_test: ClusterUnderTest) -> Iterator[str]:
    """A topic of one partition for all tests: a real cluster takes up to two minutes until it accepts publishes."""
    name = f"contract_admin_{token_hex(4)}"
    with sync.Admin(cluster_under_test.lookupd) as admin:
        admin.create_topic(name, extend=True, channels=["other"])
        yield name
        admin.delete_topic(name)


@pytest.fixture
def unused(cluster_under_test: ClusterUnderTest) -> Iterator[str]:
    """A topic for one test that publishes nothing."""
    name = f"contract_admin_{token_hex(4)}"
    with sync.Admin(cluster_under_test.lookupd) as admin:
        admin.create_topic(name, extend=True)
        yield name
        admin.delete_topic(name)


@asynccontextmanager
async def prepared(cluster: ClusterUnderTest, topic: str, channel: str) -> AsyncIterator[tuple[Admin, Producer]]:
    """Create a channel, and clients."""
    async with Admin(cluster.lookupd) as admin, Producer(cluster.lookupd) as producer:
        await admin.create_channel(topic, channel)
        yield admin, producer


async def receive(consumer: Consumer, most: int, within: float = 1.5, *, least: int = 0) -> list[Message]:
    """Return the messages that arrive until there are enough, or nothing came for some seconds."""
    found: list[Message] = []
    while len(found) < most:
        with anyio.move_on_after(within if len(found) >= least else 25.0) as scope:
            found.append(await anext(consumer))
        if scope.cancelled_caught:
            break
    return found


async def test_an_ordered_channel_delivers_one_message_at_a_time(
    cluster_under_test: ClusterUnderTest, topic: str, channel: str
) -> None:
    async with prepared(cluster_under_test, topic, channel) as (admin, producer):
        await producer.publish_many(topic, [b"1", b"2", b"3"])
        await admin.set_channel(topic, channel, ordered=True)
        async with Consumer(topic, channel, lookupd=cluster_under_test.lookupd, max_in_flight=10) as consumer:
            first = await receive(consumer, 3, least=1)
            assert {message.body for message in first} == {b"1"}  # twice: it was read ahead before the change
            for message in first:
                await message.finish()
            (second,) = await receive(consumer, 1, 25)
            assert second.body == b"2"
            await second.finish()
        await admin.set_channel(topic, channel, ordered=False)
        await producer.publish(topic, b"4")
        async with Consumer(topic, channel, lookupd=cluster_under_test.lookupd, max_in_flight=10) as consumer:
            rest = await receive(consumer, 2, 25)
            assert sorted({message.body for message in rest}) == [b"3", b"4"]


async def test_a_rate_limit_slows_messages(cluster_under_test: ClusterUnderTest, topic: str, channel: str) -> None:
    async with prepared(cluster_under_test, topic, channel) as (admin, producer):
        await producer.publish_many(topic, [b"x" * 100 * 1024] * 8)
        await admin.set_channel(topic, channel, rate_limit_kib=100)
        began = time.monotonic()
        async with Consumer(topic, channel, lookupd=cluster_under_test.lookupd, max_in_flight=10) as consumer:
            found = await receive(consumer, 8, 25)
            took = time.monotonic() - began
            for message in found:
                await message.finish()
    assert len(found) == 8
    assert took > 2  # 400 KiB at once, then one message a second


async def test_connected_consumers_are_limited(cluster_under_test: ClusterUnderTest, topic: str, channel: str) -> None:
    async with (
        prepared(cluster_under_test, topic, channel) as (admin, producer),
        Consumer(topic, channel, lookupd=cluster_under_test.lookupd, max_in_flight=10) as consumer,
    ):
        await admin.limit_consumers(topic, channel, 0)
        await producer.publish_many(topic, [b"1", b"2", b"3"])
        stopped = await receive(consumer, 1)
        await admin.limit_consumers(topic, channel, 1, address_prefix="127.0.0.1:")
        one = await receive(consumer, 3, least=1)
        await admin.limit_consumers(topic, channel, 50_000)
        rest = await receive(consumer, 2, 25)
        for message in one + rest:
            await message.finish()
    assert (len(stopped), len(one), len(rest)) == (0, 1, 2)


async def test_a_message_is_finished(cluster_under_test: ClusterUnderTest, topic: str, channel: str) -> None:
    async with prepared(cluster_under_test, topic, channel) as (admin, producer):
        await producer.publish(topic, b"stuck")
        async with Consumer(topic, channel, lookupd=cluster_under_test.lookupd) as consumer:
            (message,) = await receive(consumer, 1, 25)
            await admin.finish_message(topic, channel, message.id)
            assert (await admin.stats(topic, channel)).channels[channel].lag == 0
            with pytest.raises(InvalidInput, match="not in flight"):
                await admin.finish_message(topic, channel, int.from_bytes(message.id[:8], "big"))
            await message.finish()


async def test_delayed_messages_change(cluster_under_test: ClusterUnderTest, topic: str, channel: str) -> None:
    lookupd = cluster_under_test.lookupd
    async with prepared(cluster_under_test, topic, channel) as (admin, producer):
        await producer.publish(topic, b"later")
        async with Consumer(topic, channel, lookupd=lookupd) as consumer:
            (message,) = await receive(consumer, 1, 25)
            await message.requeue(0.9 * HOUR)
        async with Consumer(topic, channel, lookupd=lookupd) as other:  # the first one knows when it is due
            assert await receive(other, 1) == []
            await admin.deliver_delayed(topic, channel, within_hours=0)
            assert await receive(other, 1) == []
            await admin.deliver_delayed(topic, channel)
            (again,) = await receive(other, 1, 25)
            assert again.body == b"later"
            await again.requeue(0.9 * HOUR)
        await admin.empty_delayed(topic, channel)
        async with Consumer(topic, channel, lookupd=lookupd) as last:
            await admin.deliver_delayed(topic, channel)
            assert await receive(last, 1, 3) == []


async def test_a_channel_reads_again_from_its_confirmed_position(
    cluster_under_test: ClusterUnderTest, topic: str, channel: str
) -> None:
    async with (
        prepared(cluster_under_test, topic, channel) as (admin, producer),
        Consumer(topic, channel, lookupd=cluster_under_test.lookupd, max_in_flight=10) as consumer,
    ):
        await producer.publish_many(topic, [b"1", b"2", b"3"])
        held = await receive(consumer, 3, 25)
        await held[1].finish()
        await admin.redeliver_unfinished(topic, channel)
        again = await receive(consumer, 2, 25)
        assert sorted(message.body for message in again) == [b"1", b"3"]
        for message in again:
            await message.finish()
        with anyio.fail_after(20):
            while (await admin.stats(topic, channel)).channels[channel].lag:  # noqa: ASYNC110 - no event for it
                await anyio.sleep(0.1)


@pytest.mark.skipif(bool(REAL), reason="an extension of the embedded cluster")
async def test_a_channel_is_created_with_a_dispatch(cluster_under_test: ClusterUnderTest, unused: str) -> None:
    async with Admin(cluster_under_test.lookupd) as admin:
        await admin.create_channel(unused, "keys", dispatch="key_failover", key_header="cart")
        (part,) = (await admin.stats(unused)).partitions
        assert part.channels["keys"].dispatch == "key_failover"
        with pytest.raises(InvalidInput, match="has no rate limit"):
            await admin.set_channel(unused, "keys", rate_limit_kib=100)
        with pytest.raises(InvalidInput, match="no effect"):
            await admin.create_channel(unused, "other", dispatch="shared", key_header="cart")
        with pytest.raises(InvalidInput, match="is none of"):
            await admin.create_channel(unused, "other", dispatch="round_robin")


@pytest.mark.skipif(not REAL, reason="needs servers without the extension: NSQEXT_TEST_LOOKUPD")
@pytest.mark.parametrize("registered", [False, True])
async def test_a_dispatch_that_the_servers_do_not_know_is_refused(
    cluster_under_test: ClusterUnderTest, unused: str, registered: bool
) -> None:
    async with Admin(cluster_under_test.lookupd) as admin:
        if registered:
            await admin.set_topic(unused, registered_channels_only=True)
        with anyio.fail_after(150):  # so long a leader of a new topic may not report it
            while not (await admin.stats(unused)).partitions:  # noqa: ASYNC110 - no event for it
                await anyio.sleep(0.2)
        with pytest.raises(OperationNotSupported, match="do not know dispatch='key_failover'"):
            await admin.create_channel(unused, "keys", dispatch="key_failover")


async def test_a_channel_is_registered_twice_without_an_error(
    cluster_under_test: ClusterUnderTest, unused: str
) -> None:
    async with Admin(cluster_under_test.lookupd) as admin:
        await admin.set_topic(unused, registered_channels_only=True)
        for _again in range(2):
            await admin.create_channel(unused, "registered")
        with anyio.fail_after(150):  # so long a leader of a new topic may not report it
            while "registered" not in await admin.channels(unused):  # noqa: ASYNC110 - no event for it
                await anyio.sleep(0.1)


async def test_changes_of_channels_are_checked(cluster_under_test: ClusterUnderTest, topic: str, channel: str) -> None:
    async with prepared(cluster_under_test, topic, channel) as (admin, _):
        with pytest.raises(InvalidInput, match="no setting"):
            await admin.set_channel(topic, channel)
        with pytest.raises(InvalidInput, match="rate_limit_kib=0"):
            await admin.set_channel(topic, channel, rate_limit_kib=0)
        with pytest.raises(InvalidInput, match="ready=-1"):
            await admin.limit_consumers(topic, channel, -1)
        with pytest.raises(InvalidInput, match="no message id"):
            await admin.finish_message(topic, channel, b"short")
        with pytest.raises(InvalidInput, match="no partition 7"):
            await admin.finish_message(topic, channel, 7 << 50 | 1)
        with pytest.raises(InvalidInput, match="CHANNEL_NOT_FOUND"):
            await admin.set_channel(topic, "missing", ordered=True)


async def test_the_original_nsq_has_none_of_these_changes(original: Original, channel: str) -> None:
    topic = f"contract_{token_hex(4)}"
    async with Admin(original.lookupd) as admin:
        await admin.create_topic(topic, channels=[channel])
        changes: list[Callable[[], Awaitable[None]]] = [
            lambda: admin.set_channel(topic, channel, ordered=True),
            lambda: admin.limit_consumers(topic, channel, 1),
            lambda: admin.finish_message(topic, channel, 1),
            lambda: admin.redeliver_unfinished(topic, channel),
            lambda: admin.empty_delayed(topic, channel),
            lambda: admin.deliver_delayed(topic, channel),
            lambda: admin.create_channel(topic, channel, dispatch="key_failover"),
        ]
        for change in changes:
            with pytest.raises(OperationNotSupported):
                await change()
