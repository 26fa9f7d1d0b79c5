"""Client CPU per message by size of bodies, topics, connections and handlers, compared with other clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from benchmarks.curves.curve import Curve, Points
from benchmarks.run_peer import CLIENTS, available, new_topic, run_peer
from benchmarks.servers import Nsqd, fill, original_nsqd, program_given

__all__ = ("CURVES",)

_BYTES = 30_000_000
"""Largest total size of the bodies of one measurement, in bytes."""


def cost(client: str, mode: str, amount: int, nsqd: Nsqd, **numbers: int) -> float:
    """Return microseconds of client CPU per message; topics to consume are filled before."""
    topic = "many" if "topics" in numbers else new_topic()
    if mode == "sub":
        fill(nsqd.tcp, topic, amount + min(500, amount), b"x" * numbers.get("size", 200))
    try:
        return run_peer(client, mode, amount, nsqd.tcp, topic, **numbers)["cpu"]
    finally:
        nsqd.delete(topic)


@contextmanager
def _points(mode: str, name: str, values: Sequence[int], amount: int, clients: Sequence[str]) -> Iterator[Points]:
    """Yield a point for each client and each value of a number (size, topics, connections, handlers)."""
    # the original nsqd takes a minute to create 1,000 topics
    with original_nsqd(program=None if name == "topics" else program_given()) as nsqd:
        points = {}
        for value in values:
            count = min(amount, max(64, _BYTES // value)) if name == "size" else max(value * 4, amount)
            unit = value if name == "connections" else 64
            count = count // unit * unit
            for client in clients:
                if available(client):
                    points[client, float(value)] = partial(cost, client, mode, count, nsqd, **{name: value})
        yield points


SIZES = (10, 200, 2_000, 20_000, 200_000, 1_000_000)
CURVES = (
    Curve(
        "body_size_publish",
        "Publish: size of bodies",
        "bytes of a body",
        "µs of client CPU per message",
        "Up to some KB the cost of a command dominates; above, each byte is copied by the kernel and, below 64 KiB, "
        "into one piece with the commands beside it.",
        partial(_points, "pubc", "size", SIZES, 6400, CLIENTS),
        note="64 publishes in flight on one connection.",
        any_nsqd=True,
    ),
    Curve(
        "body_size_consume",
        "Consume: size of bodies",
        "bytes of a body",
        "µs of client CPU per message",
        "Up to some KB parsing and the handler dominate; above, the kernel's copy and the join of a body that is "
        "received in pieces.",
        partial(_points, "sub", "size", SIZES, 6400, CLIENTS),
        note="One handler that does nothing; each message is acknowledged.",
        any_nsqd=True,
    ),
    Curve(
        "topics",
        "Publish: topics",
        "topics",
        "µs of client CPU per message",
        "A publish finds the route of its topic in a dictionary, so topics add nothing but cache misses.",
        partial(_points, "pubc", "topics", (1, 10, 100, 1000), 9600, CLIENTS),
        note="64 publishes in flight on one connection, the topics in turn. Server: `nsqext nsqd`.",
    ),
    Curve(
        "connections",
        "Publish: connections",
        "connections",
        "µs of client CPU per message",
        "Each message has a send and a receive of its own. A turn of the event loop serves several connections, which "
        "makes some of them cheaper than one; with 1,000, their memory exceeds the caches.",
        partial(_points, "pub", "connections", (1, 10, 100, 1000), 6000, CLIENTS),
        note="One producer for each connection, one publish in flight on each.",
        any_nsqd=True,
    ),
    Curve(
        "handlers",
        "Consume: concurrent handlers",
        "handlers",
        "µs of client CPU per message",
        "Handlers are a fixed set of tasks that take messages from one queue: a message costs no task, and more "
        "handlers cost their wake-ups only.",
        partial(_points, "sub", "handlers", (1, 4, 16, 64, 256), 12_800, ("nsqext", "uvloop", "go-nsq")),
        note="Handlers that do nothing; the clients for Python beside this one have no concurrent handlers.",
        any_nsqd=True,
    ),
)
