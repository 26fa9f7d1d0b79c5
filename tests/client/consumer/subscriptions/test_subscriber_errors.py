"""Errors that end a consumer, and errors that are retried, with or without a lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nsqext.client.consumer.subscriptions.subscriber import is_fatal, is_not_leader, is_stale_meta
from nsqext.errors.server import (
    AuthFailed,
    BadTopic,
    ExtendRequired,
    InvalidCommand,
    NotLeader,
    Unauthorized,
)

if TYPE_CHECKING:
    from nsqext.errors import NsqError


@pytest.mark.parametrize("kind", [BadTopic, Unauthorized])
def test_permanent_errors_are_fatal(kind: type[NsqError]) -> None:
    assert is_fatal(kind("no"), opened=True)
    assert is_fatal(kind("no"), opened=False)


@pytest.mark.parametrize("kind", [AuthFailed, InvalidCommand])
def test_settings_accepted_once_are_not_fatal(kind: type[NsqError]) -> None:
    assert is_fatal(kind("no"), opened=False)
    assert not is_fatal(kind("no"), opened=True)


def test_errors_that_another_lookup_resolves() -> None:
    assert is_not_leader(NotLeader("no"))
    assert not is_stale_meta(NotLeader("no"))
    assert is_stale_meta(ExtendRequired("no"))
    assert not is_not_leader(ExtendRequired("no"))
    assert not is_fatal(NotLeader("no"), opened=False)
    assert not is_not_leader(None)
    assert not is_stale_meta(None)
