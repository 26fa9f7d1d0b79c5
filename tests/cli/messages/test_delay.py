"""`nsqext delay`: a relay as a process, and its store."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from nsqext import sync
from nsqext.broker import Cluster
from tests.support.blocking_client import eventually
from tests.support.command_line import lines, run, started


@pytest.mark.parametrize("generation", ["ha", "nsq"])
def test_a_relay_publishes_lists_and_cancels(tmp_path: Path, generation: str) -> None:
    store = ("--store", str(tmp_path / "store"))
    with Cluster(nodes=1, generation=generation) as cluster:
        where = ("--lookupd", cluster.lookupd[0])
        lines("topic", "create", "orders", "--channel", "ch", *where)
        with started("delay", "run", *store, *where) as process:
            with sync.Producer(cluster.lookupd, delay_via="relay") as producer:
                assert process.stdout is not None
                assert b'"delayed"' in process.stdout.readline()  # printed when topic and channel exist
                producer.publish("orders", b"soon", delay=0.2)
                producer.publish("orders", b"later", delay=3600, identity="later")
                producer.publish("orders", b"never", delay=3600, identity="never")
            (found,) = lines("tail", "orders", "--channel", "ch", "--count", "1", *where)
            assert found["body"] == "soon"
            eventually(lambda: len(lines("delay", "list", *store)) == 2)
            assert lines("delay", "cancel", "never", *store) == [{"identity": "never", "cancelled": True}]
            assert run("delay", "cancel", "never", *store).returncode == 1
            (waiting,) = lines("delay", "list", "--topic", "orders", *store)
            assert (waiting["identity"], waiting["topic"], waiting["error"]) == ("later", "orders", "")
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert len(lines("delay", "list", *store)) == 1


def test_a_store_is_not_made_by_looking_at_it(tmp_path: Path) -> None:
    result = run("delay", "list", "--store", str(tmp_path / "none"))
    assert result.returncode == 2
    assert b"does not exist" in result.stderr
    assert not (tmp_path / "none").exists()
