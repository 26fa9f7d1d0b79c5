"""``nsqext bench``: measure publish and consume rates on this machine."""

from __future__ import annotations

import statistics
import time
from secrets import token_hex
from typing import Annotated

import anyio
from attrs import define, field

from nsqext import Consumer, Message, Producer
from nsqext.cli.command import command, examples, perform
from nsqext.cli.connection import ServerAccess
from nsqext.cli.parameters import Argument, Option
from nsqext.cli.waiting import wait_of, waits
from nsqext.errors import InvalidSetting, InvalidState

_STARTUP = 60.0  # seconds for every node to accept the subscription
_IN_FLIGHT = 64  # messages
_clock = time.perf_counter


@define
class _Load:
    topic: str
    channel: str
    count: int
    in_flight: int
    batch: int
    body: bytes
    seconds: list[float] = field(factory=list)


async def _publish_one_by_one(load: _Load, producer: Producer) -> None:
    numbers = iter(range(load.count))

    async def worker() -> None:
        for _ in numbers:
            started = _clock()
            await producer.publish(load.topic, load.body)
            load.seconds.append(_clock() - started)

    async with anyio.create_task_group() as tasks:
        for _ in range(load.in_flight):
            tasks.start_soon(worker)


async def _publish_in_batches(load: _Load, producer: Producer) -> None:
    left = load.count
    while left:
        size = min(load.batch, left)
        started = _clock()
        await producer.publish_many(load.topic, [load.body] * size)
        load.seconds.append(_clock() - started)
        left -= size


def _report(cluster: ServerAccess, what: str, count: int, elapsed: float, seconds: list[float]) -> None:
    rate = count / elapsed
    record: dict[str, object] = {"mode": what, "messages": count, "seconds": elapsed, "per_second": rate}
    text = f"{what}: {count} messages in {elapsed:.3f} s, {rate:,.0f}/s"
    if len(seconds) > 1:
        cuts = statistics.quantiles(seconds, n=100)
        record |= {"p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}
        text += f"; one call {cuts[49] * 1e3:.2f} ms (median), {cuts[98] * 1e3:.2f} ms (99 %)"
    cluster.show(record, text)


async def _create_channel(cluster: ServerAccess, load: _Load) -> None:
    """Create the channel, which receives later messages only."""
    if cluster.load().lookupd:
        async with cluster.admin() as admin:
            await admin.create_channel(load.topic, load.channel)
        return
    subscribed = cluster.consumer(load.topic, load.channel, max_in_flight=1, start_timeout=_STARTUP)
    with waits.waiting(wait_of(subscribed)):
        async with subscribed:
            if not subscribed.subscribed:
                raise InvalidState(
                    f"not every node has the channel {load.channel} after {_STARTUP:g} s",
                    topic=load.topic,
                    hint="check the addresses of --nsqd",
                )


async def _measure(cluster: ServerAccess, load: _Load, producer: Producer, consumer: Consumer) -> None:
    async with producer:
        with waits.waiting(f"{load.topic} to store messages"):
            await producer.publish(load.topic, load.body)
            started = _clock()
            if load.batch > 1:
                await _publish_in_batches(load, producer)
            else:
                await _publish_one_by_one(load, producer)
        _report(cluster, "publish", load.count, _clock() - started, load.seconds)
    taken = 0
    ended = 0.0

    @consumer.handler
    async def handle(message: Message) -> None:
        nonlocal taken, ended
        taken += 1
        if taken == load.count + 1:  # the first opened the connection
            ended = _clock()
            consumer.stop()

    # before the connection: whole batches are received before the first message is handled
    begun = _clock()
    place = f"messages of {load.topic}, channel {load.channel}"
    with waits.waiting(lambda: f"{place}: {taken} of {load.count + 1} received"):
        await consumer.serve(signals=False)
    if ended:
        _report(cluster, "consume", load.count, ended - begun, [])


@examples("nsqext bench --count 50000", "nsqext bench load --channel c --lookupd 127.0.0.1:4161")
@command
def run(
    connection: ServerAccess,
    topic: Annotated[str | None, Argument(help="A topic created for the benchmark. (default: start a cluster)")] = None,
    channel: Annotated[str, Option(help="Channel to consume; it is created.")] = "bench",
    count: Annotated[int, Option(min=1, help="Messages.")] = 10_000,
    size: Annotated[int, Option(min=1, help="Size of each message in bytes.")] = 200,
    in_flight: Annotated[int, Option(min=1, help="Concurrent publishes, without --batch.")] = _IN_FLIGHT,
    batch: Annotated[int, Option(min=1, help="Messages in one publish.")] = 1,
) -> None:
    """Publish messages, then consume them, and report the rates.

    The time of consuming includes the connection, so use enough messages. Repeat the benchmark: a single run is not
    reliable on a busy machine.
    """
    if batch > 1 and in_flight != _IN_FLIGHT:
        raise InvalidSetting("--in-flight with --batch would be ignored", hint="batches are published one by one")
    load = _Load(topic or f"bench_{token_hex(4)}", channel, count, in_flight, batch, b"x" * size)

    def measure(cluster: ServerAccess) -> None:
        producer = cluster.producer()
        consumer = cluster.consumer(load.topic, load.channel, max_in_flight=2500)

        async def run() -> None:
            await _create_channel(cluster, load)
            await _measure(cluster, load, producer, consumer)

        perform(run)

    if topic is not None:
        measure(connection)
        return
    if connection.lookupd or connection.nsqd or connection.chosen_url():
        raise InvalidSetting("no topic is given", hint="create a topic (nsqext topic create) and give its name")
    from nsqext.broker import Cluster

    with Cluster(nodes=1) as cluster:
        cluster.create_topic(load.topic, channels=[channel])
        measure(ServerAccess(",".join(cluster.lookupd), json=connection.json))
