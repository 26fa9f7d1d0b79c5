"""The simulated disk: what was synced survives a loss of power, everything else may be lost or torn."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from unittest.mock import patch

import pytest

from nsqext.broker.engine.storage.files import write_atomically
from nsqext.testing.simulation.disk import SimulatedDisk, SimulatedPath
from nsqext.testing.simulation.network import Network


@contextmanager
def disk_of(seed: int, network: Network | None = None) -> Iterator[SimulatedDisk]:
    disk = SimulatedDisk(network or Network(Random(seed)), Random(seed))
    with ExitStack() as stack:
        for name, function in disk.replacements():
            stack.enter_context(patch.object(os, name, function))
        (disk.root / "n1").mkdir(parents=True)
        yield disk


def append(path: SimulatedPath, data: bytes, *, sync: bool) -> None:
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(out, data)
    if sync:
        os.fsync(out)
    os.close(out)


def left(seed: int) -> bytes | None:
    """Return what remains of a file with synced and unsynced bytes."""
    with disk_of(seed) as disk:
        folder = disk.root / "n1"
        append(folder / "queue", b"synced ", sync=True)
        append(folder / "queue", b"unsynced", sync=False)
        append(folder / "other", b"unsynced", sync=False)
        disk.lose_power("n1")
        assert (folder / "queue").exists()
        return bytes((folder / "queue").read_bytes())


def test_unsynced_bytes_are_lost_torn_or_kept() -> None:
    found = {left(seed) for seed in range(40)}
    assert {b"synced ", b"synced unsynced"} < found
    assert all(data is not None and b"synced unsynced".startswith(data) and len(data) >= 7 for data in found)


def renamed(seed: int, *, sync: bool) -> bytes | None:
    with disk_of(seed) as disk:
        folder = disk.root / "n1"
        write_atomically(folder / "state", b"new", sync=sync)
        disk.lose_power("n1")
        return bytes((folder / "state").read_bytes()) if (folder / "state").exists() else None


def test_a_file_that_was_replaced_with_sync_survives_a_loss_of_power() -> None:
    """The folder was not synced: the rename was undone, and with the file of channels all channels were forgotten."""
    assert {renamed(seed, sync=True) for seed in range(40)} == {b"new"}
    assert None in {renamed(seed, sync=False) for seed in range(40)}


@pytest.mark.parametrize(("fault", "number"), [("full", errno.ENOSPC), ("failing", errno.EIO)])
def test_a_disk_that_is_full_or_failing_refuses_writes(fault: str, number: int) -> None:
    with disk_of(1) as disk:
        folder = disk.root / "n1"
        getattr(disk, fault).add("n1")
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            append(folder / "queue", b"x", sync=True)
        assert caught.value.errno == number
        disk.heal("n1")
        append(folder / "queue", b"x", sync=True)
        assert (folder / "queue").read_bytes() == b"x"


@pytest.mark.parametrize("seed", range(5))
def test_a_removed_file_is_gone_after_a_loss_of_power(seed: int) -> None:
    with disk_of(seed) as disk:
        folder = disk.root / "n1"
        append(folder / "queue", b"synced", sync=True)
        (folder / "queue").unlink()
        disk.lose_power("n1")
        assert not (folder / "queue").exists()


def test_a_loss_of_power_concerns_one_node() -> None:
    for seed in range(5):
        with disk_of(seed) as disk:
            (disk.root / "n10").mkdir()
            append(disk.root / "n10" / "queue", b"unsynced", sync=False)
            disk.lose_power("n1")
            assert (disk.root / "n10" / "queue").read_bytes() == b"unsynced"


def test_a_sync_behind_a_rename_does_not_bring_back_the_old_name() -> None:
    for seed in range(5):
        with disk_of(seed) as disk:
            folder = disk.root / "n1"
            out = os.open(folder / "old", os.O_WRONLY | os.O_CREAT)
            os.write(out, b"x")
            (folder / "old").replace(folder / "new")
            os.fsync(out)
            disk.lose_power("n1")
            assert not (folder / "old").exists()


def test_a_failing_disk_does_not_sync_what_it_has_taken() -> None:
    with disk_of(1) as disk:
        folder = disk.root / "n1"
        out = os.open(folder / "queue", os.O_WRONLY | os.O_CREAT)
        os.write(out, b"x")
        disk.failing.add("n1")
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.fsync(out)


def test_a_sync_takes_time_on_a_slow_disk() -> None:
    network, spent = Network(Random(1)), list[float]()
    with disk_of(1, network) as disk:
        disk.slow["n1"] = 5.0
        (disk.root / "n2").mkdir()
        for node in ("n2", "n1", "n1"):
            append(disk.root / node / "queue", b"x", sync=True)
            spent.append(network.now)
            if node == "n1":
                disk.heal("n1")
    assert spent[0] == 0.0 < spent[1] == spent[2] <= 5.0


def test_files_are_closed_by_a_loss_of_power() -> None:
    with disk_of(1) as disk:
        out = os.open(disk.root / "n1" / "queue", os.O_WRONLY | os.O_CREAT)
        disk.lose_power("n1")
        for use in (lambda: os.write(out, b"x"), lambda: os.ftruncate(out, 0)):
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                use()


def test_a_full_disk_says_how_much_of_a_write_it_has_taken() -> None:
    parts = set[int]()
    for seed in range(20):
        with disk_of(seed) as disk:
            path = disk.root / "n1" / "queue"
            out = os.open(path, os.O_WRONLY | os.O_CREAT)
            disk.full.add("n1")
            try:
                written = os.write(out, b"abcdef")
            except OSError:
                written = 0
            assert path.read_bytes() == b"abcdef"[:written]
            parts.add(written)
    assert {0} < parts <= set(range(6))


def test_the_sync_of_a_folder_makes_the_names_in_it_durable() -> None:
    kept = set[tuple[bool, bool]]()
    for seed in range(20):
        with disk_of(seed) as disk:
            folders = [disk.root / "n1" / name for name in ("one", "two")]
            for folder in folders:
                folder.mkdir()
                append(folder / "old", b"x", sync=True)
                (folder / "old").replace(folder / "new")
            synced = os.open(folders[0], os.O_RDONLY)
            os.fsync(synced)
            disk.lose_power("n1")
            first, second = ((folder / "new").exists() for folder in folders)
            kept.add((first, second))
    assert kept == {(True, True), (True, False)}


def test_only_an_empty_folder_is_removed() -> None:
    with disk_of(1) as disk:
        folder = disk.root / "n1" / "topic"
        folder.mkdir()
        append(folder / "queue", b"x", sync=True)
        with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
            folder.rmdir()
        (folder / "queue").unlink()
        folder.rmdir()
        assert not folder.exists()
