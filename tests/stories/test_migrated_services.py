"""The services of the migration guide behave the same before and after: FastStream on NATS, and a pynsq worker."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path

import anyio
import pytest

from nsqext import App, Consumer, Producer
from nsqext.broker import Cluster
from tests.support.consumers import eventually
from tests.support.interop_clients import python_of
from tests.support.programs import ROOT

pytestmark = pytest.mark.timeout(300)  # the first test of a client installs it

MESSAGES = [
    ("orders", {"number": 1, "cents": 450}, {"customer": "ann"}),
    ("orders", {"number": 2, "cents": 0}, {"customer": "bob"}),
    ("orders", {"number": 1, "cents": 450}, {"customer": "ann"}),
    ("refunds.eu", {"order": 1, "cents": 50}, {"customer": "ann"}),
]
INVOICE = {"order": 1, "customer": "ann", "cents": 450}
CLICKS = [json.dumps({"id": str(number), "page": f"/{number % 3}"}).encode() for number in range(600)]


def environ(**settings: str) -> dict[str, str]:
    """Return an environment in which the examples can be imported."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **settings}


def test_the_faststream_service_before(tmp_path: Path) -> None:
    program = ROOT / "tests" / "interop" / "clients" / "use_faststream.py"
    settings = environ(BILLING_DATABASE=str(tmp_path / "billing.db"))
    done = subprocess.run(
        [python_of("faststream"), str(program), json.dumps(MESSAGES)],
        env=settings, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"published": [INVOICE, INVOICE], "total": 400}


@pytest.mark.anyio
async def test_the_faststream_service_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BILLING_DATABASE", str(tmp_path / "billing.db"))
    from examples.migration import faststream_after as service

    with Cluster(nodes=1) as cluster:
        for topic in ("orders", "invoices", "refunds.eu", "billing-dead"):
            cluster.create_topic(topic, extend=True, channels=["billing", "audit"])
        async with service.app.test(cluster.lookupd) as test:
            for topic, body, headers in MESSAGES:
                await service.app.publish(topic, body, headers=headers)
            with anyio.fail_after(25):
                await test.wait_published("invoices", 2)
                await eventually(lambda: service.ledger().total() == 400)
            found = [json.loads(one.body) for one in test.published if one.topic == "invoices"]
        async with Consumer("billing-dead", "audit", lookupd=cluster.lookupd) as letters:
            with anyio.fail_after(25):
                letter = await anext(letters)
            await letter.finish()
    assert found == [INVOICE, INVOICE]
    assert letter.headers["dead-letter-error"] == "Reject: order 2 costs nothing"


async def publish_clicks(lookupd: list[str]) -> None:
    """Publish the clicks and an invalid message."""
    async with Producer(lookupd) as producer:
        await producer.publish_many("clicks", [*CLICKS, b"no click"])


def rows(path: Path, table: str) -> int:
    """Return the number of rows; 0 while there is no table."""
    with sqlite3.connect(path) as database:
        try:
            return int(database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])  # noqa: S608
        except sqlite3.OperationalError:
            return 0


async def check_clicks(cluster: Cluster, path: Path) -> None:
    """Wait until all clicks are written and reported."""
    await publish_clicks(cluster.lookupd)
    await eventually(lambda: (rows(path, "clicks"), rows(path, "broken")) == (len(CLICKS), 1), patience=30.0)
    reported = 0
    async with Consumer("reports", "audit", lookupd=cluster.lookupd) as reports:
        with anyio.fail_after(25):
            while reported < len(CLICKS):
                report = await anext(reports)
                await report.finish()
                reported += json.loads(report.body)["written"]
    assert reported == len(CLICKS)


def make_cluster() -> Cluster:
    """Return an original NSQ."""
    return Cluster(nodes=1, generation="original")


def create_topics(cluster: Cluster) -> None:
    """Create the topics of the worker."""
    cluster.create_topic("clicks", channels=["counter"])
    cluster.create_topic("reports", channels=["audit"])


def test_the_pynsq_worker_before(tmp_path: Path) -> None:
    python, path = python_of("pynsq"), tmp_path / "clicks.db"
    with make_cluster() as cluster:
        create_topics(cluster)
        node = next(iter(cluster.nodes.values()))
        settings = environ(NSQEXT_LOOKUPD=cluster.lookupd[0], NSQD=node.tcp, CLICKS_DATABASE=str(path))
        command = [python, "-W", "ignore", str(ROOT / "examples" / "migration" / "pynsq_before.py")]
        with subprocess.Popen(command, env=settings) as worker:
            try:
                anyio.run(check_clicks, cluster, path)
            finally:
                worker.kill()


@pytest.mark.anyio
async def test_the_pynsq_worker_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clicks.db"
    monkeypatch.setenv("CLICKS_DATABASE", str(path))
    from examples.migration import pynsq_after as worker

    with make_cluster() as cluster:
        create_topics(cluster)
        app: App = worker.app
        async with app.test(cluster.lookupd):
            await check_clicks(cluster, path)
