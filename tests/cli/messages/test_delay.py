"""`nsqext delay`: a relay as a process, and its store."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from nsqext import sync
from nsqext.broker import Cluster
from nsqext.delays import DelayStore
from nsqext.protocol.delay_record import DelayedMessage
from tests.support import plain_http
from tests.support.blocking_client import eventually
from tests.support.command_line import lines, run, started


@pytest.mark.parametrize("generation", ["redesigned", "original"])
def test_a_relay_publishes_lists_and_cancels(tmp_path: Path, generation: str) -> None:
    store = ("--store", str(tmp_path / "store"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    with Cluster(nodes=1, generation=generation) as cluster:
        where = ("--lookupd", cluster.lookupd[0])
        lines("topic", "create", "orders", "--channel", "ch", *where)
        with started("delay", "run", "--http", address, *store, *where) as process:
            with sync.Producer(cluster.lookupd, delay_via="relay") as producer:
                assert process.stdout is not None
                assert b'"delayed"' in process.stdout.readline()  # printed when topic and channel exist
                producer.publish("orders", b"soon", delay=0.2)
                producer.publish("orders", b"later", delay=3600, identity="later")
                producer.publish("orders", b"never", delay=3600, identity="never")
            (found,) = lines("tail", "orders", "--channel", "ch", "--count", "1", *where)
            assert found["body"] == "soon"
            metrics = plain_http.get(f"http://{address}/metrics").text
            assert "nsqext_consumer_connections{" in metrics and "nsqext_producer_connections{" in metrics
            eventually(lambda: len(lines("delay", "list", *store)) == 2)
            assert lines("delay", "cancel", "never", "--yes", *store) == [
                {"identity": "never", "cancelled": True, "result": "cancelled"}
            ]
            assert run("delay", "cancel", "never", "--yes", *store).returncode == 1
            (waiting,) = lines("delay", "list", "--topic", "orders", *store)
            assert (waiting["identity"], waiting["topic"], waiting["error"]) == ("later", "orders", "")
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert len(lines("delay", "list", *store)) == 1


def test_what_is_set_aside_is_listed_and_a_late_cancel_says_so(tmp_path: Path) -> None:
    where = ("--store", str(tmp_path / "store"))
    with DelayStore(tmp_path / "store") as store:
        store.refuse([(b"hello", "not a delayed message")])
        store.add([(DelayedMessage(identity="a", topic="t", due=1), b"x")])
        store.take([], 1, 1.0, 60.0)
        (found,) = lines("delay", "list", "--refused", *where)
        assert (found["record"], found["reason"]) == ("b'hello'", "not a delayed message")
        assert lines("delay", "list", *where)[0]["publishing"] is True
        done = run("delay", "cancel", "a", "--yes", *where)
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"identity": "a", "cancelled": False, "result": "too late"}


def test_a_store_is_not_made_by_looking_at_it(tmp_path: Path) -> None:
    result = run("delay", "list", "--store", str(tmp_path / "none"))
    assert result.returncode == 2
    assert b"does not exist" in result.stderr
    assert not (tmp_path / "none").exists()
