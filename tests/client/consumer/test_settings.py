"""Settings that consumers negotiate: layers, sampling, short heartbeats; and a handler that always fails."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import trustme

from nsqext import Producer
from nsqext.broker import Cluster
from nsqext.broker.options import ClusterOptions
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.consumers import depth, eventually, opened, take

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
