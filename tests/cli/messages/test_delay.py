"""`nsqext delay`: a relay as a process, and its store."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest

from nsqext import sync
from nsqext.broker import Cluster
from nsqext.cli import main
from nsqext.delays import DelayStore
from nsqext.errors import InvalidSetting
from nsqext.protocol.delay_record import DelayedMessage
from nsqext.transactions import schema_sql
from tests.support import plain_http
from tests.support.blocking_client import eventually
from tests.support.command_line import lines, run, started
from tests.support.server_program import LOCAL, running


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
            names = ("consumer_connections{", "producer_connections{", "delay_waiting_messages{")
            assert [name for name in names if f"\nnsqext_{name}" not in metrics] == []
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


@pytest.mark.parametrize(
    ("relay", "line", "expected"),
    [
        (
            "nsqext.delays.DelayRelay",
            "delay run --store {}/store --topic t --channel c --keep 7",
            {"topic": "t", "channel": "c", "keep": 7.0},
        ),
        (
            "nsqext.transactions.OutboxRelay",
            "outbox relay --database sqlite:///{}/outbox.db --batch 3 --poll 0.25",
            {"batch": 3, "poll": 0.25},
        ),
    ],
    ids=["delay", "outbox"],
)
def test_the_options_of_a_command_are_those_of_its_relay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, relay: str, line: str, expected: dict[str, object]
) -> None:
    def make(store: object, **given: object) -> NoReturn:
        found.append(given)
        raise InvalidSetting("recorded")

    found: list[dict[str, object]] = []
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as connection:
        connection.executescript(schema_sql("sqlite"))
    monkeypatch.setattr(relay, make)
    with pytest.raises(SystemExit, match="2"):
        main([*line.format(tmp_path).split(), "--lookupd", "h:1"])
    assert found == [expected]


def test_a_relay_needs_no_lookup_service(tmp_path: Path) -> None:
    with Cluster(nodes=1, generation="original") as cluster:
        words = ("--store", str(tmp_path / "store"), "--nsqd", cluster.nodes["n1"].tcp)
        with started("delay", "run", *words) as process:
            assert process.stdout is not None
            assert b'"delayed"' in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


def test_a_relay_that_starts_before_lookup_waits_for_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    with started("delay", "run", "--store", str(tmp_path / "store"), "--lookupd", address) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"waiting: no lookup node returned a usable response" in process.stderr.readline()
        with running("nsqlookupd", "-tcp-address=127.0.0.1:0", f"-http-address={address}") as lookupd:
            register = f"-lookupd-tcp-address={lookupd.address('TCP')}"
            with running("nsqd", *LOCAL, register, "-data-path", str(tmp_path)):
                assert b'"delayed"' in process.stdout.readline()
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == 0


def test_a_relay_creates_no_topic_if_it_is_not_to(tmp_path: Path) -> None:
    with Cluster(nodes=1) as cluster:
        words = ("--no-create", "--store", str(tmp_path / "store"), "--lookupd", cluster.lookupd[0])
        with started("delay", "run", *words) as process:
            assert process.stdout is not None
            assert b'"delayed"' in process.stdout.readline()
            assert cluster.topics == {}


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
