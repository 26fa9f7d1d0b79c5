"""What operators see of delayed messages: numbers, metrics, the doctor, and records that were set aside."""

from __future__ import annotations

import json
import re
import signal
import socket
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from nsqext.broker import Cluster
from nsqext.delays import DelayRelay, DelayStatistics, DelayStore, DelaySummary
from nsqext.errors import InvalidState
from nsqext.observability.prometheus import Prometheus
from nsqext.protocol.delay_record import DelayedMessage
from nsqext.sync import Producer
from tests.support import plain_http
from tests.support.blocking_client import eventually
from tests.support.command_line import Terminal, lines, run, started


def message(identity: str, due: float) -> tuple[DelayedMessage, bytes]:
    """Return a message that is due at a time, in seconds since 1970."""
    return DelayedMessage(identity=identity, topic="t", due=round(due * 1000)), b"x"


def test_the_summary_counts_what_waits_and_since_when_it_is_due(tmp_path: Path) -> None:
    with DelayStore(tmp_path / "store") as store:
        assert store.summary(9.0) == DelaySummary(0, None, 0)
        store.add([message("a", 10.0), message("b", 12.0)])
        store.refuse([(b"hello", "not a delayed message")])
        assert store.summary(9.0) == DelaySummary(2, None, 1)
        assert store.summary(10.0) == DelaySummary(2, 0.0, 1)
        assert store.summary(15.0) == DelaySummary(2, 5.0, 1)
        store.failed("a", "no leader", 15.0, 30.0, alone=True)  # tried again later, and due since then all the same
        assert store.summary(16.0) == DelaySummary(2, 6.0, 1)
        store.take(["a"], 0, 16.0, 60.0)
        assert store.summary(16.0) == DelaySummary(1, 4.0, 1)
        assert store.discard_refused() == 1
        assert store.summary(16.0) == DelaySummary(1, 4.0, 0)


def test_metrics_report_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(_: float) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    registry = CollectorRegistry()
    store = DelayStore(tmp_path / "store")
    store.add([message("a", 1.0), message("b", 2.0**32)])
    store.refuse([(b"hello", "not a delayed message")])
    relay = DelayRelay(store)
    Prometheus(registry=registry).attach(relay)
    value = registry.get_sample_value
    assert value("nsqext_delay_waiting_messages") == 2
    assert value("nsqext_delay_refused_records") == 1
    late = value("nsqext_delay_late_seconds")
    assert late is not None
    assert late > 1e9
    store.take(["a"], 0, 3.0, 60.0)
    assert value("nsqext_delay_late_seconds") == 0
    assert value("nsqext_delay_published_messages_total") == 0
    with closing(sqlite3.connect(tmp_path / "store")) as database:
        database.execute("ALTER TABLE delayed RENAME TO away")
    with pytest.raises(InvalidState, match="cannot be read: no such table"):
        relay.summary()
    with monkeypatch.context() as patched, pytest.raises(InvalidState, match="is malformed"):
        patched.setattr(store, "summary", damaged)
        relay.summary()
    store.close()
    assert value("nsqext_delay_waiting_messages") is None
    assert value("nsqext_delay_failed_publishes_total") == 0
    assert relay.statistics() == DelayStatistics(0, 0, 0)


def test_a_relay_serves_its_metrics_and_the_doctor_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    with Cluster(nodes=1) as cluster:
        where = ("--lookupd", cluster.lookupd[0])
        lines("topic", "create", "orders", "--channel", "ch", *where)
        with started("delay", "run", "--store", str(path), "--http", address, *where) as process:
            assert process.stdout is not None
            assert b'"delayed"' in process.stdout.readline()
            with Producer(cluster.lookupd, delay_via="relay") as producer:
                producer.publish("delayed", b"hello")
                producer.publish("orders", b"soon", delay=0.01)
                producer.publish("orders", b"later", delay=3600)

            def text() -> str:
                return plain_http.get(f"http://{address}/metrics").text

            eventually(lambda: 'nsqext_delay_published_messages_total{worker="1"} 1.0' in text())
            eventually(lambda: 'nsqext_delay_waiting_messages{worker="1"} 1.0' in text())
            eventually(lambda: 'nsqext_delay_refused_records{worker="1"} 1.0' in text())
            assert 'nsqext_consumer_received_messages_total{channel="relay",topic="delayed",worker="1"} 3.0' in text()
            assert plain_http.get(f"http://{address}/readyz").status_code == 200
            found = {one["subject"]: one for one in lines("doctor", "--metrics", f"http://{address}/metrics", *where)}
            assert found["delays"]["status"] == "warning"
            assert found["delays"]["text"] == "1 delayed message waiting, none is due; 1 record set aside"
            assert found["service delayed/relay"]["status"] == "ok"
            with closing(sqlite3.connect(path)) as database:
                for before, behind, status in (("delayed", "away", 503), ("away", "delayed", 200)):
                    database.execute(f"ALTER TABLE {before} RENAME TO {behind}")
                    eventually(lambda: plain_http.get(f"http://{address}/readyz").status_code == status)  # noqa: B023
            lines("topic", "create", "gone", "--channel", "ch", *where)
            with Producer(cluster.lookupd, delay_via="relay") as producer:
                producer.publish("gone", b"not stored", delay=0.5)
                lines("topic", "delete", "gone", "--yes", *where)
                eventually(lambda: "no message is stored" in plain_http.get(f"http://{address}/readyz").text)
                producer.publish("orders", b"stored", delay=0.01)
                eventually(lambda: plain_http.get(f"http://{address}/readyz").status_code == 200)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


def test_the_doctor_examines_a_store(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "store"

    def last(status: int) -> dict[str, Any]:
        done = run("doctor", "--lookupd", cluster.lookupd[0], "--delay-store", str(path))
        assert (done.returncode, done.stderr) == (status, b"")
        with Terminal("doctor", "--lookupd", cluster.lookupd[0], "--delay-store", str(path)) as terminal:
            assert terminal.end(30) == status
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert found["subject"] == "delays"
        assert found["hint"] in terminal.shown
        return found

    assert last(1)["text"].endswith("does not exist")
    with DelayStore(path) as store:
        assert (last(0)["status"], last(0)["text"]) == ("ok", "0 delayed messages waiting, none is due")
        store.refuse([(b"hello", "not a delayed message")])
        assert last(0)["hint"] == "nsqext delay list --refused shows them, and nsqext delay discard deletes them"
        store.add([message("b", time.time() - 10.0)])
        late = re.fullmatch(r"1 delayed message waiting, due for (\d+) s; 1 record set aside", last(0)["text"])
        assert late is not None and 10 <= int(late[1]) < 60
        store.add([message("a", 1.0)])
        found = last(1)
    assert found["status"] == "error"
    assert found["hint"].startswith("does nsqext delay run use this store?")


def test_records_that_were_set_aside_are_deleted(tmp_path: Path) -> None:
    where = ("--store", str(tmp_path / "store"))
    with DelayStore(tmp_path / "store") as store:
        store.refuse([(b"hello", "not a delayed message")])
        store.add([message("a", 2.0**32)])
        assert lines("delay", "discard", "--yes", *where) == [{"store": str(tmp_path / "store"), "discarded": 1}]
        assert store.refused() == []
        assert store.count() == 1
