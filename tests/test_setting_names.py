"""Names of settings: suggestions, prefixes of variables, and what clients show."""

from __future__ import annotations

from typing import Any

import pytest

import nsqext
from nsqext.errors import InvalidSetting, UnknownSetting


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("connection_tls", "tls"),
        ("connection_auth_secret", "auth_secret"),
        ("connection_request_timeout", "request_timeout"),
        ("failure_requeue_delay", "requeue_delay"),
        ("delivery_on_lost", "on_lost"),
        ("poll_interval", "lookup_poll_interval"),
        ("max_inflight", "max_in_flight"),
    ],
)
def test_a_name_with_another_prefix_suggests_the_right_one(name: str, right: str) -> None:
    settings: Any = {name: 1}
    with pytest.raises(UnknownSetting, match=f"did you mean {right}\\?"):
        nsqext.Consumer("orders", "ch", "h:1", **settings)


def test_a_prefix_of_another_part_of_the_package_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSQEXT_TEST_LOOPS", raising=False)
    monkeypatch.setenv("NSQEXT_TEST_LOOKUPD", "h:1")
    monkeypatch.setenv("NSQEXT_TEST_TIMEOUT", "7")
    assert nsqext.Producer(env="NSQEXT_TEST_").settings["timeout"] == 7.0


@pytest.mark.parametrize("name", ["NSQEXT_OUTBOX", "NSQEXT_WEB_BASIC_AUTH", "NSQEXT_CONTEXTS_FILE", "NSQEXT_WORKER"])
def test_variables_of_commands_are_no_settings_of_clients(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With the database of the outbox in the environment, each client and command refused to start."""
    for variable, value in {"NSQEXT_LOOKUPD": "h:1", "NSQEXT_TIMEOUT": "7", name: "sqlite:///shop.db"}.items():
        monkeypatch.setenv(variable, value)
    assert nsqext.Producer().settings["timeout"] == 7.0


def test_clients_that_need_lookup_do_not_ask_for_nsqd() -> None:
    with pytest.raises(InvalidSetting, match="set QUEUE_LOOKUPD, or QUEUE_URL"):
        nsqext.Lookup(env="QUEUE_")
    with pytest.raises(InvalidSetting, match="set QUEUE_LOOKUPD, QUEUE_NSQD or QUEUE_URL"):
        nsqext.Producer(env="QUEUE_")


def test_an_app_shows_the_defaults_of_its_consumers_and_its_producer_its_own() -> None:
    app = nsqext.App("h:1")
    assert (app.settings["close_timeout"], app.producer.settings["close_timeout"]) == (30.0, 5.0)
    app = nsqext.App("h:1", close_timeout=7)
    assert (app.settings["close_timeout"], app.producer.settings["close_timeout"]) == (7, 7)
