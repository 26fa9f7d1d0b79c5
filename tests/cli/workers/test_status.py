"""Health and metrics of all workers of ``nsqext run``, their numbers, and their logging."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nsqext import sync
from nsqext.app.health import Health
from nsqext.cli.status_page import StatusPage, combined_health, combined_metrics, listen_for_status
from tests.cli.workers.test_run import Program, program
from tests.support import plain_http
from tests.support.blocking_client import eventually

if TYPE_CHECKING:
    from nsqext.broker import Cluster

NODES = 2

SERVICE = """
import logging
import os
import nsqext
from nsqext.observability.prometheus import Prometheus

{configured}
app = nsqext.App(middleware=[Prometheus()])

@app.handler({topic!r}, "ch")
async def handle(body: str) -> None:
    logging.getLogger("service").info("handled %s by %s", body, os.environ["NSQEXT_WORKER"])
"""

READY = Health(live=True, ready=True)
STARTING = Health(live=True, ready=False, reasons=("orders/ch: no partition is connected",))
GONE = Health(live=False, ready=False, reasons=("does not respond",))


@pytest.mark.parametrize(
    ("workers", "live", "ready", "reasons"),
    [
        ({1: READY, 2: READY}, True, True, ()),
        ({1: READY, 2: STARTING}, True, False, ("worker 2: orders/ch: no partition is connected",)),
        (
            {2: GONE, 1: STARTING},
            False,
            False,
            ("worker 1: orders/ch: no partition is connected", "worker 2: does not respond"),
        ),
    ],
)
def test_a_program_is_live_and_ready_if_each_worker_is(
    workers: Mapping[int, Health], live: bool, ready: bool, reasons: tuple[str, ...]
) -> None:
    health = combined_health(workers)
    assert (health.live, health.ready, health.reasons) == (live, ready, reasons)


def test_metrics_of_workers_have_their_numbers() -> None:
    text = '# HELP n_total Messages.\n# TYPE n_total counter\nn_total{{topic="a\\"b"}} {}\n'
    combined = combined_metrics({2: text.format(5.0), 1: text.format(3.0), 3: ""}).decode()
    assert combined.count("# TYPE n_total counter") == 1
    (family,) = text_string_to_metric_families(combined)
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"topic": 'a"b', "worker": "1"}, 3.0),
        ({"topic": 'a"b', "worker": "2"}, 5.0),
    ]


@pytest.mark.anyio
async def test_the_page_answers_health_and_metrics() -> None:
    scrapes: list[str] = []

    async def health() -> Mapping[int, Health]:
        return {1: READY, 2: STARTING}

    async def metrics() -> Mapping[int, str]:
        scrapes.append("")
        return {1: ""}

    transport = httpx.ASGITransport(StatusPage(health, metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
        live, ready, page, other = [await client.get(path) for path in ("/healthz", "/readyz", "/metrics", "/x")]
        posts = [await client.post(path) for path in ("/healthz", "/readyz", "/metrics", "/x")]
    assert [(post.status_code, post.headers.get("allow")) for post in posts] == [(405, "GET, HEAD")] * 3 + [(404, None)]
    assert (live.status_code, ready.status_code, page.status_code, other.status_code) == (200, 503, 200, 404)
    assert ready.json() == {"ok": False, "reasons": ["worker 2: orders/ch: no partition is connected"]}
    assert len(scrapes) == 1  # health does not read databases
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")


def address_of(running: Program) -> str:
    """Return the URL that a program has logged."""
    running.wait_log("health and metrics on http://")
    (found,) = re.findall(r"health and metrics on (http://\S+)", running.log)
    return str(found)


def handled(text: str, topic: str) -> dict[str, float]:
    """Return the number of handled messages by worker."""
    return {
        sample.labels["worker"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "nsqext_handled_messages_total" and sample.labels["topic"] == topic
    }


def test_a_program_serves_health_and_metrics_of_all_workers(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICE.format(topic=topic, configured=""))
    with program(tmp_path, cluster, "service:app", "--workers", "2", "--http", "127.0.0.1:0") as running:
        running.wait_log("all workers are ready: 2")
        page = address_of(running)
        assert plain_http.get(f"{page}/readyz").status_code == 200
        with sync.Producer(cluster.lookupd) as producer:
            producer.publish_many(topic, [b"%d" % number for number in range(20)])
        eventually(lambda: running.log.count("handled ") == 20, seconds=30.0)
        counts = {number: running.log.count(f" by {number}\n") for number in "12"}
        eventually(
            lambda: handled(plain_http.get(f"{page}/metrics").text, topic) == {k: v for k, v in counts.items() if v},
            seconds=30.0,
        )
        text = plain_http.get(f"{page}/metrics").text
        assert {f'worker="{number}"' for number in "12"} <= set(re.findall(r'worker="\d+"', text))
        os.kill(running.ready()[2], signal.SIGSTOP)
        try:
            answer = plain_http.get(f"{page}/healthz")
            assert (answer.status_code, json.loads(answer.content)["reasons"]) == (503, ["worker 2: does not respond"])
        finally:
            os.kill(running.ready()[2], signal.SIGCONT)
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
    assert "Traceback" not in running.log


BROKEN = """
from prometheus_client import REGISTRY

class Broken:
    def collect(self):
        raise RuntimeError("the database is down")

    def describe(self):
        return ()

REGISTRY.register(Broken())
"""


@pytest.mark.parametrize(
    ("configured", "middleware", "lines"),
    [("", "Prometheus(buckets=(1.0, 2.0))", 1), (BROKEN, "Prometheus()", 0)],
    ids=["own buckets", "a collector that fails"],
)
def test_metrics_of_the_program_do_not_end_its_workers(
    cluster: Cluster, topic: str, tmp_path: Path, configured: str, middleware: str, lines: int
) -> None:
    service = SERVICE.format(topic=topic, configured=configured).replace("Prometheus()]", f"{middleware}]")
    (tmp_path / "service.py").write_text(service)
    with program(tmp_path, cluster, "service:app", "--http", "127.0.0.1:0") as running:
        running.wait_log("all workers are ready: 1")
        page = address_of(running)
        answers = [plain_http.get(f"{page}{path}") for path in ("/metrics", "/healthz", "/readyz")]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert answers[0].text.count("\nnsqext_producer_connections{") == lines
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
    assert ("RuntimeError: the database is down" in running.log) is bool(configured)
    assert "ExceptionGroup" not in running.log


def test_a_program_is_ready_when_every_subscription_stands(cluster: Cluster, tmp_path: Path) -> None:
    name = f"t_{token_hex(4)}"
    (tmp_path / "service.py").write_text(
        SERVICE.format(topic=name, configured="").replace("Prometheus()]", "Prometheus()], start_timeout=0.1")
    )
    with program(tmp_path, cluster, "service:app", "--ready-file", "ready", "--http", "127.0.0.1:0") as running:
        page = address_of(running)
        eventually(lambda: "no partition is connected" in plain_http.get(f"{page}/readyz").text, seconds=30.0)
        running.wait_log("waiting for a partition to subscribe to")
        answer = plain_http.get(f"{page}/healthz")
        assert answer.status_code == 200
        assert not (tmp_path / "ready").exists()
        assert "are ready" not in running.log
        cluster.create_topic(name, channels=["ch"])
        running.wait_log("all workers are ready: 1")
        assert (tmp_path / "ready").exists()
        assert plain_http.get(f"{page}/readyz").status_code == 200
        cluster.delete_topic(name)
        eventually(lambda: not (tmp_path / "ready").exists(), seconds=30.0)
        assert plain_http.get(f"{page}/healthz").status_code == 200


def test_a_logging_configuration_of_the_program_is_kept(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    configured = 'logging.basicConfig(level=logging.INFO, format="mine %(message)s")'
    (tmp_path / "service.py").write_text(SERVICE.format(topic=topic, configured=configured))
    with program(tmp_path, cluster, "service:app") as running:
        running.wait_log("all workers are ready: 1")
        with sync.Producer(cluster.lookupd) as producer:
            producer.publish(topic, b"x")
        running.wait_log("mine handled x by 1")
    assert "[worker 1]" not in running.log


@pytest.mark.parametrize("given", ["8080", "127.0.0.1:port", "127.0.0.1:99999"])
def test_an_invalid_address_is_refused(cluster: Cluster, tmp_path: Path, given: str) -> None:
    with program(tmp_path, cluster, "service:app", "--http", given) as running:
        assert running.end() == 2
    assert "is not HOST:PORT" in running.log


def test_an_address_of_ipv6_has_brackets() -> None:
    with listen_for_status("[::1]:0") as listener:
        assert listener.getsockname()[0] == "::1"


def test_an_address_in_use_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with program(tmp_path, cluster, "service:app", "--http", cluster.lookupd[0]) as running:
        assert running.end() == 2
    assert cluster.lookupd[0] in running.log
