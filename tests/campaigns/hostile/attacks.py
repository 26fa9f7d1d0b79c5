"""The attacks, the bounds that hold during each, and how one is run."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
from attrs import field, frozen

from nsqext.broker import Cluster
from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.protocol.client.body_compression import COMPRESS_HEADER, SIZE_HEADER
from nsqext.sync import Producer
from tests.campaigns.hostile.honest import HONEST_TOPIC, honest
from tests.campaigns.hostile.meter import Usage
from tests.support.command_line import Process, environment

__all__ = ("ATTACKS", "Attack", "Bounds", "Result", "honest_cluster", "run")

_FOLDER = Path(__file__).parent
_MIB = 1 << 20
_CONSUMED = {"consume_honest": "target", "consume_headers": "headers"}
"""Topics of honest servers, by the scenario that consumes from them."""


@frozen
class Bounds:
    """What the process under attack may use at most.

    Attributes:
        rss: growth of its memory, in MiB.
        block: longest turn of its event loop, in seconds of CPU.
        wait: longest wait of an honest peer for its message, in seconds.
        log_lines: lines logged in a second, besides three for each connection of the attacker.
        descriptors: descriptors that stay open afterwards.
    """

    rss: float = 96.0
    block: float = 0.3
    wait: float = 2.0
    log_lines: float = 30.0
    descriptors: int = 8


@frozen
class Attack:
    """One attack.

    Attributes:
        name: of the attack, and of the function that attacks.
        tried: what the hostile peer does.
        side: what is attacked: ``client`` or ``broker``.
        scenario: what the client does meanwhile.
        bounds: what may be used.
        descriptors: limit of descriptors of the broker; 0 for the system's.
    """

    name: str
    tried: str
    side: str
    scenario: str = ""
    bounds: Bounds = field(factory=Bounds)
    descriptors: int = 0


@frozen
class Result:
    """What an attack did.

    Attributes:
        attack: the attack.
        usage: what the process under attack used.
        connections: connections of the attacker.
        sent: bytes that the attacker sent.
        seconds: length of the attack.
    """

    attack: Attack
    usage: Usage
    connections: int
    sent: int
    seconds: float

    def broken(self, *, timed: bool = True) -> list[str]:
        """Return the bounds that did not hold, with the figures seen.

        Args:
            timed: include the wait of honest peers, which depends on the load of the machine.
        """
        usage, bounds = self.usage, self.attack.bounds
        seen = {
            f"memory {usage.rss:.0f} MiB > {bounds.rss:.0f}": usage.rss > bounds.rss,
            f"turn {usage.block:.2f} s > {bounds.block}": usage.block > bounds.block,
            f"wait {usage.wait:.2f} s > {bounds.wait}": timed and usage.wait > bounds.wait,
            f"{usage.log_lines} log lines": usage.log_lines > bounds.log_lines * self.seconds + 3 * self.connections,
            f"{usage.descriptors} descriptors stay open": usage.descriptors > bounds.descriptors,
            "no honest message was served": not usage.served,
            "not recovered": not usage.recovered,
        }
        return [text for text, is_broken in seen.items() if is_broken]


def _client(name: str, scenario: str, tried: str, **bounds: Any) -> Attack:
    return Attack(name, tried, "client", scenario, Bounds(**bounds))


def _broker(name: str, tried: str, descriptors: int = 0, **bounds: Any) -> Attack:
    return Attack(name, tried, "broker", "", Bounds(**bounds), descriptors)


ATTACKS: tuple[Attack, ...] = (
    _client("ignore-rdy", "consume", "nsqd sends messages without end, whatever RDY says"),
    _client("flood-errors", "publish", "nsqd sends error frames of 100 KB without end"),
    _client("flood-fin-failed", "publish", "nsqd sends rejections of FIN to a producer without end"),
    _client("flood-heartbeats", "publish", "nsqd sends heartbeats without end, and does not read"),
    _client("never-read", "publish_large", "nsqd does not read what 8 tasks publish, 1 MB each"),
    _client("garbage", "publish", "nsqd sends random bytes"),
    _client("huge-frames", "publish", "nsqd announces a frame of 2 GiB and sends it"),
    _client("odd-frames", "publish", "nsqd sends frames of sizes and types that do not exist"),
    _client("flood-compressed", "publish_deflated", "nsqd sends frames of 15 MB that deflate to 15 KB", rss=160.0),
    _client("largest-frames", "publish", "nsqd sends error frames of 16 MB"),
    _client("slow-loris", "publish", "nsqd sends its response to IDENTIFY one byte at a time"),
    _client("nodes-1000", "look_up", "lookup lists 1,000 lookup nodes, and 1,000 nodes for each topic"),
    _client("nodes-8000", "look_up", "lookup lists 8,000 lookup nodes, and 8,000 nodes for each topic", rss=160.0),
    _client("endless-body", "look_up", "lookup sends a body without end"),
    _client("large-answers", "look_up", "64 lookup nodes send 15 MB each", rss=640.0, block=1.5, wait=5.0),
    _client("slow-answers", "look_up", "lookup responds one byte at a time"),
    _client("wrong-json", "look_up", "lookup sends JSON of wrong types or depth"),
    _client(
        "unpack",
        "consume_honest",
        "4 handlers consume messages of 62 KB that unpack to 64 MB",
        rss=512.0,
        block=1.0,
        wait=3.0,
    ),
    _client("header-bombs", "consume_headers", "a handler reads headers of 40 KB with 5,000 names"),
    _broker("chunked-bodies", "chunked HTTP bodies of 400 MB"),
    # unfinished messages of a partition take 256 MiB of memory at most, the output of a connection 4 MiB
    _broker("unread-replies", "a client publishes and does not read the replies", rss=400.0),
    _broker("tiny-batches", "batches of 5 MB with a million messages of one byte", rss=400.0, block=0.15, wait=1.0),
    _broker(
        "drained-batches", "batches of 440,000 messages, which one consumer drains", rss=400.0, block=0.15, wait=1.0
    ),
    _broker("unread-messages", "20 consumers with RDY 2,500 do not read, while a client publishes", rss=400.0),
    _broker("half-open", "bodies, lines and HTTP headers that arrive one byte a second, on 600 connections"),
    _broker("odd-identify", "IDENTIFY with JSON of wrong types, of 1 MB and of 100,000 levels"),
    _broker("many-channels", "a new channel with each connection"),
    _broker("header-filters", "headers of 40 KB with 5,000 names, read by filters"),
    _broker("statistics", "16 clients request statistics and metrics without end"),
    _broker("full-window", "a client keeps its connection full of commands"),
    _broker("silent-connections", "2,000 connections that send nothing"),
    _broker("long-lines", "lines of 16 MB over TCP and HTTP"),
    _broker("catastrophic-filters", "filters that take a backtracking engine exponential time"),
    _broker("out-of-descriptors", "more connections than the broker has descriptors", 256),
)


@contextmanager
def _program(module: str, *arguments: str) -> Iterator[Process]:
    """Run a module in a process of its own; it is killed in the end, if it has not ended."""
    words = (str(_FOLDER / f"{module}.py"), *arguments)
    with Process(words, environment(), _FOLDER.parents[2]) as process:
        assert process.stderr is not None
        Thread(target=process.stderr.read, daemon=True).start()  # its log does not block it
        yield process


def _tell(process: Process, data: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(data).encode() + b"\n")
    process.stdin.flush()


def _read(process: Process) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"process {process.pid} ended without an answer")
    return json.loads(line)


def _end(process: Process) -> dict[str, int]:
    """End an attacker; return its counters."""
    assert process.stdin is not None
    process.stdin.close()
    counters: dict[str, int] = _read(process)
    return counters


def run(attack: Attack, cluster: Cluster, seconds: float) -> Result:
    """Run an attack.

    Args:
        attack: the attack.
        cluster: honest servers for clients under attack, with the topics ``honest`` and ``target``.
        seconds: length of the attack.

    Raises:
        RuntimeError: a process ended early.
    """
    if attack.side == "broker":
        return anyio.run(_attack_broker, attack, seconds)
    if attack.scenario in _CONSUMED:
        return _attack_consumer(attack, cluster, seconds)
    with _program("servers", attack.name) as attacker, _program("victim") as victim:
        usage = _watch_client(victim, attack, cluster, seconds, f"127.0.0.1:{_read(attacker)}")
        return _result(attack, usage, _end(attacker), seconds)


def _watch_client(victim: Process, attack: Attack, cluster: Cluster, seconds: float, hostile: str) -> Usage:
    task = {"side": "client", "scenario": attack.scenario, "hostile": hostile, "seconds": seconds}
    _tell(victim, {**task, "lookupd": cluster.lookupd[0]})
    return Usage(**_read(victim))


def _attack_consumer(attack: Attack, cluster: Cluster, seconds: float) -> Result:
    """Publish what costs a consumer much, for a client to consume."""
    size = 64 * _MIB
    messages = [OutgoingMessage(b"x", headers={f"{number:x}": "1" for number in range(5000)})] * 200
    if attack.name == "unpack":
        headers = {COMPRESS_HEADER: "1", SIZE_HEADER: str(size)}
        messages = [OutgoingMessage(gzip.compress(bytes(size)), headers=headers)] * 20
    with Producer(cluster.lookupd) as producer:
        producer.publish_many(_CONSUMED[attack.scenario], messages)
    with _program("victim") as victim:
        usage = _watch_client(victim, attack, cluster, seconds, "")
    sent = sum(len(message.body) + len(str(message.headers)) for message in messages)
    return _result(attack, usage, {"connections": 1, "sent": sent}, seconds)


async def _attack_broker(attack: Attack, seconds: float) -> Result:
    with _program("victim") as victim:
        _tell(victim, {"side": "broker", "descriptors": attack.descriptors})
        places = await anyio.to_thread.run_sync(_read, victim)
        waits = Usage()
        async with honest(places["lookupd"], waits) as peer:
            _tell(victim, "start")
            with _program("clients", attack.name, places["tcp"], places["http"]) as attacker:
                await peer.exchange_until(time.monotonic() + seconds)
                counters = await anyio.to_thread.run_sync(_end, attacker)
            with anyio.move_on_after(30):
                await peer.exchange(5)
                async with honest(places["lookupd"], Usage(), "second"):  # new connections are served as well
                    waits.recovered = True
        _tell(victim, "stop")
        usage = Usage(**await anyio.to_thread.run_sync(_read, victim))
    usage.wait, usage.served, usage.recovered = waits.wait, waits.served, waits.recovered
    return _result(attack, usage, counters, seconds)


def _result(attack: Attack, usage: Usage, counters: dict[str, int], seconds: float) -> Result:
    return Result(attack, usage, counters["connections"], counters["sent"], seconds)


@contextmanager
def honest_cluster() -> Iterator[Cluster]:
    """Run the honest servers that clients under attack use beside the hostile ones."""
    with Cluster(nodes=1) as cluster:
        cluster.create_topic(HONEST_TOPIC, channels=["default"])
        for topic in _CONSUMED.values():
            cluster.create_topic(topic, extend=True, channels=["default"])
        yield cluster
