"""What the record of a relay says about messages that were lost, and that it is complete before a FIN is sent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from nsqext import sync
from nsqext.broker import Cluster
from tests.campaigns.soak.recorded_relay import Copy, RelayNotes, explain, numbers_in_log
from tests.support.numbered_keys import body
from tests.support.programs import ROOT


def _file(folder: Path, *lines: tuple[object, ...], rest: bytes = b"") -> Path:
    file = folder / "notes"
    file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines) + rest)
    return file


def _stored(number: int, node: str = "n:1", partition: int = 0) -> tuple[object, ...]:
    return ("stored", "c0", number, node, partition, None, 100.0 + number)


def test_a_message_that_is_finished_before_its_copy_is_acknowledged_is_early(tmp_path: Path) -> None:
    finished = ("finished", "c0", 1)
    file = _file(tmp_path, _stored(0), ("finished", "c0", 0), finished, _stored(1), rest=b'["stored","c0",2')
    notes = RelayNotes.read(file)
    assert notes.early == {("c0", 1)}
    assert notes.finished == {("c0", 0), ("c0", 1)}
    assert notes.copies == {("c0", 0): Copy("n:1", 0, None, 100.0), ("c0", 1): Copy("n:1", 0, None, 101.0)}
    assert notes.acknowledged == 2
    assert RelayNotes.read(tmp_path / "none") == RelayNotes()


def test_the_reason_of_each_lost_message_is_named(tmp_path: Path) -> None:
    lines = [_stored(0), _stored(1), _stored(2, "n:2", 1), *(("finished", "c0", number) for number in (0, 1, 2, 3))]
    notes = RelayNotes.read(_file(tmp_path, *lines))
    missing = {("c0", number) for number in (1, 2, 3, 4)}
    assert explain(missing, notes, {("c0", 0), ("c0", 1)}).startswith(
        "1 finished before a copy was acknowledged, 1 not finished in the source, 2 acknowledged by the target, "
        "1 acknowledged, and not in its log, 1 in its log, and not delivered; acknowledged were 1 by n:2 partition 1, "
    )
    assert explain(missing, notes, None) == (
        "1 finished before a copy was acknowledged, 1 not finished in the source, 2 acknowledged by the target"
    )


@pytest.mark.timeout(60)
def test_a_relay_records_each_copy_before_it_finishes_the_message(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("orders", 2, channels=["relay"])
        cluster.create_topic("copy", 2, channels=["ch"])
        with sync.Producer(cluster.lookupd) as producer:
            producer.publish_many("orders", [body(key, number) for key in range(2) for number in range(50)])
        words = ["relay", "orders", "--to", "copy", "--lookupd", ",".join(cluster.lookupd), "--until-end"]
        program = [sys.executable, "-m", "tests.campaigns.soak.recorded_relay", str(notes), *words]
        subprocess.run(program, cwd=ROOT, check=True, timeout=40.0)
        found = RelayNotes.read(notes)
        expected = {(f"c{key}", number) for key in range(2) for number in range(50)}
        assert (set(found.copies), found.finished, found.early) == (expected, expected, set())
        assert numbers_in_log(cluster.lookupd, "copy") == expected
