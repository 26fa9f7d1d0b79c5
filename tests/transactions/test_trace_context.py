"""A trace runs from the transaction that adds a message over outbox, relay and inbox to the handler."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from attrs import frozen
from opentelemetry import baggage, context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import text

from docs.pictures.draw_flows import TRACE, TraceSpan
from nsqext import App, Consumer, OutgoingMessage, Producer
from nsqext.broker import Cluster
from nsqext.errors import InvalidBody
from nsqext.observability.otel import OpenTelemetry
from nsqext.transactions import Inbox, Outbox, OutboxRelay, OutboxStore, schema_sql
from nsqext.transactions.trace_context import active_context, without_active_span
from tests.support.relays import running

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

pytestmark = pytest.mark.anyio
_SECONDS = 25


class Process:
    """A process with OpenTelemetry's SDK, whose spans are kept in memory."""

    def __init__(self, name: str = "test", **options: Any) -> None:
        self.name = name
        self._spans = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.span = tracers.get_tracer("test").start_as_current_span
        self.observer = OpenTelemetry(tracers, **options)

    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._spans.get_finished_spans()


def pictured(*processes: Process) -> set[TraceSpan]:
    """Return the spans of processes as the picture has them."""
    spans = [(process.name, span) for process in processes for span in process.spans()]
    names = {span.context.span_id: span.name for _, span in spans if span.context is not None}
    return {
        TraceSpan(
            span.name,
            process,
            None if span.parent is None else names[span.parent.span_id],
            tuple(names[link.context.span_id] for link in span.links),
        )
        for process, span in spans
    }


async def test_a_trace_runs_from_the_request_to_the_handler(
    database: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    """It is the trace of the picture in the documentation."""
    service, relay, worker = Process("service"), Process("relay"), Process("worker", parent=True)
    inbox, handled = Inbox(sessions.begin), anyio.Event()
    with Cluster(nodes=1) as cluster, OutboxStore(database) as store, anyio.fail_after(_SECONDS):
        cluster.create_topic("orders", extend=True, channels=["billing"])
        app = App(cluster.lookupd, middleware=[worker.observer, inbox])

        @app.handler("orders", "billing")
        async def bill(order: dict[str, int]) -> None:
            with worker.span("bill"):
                await inbox.session().execute(text("INSERT INTO effects (number) VALUES (:id)"), order)
            handled.set()

        async with (
            Producer(cluster.lookupd, middleware=[relay.observer]) as producer,
            app,
            anyio.create_task_group() as tasks,
        ):
            with relay.span("start"):
                tasks.start_soon(OutboxRelay(store, poll=0.02).run, producer)
            with service.span("POST /orders"):
                async with sessions.begin() as session:
                    await Outbox().add_async(session, "orders", {"id": 7})
            await handled.wait()
            tasks.cancel_scope.cancel()
    assert pictured(service, relay, worker) == {*TRACE, TraceSpan("start", "relay", None)}
    traces = {span.name: span.context.trace_id for one in (service, worker) for span in one.spans() if span.context}
    assert len(traces) == 3
    assert len(set(traces.values())) == 1


@contextmanager
def tables(tmp_path: Any) -> Iterator[sqlite3.Connection]:
    """Open a database with an outbox."""
    with closing(sqlite3.connect(tmp_path / "o.db")) as connection:
        connection.executescript(schema_sql("sqlite"))
        yield connection


def stored(connection: sqlite3.Connection) -> dict[str, str] | None:
    """Return the trace context of the newest message."""
    (found,) = connection.execute("SELECT trace_context FROM nsqext_outbox ORDER BY sequence DESC").fetchone()
    return None if found is None else json.loads(found)


def test_the_context_is_stored_where_a_span_is_active(tmp_path: Any) -> None:
    process = Process()
    with tables(tmp_path) as connection:
        Outbox().add(connection, "t", b"x")
        assert stored(connection) is None
        with process.span("request") as span:
            Outbox().add(connection, "t", b"x")
            found = stored(connection)
            assert found is not None
            assert list(found) == ["traceparent"]
            assert f"{span.get_span_context().span_id:016x}" in found["traceparent"]
            with without_active_span():
                Outbox().add(connection, "t", b"x")
            assert stored(connection) is None
            token = context.attach(baggage.set_baggage("tenant", "blue"))
            Outbox().add(connection, "t", b"x")
            context.detach(token)
            assert set(stored(connection) or ()) == {"traceparent", "baggage"}
            Outbox().add(connection, "t", b"x", headers={"a": "x" * 59_900})  # a message is not lost for its trace
            assert stored(connection) is None


def test_a_program_without_opentelemetry_does_not_load_it() -> None:
    program = (
        "import sqlite3, sys; from nsqext.transactions import Outbox, schema_sql; db = sqlite3.connect(':memory:');"
        "db.executescript(schema_sql('sqlite')); Outbox().add(db, 't', b'x'); "
        "print([one for one in sys.modules if one.startswith('opentelemetry')])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"[]\n"


@frozen
class Order:
    """A value."""

    id: int


def test_values_are_encoded_as_by_a_publish_of_an_app(tmp_path: Any) -> None:
    with tables(tmp_path) as connection:
        for value in (b"bytes", "t\u00e4xt", {"a": 1}, Order(7)):
            Outbox().add(connection, "t", value)
        bodies = [body for (body,) in connection.execute("SELECT body FROM nsqext_outbox ORDER BY sequence")]
        assert bodies == [b"bytes", "t\u00e4xt".encode(), b'{"a":1}', b'{"id":7}']
        for wrong in ("", b"", object(), float("nan")):
            with pytest.raises(InvalidBody):
                Outbox().add(connection, "t", wrong)
        assert connection.execute("SELECT count(*) FROM nsqext_outbox").fetchone() == (4,)


async def sent(cluster: Cluster, topic: str) -> Mapping[str, object]:
    """Return the headers of the next message."""
    async with Consumer(topic, "ch", cluster.lookupd) as consumer:
        with anyio.fail_after(_SECONDS):
            message = await anext(consumer)
            await message.finish()
    return message.headers if message.header else {}


@pytest.mark.parametrize("extend", [True, False])
@pytest.mark.parametrize("observed", [True, False])
async def test_the_context_is_sent_where_the_topic_supports_headers(
    cluster: Cluster, tmp_path: Any, extend: bool, observed: bool
) -> None:
    """With or without a middleware at the producer of the relay."""
    topic, process = f"t_{token_hex(4)}", Process(create_spans=False)
    cluster.create_topic(topic, extend=extend, channels=["ch"])
    with tables(tmp_path) as connection, process.span("request") as request:
        Outbox().add(connection, topic, b"x")
        connection.commit()
    with OutboxStore(f"sqlite:///{tmp_path}/o.db") as store:
        middleware = [process.observer] if observed else []
        async with (
            Producer(cluster.lookupd, middleware=middleware) as producer,
            running(OutboxRelay(store, poll=0.02), producer),
        ):
            headers = await sent(cluster, topic)
    expected = request.get_span_context()
    place = f"00-{expected.trace_id:032x}-{expected.span_id:016x}"
    assert str(headers.get("traceparent")).startswith(place) == extend
    assert ("traceparent" in headers) == extend
    if observed:
        (publish,) = [span for span in process.spans() if span.name == f"publish {topic}"]
        assert [link.context.span_id for link in publish.links] == ([expected.span_id] if extend else [])


async def test_a_header_of_the_program_replaces_the_context(cluster: Cluster, tmp_path: Any) -> None:
    topic, process = f"t_{token_hex(4)}", Process()
    cluster.create_topic(topic, extend=True, channels=["ch"])
    own = f"00-{'a' * 32}-{'b' * 16}-01"
    with tables(tmp_path) as connection, process.span("request"):
        Outbox().add(connection, topic, b"x", headers={"traceparent": own})
        connection.commit()
    with OutboxStore(f"sqlite:///{tmp_path}/o.db") as store:
        async with Producer(cluster.lookupd) as producer, running(OutboxRelay(store, poll=0.02), producer):
            headers = await sent(cluster, topic)
    assert headers["traceparent"] == own


async def test_an_active_span_replaces_the_context_of_a_forwarded_message(cluster: Cluster) -> None:
    topic, process = f"t_{token_hex(4)}", Process()
    cluster.create_topic(topic, extend=True, channels=["ch"])
    old = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "kind": "order"}
    async with Producer(cluster.lookupd, middleware=[process.observer]) as producer:
        with process.span("process") as span:
            await producer.publish_many(topic, [OutgoingMessage(b"x", headers=old)])
        assert f"{span.get_span_context().trace_id:032x}" in str((await sent(cluster, topic))["traceparent"])
        await producer.publish(topic, b"x", headers=old)
        assert "a" * 32 in str((await sent(cluster, topic))["traceparent"])
    parents = {one.name: one.parent.span_id for one in process.spans() if one.parent is not None}
    assert parents[f"publish {topic}"] == int("b" * 16, 16)


def test_no_context_is_stored_before_the_program_loads_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    with Process().span("request"):
        assert active_context()
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        assert active_context() == {}
