"""Helpers for tests of the consumer: fill a topic, run a consumer, record the commands that it sends."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import anyio
from anyio import create_task_group

from nsqext import Consumer, ConsumerSettings
from tests.support import plain_http

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from nsqext.broker import Cluster
    from tests.support.fake_nsqd import Peer, ScriptedNode

__all__ = (
    "OF_LOOKUP",
    "PATIENT_LOOKUP",
    "QUICK",
    "depth",
    "eventually",
    "in_batches",
    "opened",
    "publish",
    "quick",
    "quick_sharing",
    "running",
    "sent",
    "server_ready",
    "take",
    "tape",
)

_PATIENCE = 25.0

PATIENT_LOOKUP: dict[str, Any] = {"lookup_request_timeout": 20.0, "lookup_straggler_timeout": 20.0}
"""A slow machine makes no request fail."""


def quick(**settings: Unpack[ConsumerSettings]) -> dict[str, Any]:
    """Return settings with short pauses, long timeouts, and the full RDY count from the start."""
    return {
        "reconnect_wait": 0.01,
        "max_reconnect_wait": 0.1,
        "close_timeout": 20.0,
        "start_timeout": 25.0,
        "initial_ready": 2500,
        "lookup_max_pause": 0.1,
        **PATIENT_LOOKUP,
        **settings,
    }


QUICK = quick()

OF_LOOKUP = frozenset(("lookup_max_pause", *PATIENT_LOOKUP))
"""Settings of lookup."""


def quick_sharing(**settings: Unpack[ConsumerSettings]) -> dict[str, Any]:
    """Return the settings of `quick` for a consumer with a shared `nsqext.Lookup`, which has its own, or without."""
    return {name: value for name, value in quick(**settings).items() if name not in OF_LOOKUP}


def publish(cluster: Cluster, topic: str, *bodies: bytes, partition: int = 0, ext: str = "") -> None:
    """Publish over HTTP, without a producer."""
    node = cluster.nodes[cluster.leader(topic, partition)]
    for body in bodies:
        params = {"topic": topic, "partition": str(partition)}
        if ext:
            params["ext"] = ext
        answer = plain_http.post(f"http://{node.http}/{'pub_ext' if ext else 'pub'}", params=params, content=body)
        assert answer.status_code == 200, answer.text


async def eventually(done: Callable[[], object], patience: float = _PATIENCE) -> None:
    """Wait until a condition holds; it is tested every 5 ms at first, and every 20 ms after 0.4 s."""
    begun = time.monotonic()
    while not done():
        waited = time.monotonic() - begun
        assert waited < patience, "the condition did not hold in time"
        await anyio.sleep(min(max(waited / 20, 0.005), 0.02))


async def tape(peer: Peer, count: int) -> list[str]:
    """Return the names of the next commands; FIN and REQ are followed by the number of their message."""
    words: list[str] = []
    while len(words) < count:
        with anyio.fail_after(_PATIENCE):
            command = await peer.next()
        name = command.words[0].decode()
        if name in ("FIN", "REQ", "TOUCH"):
            number = command.words[1]
            is_text = number.isascii() and number.isalnum()
            words.append(f"{name} {int(number, 16) if is_text else int.from_bytes(number[:8], 'big')}")
        else:
            words.append(b" ".join(command.words).decode())
    return words


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the only error of a group instead of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        only: BaseException = group
        while isinstance(only, BaseExceptionGroup) and len(only.exceptions) == 1:
            only = only.exceptions[0]
        raise only from None


async def running(consumer: Consumer, body: Callable[[], Awaitable[object]], *nodes: ScriptedNode) -> None:
    """Run a consumer during ``body``; then stop it and wait for its end.

    At the end the scripted nodes close their connections, so that the consumer does not wait for the response to CLS.
    """
    with _plain_errors():
        async with create_task_group() as tasks:
            tasks.start_soon(consumer.serve)
            try:
                await body()
            finally:
                consumer.stop()
                with anyio.CancelScope(shield=True):
                    for peer in [peer for node in nodes for peer in node.peers]:
                        await peer.close()


def _channels(cluster: Cluster, topic: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the statistics of the channels, each with its partition."""
    for node in cluster.nodes.values():
        data = plain_http.get(f"http://{node.http}/stats", params={"format": "json", "topic": topic}).json()
        for entry in data.get("data", data)["topics"]:
            if cluster.leader(topic, int(entry["topic_partition"])) == node.name:
                for channel in entry["channels"]:
                    yield int(entry["topic_partition"]), channel


def depth(cluster: Cluster, topic: str) -> int:
    """Return the number of unfinished messages of the channel, over all partitions."""
    return sum(
        channel["depth"] + channel["in_flight_count"] + channel["deferred_count"]
        for _, channel in _channels(cluster, topic)
    )


def sent(cluster: Cluster, topic: str, partition: int) -> int:
    """Return the number of messages of a partition that its server has sent, and that are not answered."""
    return sum(channel["in_flight_count"] for number, channel in _channels(cluster, topic) if number == partition)


def server_ready(cluster: Cluster, topic: str, partition: int) -> int:
    """Return the RDY counts of a partition that its server has received, over all connections."""
    channels = (channel for number, channel in _channels(cluster, topic) if number == partition)
    return sum(client["ready_count"] for channel in channels for client in channel["clients"])


def opened(topic: str | list[str], cluster: Cluster, **settings: Unpack[ConsumerSettings]) -> Consumer:
    """Return a consumer of the channel ``ch``."""
    return Consumer(topic, "ch", lookupd=cluster.lookupd, **quick(**settings))


async def take(consumer: Consumer, count: int) -> list[bytes]:
    """Receive and finish messages; return their bodies."""
    bodies = []
    with anyio.fail_after(25):
        async for message in consumer:
            await message.finish()
            bodies.append(message.body)
            if len(bodies) == count:
                break
    return bodies


def in_batches(cluster: Cluster, topic: str, **settings: Unpack[ConsumerSettings]) -> Consumer:
    """Return a consumer whose messages are read in batches."""
    return Consumer(topic, "ch", lookupd=cluster.lookupd, **quick(**settings))
