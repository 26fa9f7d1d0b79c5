"""`nsqext doctor --metrics`: what the page of a service tells."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_hex
from typing import TYPE_CHECKING

import pytest
from anyio import to_thread
from prometheus_client import CollectorRegistry, generate_latest

from nsqext import App, Message, Reject
from nsqext.cli.admin.service_metrics import SERIES, judge, read_series
from nsqext.observability.prometheus import Prometheus
from tests.support.command_line import run
from tests.support.consumers import eventually
from tests.support.series import exported
from tests.support.tables import table

if TYPE_CHECKING:
    from nsqext.broker import Cluster

_RELAYED = 'nsqext_relay_lag_messages{{topic="a",channel="relay",target="b"}} {}'
_CHANNEL = '{topic="orders",channel="billing"}'
_HANDLED, _REDELIVERED = f"nsqext_handled_messages_total{_CHANNEL}", f"nsqext_redelivered_messages_total{_CHANNEL}"


def findings(page: str) -> dict[str, tuple[str, str]]:
    """Return status and text of each finding about a page, by its subject; a subject has one finding."""
    found = list(judge(read_series(page, "nsqext")))
    assert len({one.subject for one in found}) == len(found)
    return {one.subject: (one.status, one.text) for one in found}


def test_every_series_that_is_judged_exists_with_its_labels() -> None:
    known = exported()
    for name, (labels, _) in SERIES.items():
        assert known[f"nsqext_{name}"] >= set(labels), name


@table(
    "page, status, text",
    [
        (
            f"nsqext_consumer_dropped_messages_total{_CHANNEL} 2",
            "error",
            "2 messages failed and dropped since the start",
        ),
        (
            f"nsqext_consumer_dead_letters_total{_CHANNEL} 1",
            "warning",
            "1 message sent to the dead letters since the start",
        ),
        (
            f"{_HANDLED} 100\n{_REDELIVERED} 6\nnsqext_consumer_lost_messages_total{_CHANNEL} 5",
            "warning",
            "6 of 100 handled messages were redeliveries (6%), 5 after a timeout or a lost connection",
        ),
        (
            f"{_HANDLED} 100\n{_REDELIVERED} 5",
            "ok",
            "nothing dropped, no dead letters",
        ),
        (
            f"nsqext_consumer_connections{_CHANNEL} 2\nnsqext_consumer_starved_connections{_CHANNEL} 2",
            "warning",
            "all of 2 connections have used up their RDY counts",
        ),
        (
            f"nsqext_consumer_connections{_CHANNEL} 2\nnsqext_consumer_starved_connections{_CHANNEL} 1",
            "ok",
            "nothing dropped, no dead letters",
        ),
        (f"nsqext_consumer_connections{_CHANNEL} 0", "error", "has no connection to a node"),
        ("nsqext_outbox_waiting_messages 0\nnsqext_outbox_relays 1", "ok", "0 messages waiting; 1 relay"),
        ("nsqext_outbox_waiting_messages 0\nnsqext_outbox_relays 0", "ok", "0 messages waiting; 0 relays"),
        (
            "nsqext_outbox_waiting_messages 2\nnsqext_outbox_oldest_seconds 3\nnsqext_outbox_relays 0",
            "error",
            "2 messages waiting, the oldest for 3 s; 0 relays",
        ),
        (
            "nsqext_outbox_waiting_messages 2\nnsqext_outbox_oldest_seconds 61\nnsqext_outbox_relays 1",
            "warning",
            "2 messages waiting, the oldest for 61 s; 1 relay",
        ),
        (
            "nsqext_outbox_waiting_messages 0\nnsqext_outbox_refused_messages 1\nnsqext_outbox_relays 1",
            "warning",
            "0 messages waiting; 1 relay; 1 message set aside",
        ),
        (
            "nsqext_delay_waiting_messages 3\nnsqext_delay_late_seconds 61.5",
            "error",
            "3 delayed messages waiting, due for 61 s",
        ),
        (
            "nsqext_delay_waiting_messages 3\nnsqext_delay_late_seconds 0\nnsqext_delay_refused_records 2",
            "warning",
            "3 delayed messages waiting, none is due; 2 records set aside",
        ),
        ("nsqext_outbox_published_messages_total 7", "error", "its relay cannot read the database"),
        (
            "nsqext_outbox_published_messages_total 7\nnsqext_outbox_waiting_messages 0",
            "ok",
            "0 messages waiting; 0 relays",
        ),
        ("nsqext_delay_published_messages_total 7", "error", "their relay cannot read its store"),
        (
            "nsqext_delay_published_messages_total 7\nnsqext_delay_waiting_messages 0",
            "ok",
            "0 delayed messages waiting, none is due",
        ),
        (_RELAYED.format(10_000), "ok", "10000 messages behind"),
        (_RELAYED.format(10_001), "warning", "10001 messages behind"),
    ],
)
def test_a_page_is_judged(page: str, status: str, text: str) -> None:
    (found,) = findings(page + "\n").values()
    assert found == (status, text)


def test_workers_and_namespaces_are_combined() -> None:
    page = "".join(
        f'{namespace}_consumer_dropped_messages_total{{topic="{topic}",channel="ch",worker="{worker}"}} 1\n'
        for namespace in ("mine", "nsqext")
        for topic in ("orders", "bills")
        for worker in (1, 2)
    )
    page += 'mine_outbox_waiting_messages{worker="1"} 3\nmine_outbox_waiting_messages{worker="2"} 2\n'
    found = read_series(page + "process_open_fds 9\n", "mine")
    assert found == {
        "consumer_dropped_messages_total": {("orders", "ch"): 2, ("bills", "ch"): 2},
        "outbox_waiting_messages": {(): 3},
    }


@contextmanager
def serving(page: bytes, status: int = 200) -> Iterator[str]:
    """Serve a page; yield its URL."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.anyio
async def test_the_doctor_finds_what_a_service_drops(cluster: Cluster) -> None:
    registry, topic = CollectorRegistry(), f"t_{token_hex(4)}"
    cluster.create_topic(topic, channels=["ch"])
    app = App(cluster.lookupd, middleware=[Prometheus(registry)])

    @app.handler(topic, "ch")
    async def refuse(message: Message) -> None:
        raise Reject("no such order")

    async with app:
        await app.producer.publish(topic, b"one")
        (consumer,) = app.consumers
        await eventually(lambda: consumer.statistics().dropped == 1)
        page = generate_latest(registry)
    with serving(page) as url:
        done = await to_thread.run_sync(lambda: run("doctor", "--metrics", url, "--lookupd", cluster.lookupd[0]))
    assert (done.returncode, done.stderr) == (1, b"")
    (found,) = (one for one in map(json.loads, done.stdout.splitlines()) if one["subject"] == f"service {topic}/ch")
    assert found["text"] == "1 message failed and dropped since the start"
    assert found["hint"] == "set dead_letter, so that they are kept"


@table(
    "page, status, text",
    [
        (b"nsqext_consumer_connections 1", 404, "responded with status 404"),
        (b"<html><body>hello</body></html>", 200, "is no page of metrics"),
        (b"\xff", 200, "is no page of metrics"),
        (b"process_open_fds 9\n", 200, "has no series that begin with nsqext_"),
    ],
)
def test_the_doctor_explains_pages_without_metrics(cluster: Cluster, page: bytes, status: int, text: str) -> None:
    with serving(page, status) as url:
        done = run("doctor", "--metrics", url, "--lookupd", cluster.lookupd[0])
    assert (done.returncode, done.stderr) == (1, b"")
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["status"], found["subject"]) == ("error", f"metrics {url}")
    assert text in found["text"]
    assert found["hint"]


def test_the_doctor_accepts_a_service_without_consumers(cluster: Cluster) -> None:
    with serving(b"# TYPE nsqext_published_messages_total counter\n") as url:
        done = run("doctor", "--metrics", url, "--lookupd", cluster.lookupd[0])
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["status"], found["subject"]) == ("ok", f"metrics {url}")


def test_the_doctor_refuses_what_is_no_url_and_explains_what_does_not_respond(cluster: Cluster) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    for url in (
        "billing:8080/metrics",
        "http://[/metrics",
        "http:///metrics",
        "http://a b/",
        "http://a/b c",
        "http://a:99999/",
    ):
        done = run("doctor", "--metrics", url, *where)
        assert (done.returncode, done.stdout, b"is not an HTTP URL" in done.stderr) == (2, b"", True), url
    done = run("doctor", "--metrics-namespace", "mine", *where)
    assert (done.returncode, b"would be ignored" in done.stderr) == (2, True)
    done = run("doctor", "--metrics", "http://bob:Zq7@127.0.0.1:1/metrics", *where)
    assert (done.returncode, b"Zq7" in done.stdout + done.stderr) == (1, False)
    assert json.loads(done.stdout.splitlines()[-1])["hint"].startswith("is the service running")
