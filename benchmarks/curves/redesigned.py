"""Client CPU per message on a redesigned node: partitions, headers, compression. The peers do not support these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.curves.child import child
from benchmarks.curves.curve import Curve, Points
from benchmarks.run_peer import run_peer
from benchmarks.servers import redesigned_cluster

__all__ = ("CURVES",)

_PARTITIONS = (1, 4, 16, 64, 254)
_IN_FLIGHT = (1, 10, 40)
_LEAST, _FOR_EACH = 12_700, 100
"""Messages of a topic, and of a partition, at least."""
_HEADERS = (0, 1, 2, 4, 8, 16, 32)
_SIZES = (1_000, 10_000, 100_000, 1_000_000)
_BODY_BYTES = 20_000_000


def publish_cpu(mode: str, amount: int, address: str, topic: str) -> float:
    """Return microseconds of client CPU per message."""
    return run_peer("nsqext", mode, amount, address, topic)["cpu"]


def consume_cpu(address: str, topic: str, partitions: int, each: int) -> float:
    """Fill a topic, and consume it with a number of messages in flight per partition; µs of client CPU per message."""
    amount = max(_LEAST, partitions * max(_FOR_EACH, 20 * each))
    return float(child("consume_partitions", address, topic, amount, partitions * each))


def compressed_cpu(address: str, codec: str, size: int) -> float:
    """Return microseconds of client CPU per compressed body."""
    return float(child("publish_compressed", address, codec, size, max(40, min(1000, _BODY_BYTES // size))))


@contextmanager
def _partition_points() -> Iterator[Points]:
    points = {}
    with redesigned_cluster(*(f"p{count}:{count}" for count in _PARTITIONS)) as address:
        for count in _PARTITIONS:
            points["publish, one in flight", float(count)] = partial(publish_cpu, "pub", 2540, address, f"p{count}")
            points["publish, 64 in flight", float(count)] = partial(publish_cpu, "pubc", 6400, address, f"p{count}")
            for each in _IN_FLIGHT:
                name = f"consume, {each} in flight for each partition"
                points[name, float(count)] = partial(consume_cpu, address, f"p{count}", count, each)
        yield points


@contextmanager
def _header_points() -> Iterator[Points]:
    with redesigned_cluster() as address:
        yield {
            ("headers", float(count)): partial(
                publish_cpu, f"headers{count}" if count else "pub", 3200, address, "ext" if count else "plain"
            )
            for count in _HEADERS
        }


@contextmanager
def _compression_points() -> Iterator[Points]:
    with redesigned_cluster() as address:
        yield {
            (codec, float(size)): partial(compressed_cpu, address, codec, size)
            for size in _SIZES
            for codec in ("none", "lz4", "snappy", "gzip")
        }


CURVES = (
    Curve(
        "partitions",
        "Partitions",
        "partitions of the topic",
        "µs of client CPU per message",
        "Publishing: the partitions of a node share a connection, so their number adds nothing. Consuming: each "
        "partition has a connection, as the protocol requires, with a receive and a send (FIN) for the messages that "
        "are in flight on it together; their number determines the cost, and the number of partitions adds nothing.",
        _partition_points,
        note="One node; the topic that is consumed was filled before.",
    ),
    Curve(
        "headers",
        "Publish: headers",
        "headers of a message (0: a plain publish)",
        "µs of client CPU per message",
        "Checking the names and values, and one JSON encoder for all of them: a fraction of a microsecond for each "
        "header, beside what a lone publish costs.",
        _header_points,
        note="One publish in flight.",
    ),
    Curve(
        "compression",
        "Publish: compression",
        "bytes of a body (half of it random)",
        "µs of client CPU per message",
        "The codec: lz4 and snappy compress about a GB a second, gzip less than a tenth of that.",
        _compression_points,
        digits=1,
        note="One publish in flight, on a topic with extend support.",
    ),
)
