"""Health of an app: its consumers, lifespans, relays and checks, and the routes for probes."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from nsqext import App, Message
from nsqext.app import Health
from nsqext.broker import Cluster
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.transactions import Outbox, OutboxRelay, OutboxStore
from tests.support.apps import nothing
from tests.support.consumers import eventually

pytestmark = pytest.mark.anyio


async def test_an_app_whose_lifespan_has_failed_is_not_live(cluster: Cluster) -> None:
    app = App(cluster.lookupd)
    failing = anyio.Event()

    async def fail() -> None:
        await failing.wait()
        raise ZeroDivisionError("no relay")

    @app.lifespan
    async def relay(_: App) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            yield

    with anyio.fail_after(25):
        await app.start()
        assert app.health().live
        failing.set()
        await eventually(lambda: not app.health().ready)
        ended = "the app has ended: ZeroDivisionError('no relay')"
        assert app.health() == Health(live=False, ready=False, reasons=(ended,))
        with pytest.raises(ZeroDivisionError):
            await app.wait()


async def test_health(cluster: Cluster, topic: str) -> None:
    app = App(cluster.lookupd, start_timeout=25.0)
    app.handler(topic, "ch")(nothing)
    assert app.health() == Health(live=True, ready=False, reasons=("the app is not running",))
    with anyio.fail_after(25):
        async with app:
            assert app.health() == Health(live=True, ready=True)
            app.consumers[0].stop()
            await app.wait()
    assert app.health() == Health(live=True, ready=False, reasons=("the app is not running",))
    lost = App("127.0.0.1:1", start_timeout=0.1)
    lost.handler("orders", "ch")(nothing)
    lost.readiness_check(lambda: "cold")
    with anyio.fail_after(25):
        async with lost:
            health = lost.health()
    assert (health.live, health.ready) == (True, False)
    no_node, check = health.reasons
    assert re.fullmatch(r"orders/ch: no partition is connected, \d+ failed lookups", no_node)
    assert check == "cold"


async def test_an_app_that_has_lost_its_nodes_is_live_but_not_ready() -> None:
    with Cluster(1) as cluster, anyio.fail_after(25):
        cluster.create_topic("orders", channels=["ch"])
        app = App(cluster.lookupd)
        app.handler("orders", "ch")(nothing)
        async with app:
            assert app.health().ready
            cluster.kill(cluster.leader("orders", 0))
            await eventually(lambda: not app.health().ready)
            assert app.health().live
            assert "orders/ch: no partition is connected" in app.health().reasons[0]


async def test_an_app_without_handlers_is_ready_when_its_lifespans_have_begun() -> None:
    app, seen = App("127.0.0.1:1"), list[Health]()

    @app.lifespan
    async def connects(app: App) -> AsyncIterator[None]:
        seen.append(app.health())
        yield

    async with app:
        seen.append(app.health())
    assert seen == [Health(live=True, ready=False, reasons=("the app is starting",)), Health(live=True, ready=True)]


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/healthz", "GET", 200),
        ("/healthz", "POST", 405),
        ("/readyz", "GET", 503),
        ("/readyz", "HEAD", 503),
        ("/", "GET", 404),
    ],
)
async def test_the_health_endpoint(path: str, method: str, status: int) -> None:
    app = App("127.0.0.1:1")
    transport = httpx.ASGITransport(app=app.asgi())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert response.headers["cache-control"] == "no-store"
    assert response.headers.get("allow") == ("GET, HEAD" if status == 405 else None)
    if (path, method) == ("/readyz", "GET"):
        assert response.json() == {"ok": False, "reasons": ["the app is not running"]}


async def test_the_health_endpoint_below_a_mount_answers_head_without_a_body() -> None:
    sent: list[Any] = []

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {"type": "http", "method": "HEAD", "path": "/app/healthz", "root_path": "/app"}
    await App("127.0.0.1:1").asgi()(scope, anyio.sleep_forever, send)  # type: ignore[arg-type]
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"")


async def test_the_health_endpoint_acknowledges_begin_and_end_of_its_server() -> None:
    events, sent = iter(("lifespan.startup", "lifespan.shutdown")), list[Any]()

    async def receive() -> dict[str, str]:
        return {"type": next(events)}

    async def send(event: Any) -> None:
        sent.append(event["type"])

    await App("127.0.0.1:1").asgi()({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_an_app_is_ready_while_no_readiness_check_has_a_reason() -> None:
    app, reasons = App("127.0.0.1:1"), ["the cache is cold", None]

    @app.readiness_check
    def cache() -> str | None:
        return reasons[0]

    @app.readiness_check
    def disk() -> str | None:
        if reasons[1] is not None:
            raise OSError(reasons[1])
        return None

    assert cache() == "the cache is cold", "it can still be called"
    assert app.health().reasons == ("the app is not running",)
    async with app:
        assert app.health() == Health(live=True, ready=False, reasons=("the cache is cold",))
        reasons[:] = None, "full"
        (reason,) = app.health().reasons
        assert reason.startswith("the readiness check ")
        assert reason.endswith(".disk raised OSError('full')")
        reasons[:] = None, None
        assert app.health() == Health(live=True, ready=True)
        with pytest.raises(InvalidState):
            app.readiness_check(cache)


async def test_what_is_no_readiness_check_is_refused() -> None:
    async def ask() -> str | None:
        raise NotImplementedError

    for wrong, reason in (
        (ask, "is a coroutine function, which would not be awaited"),
        ("cold", "readiness_check='cold' is not a function"),
    ):
        with pytest.raises(InvalidSetting, match=reason):
            App("127.0.0.1:1").readiness_check(wrong)  # type: ignore[arg-type]


async def test_an_app_is_ready_while_its_relay_stores_what_it_publishes(
    cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    """It was ready although no message of the outbox reached the cluster."""
    path = tmp_path / "outbox"
    with OutboxStore(f"sqlite:///{path}", create=True) as store, closing(sqlite3.connect(path)) as connection:
        app = App(cluster.lookupd, timeout=0.5)
        OutboxRelay(store, poll=0.05).attach(app)
        with anyio.fail_after(25):
            async with app:
                assert app.health().ready
                Outbox().add(connection, f"{topic}_missing", b"x")
                connection.commit()
                await eventually(lambda: not app.health().ready)
                assert app.health().live
                assert app.health().reasons[0].startswith("no message is stored: ")
                await anyio.to_thread.run_sync(lambda: cluster.create_topic(f"{topic}_missing", channels=["ch"]))
                await eventually(lambda: app.health().ready)
                connection.execute("ALTER TABLE nsqext_outbox RENAME TO away")
                await eventually(lambda: not app.health().ready)
                assert app.health().reasons[0].startswith("the database of the outbox cannot be used: ")
                connection.execute("ALTER TABLE away RENAME TO nsqext_outbox")
                await eventually(lambda: app.health().ready)


async def test_an_app_that_drains_is_live_but_not_ready(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App(cluster.lookupd)
    begun, release = anyio.Event(), anyio.Event()

    @app.handler(topics[0], "ch")
    async def handle(message: Message) -> None:
        begun.set()
        await release.wait()

    with anyio.fail_after(25):
        async with app:
            await app.publish(topics[0], b"one")
            await begun.wait()
            app.stop()
            assert app.health() == Health(live=True, ready=False, reasons=("the app is stopping",))
            release.set()
