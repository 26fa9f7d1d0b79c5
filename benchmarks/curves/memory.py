"""Memory of a client and of a broker."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from benchmarks.curves.child import child, rss
from benchmarks.curves.curve import Curve, Points
from benchmarks.run_peer import new_topic
from benchmarks.servers import cluster_process, fill, original_nsqd

__all__ = ("CURVES",)

_HELD = {
    "an idle consumer": ("idle_consumers", (10, 50, 200)),
    "a subscribed partition": ("subscribed_partitions", (16, 64, 254)),
    "a pending publish": ("pending_publishes", (1000, 4000, 16_000)),
    "a message in flight": ("messages_in_flight", (500, 1000, 2000)),
}


@contextmanager
def _client_points() -> Iterator[Points]:
    partitions = _HELD["a subscribed partition"][1]
    with cluster_process("p1", *(f"p{count}:{count}" for count in partitions)) as (_, address):
        yield {
            (name, float(count)): partial(_client_memory, what, address, count)
            for name, (what, counts) in _HELD.items()
            for count in counts
        }


def _client_memory(what: str, address: str, count: int) -> float:
    return float(child(what, address, count))


def _broker_topics(count: int) -> float:
    """Return KiB of the broker for each topic of four partitions."""
    with cluster_process("t") as (pid, _):
        before = rss(pid)
    with cluster_process(*(f"t{number}:4" for number in range(count))) as (pid, _):
        return (rss(pid) - before) / count


def _broker_connections(count: int) -> float:
    """Return KiB of nsqd for each idle connection."""
    with original_nsqd() as nsqd, ExitStack() as stack:
        before = rss(nsqd.pid)
        host, _, port = nsqd.tcp.rpartition(":")
        socks = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]
        for number, sock in enumerate(socks):
            sock.sendall(b"  V2SUB conns_%d#ephemeral ch#ephemeral\n" % (number % 4))
            sock.recv(100)
        return (rss(nsqd.pid) - before) / count


def _broker_messages(count: int) -> float:
    """Return KiB of nsqd for 1,000 stored messages of 200 bytes that no consumer has read."""
    with original_nsqd(mem_queue_size=0) as nsqd:
        fill(nsqd.tcp, new_topic(), 1000, b"x" * 200)
        before = rss(nsqd.pid)
        fill(nsqd.tcp, new_topic(), count, b"x" * 200)
        return (rss(nsqd.pid) - before) / count * 1000


@contextmanager
def _broker_points() -> Iterator[Points]:
    yield {
        **{("a topic of 4 partitions", float(count)): partial(_broker_topics, count) for count in (10, 100, 300)},
        **{("a connection", float(count)): partial(_broker_connections, count) for count in (10, 100, 1000)},
        **{
            ("1,000 messages on disk", float(count)): partial(_broker_messages, count)
            for count in (10_000, 50_000, 200_000)
        },
    }


CURVES = (
    Curve(
        "client_memory",
        "Memory of a client",
        "number of them",
        "KiB each",
        "A consumer has its queues, tasks and statistics; a partition has a socket, a protocol state and a task that "
        "waits (about 7 KiB of it); a publish and a message are a few Python objects beside their bytes. All of it is "
        "linear: none grows with the number of the others.",
        _client_points,
        note="Growth of the resident memory divided by the number; bodies of 200 bytes.",
    ),
    Curve(
        "broker_memory",
        "Memory of the broker",
        "number of them",
        "KiB each",
        "Partitions, channels and connections are Python objects. Messages on disk cost buffers of a fixed size, so "
        "the figure falls with their number: they are read when they are sent.",
        _broker_points,
        note="Growth of the resident memory of `nsqext` servers divided by the number.",
    ),
)
