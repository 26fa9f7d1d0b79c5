"""Names of files, and atomic writes."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest

from nsqext.broker.engine.storage.files import decode_checked, topic_folder, with_checksum, write_atomically
from nsqext.broker.engine.storage.partition_store import ChannelState, stored_partitions
from tests.support.engine_partition import Bench


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomically(path, b"one", sync=False)
    write_atomically(path, b"two", sync=True)
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("sync", [False, True])
def test_content_is_synced_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    synced: list[tuple[int, dict[str, bytes]]] = []

    def record(file: int) -> None:
        synced.append((os.fstat(file).st_ino, {one.name: one.read_bytes() for one in tmp_path.iterdir()}))

    monkeypatch.setattr(os, "fsync", record)
    opened = len([*Path("/dev/fd").iterdir()])
    write_atomically(path, b"new", sync=sync)
    assert len([*Path("/dev/fd").iterdir()]) == opened
    assert (
        synced
        == [
            (path.stat().st_ino, {"state": b"old", "state.new": b"new"}),
            (tmp_path.stat().st_ino, {"state": b"new"}),
        ][: 2 * sync]
    )


@pytest.mark.parametrize("topic", [".", "..", "...", "orders", "a.b"])
def test_every_topic_has_its_own_folder(tmp_path: Path, topic: str) -> None:
    node = tmp_path / "n1"
    partition = Bench(data_path=node, topic=topic).partition
    assert [path.name for path in tmp_path.iterdir()] == ["n1"]
    assert [path for path in node.iterdir() if not path.is_dir()] == []
    assert [state.topic for state in stored_partitions(node)] == [topic]
    partition.close(destroy=True)
    assert list(node.iterdir()) == []


def test_names_of_existing_folders_do_not_change(tmp_path: Path) -> None:
    assert [topic_folder(tmp_path, topic).name for topic in ("orders", ".a", "a..")] == ["orders", ".a", "a.."]


def test_offsets_and_counts_are_whole_numbers_below_a_bound() -> None:
    def offset(value: object) -> int:
        data = orjson.dumps({"name": "ch", "offset": value, "count": 0})
        return decode_checked(with_checksum(data), ChannelState).offset

    assert [offset(number) for number in (0, 1, (1 << 62) - 1)] == [0, 1, (1 << 62) - 1]
    for value in (-1, 1 << 62, True, 1.0, "1", None):
        with pytest.raises(ValueError, match="Expected"):
            offset(value)
