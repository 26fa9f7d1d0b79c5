"""Requests of other web sites are refused; those of programs and of the server's page are accepted."""

from __future__ import annotations

import pytest

from nsqext.http.uvicorn_server import HttpGuard

OWN = "127.0.0.1:4151"


@pytest.mark.parametrize(
    "host",
    ["", OWN, "localhost:4151", "LOCALHOST", "nsq.localhost:1", "[::1]:4151", "[::1]", "10.0.0.7", "broker:4151"],
)
def test_hosts_of_this_server_are_accepted(host: str) -> None:
    assert HttpGuard(["Broker"]).refusal("POST", host, "", "") == ""


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:4151", "evillocalhost", "127.0.0.1.evil.example", "a b", "[::1", "x@[::1]"]
)
def test_other_hosts_are_refused(host: str) -> None:
    assert "is not allowed: give the name with --http-host" in HttpGuard().refusal("GET", host, "", "")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:3000", "http://[bad"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_origins_are_refused(method: str, origin: str) -> None:
    assert HttpGuard().refusal(method, OWN, origin, "").startswith("cross-site request refused")


def test_the_own_origin_is_accepted() -> None:
    assert HttpGuard().refusal("POST", OWN, f"http://{OWN}", "same-origin") == ""


def test_a_change_from_another_site_is_refused_and_a_link_to_a_page_is_not() -> None:
    guard = HttpGuard()
    assert [
        site for site in ("", "same-origin", "same-site", "cross-site") if guard.refusal("POST", OWN, "", site)
    ] == [
        "same-site",
        "cross-site",
    ]
    assert guard.refusal("GET", OWN, "", "cross-site") == ""
