"""Targets: what is read from disks."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from nsqext.broker.coordinator.state_file import StateFile
from nsqext.broker.engine.storage.files import with_checksum, without_checksum
from nsqext.cli.message_files import outgoing_message, read_entries
from nsqext.errors import InvalidInput, InvalidSetting
from nsqext.protocol.frames import FrameType
from tests.support.coordinators import make_coordinator
from tests.support.nsqd_sessions import Client, Clock, host, make_node, sized

__all__ = ("LETTERS", "coordinator_state", "disk", "message_files", "stored_files")

_QUEUE = "t/t-0.diskqueue.000000.dat"
_STATE = "t/t-0.channels.json"
_DELAYED = "t/t-0.delayed.jsonl"
_BASE = "t/t-0.diskqueue.000000.base.json"
LETTERS = {b"q": _QUEUE, b"c": _STATE, b"d": _DELAYED, b"b": _BASE}
"""Files by the first byte of an input of `disk`."""


@cache
def stored_files() -> dict[str, bytes]:
    """Return the files of a node with messages, a channel that has finished some of them, and a delayed message."""
    with tempfile.TemporaryDirectory() as folder:
        node = make_node(data_path=Path(folder))
        host(node, "t")
        client = Client(node)
        client.ask(b"SUB t c 0\n")
        client.send(b"RDY 2\n")
        client.send(b"".join(sized("PUB t 0", b"body %d" % number) for number in range(4)))
        first, second = [data for kind, data in client.receive() if kind == FrameType.MESSAGE][:2]
        client.send(b"FIN " + first[10:26] + b"\nREQ " + second[10:26] + b" 86400000\n")
        client.session.end()
        node.tick()
        node.unhost("t", 0)
        return {name: _without_checksums(name, (Path(folder) / name).read_bytes()) for name in LETTERS.values()}


def _without_checksums(name: str, data: bytes) -> bytes:
    """Return the content of a file without checksums, behind which no damage would be read."""
    if name == _QUEUE:
        return data
    return b"\n".join(without_checksum(line) if line else line for line in data.split(b"\n"))


def _sealed(name: str, data: bytes) -> bytes:
    """Undo `_without_checksums`."""
    if name == _QUEUE:
        return data
    if name != _DELAYED:
        return with_checksum(data)
    return b"\n".join(with_checksum(line) if line else line for line in data.split(b"\n"))


def disk(data: bytes) -> None:
    """Files of a node after a restart; the first byte chooses which of them is damaged."""
    files = stored_files() | {LETTERS.get(data[:1], _QUEUE): data[1:]}
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_memory_folder()))
    try:
        (folder / "t").mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(_sealed(name, content))
        clock = Clock()
        node = make_node(clock, data_path=folder)
        with suppress(InvalidSetting):
            node.load()
            host(node, "t")
            client = Client(node)
            client.send(b"SUB t c 0\nRDY 100\n")
            client.send(sized("PUB t 0", b"after the restart"))
            clock.seconds += 100.0
            node.tick()
            client.receive()
            client.session.end()
        for topic, partition in list(node.hosted):
            node.unhost(topic, partition)
    finally:
        shutil.rmtree(folder)


@cache
def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def coordinator_state(data: bytes) -> None:
    """The coordinator's file of topics."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_memory_folder()))
    try:
        path = folder / "cluster.json"
        path.write_bytes(with_checksum(data))
        coordinator = make_coordinator(2, folder=folder)
        with suppress(InvalidSetting):
            StateFile(coordinator, path).load()
        for member in coordinator.members.values():
            for topic, partition in list(member.node.hosted):
                member.node.unhost(topic, partition)
    finally:
        shutil.rmtree(folder)


def message_files(data: bytes) -> None:
    """Files of `nsqext record`, as `nsqext replay` reads them."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_memory_folder()))
    try:
        path = folder / "t.jsonl.gz"
        path.write_bytes(data)
        with suppress(InvalidInput):
            for entry in read_entries(path):
                with suppress(InvalidInput):
                    outgoing_message(entry.record)
    finally:
        shutil.rmtree(folder)
