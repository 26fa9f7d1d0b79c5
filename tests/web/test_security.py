"""Who may use the page, and the headers of its responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nsqext.broker import Cluster
from nsqext.errors import InvalidSetting
from nsqext.web import WebOptions
from tests.support.web_pages import browsing

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=1) as running:
        yield running


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


async def test_a_proxy_names_the_user(cluster: Cluster) -> None:
    async with browsing(cluster, proxy_header="X-Forwarded-User") as browser:
        assert (await browser.get("/")).status_code == 403
        answer = await browser.get("/", headers={"x-forwarded-user": "<ann>"})
    assert answer.status_code == 200
    assert "&lt;ann&gt;" in answer.text and "<ann>" not in answer.text


@pytest.mark.parametrize(
    "options", [{"basic_auth": "nocolon"}, {"basic_auth": ":x"}, {"interval": 0}, {"proxy_header": "X: y"}]
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        WebOptions(**options)  # type: ignore[arg-type]


def test_the_password_is_not_shown() -> None:
    assert "secret" not in repr(WebOptions(basic_auth="ann:secret"))
