"""`nsqext web` and `nsqext broker --web` as processes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from nsqext.broker import Cluster
from nsqext.cli import main
from nsqext.cli.servers.web import AUTH_VARIABLE
from nsqext.web import WebOptions, WebPage
from tests.support import plain_http
from tests.support.command_line import Process, run, started

if TYPE_CHECKING:
    from nsqext.types import Address

_TABS = 40


def line_with(process: Process, text: str) -> str:
    """Read lines of standard output until one contains a text."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line.decode():
            return line.decode()
    raise AssertionError(f"no line with {text!r}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_page_is_served_until_a_signal(number: signal.Signals) -> None:
    with (
        Cluster(nodes=1) as cluster,
        started(
            "web", "--lookupd", cluster.lookupd[0], "--port", "0", cwd=None, **{AUTH_VARIABLE: "ann:secret"}
        ) as process,
    ):
        url, _, mode = line_with(process, "http://").partition(" ")
        assert mode.strip() == "(read only)"
        assert plain_http.get(url).status_code == 401
        answer = plain_http.get(url, auth=("ann", "secret"))
        assert cluster.nodes["n1"].tcp in answer.text
        with ExitStack() as tabs:  # open pages do not keep the program alive, and are no reason for a traceback
            client = tabs.enter_context(httpx.Client(auth=("ann", "secret"), trust_env=False))
            for _ in range(_TABS):
                events = tabs.enter_context(client.stream("GET", url, headers={"accept": "text/event-stream"}))
                assert next(events.iter_lines()).startswith("retry:")
            process.send_signal(number)
            assert process.wait(timeout=30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | Sequence[str], WebOptions, str]]:
    """Lookup nodes, options and address of pages that are not served."""
    found: list[tuple[str | Sequence[str], WebOptions, str]] = []

    async def serve(lookupd: str | Sequence[str], options: WebOptions, address: Address) -> None:
        found.append((lookupd, options, str(address)))

    monkeypatch.setattr("nsqext.cli.servers.web._serve_until_signal", serve)
    return found


def web(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["web", *words])
    assert ended.value.code == 0


def test_the_page_connects_with_the_settings_of_the_client(
    monkeypatch: pytest.MonkeyPatch, pages: list[tuple[str, WebOptions, str]]
) -> None:
    monkeypatch.setenv("NSQEXT_TLS", "true")
    monkeypatch.setenv("NSQEXT_LOOKUP_AUTH_SECRET", "hush")
    web("--url", "nsq://127.0.0.1:1?auth_secret=hush")
    ((lookupd, options, _),) = pages
    page = WebPage(lookupd, options)
    for settings in (options.settings, page._pages._settings):
        assert (settings["tls"], settings["auth_secret"], settings["lookup_auth_secret"]) == (True, "hush", "hush")
    producer = page._producer.settings
    assert (producer["tls"], producer["auth_secret"]) == (True, "***")


def test_the_page_is_of_the_context_as_for_other_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pages: list[tuple[str, WebOptions, str]]
) -> None:
    contexts = tmp_path / "contexts.toml"
    contexts.write_text('current = "prod"\n[contexts]\nprod = "nsq://prod:1"\ntest = "nsq://test:2"\n')
    monkeypatch.setenv("NSQEXT_CONTEXTS_FILE", str(contexts))
    for words in ((), ("--context", "test"), ("--lookupd", "given:3")):
        web(*words)
    assert [lookupd for lookupd, _, _ in pages] == ["prod:1", "test:2", "given:3"]


def test_the_options_of_the_command_are_those_of_the_page(
    tmp_path: Path, pages: list[tuple[str, WebOptions, str]]
) -> None:
    (tmp_path / "auth").write_text("ann:secret\n")
    words = f"--host 192.0.2.1 --port 1 --http-host x --write --interval 2 --basic-auth-file {tmp_path / 'auth'}"
    web(*words.split())
    web("--host", "192.0.2.1", "--proxy-header", "X-User")
    (_, options, address), (_, proxied, _) = pages
    assert (options.write, options.interval, options.http_hosts, address) == (True, 2.0, ("x",), "192.0.2.1:1")
    assert (options.basic_auth, proxied.basic_auth, proxied.proxy_header) == ("ann:secret", None, "X-User")


def test_a_port_without_a_page_is_refused() -> None:
    done = run("broker", "--web-port", "0")
    assert (done.returncode, b"--web-port without --web would be ignored" in done.stderr) == (2, True)


def test_the_broker_serves_a_page_that_changes_it() -> None:
    with started("broker", "--nodes", "2", "--web", "--web-port", "0", "--topic", "orders") as process:
        url = line_with(process, "page: ").partition(" ")[2].strip()
        line_with(process, "ready")
        text = plain_http.get(url).text
        assert "/topics/orders" in text
        assert "/actions/kill" in text
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--host", "192.0.2.1"), "can be reached from other machines"),
        (("--proxy-header", "X: y"), "not the name of a header"),
        (("--basic-auth-file", "/dev/null"), "/dev/null is empty"),
        (("--basic-auth-file", sys.executable), f"{sys.executable} is no text in UTF-8"),
        (("--delay-store", "/dev/null/store"), "/dev/null/store does not exist"),
    ],
)
def test_bad_settings_are_refused(words: tuple[str, ...], text: str) -> None:
    with started("web", "--lookupd", "127.0.0.1:1", "--port", "0", *words) as process:
        _, errors = process.communicate()
    assert process.returncode == 2
    assert text in errors.decode() and len(errors.splitlines()) == 1
