"""Servers for benchmarks, each in a process of its own; and filled topics for consumers to empty."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trustme

__all__ = ("Nsqd", "cluster_process", "cpu_of", "fill", "original_nsqd", "program_given", "redesigned_cluster")

_BATCH = 100
_BATCH_BYTES = 4_000_000


class Nsqd:
    """A running nsqd of the original NSQ.

    Attributes:
        pid: id of its process.
        tcp: its TCP address.
        http: its HTTP address.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid: int = process.pid
        self.tcp: str = ""
        self.http: str = ""
        lines = process.stderr or iter(())
        for line in lines:
            address = line.rpartition(" ")[2].strip()
            if "TCP: listening on " in line:
                self.tcp = address
            elif "HTTP: listening on " in line:
                self.http = address
            if self.tcp and self.http:
                break
        # a pipe that is not read would block the server
        threading.Thread(target=deque, args=(lines, 0), daemon=True).start()

    def delete(self, topic: str) -> None:
        """Delete a topic with its messages, if it exists."""
        request = urllib.request.Request(f"http://{self.http}/topic/delete?topic={topic}", method="POST")
        with suppress(urllib.error.HTTPError), urllib.request.urlopen(request) as response:  # noqa: S310
            response.read()


def program_given() -> str | None:
    """Return the path of another nsqd program to measure with, which NSQEXT_BENCH_NSQD names."""
    return os.environ.get("NSQEXT_BENCH_NSQD")


@contextmanager
def original_nsqd(
    core: int | None = None, *, mem_queue_size: int = 10_000_000, program: str | None = None, tls: bool = False
) -> Iterator[Nsqd]:
    """Run ``nsqext nsqd``, or another program with the same flags.

    Args:
        core: the core that it may use; any without it.
        mem_queue_size: messages of a topic and of a channel that it keeps in memory.
        program: path of another nsqd.
        tls: offer TLS, with a certificate of its own.
    """
    command = [program] if program else [sys.executable, "-m", "nsqext", "nsqd"]
    with tempfile.TemporaryDirectory() as folder:
        words = ["-tcp-address", "127.0.0.1:0", "-http-address", "127.0.0.1:0", "-data-path", folder]
        words += certificate(Path(folder)) if tls else []
        process = subprocess.Popen(  # noqa: S603
            [*command, *words, "-mem-queue-size", str(mem_queue_size)], stderr=subprocess.PIPE, text=True
        )
        try:
            if core is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(process.pid, {core})
            yield Nsqd(process)
        finally:
            process.kill()
            process.wait()


@contextmanager
def redesigned_cluster(*topics: str) -> Iterator[str]:
    """Run a cluster of one node; yields the address of its lookup node.

    Args:
        topics: ``NAME``, ``NAME:PARTITIONS``, or ``NAME:PARTITIONS:ext``; by default ``plain`` and ``ext``.
    """
    with cluster_process(*(topics or ("plain", "ext:1:ext"))) as (_, address):
        yield f"http://{address}"


@contextmanager
def cluster_process(*topics: str, nodes: int = 1) -> Iterator[tuple[int, str]]:
    """Run a cluster; yields the id of its process and the address of its lookup node."""
    command = [sys.executable, "-m", "benchmarks.servers", str(nodes), *topics]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        if process.stdout is None:
            raise SystemExit("the cluster has no stdout")
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process; Linux only."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK")


def certificate(folder: Path) -> list[str]:
    """Write a certificate and its key; return the options of nsqd that name them."""
    made = trustme.CA().issue_cert("localhost", "127.0.0.1")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    made.private_key_pem.write_to_path(folder / "key.pem")
    words = ["-tls-cert", str(folder / "cert.pem"), "-tls-key", str(folder / "key.pem")]
    return [*words, "-https-address", "127.0.0.1:0"]


def fill(address: str, topic: str, count: int, body: bytes) -> None:
    """Make the channel ``ch`` of a topic, and publish messages to it."""
    host, _, port = address.rpartition(":")

    def read() -> bytes:
        size = int.from_bytes(file.read(4), "big")
        return file.read(size)[4:]

    each = max(1, min(_BATCH, _BATCH_BYTES // len(body)))
    items = struct.pack(">i", each) + (struct.pack(">i", len(body)) + body) * each
    batch = b"MPUB %s\n%s%s" % (topic.encode(), struct.pack(">i", len(items)), items)
    with socket.create_connection((host, int(port))) as sock, sock.makefile("rb") as file:
        sock.sendall(b"  V2SUB %s ch\n" % topic.encode())
        answers = [read()]
        for _ in range(-(-count // each)):
            sock.sendall(batch)
            answers.append(read())
    if set(answers) != {b"OK"}:
        raise SystemExit(f"the topic cannot be filled: {set(answers)}")


if __name__ == "__main__":
    from nsqext.broker import Cluster

    with Cluster(nodes=int(sys.argv[1])) as cluster:
        for text in sys.argv[2:]:
            name, partitions, extend, *_ = (*text.split(":"), "1", "")
            cluster.create_topic(name, partitions=int(partitions), extend=extend == "ext", channels=["ch"])
        print(cluster.lookupd[0], flush=True)
        sys.stdin.read()
