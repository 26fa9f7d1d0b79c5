"""Servers for benchmarks, each in a process of its own; and filled topics for consumers to empty."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ("fill", "original_nsqd", "redesigned_cluster")

_BATCH = 100


@contextmanager
def original_nsqd(core: int | None = None) -> Iterator[str]:
    """Run ``nsqext nsqd``; yields its TCP address.

    Args:
        core: the core that it may use; any without it.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ("-tcp-address", "127.0.0.1:0", "-http-address", "127.0.0.1:0", "-data-path", folder)
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "nsqext", "nsqd", *words, "-mem-queue-size", "10000000"],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            if core is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(process.pid, {core})
            if process.stderr is None:
                raise SystemExit("nsqd has no stderr")
            for line in process.stderr:
                if "TCP: listening on " in line:
                    yield line.rpartition(" ")[2].strip()
                    break
        finally:
            process.kill()
            process.communicate()


@contextmanager
def redesigned_cluster() -> Iterator[str]:
    """Run a cluster of one node with the topics ``plain`` and ``ext``; yields the address of its lookup node."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.servers"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        if process.stdout is None:
            raise SystemExit("the cluster has no stdout")
        yield f"http://{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.communicate()


def fill(address: str, topic: str, count: int, body: bytes) -> None:
    """Make the channel ``ch`` of a topic, and publish messages to it."""
    host, _, port = address.rpartition(":")

    def read() -> bytes:
        size = int.from_bytes(file.read(4), "big")
        return file.read(size)[4:]

    items = struct.pack(">i", _BATCH) + (struct.pack(">i", len(body)) + body) * _BATCH
    batch = b"MPUB %s\n%s%s" % (topic.encode(), struct.pack(">i", len(items)), items)
    with socket.create_connection((host, int(port))) as sock, sock.makefile("rb") as file:
        sock.sendall(b"  V2SUB %s ch\n" % topic.encode())
        answers = [read()]
        for _ in range(-(-count // _BATCH)):
            sock.sendall(batch)
            answers.append(read())
    if set(answers) != {b"OK"}:
        raise SystemExit(f"the topic cannot be filled: {set(answers)}")


if __name__ == "__main__":
    from nsqext.broker import Cluster

    with Cluster(nodes=1) as cluster:
        cluster.create_topic("plain", channels=["ch"])
        cluster.create_topic("ext", extend=True, channels=["ch"])
        print(cluster.lookupd[0], flush=True)
        sys.stdin.read()
