"""Names of files, atomic writes, JSON with a checksum, and the lock of a folder."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest

from nsqext.broker.engine.storage.files import (
    SegmentFolder,
    decode_checked,
    keep_aside,
    locked,
    topic_folder,
    with_checksum,
    without_checksum,
    write_atomically,
)
from nsqext.broker.engine.storage.partition_store import ChannelState, StoredPartition, stored_partitions
from nsqext.errors import InvalidSetting
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


def test_members_that_a_stored_state_lacks_have_no_effect() -> None:
    channel = b'{"name":"ch","offset":1,"count":1}'
    data = with_checksum(b'{"topic":"orders","partition":2,"channels":[%b]}' % channel)
    ch = ChannelState("ch", 1, 1, [], False, False, "shared", "##key", False, 0)
    assert StoredPartition.decode(data) == StoredPartition("orders", 2, False, False, False, 0, [ch], 0, 0, 0, [])


def test_a_begin_that_does_not_say_where_the_queue_ended_continues_it(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path, "orders", 0, sync=False)
    folder.base_path(3).write_bytes(with_checksum(b'{"offset":64,"count":2}'))
    file = folder.read_begin(3)
    assert (file.path, file.number, file.offset, file.count) == (folder.data_path(3), 3, 64, 2)
    assert (file.size, file.end, file.follows) == (0, 64, -1)


def test_every_change_of_checked_content_is_noticed() -> None:
    data = with_checksum(b'{"a":1}')
    assert without_checksum(data) == b'{"a":1}'
    for at in range(len(data)):
        for changed in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            with pytest.raises(ValueError, match="the checksum is wrong"):
                without_checksum(changed)


def test_a_file_that_is_kept_aside_replaces_no_other_one(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for content, move in ((b"1", False), (b"2", True), (b"3", False)):
        path.write_bytes(content)
        kept = keep_aside(path, "damaged", move=move)
        assert (kept.read_bytes(), path.exists()) == (content, not move)
    assert {file.name: file.read_bytes() for file in tmp_path.glob("*.damaged*")} == {
        "state.damaged": b"1",
        "state.damaged.2": b"2",
        "state.damaged.3": b"3",
    }


def test_one_server_uses_a_folder(tmp_path: Path) -> None:
    with locked(None):
        pass
    folder = tmp_path / "new" / "node"
    with pytest.raises(InvalidSetting, match=r"failed to lock data-path: open .*node: no such file"), locked(folder):
        pass
    opened = len([*Path("/dev/fd").iterdir()])
    for _ in range(2):
        with locked(folder, make=True):
            with pytest.raises(InvalidSetting, match="possibly in use"), locked(folder):
                pass
            with locked(tmp_path):
                pass
        assert len([*Path("/dev/fd").iterdir()]) == opened
