"""The clusters under test: how each is started, and what can be done to it."""

from __future__ import annotations

import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode

import orjson

from nsqext.broker import ClusterOptions
from tests.support.cluster import REAL
from tests.support.command_line import Process, environment
from tests.support.programs import ROOT

if TYPE_CHECKING:
    from nsqext.testing.simulation import Fault

__all__ = (
    "TOPICS",
    "BrokerProcess",
    "EmbeddedProcess",
    "OriginalProcesses",
    "RealCluster",
    "SoakCluster",
    "led_by_others",
    "new_cluster",
    "targets",
)

End = Callable[[], object]
TOPICS: dict[str, dict[str, bool]] = {
    "plain": {},
    "lanes": {"extend": True},
    "keyed": {"extend": True},
    "ordered": {"ordered": True},
    "tagged": {"extend": True},
}
"""Flags of each kind of topic."""
_NODES = ("n1", "n2", "n3")
_START = 30.0
_TAKEOVER = 90.0
"""Seconds within which other replicas lead the partitions of a killed node."""

_KILL = os.environ.get("NSQEXT_TEST_KILL_LEADER", "")
"""Commands of a real cluster; ``{n}`` stands for the place of a node among the nodes by address, from 1."""
_START_NODE = os.environ.get("NSQEXT_TEST_START_NODE", "")
_FREEZE = os.environ.get("NSQEXT_TEST_FREEZE_NODE", "")
_THAW = os.environ.get("NSQEXT_TEST_THAW_NODE", "")
_PROGRAMS = os.environ.get("NSQEXT_TEST_ORIGINAL_PROGRAMS", "")


class SoakCluster(Protocol):
    """A cluster, and the faults that it can have.

    Attributes:
        lookupd: lookup addresses.
        kinds: kinds of faults.
        topics: kinds of topics that it has.
        traced: publishes may have trace ids.
        settle: seconds after the last fault in which leaders are elected and clients reconnect.
        shortest: seconds of the shortest node fault.
        losses: when a fault took all unfinished messages of a node, and where this node stored them.
    """

    lookupd: list[str]
    kinds: tuple[str, ...]
    topics: tuple[str, ...]
    traced: bool
    settle: float
    shortest: float
    losses: Sequence[tuple[float, int]]

    def start(self) -> None:
        """Start it; returns when it can be used."""

    def begin(self, fault: Fault, topics: Sequence[str]) -> End:
        """Begin a fault; the result ends it."""

    def pids(self) -> dict[str, int]:
        """Return the processes that faults never end, by name."""

    def stop(self) -> None:
        """Stop it."""


def _nothing() -> None:
    pass


def _pick(fault: Fault, choices: Sequence[Any]) -> Any:
    return choices[int(fault.chance * len(choices))]


def _stopped(pid: int, seconds: float) -> End:
    """Stop a process for some seconds; the process cannot be controlled meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(min(seconds, 3.0))
    os.kill(pid, signal.SIGCONT)
    return _nothing


class EmbeddedProcess:
    """The embedded cluster, in memory, in a process of its own."""

    kinds: tuple[str, ...] = (
        *("kill", "kill", "terminate", "freeze", "freeze", "move", "move", "refuse", "cut", "delay", "cluster_stop"),
        *("lookup_kill", "lookup_stale", "lookup_empty", "lookup_slow"),
    )
    topics: tuple[str, ...] = tuple(TOPICS)
    traced: bool = True
    settle: float = 20.0
    shortest: float = 0.1
    losses: Sequence[tuple[float, int]] = ()

    def __init__(self, seed: int, memory: int) -> None:
        self._seed = seed
        self._memory = memory
        self._process: Process | None = None
        self._down: set[str] = set()
        self.lookupd: list[str] = []

    def start(self) -> None:
        words = (str(ROOT / "tests" / "campaigns" / "soak" / "cluster_process.py"), str(self._seed), str(self._memory))
        self._process = Process(words, environment(), ROOT)
        assert self._process.stderr is not None
        Thread(target=self._process.stderr.read, daemon=True).start()  # its log does not block it
        self.lookupd = self._read()["lookupd"]

    def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        reply: dict[str, Any] = orjson.loads(self._process.stdout.readline())
        return reply

    def call(self, name: str, /, *arguments: object, **options: object) -> Any:
        """Call a method of the cluster; a call that it refuses has no effect."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps([name, arguments, options]) + b"\n")
        self._process.stdin.flush()
        return self._read().get("result")

    def leader(self, topic: str, partition: int) -> str:
        """Return the name of the node that leads a partition."""
        return str(self.call("leader", topic, partition))

    def begin(self, fault: Fault, topics: Sequence[str]) -> End:
        assert self._process is not None
        kind, node = fault.kind, fault.target
        direction = "in" if fault.chance < 0.5 else "out"
        if kind == "cluster_stop":
            return _stopped(self._process.pid, fault.seconds)
        if kind in ("kill", "terminate", "lookup_kill"):
            return self._kill("terminate" if kind == "terminate" else "kill", "l1" if "lookup" in kind else node)
        if kind == "freeze":
            if self.call("state", node) != "down":
                self.call("faults.freeze", node)
            return lambda: self.call("faults.thaw", node)
        if kind == "refuse":
            self.call("faults.refuse", node)
            return lambda: self.call("faults.refuse", node, False)
        if kind == "cut":
            self.call("faults.cut", node, direction, connections=1 + int(4 * fault.chance))
            return _nothing
        if kind == "delay":
            self.call("faults.delay", node, direction, fault.chance * 0.05)
            return lambda: self.call("faults.heal")
        if kind == "move":
            self.call("move_leader", _pick(fault, topics), int(8 * fault.chance) % 2, node)
            return _nothing
        lookup = None if fault.chance < 0.5 else "l2"
        options: dict[str, object] = {"seconds": fault.chance} if kind == "lookup_slow" else {}
        self.call(f"faults.{kind.removeprefix('lookup_')}_lookup", name=lookup, **options)
        return lambda: self.call("faults.heal_lookup")

    def _kill(self, how: str, name: str) -> End:
        if name in self._down:
            return _nothing
        self._down.add(name)
        self.call(how, name)

        def restart() -> None:
            self.call("restart", name)
            self._down.discard(name)

        return restart

    def pids(self) -> dict[str, int]:
        return {} if self._process is None else {"cluster": self._process.pid}

    def stop(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with self._process:
                self._process.stdin.close()
                self._process.wait()


def _ask(method: str, address: str, path: str, **parameters: object) -> Any:
    """Send an HTTP request; None for a refused one."""
    url = f"http://{address}{path}?{urlencode(parameters)}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5.0) as response:
            return orjson.loads(response.read())
    except (OSError, orjson.JSONDecodeError):
        return None


def move_leader(lookupd: str, fault: Fault, topic: str) -> bool:
    """Move a leader over the HTTP API of nsqlookupd, if the cluster is in a state that allows it."""
    found = _ask("GET", lookupd, "/lookup", topic=topic)
    data = (found or {}).get("data", found) or {}
    partitions = data.get("partitions") or {}
    ids = sorted({entry["distributed_id"] for entry in partitions.values()})
    number = str(int(8 * fault.chance) % 2)
    others = [name for name in ids if number in partitions and name != partitions[number]["distributed_id"]]
    if not others:
        return False
    source, target = partitions[number]["distributed_id"], _pick(fault, others)
    where = {"topic": topic, "partition": number, "move_leader": "true", "move_from": source, "move_to": target}
    return _ask("POST", lookupd, "/topic/partition/move", **where) is not None


def free_ports(count: int) -> list[int]:
    """Return free ports below those that the system gives to clients, so that they stay free during a restart."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


class BrokerProcess:
    """``nsqext broker --data-path``, which is killed by kill -9 and started again on the same files."""

    kinds: tuple[str, ...] = ("cluster_kill", "cluster_kill", "cluster_end", "cluster_stop", "move", "move")
    topics: tuple[str, ...] = tuple(TOPICS)
    traced: bool = True
    settle: float = 20.0
    shortest: float = 0.1
    losses: Sequence[tuple[float, int]] = ()

    def __init__(self, folder: Path) -> None:
        lookup, *ports = (f"127.0.0.1:{port}" for port in free_ports(7))
        self.lookupd: list[str] = [lookup]
        self._folder = folder
        self._command = [sys.executable, "-m", "nsqext", "broker", "--data-path", str(folder / "data")]
        self._command += ["--lookupd-http-address", lookup]
        for tcp, http in zip(ports[:3], ports[3:], strict=True):
            self._command += ["--tcp-address", tcp, "--http-address", http]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = self._folder / "broker.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        deadline = time.monotonic() + _START
        while b"ready" not in log.read_bytes():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"the broker did not start: {log.read_text()}")
            time.sleep(0.02)

    def begin(self, fault: Fault, topics: Sequence[str]) -> End:
        assert self._process is not None
        if fault.kind == "cluster_stop":
            return _stopped(self._process.pid, fault.seconds)
        if fault.kind == "move":
            move_leader(self.lookupd[0], fault, _pick(fault, topics))
            return _nothing
        if self._process.returncode is None:
            self._end(kill=fault.kind == "cluster_kill")
            time.sleep(min(fault.seconds, 2.0))
            self.start()
        return _nothing

    def _end(self, *, kill: bool) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        self._process.wait()

    def pids(self) -> dict[str, int]:
        return {}

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._end(kill=False)


class OriginalProcesses:
    """Three nsqd and a nsqlookupd of the original NSQ, each a process with files that is killed and started again.

    Their programs are those of `nsqext`, or those in the directory NSQEXT_TEST_ORIGINAL_PROGRAMS.
    The nsqd of NSQ keeps messages in its memory, and loses the unfinished ones by kill -9.
    """

    kinds: tuple[str, ...] = ("kill", "kill", "terminate", "terminate", "freeze", "lookup_kill")
    topics: tuple[str, ...] = ("plain",)
    traced: bool = False
    settle: float = 30.0
    shortest: float = 0.1
    forgets: bool = bool(_PROGRAMS)
    """Whether a nsqd that is killed loses messages."""

    def __init__(self, folder: Path) -> None:
        tcp, http, *ports = free_ports(8)
        self.lookupd: list[str] = [f"127.0.0.1:{http}"]
        addresses = ["-tcp-address", f"127.0.0.1:{tcp}", "-http-address", self.lookupd[0]]
        self._commands: dict[str, list[str]] = {"l1": [*_program("nsqlookupd"), *addresses]}
        for number, (node, web) in enumerate(zip(ports[:3], ports[3:], strict=True), 1):
            data = folder / f"n{number}"
            data.mkdir()
            words = ["-lookupd-tcp-address", f"127.0.0.1:{tcp}", "-data-path", str(data), "-mem-queue-size", "0"]
            words += ["-tcp-address", f"127.0.0.1:{node}", "-http-address", f"127.0.0.1:{web}"]
            self._commands[f"n{number}"] = [*_program("nsqd"), *words, "-broadcast-address", "127.0.0.1"]
        self._web = {"l1": http, **dict(zip(_NODES, ports[3:], strict=True))}
        self._ports = dict(zip(_NODES, ports[:3], strict=True))
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._down: set[str] = set()
        self.losses: Sequence[tuple[float, int]] = ()

    def start(self) -> None:
        for name in self._commands:
            self._start(name)

    def _start(self, name: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(self._commands[name], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        self._processes[name] = process
        deadline = time.monotonic() + _START
        while not _responds(f"127.0.0.1:{self._web[name]}"):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"{name} did not start: {(self._folder / f'{name}.log').read_text()}")
            time.sleep(0.02)

    def begin(self, fault: Fault, topics: Sequence[str]) -> End:
        name = "l1" if fault.kind == "lookup_kill" else fault.target
        if name in self._down:
            return _nothing
        self._down.add(name)
        process = self._processes[name]
        if fault.kind == "freeze":
            process.send_signal(signal.SIGSTOP)
        else:
            process.send_signal(signal.SIGTERM if fault.kind == "terminate" else signal.SIGKILL)
            process.wait()
        if _PROGRAMS and fault.kind == "kill":
            self.losses = [*self.losses, (time.monotonic(), self._ports[name])]

        def end() -> None:
            if fault.kind == "freeze":
                process.send_signal(signal.SIGCONT)
            else:
                self._start(name)
            self._down.discard(name)

        return end

    def pids(self) -> dict[str, int]:
        return {}

    def stop(self) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
            process.wait()


def _program(name: str) -> list[str]:
    return [str(Path(_PROGRAMS) / name)] if _PROGRAMS else [sys.executable, "-m", "nsqext", name]


def _responds(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/ping", timeout=5.0):
            return True
    except OSError:
        return False


class RealCluster:
    """A cluster that runs already; its nodes are killed and started by the commands of environment variables."""

    topics: tuple[str, ...] = tuple(kind for kind in TOPICS if kind != "keyed")
    traced: bool = True
    settle: float = 90.0
    shortest: float = 45.0
    """A leader that is killed and starts again before another replica leads loses messages that it acknowledged."""
    losses: Sequence[tuple[float, int]] = ()

    def __init__(self) -> None:
        self.lookupd: list[str] = REAL.split(",")
        self.kinds: tuple[str, ...] = ("move", "move")
        self.kinds += ("kill",) * 2 if _KILL and _START_NODE else ()
        self.kinds += ("freeze",) if _FREEZE and _THAW else ()
        self._down: set[int] = set()

    def leader(self, topic: str, partition: int) -> str:
        """Return the name of the node that leads a partition; all nodes have to run."""
        partitions = _ask("GET", self.lookupd[0], "/lookup", topic=topic)["data"]["partitions"]
        return _NODES[self._ports().index(partitions[str(partition)]["tcp_port"])]

    def start(self) -> None:
        """Do nothing: it runs."""

    def begin(self, fault: Fault, topics: Sequence[str]) -> End:
        if fault.kind == "move":
            move_leader(self.lookupd[0], fault, _pick(fault, topics))
            return _nothing
        number = 1 + _NODES.index(fault.target)
        if self._down:
            return _nothing  # a second node would take the majority away
        self._down.add(number)
        port = self._ports()[number - 1]
        _run(_KILL if fault.kind == "kill" else _FREEZE, number)

        def end() -> None:
            deadline = time.monotonic() + _TAKEOVER
            while self._leads(port, topics) and time.monotonic() < deadline:
                time.sleep(1.0)
            _run(_START_NODE if fault.kind == "kill" else _THAW, number)
            self._down.discard(number)

        return end

    def pids(self) -> dict[str, int]:
        return {}

    def stop(self) -> None:
        """Do nothing: it runs on."""

    def _ports(self) -> list[int]:
        """Return the TCP ports of the nodes; all of them have to run."""
        return sorted(node["tcp_port"] for node in _ask("GET", self.lookupd[0], "/nodes")["data"]["producers"])

    def _leads(self, port: int, topics: Sequence[str]) -> bool:
        """Return whether a partition of a topic is not led by another node yet."""
        return not all(
            led_by_others(_ask("GET", self.lookupd[0], "/lookup", topic=topic, metainfo="true"), port)
            for topic in topics
        )


def led_by_others(answer: Any, port: int) -> bool:
    """Return whether lookup names a leader with another port for each partition; ``answer`` is None for no answer.

    Lookup leaves out partitions without a leader.
    """
    if not answer:
        return False
    leaders = [leader["tcp_port"] for leader in answer["data"]["partitions"].values()]
    return len(leaders) == answer["data"]["meta"]["partition_num"] and port not in leaders


def _run(command: str, number: int) -> None:
    subprocess.run(shlex.split(command.format(n=number)), check=True, stdout=subprocess.DEVNULL)


def targets() -> list[str]:
    """Return the names of the clusters that can be tested: the real one if an environment variable names it."""
    return ["embedded", "broker", "original", *(["real"] if REAL else [])]


def new_cluster(
    target: str, seed: int, folder: Path, *, memory: int = ClusterOptions().node_memory_bound
) -> SoakCluster:
    """Return a cluster of a kind; a node of the embedded one has ``memory`` bytes for messages."""
    if target == "real":
        return RealCluster()
    if target == "broker":
        return BrokerProcess(folder)
    if target == "original":
        return OriginalProcesses(folder)
    return EmbeddedProcess(seed, memory)
