"""No log record, span, metric, repr or error of a client or the broker contains a secret."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

import nsqext
from nsqext import App, Consumer, ConsumerSettings, Message, Producer, ProducerSettings, sync
from nsqext.broker import Cluster, ClusterOptions
from nsqext.cli import main
from nsqext.errors import NsqError
from nsqext.observability import LogObserver
from nsqext.observability.otel import OpenTelemetry
from nsqext.observability.prometheus import Prometheus
from nsqext.web import WebOptions, WebPage
from tests.support.auth_server import auth_server

GOOD = "planted-good-secret"
WRONG = "planted-wrong-secret"
TOKEN = "planted-lookup-token"
MARK = "planted-"
"""Prefix of every secret in this file."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node that requires AUTH."""
    with auth_server(GOOD) as address, Cluster(1, options=ClusterOptions(auth_addresses=(address,))) as cluster:
        cluster.create_topic("orders", channels=["ch"], extend=True)
        yield cluster


class Findings:
    """Collects all texts that a program may show or store."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.texts: list[str] = []
        self._caplog = caplog
        self._spans = InMemorySpanExporter()
        self._metrics = InMemoryMetricReader()
        self._registry = CollectorRegistry()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        telemetry = OpenTelemetry(tracers, MeterProvider([self._metrics]))
        self.middleware = [telemetry, Prometheus(self._registry), LogObserver()]

    def add(self, *values: object) -> None:
        """Add the text forms of objects, and tracebacks of errors with their causes."""
        for value in values:
            self.texts += [repr(value), str(value)]
            if isinstance(value, BaseException):
                self.texts += traceback.format_exception(value)

    def everything(self) -> str:
        """Return all collected text."""
        formatter = logging.Formatter("%(name)s %(levelname)s %(message)s")
        records = [f"{formatter.format(record)} {vars(record)}" for record in self._caplog.records]
        spans = [span.to_json() for span in self._spans.get_finished_spans()]
        data: Any = self._metrics.get_metrics_data()
        metrics = [data.to_json() if data is not None else "", generate_latest(self._registry).decode()]
        return "\n".join([*self.texts, *records, *spans, *metrics])


def producing(secret: str) -> ProducerSettings:
    """Return settings of producers with both kinds of secrets."""
    return {"timeout": 20.0 if secret == GOOD else 1.0, "auth_secret": secret, "lookup_auth_secret": TOKEN}


def consuming(secret: str) -> ConsumerSettings:
    """Return settings of consumers with both kinds of secrets."""
    return {"start_timeout": 1.0, "lookup_timeout": 0.0, "auth_secret": secret, "lookup_auth_secret": TOKEN}


def attempt(findings: Findings, call: Callable[[], object]) -> None:
    """Run an operation that fails."""
    with pytest.raises((NsqError, TypeError, OSError)) as caught:
        call()
    findings.add(caught.value)


async def clients(cluster: Cluster, findings: Findings) -> None:
    """Use all asynchronous clients, with the right secret and with a wrong one."""
    handled = anyio.Event()
    app = App(cluster.lookupd, middleware=findings.middleware, **producing(GOOD))

    @app.handler("orders", "ch")
    async def handle(message: Message) -> None:
        findings.add(message, message.owner)
        if message.attempts == 1:
            raise RuntimeError("a broken handler")
        handled.set()

    await app.start()
    findings.add(await app.producer.publish("orders", b"x", headers={"user": "42"}))
    findings.add(app, app.health(), app.producer, app.consumers, app.producer.statistics(), app.producer.settings)
    findings.add(app.consumers[0].statistics(), app.consumers[0].connections)
    with anyio.fail_after(25):
        await handled.wait()
    await app.aclose()
    async with nsqext.Admin(cluster.lookupd, lookup_auth_secret=TOKEN) as admin:
        findings.add(admin, await admin.topics())
        try:
            await admin.pause_channel("unknown", "ch")
        except NsqError as error:
            findings.add(error)
    await refused(cluster, findings)


async def refused(cluster: Cluster, findings: Findings) -> None:
    """Use clients whose secret the server refuses, and clients without a server."""
    for lookupd in (cluster.lookupd, ["127.0.0.1:1"]):
        errors = 0
        try:
            async with Producer(lookupd, middleware=findings.middleware, **producing(WRONG)) as producer:
                await producer.publish("orders", b"x")
        except NsqError as error:
            errors += 1
            findings.add(error)
        try:
            async with Consumer("orders", "ch", lookupd=lookupd, **consuming(WRONG)) as consumer:
                findings.add(consumer, consumer.connections)
                consumer.stop()
        except NsqError as error:
            findings.add(error)
        assert errors == 1


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_secrets_are_shown_nowhere(
    cluster: Cluster, backend: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    findings = Findings(caplog)
    anyio.run(clients, cluster, findings, backend=backend)
    with sync.Producer(cluster.lookupd, **producing(WRONG)) as producer:
        findings.add(producer)
        attempt(findings, lambda: producer.publish("orders", b"x"))
    consumer = sync.Consumer("orders", "ch", lookupd=cluster.lookupd, **consuming(WRONG))
    findings.add(consumer, consumer.settings)
    lookup = cluster.lookupd[0]
    for wrong in (
        f"nsq://:{WRONG}@{lookup}?tiemout=3",
        f"nsq://user:{WRONG}@{lookup}",
        f"nsq://:{WRONG}@{lookup}?timeout=soon",
        f"nsq://{lookup}?auth_secert={WRONG}",
        f"nsq://{lookup}?conection_auth_secret={WRONG}",
        f"nsq://{lookup}?auth_secret={WRONG}&auth_secret={WRONG}",
    ):
        for make in (Producer, App, sync.Producer):
            attempt(findings, lambda make=make, wrong=wrong: make(wrong))  # type: ignore[misc]
        attempt(findings, lambda wrong=wrong: Consumer("orders", "ch", wrong))  # type: ignore[misc]
    attempt(findings, lambda: Producer(f"nsq://{lookup}", conection_auth_secret=WRONG))  # type: ignore[call-arg]
    attempt(findings, lambda: nsqext.Lookup(lookup, lookup_auth_secret=f"{TOKEN}\n"))
    attempt(findings, lambda: Producer(["lookup.example:4161"], **producing(WRONG)))
    monkeypatch.setenv("NSQEXT_AUTH_SECRETS", WRONG)
    attempt(findings, lambda: App(f"nsq://{lookup}", env="NSQEXT_"))
    assert len(caplog.records) > 50
    assert "process orders" in findings.everything()
    no_secrets_in(findings)


def no_secrets_in(findings: Findings) -> None:
    """Check that the findings contain no secret."""
    shown = findings.everything()
    places = [shown[max(at - 200, 0) : at + 60] for at in range(len(shown)) if shown.startswith(MARK, at)]
    assert places == []


@pytest.mark.parametrize("secret", [GOOD, WRONG])
def test_commands_show_no_secret(
    cluster: Cluster,
    secret: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("NSQEXT_CONTEXTS_FILE", str(tmp_path / "contexts.toml"))
    findings = Findings(caplog)
    lookup = cluster.lookupd[0]
    patient = f"nsq://:{secret}@{lookup}?start_timeout=1&timeout={60 if secret == GOOD else 1}"
    urls = [
        f"nsq://:{secret}@{lookup}?timeout=1&start_timeout=1",
        f"nsq://{lookup}?conection_auth_secret={secret}",
        f"nsq://user:{secret}@{lookup}",
    ]
    commands = [["config", "list"], ["config", "set", "mine", urls[0]], ["config", "list"], ["config", "use", "other"]]
    for url in urls:
        commands += [
            ["pub", "orders", "a message", "--url", patient if url == urls[0] else url],
            ["pub", "unknown_topic", "a message", "--url", url],
            ["tail", "orders", "--channel", "ch", "--count", "1", "--url", url],
            *([name, "--url", url] for name in ("doctor", "lookup", "stats")),
            ["topic", "list", "--url", url],
            ["check", "--url", url],
        ]
    for words in commands:
        with pytest.raises(SystemExit) as ended:
            main(words)
        findings.add(ended.value, *capsys.readouterr())
    no_secrets_in(findings)
    assert "mine" in findings.everything()


def test_the_web_page_and_its_admin_show_no_secret(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    findings = Findings(caplog)

    async def browse() -> None:
        options = WebOptions(basic_auth=f"user:{GOOD}", write=True)
        page = WebPage(cluster.lookupd, options)
        findings.add(page, options)
        async with anyio.create_task_group() as tasks:
            await tasks.start(page.run)
            transport = httpx.ASGITransport(app=page, raise_app_exceptions=False)
            for auth in (("user", GOOD), ("user", WRONG), None):
                async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8171", auth=auth) as web:
                    for path in ("/", "/topics/orders", "/topics/orders/messages", f"/topics/{'x' * 300}", "/nowhere"):
                        findings.add((await web.get(path)).text)
                    findings.add((await web.post("/actions/publish", data={"topic": "orders", "body": "x"})).text)
            tasks.cancel_scope.cancel()

    anyio.run(browse)
    attempt(findings, lambda: WebOptions(basic_auth=WRONG))
    with sync.Admin(cluster.lookupd, lookup_auth_secret=TOKEN) as admin:
        findings.add(admin, admin.topics())
        attempt(findings, lambda: admin.topic("unknown"))
    attempt(findings, lambda: sync.Admin(["lookup.example:4161"], lookup_auth_secret=TOKEN).__enter__().topics())
    no_secrets_in(findings)
    assert "orders" in findings.everything()


def test_the_search_finds_secrets(caplog: pytest.LogCaptureFixture) -> None:
    """Guard against a search that never finds a secret."""
    findings = Findings(caplog)
    logging.getLogger("nsqext.test").warning("connected", extra={"hidden": GOOD})
    assert MARK in findings.everything()
    findings = Findings(caplog)
    caplog.clear()
    findings.add(ValueError(WRONG))
    assert MARK in findings.everything()
