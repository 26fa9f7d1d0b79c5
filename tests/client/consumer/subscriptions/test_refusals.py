"""Which errors end a consumer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nsqext.client.consumer.subscriptions.refusals import heals_itself, is_fatal, is_refused
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
def test_what_can_never_be_right_is_fatal(kind: type[NsqError]) -> None:
    assert is_fatal(kind("no"), opened=True)
    assert is_fatal(kind("no"), opened=False)


@pytest.mark.parametrize("kind", [AuthFailed, InvalidCommand])
def test_settings_that_were_taken_once_are_not_fatal(kind: type[NsqError]) -> None:
    assert is_fatal(kind("no"), opened=False)
    assert not is_fatal(kind("no"), opened=True)


def test_what_another_look_at_lookup_mends() -> None:
    assert is_refused(NotLeader("no"))
    assert not heals_itself(NotLeader("no"))
    assert heals_itself(ExtendRequired("no"))
    assert not is_refused(ExtendRequired("no"))
    assert not is_fatal(NotLeader("no"), opened=False)
    assert not is_refused(None)
    assert not heals_itself(None)
