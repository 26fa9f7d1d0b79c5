"""Access control of the page, and the headers of its responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from nsqext.errors import InvalidSetting, UnknownSetting
from nsqext.web import WebOptions, WebPage
from tests.support.consumers import eventually
from tests.support.web_pages import browsing, press, token_of

if TYPE_CHECKING:
    from nsqext.broker import Cluster

    pass

pytestmark = pytest.mark.anyio


async def test_foreign_hosts_are_refused(cluster: Cluster) -> None:
    async with browsing(cluster, http_hosts=("nsq.example",)) as browser:
        for host, status in (
            ("evil.example", 403),
            ("evil.example:8171", 403),
            ("", 403),
            ("nsq.example", 200),
            ("localhost:8171", 200),
            ("127.0.0.1:8171", 200),
            ("[::1]:8171", 200),
        ):
            answer = await browser.get("/", headers={"host": host})
            assert (host, answer.status_code) == (host, status)
        refused = await browser.get("/", headers={"host": "evil.example"})
    assert "--http-host" in refused.text
    assert cluster.nodes["n1"].tcp not in refused.text


async def test_streams_of_events_are_bounded() -> None:
    """This includes requests before the first stream starts, and browsers that disconnect."""
    page = WebPage(["127.0.0.1:1"])
    statuses: list[int] = []

    async def request() -> None:
        async def receive() -> dict[str, object]:
            await anyio.sleep_forever()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"host", b"localhost"), (b"accept", b"text/event-stream")]
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": headers}
        await page(scope, receive, send)

    async with anyio.create_task_group() as running:
        await running.start(page.run)
        for _ in range(2):
            statuses.clear()
            async with anyio.create_task_group() as tasks:
                for _ in range(80):
                    tasks.start_soon(request)
                await eventually(lambda: len(statuses) == 80)
                tasks.cancel_scope.cancel()
            assert (statuses.count(200), statuses.count(503)) == (64, 16)
        running.cancel_scope.cancel()


async def test_every_response_has_secure_headers(cluster: Cluster) -> None:
    async with browsing(cluster) as browser:
        for path in ("/", "/nowhere", "/static/page.js"):
            headers = (await browser.get(path)).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            assert headers["x-frame-options"] == "DENY"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "same-origin"
        text = (await browser.get("/")).text
    assert "onclick" not in text and "style=" not in text and "<script>" not in text


async def test_basic_auth(cluster: Cluster) -> None:
    async with browsing(cluster, basic_auth="ann:s:e") as browser:
        for auth, status in ((None, 401), (("ann", "wrong"), 401), (("bob", "s:e"), 401), (("ann", "s:e"), 200)):
            answer = await browser.get("/", auth=auth)
            assert (auth, answer.status_code) == (auth, status)
        assert "ann" in answer.text
        refused = await browser.get("/", headers={"authorization": "Basic ???"})
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic ")


async def test_the_user_of_the_proxy_is_the_user_of_the_page(cluster: Cluster) -> None:
    async with browsing(cluster, proxy_header="X-User", basic_auth="page:secret") as browser:
        answer = await browser.get("/", headers={"x-user": "maria"}, auth=("page", "secret"))
    assert "maria" in answer.text


async def test_a_proxy_names_the_user(cluster: Cluster) -> None:
    async with browsing(cluster, proxy_header="X-Forwarded-User") as browser:
        assert (await browser.get("/")).status_code == 403
        answer = await browser.get("/", headers={"x-forwarded-user": "<ann>"})
    assert answer.status_code == 200
    assert "&lt;ann&gt;" in answer.text and "<ann>" not in answer.text


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"basic_auth": "nocolon"},
            {"basic_auth": ":x"},
            {"basic_auth": "x:"},
            {"interval": 0},
            {"proxy_header": "X: y"},
        ),
        *(
            {"basic_auth": 5},
            {"interval": "1"},
            {"proxy_header": True},
            {"write": "no"},
            {"http_hosts": "page.internal"},
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        WebOptions(**options)  # type: ignore[arg-type]


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(UnknownSetting, match="did you mean lookup_timeout"):
        WebPage("127.0.0.1:1", WebOptions(settings={"lookup_tiemout": 3.0}))
    with pytest.raises(InvalidSetting, match="is not a WebOptions"):
        WebPage("127.0.0.1:1", {"write": True})  # type: ignore[arg-type]


def test_actions_have_time_for_lookup_whatever_the_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, object]] = []
    monkeypatch.setattr("nsqext.web.app.Admin", lambda lookupd, **given: found.append(given))
    WebPage("127.0.0.1:1", WebOptions(settings={"lookup_request_timeout": 0.1}))
    assert [given["lookup_request_timeout"] for given in found] == [15.0]


def test_the_password_is_not_shown() -> None:
    assert "secret" not in repr(WebOptions(basic_auth="ann:secret"))


async def test_the_secret_of_a_url_is_not_shown() -> None:
    """Each page named the lookup nodes as they were given."""
    page = httpx.ASGITransport(app=WebPage("nsq://:hidden@127.0.0.1:1"))
    async with httpx.AsyncClient(transport=page, base_url="http://localhost") as browser:
        answer = await browser.get("/nothing")
    assert "nsq://***@127.0.0.1:1" in answer.text


async def test_changes_from_other_sites_are_refused(cluster: Cluster) -> None:
    async with browsing(cluster, write=True) as browser:
        form = {"token": await token_of(browser), "topic": "evil"}
        for headers in (
            {"origin": "http://evil.example"},
            {"origin": "http://localhost:9999"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
            {"host": "evil.example"},
        ):
            answer = await browser.post("/actions/create-topic", data=form, headers=headers)
            assert (headers, answer.status_code) == (headers, 403)
            assert "What to do" in answer.text
        assert (await browser.get("/topics/evil")).status_code == 404


@pytest.mark.parametrize("token", [None, "", "0" * 64, "\u00e9"])
async def test_changes_without_the_token_are_refused(cluster: Cluster, token: str | None) -> None:
    form = {"topic": "evil"} | ({} if token is None else {"token": token})
    async with browsing(cluster, write=True) as browser:
        answer = await browser.post("/actions/create-topic", data=form)
        assert answer.status_code == 403
        assert "reload its page" in answer.text
        assert (await browser.get("/topics/evil")).status_code == 404


async def test_the_token_of_another_user_is_refused(cluster: Cluster) -> None:
    async with browsing(cluster, write=True, proxy_header="X-User") as browser:
        browser.headers["x-user"] = "ann"
        token = await token_of(browser)
        browser.headers["x-user"] = "bob"
        answer = await browser.post("/actions/create-topic", data={"topic": "evil", "token": token})
    assert answer.status_code == 403


async def test_a_page_that_only_reads_has_no_forms_and_refuses_changes(cluster: Cluster) -> None:
    cluster.create_topic("read", channels=["ch"])
    async with browsing(cluster) as browser, browsing(cluster, write=True) as writer:
        for path in ("/", "/topics/read", "/topics/read/channels/ch"):
            # the search of topics is a form too, which only reads
            assert 'method="post"' not in (await browser.get(path)).text
            assert 'method="post"' in (await writer.get(path)).text
        answer = await browser.post("/actions/delete-topic", data={"topic": "read", "token": "", "sure": "yes"})
        assert answer.status_code == 403
        assert "--write" in answer.text
        assert (await browser.get("/topics/read")).status_code == 200


async def test_actions_are_posts(cluster: Cluster) -> None:
    async with browsing(cluster, write=True) as browser:
        assert (await browser.get("/actions/create-topic")).status_code == 405
        assert (await press(browser, "nothing")).status_code == 404
        large = await press(browser, "create-topic", topic="x" * 5_000_000)
    assert large.status_code == 413


async def test_a_second_proxy_header_is_refused(cluster: Cluster) -> None:
    async with browsing(cluster, proxy_header="X-User") as browser:
        answer = await browser.get("/", headers=[("x-user", "admin"), ("x-user", "ann")])
    assert answer.status_code == 403


async def test_a_browser_that_does_not_read_events_is_disconnected(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.web.app._UNREAD", 0.05)
    page = WebPage(cluster.lookupd, WebOptions(interval=0.1))
    scope = {
        **{"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "query_string": b"", "root_path": ""},
        **{"http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "client": ("127.0.0.1", 1)},
        "headers": [(b"host", b"localhost"), (b"accept", b"text/event-stream")],
        "asgi": {"version": "3.0", "spec_version": "2.4"},
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:  # the buffers are full
            await anyio.sleep_forever()

    async def receive() -> Any:
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        await tasks.start(page.run)
        with anyio.fail_after(25):
            await page(scope, receive, send)
        tasks.cancel_scope.cancel()
    assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * 2]


async def test_a_page_below_a_path_says_that_it_needs_a_root() -> None:
    """Its links, styles and forms led to the application around it."""
    around = Starlette(routes=[Mount("/nsq", WebPage("127.0.0.1:1"))])
    transport = httpx.ASGITransport(app=around)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in ("/nsq/", "/nsq/topics/orders", "/nsq/static/page.css"):
            answer = await client.get(path)
            assert answer.status_code == 500
            assert answer.text.startswith("the page is mounted at /nsq, and its links need the root of a host")
            assert answer.headers["x-content-type-options"] == "nosniff"
