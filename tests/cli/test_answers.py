"""A cluster that does not respond yet is asked again."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import anyio
import pytest

from nsqext.cli import answers
from nsqext.cli.answers import answer_of
from nsqext.errors import InvalidInput, LookupUnreachable, NsqError, TopicNotFound

if TYPE_CHECKING:
    from nsqext import Admin
    from nsqext.cli.connection import ServerAccess

pytestmark = pytest.mark.anyio


class Access:
    """Access to a cluster of these lookup nodes; its administration client is ``"admin"``."""

    def __init__(self, lookupd: str = "l1") -> None:
        self.lookupd = lookupd

    def load(self) -> SimpleNamespace:
        return SimpleNamespace(lookupd=self.lookupd)

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[str]:
        yield "admin"


async def answer(access: Access, *failures: NsqError) -> str | None:
    left = list(failures)

    async def ask(admin: Admin) -> str:
        if left:
            raise left.pop(0)
        return f"answer of {admin}"

    with anyio.fail_after(20):
        return await answer_of(cast("ServerAccess", access), ask)


async def test_failures_that_may_pass_are_waited_for_and_the_first_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(answers, "_FIRST", 0.001)
    with caplog.at_level(logging.INFO, "nsqext.relay"):
        assert await answer(Access(), LookupUnreachable("down"), TopicNotFound("new")) == "answer of admin"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "waiting: down"),
        ("INFO", "waiting: new"),
    ]


async def test_other_errors_are_raised() -> None:
    with pytest.raises(InvalidInput, match="wrong"):
        await answer(Access(), InvalidInput("wrong"))


async def test_a_cluster_without_lookup_is_not_asked() -> None:
    assert await answer(Access(""), InvalidInput("wrong")) is None
