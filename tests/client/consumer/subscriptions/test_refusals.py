"""Errors that end a consumer, and errors that are retried, with or without a lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nsqext.client.consumer.subscriptions.refusals import NOT_LEADER, STALE_META, is_fatal
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
    assert isinstance(NotLeader("no"), NOT_LEADER)
    assert not isinstance(NotLeader("no"), STALE_META)
    assert isinstance(ExtendRequired("no"), STALE_META)
    assert not isinstance(ExtendRequired("no"), NOT_LEADER)
    assert not is_fatal(NotLeader("no"), opened=False)
