"""Settings that consumers negotiate: layers, sampling, short heartbeats; and a handler that always fails."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import trustme

from nsqext import Message, Producer
from nsqext.broker import Cluster
from nsqext.broker.options import ClusterOptions
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.consumers import depth, eventually, opened, quick, take

pytestmark = pytest.mark.anyio

_numbers = itertools.count()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def cluster(authority: trustme.CA) -> Iterator[Cluster]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    with Cluster(1, options=ClusterOptions(tls=context, limits=ServerLimits(tls=True))) as made:
        yield made


@pytest.fixture
def topic(cluster: Cluster) -> str:
    name = f"t{next(_numbers)}"
    cluster.create_topic(name, channels=["ch"])
    return name


@pytest.mark.parametrize(
    ("tls", "compression"),
    [(False, {}), (False, {"deflate_level": 3}), (True, {}), (True, {"snappy": True})],
    ids=["plain", "deflate", "tls", "snappy in tls"],
)
async def test_a_round_trip_through_all_layers(
    cluster: Cluster, authority: trustme.CA, topic: str, tls: bool, compression: dict[str, Any]
) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    connection: Any = {
        "tls": context if tls else None,
        "tls_hostname": "localhost" if tls else None,
        **compression,
    }
    sent = [b"%d " % number * (20_000 if number % 50 == 0 else 20) for number in range(200)]
    with anyio.fail_after(25):
        async with Producer(cluster.lookupd, **connection) as producer:
            await producer.publish_many(topic, sent)
        consumer = opened(topic, cluster, **connection, max_in_flight=50)
        async with consumer:
            async for message in consumer:
                await message.requeue()
                break
            assert sorted(await take(consumer, len(sent))) == sorted(sent)
        await eventually(lambda: not depth(cluster, topic))


async def test_a_sample_of_the_messages(cluster: Cluster, topic: str) -> None:
    seen: list[bytes] = []
    with anyio.fail_after(25):
        async with Producer(cluster.lookupd) as producer:
            await producer.publish_many(topic, [b"%d" % number for number in range(1000)])
        consumer = opened(topic, cluster, sample_rate=30)

        @consumer.handler
        async def handle(message: Message) -> None:
            seen.append(message.body)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consumer.serve)
            await eventually(lambda: not depth(cluster, topic))
            consumer.stop()
    assert 150 < len(seen) < 500
    assert len(set(seen)) == len(seen)


async def test_a_handler_that_failed_for_long_continues_when_it_is_repaired(cluster: Cluster, topic: str) -> None:
    failures = 0
    levels: set[int] = set()
    ready: set[int] = set()
    done: set[bytes] = set()
    options = quick(backoff_base=0.005, backoff_max_wait=0.02, requeue_delay=0.0, max_attempts=0)
    with anyio.fail_after(25):
        async with Producer(cluster.lookupd) as producer:
            await producer.publish_many(topic, [b"%d" % number for number in range(20)])
        consumer = opened(topic, cluster, **options, max_in_flight=5)

        @consumer.handler
        async def handle(message: Message) -> None:
            nonlocal failures
            levels.add(consumer.backoff.level)
            ready.add(sum(one.ready for one in consumer.connections))
            if failures < 30:
                failures += 1
                raise ValueError("not today")
            done.add(message.body)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consumer.serve)
            await eventually(lambda: len(done) == 20)
            await eventually(lambda: consumer.backoff.level == 0)
            await eventually(lambda: not depth(cluster, topic))
            consumer.stop()
    assert max(levels) > 0
    assert max(ready) <= 5
