"""What a default producer and consumer load: a module that only a setting or a call needs is loaded by it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import nsqext
from nsqext.broker import Cluster

_LOADED = """
    nsqext _version arguments errors errors.server settings types waits
    client client.events client.pulse client.settings client.tasks
    client.consumer client.consumer.consumer client.consumer.message client.consumer.options
    client.consumer.handlers client.consumer.handlers.receiver_queues client.consumer.handlers.workers
    client.consumer.subscriptions client.consumer.subscriptions.assignment client.consumer.subscriptions.backlog
    client.consumer.subscriptions.backoff
    client.consumer.subscriptions.flush_schedule
    client.consumer.subscriptions.partition_reader client.consumer.subscriptions.rdy_distributor
    client.consumer.subscriptions.refusals
    client.consumer.subscriptions.subscriber client.consumer.subscriptions.subscription
    client.consumer.subscriptions.subscription_group client.consumer.subscriptions.topics
    client.producer client.producer.attempt_errors client.producer.connection_pool client.producer.options
    client.producer.producer client.producer.publisher client.producer.publishing
    client.producer.request client.producer.route client.producer.sender
    lookup lookup.metadata lookup.options lookup.partition_map lookup.poller
    protocol protocol.client protocol.client.client_protocol protocol.client.commands protocol.frames
    protocol.identify protocol.messages protocol.names
    transport transport.connection transport.event_loop transport.handshake transport.options
"""
"""Modules of both classes."""
_CONNECTED = "http http.client http.connections lookup.client lookup.responses"
"""Modules of the first connection, through lookup."""
_ITERATED = "client.consumer.handlers.iteration"
"""Modules of the loop over messages."""
_HANDLED = "client.consumer.handler_functions"
"""Modules of a handler."""

_PROGRAM = """
import json, sys
import nsqext
nsqext.Producer, nsqext.Consumer

async def iterate(lookupd):
    async with nsqext.Producer(lookupd) as producer, nsqext.Consumer("t", "ch", lookupd=lookupd) as consumer:
        await producer.publish("t", b"x")
        await (await anext(consumer)).finish()

async def handle(lookupd):
    consumer, handled = nsqext.Consumer("t", "ch", lookupd=lookupd), anyio.Event()

    @consumer.handler
    async def handler(message):
        handled.set()

    async with nsqext.Producer(lookupd) as producer, consumer:
        await producer.publish("t", b"x")
        await handled.wait()

if sys.argv[1:]:
    import anyio
    anyio.run(globals()[sys.argv[1]], sys.argv[2])
print(json.dumps({n: m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "nsqext"}))
"""


def _loaded(*arguments: str) -> dict[str, int]:
    """Return the modules that a new interpreter loads, without the package's name, and their numbers of lines."""
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, cwd=Path(nsqext.__file__).parents[1]
    )
    files: dict[str, str] = json.loads(run.stdout)
    return {
        name.removeprefix("nsqext."): len(Path(file).read_text(encoding="utf-8").splitlines())
        for name, file in files.items()
    }


@pytest.mark.parametrize(
    ("work", "further", "most_modules", "most_lines"),
    [(None, "", 60, 13_500), ("iterate", _ITERATED, 66, 14_760), ("handle", _HANDLED, 66, 14_760)],
)
def test_a_producer_and_a_consumer_load_what_they_need(
    work: str | None, further: str, most_modules: int, most_lines: int
) -> None:
    listed = {*_LOADED.split(), *further.split()}
    if work is None:
        loaded = _loaded()
    else:
        listed |= {*_CONNECTED.split()}
        with Cluster(nodes=1) as cluster:
            cluster.create_topic("t", channels=["ch"])
            loaded = _loaded(work, ",".join(cluster.lookupd))
    assert sorted(loaded.keys() - listed) == [], (
        "load it where a setting or a call needs it; or list it, with the reason"
    )
    assert sorted(listed - loaded.keys()) == [], "it is not loaded any more: leave it out of the list"
    assert len(loaded) <= most_modules
    assert sum(loaded.values()) <= most_lines
