"""When a topic that lookup does not know counts as deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from nsqext.errors import LookupFailed, TopicNotFound
from nsqext.lookup.options import LookupOptions
from nsqext.partitions import LeaderLocator
from tests.support.clock import Clock, replace_clock
from tests.support.fake_nsqd import ScriptedLookup, scripted_lookup

pytestmark = pytest.mark.anyio

SOME = 8.0
"""Seconds; three times as many are more than a topic may be absent."""
MANY = 21.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the rule."""
    clock = Clock()
    replace_clock(monkeypatch, clock)
    return clock


@asynccontextmanager
async def locating() -> AsyncIterator[tuple[LeaderLocator, ScriptedLookup]]:
    """Open a locator with a lookup node that finds no topic."""
    async with scripted_lookup() as lookup:
        lookup.refuse()
        locator = LeaderLocator(str(lookup.address), LookupOptions(max_pause=0.0), timeout=0.05)
        try:
            yield locator, lookup
        finally:
            await locator.aclose()


async def after_each(clock: Clock, look: Callable[[], Awaitable[bool]], *seconds: float) -> list[bool]:
    """Look after each of these pauses."""
    found: list[bool] = []
    for pause in seconds:
        clock.now += pause
        found.append(await look())
    return found


async def test_a_topic_that_was_never_found(clock: Clock) -> None:
    async with locating() as (locator, _):

        async def look() -> bool:
            return await locator.is_deleted("orders")

        assert await after_each(clock, look, 0, SOME, SOME, SOME) == [False, False, False, True]
        assert await after_each(clock, look, MANY) == [True], "a topic that is deleted remains so until it is found"


async def test_a_pause_without_a_look_is_no_absence(clock: Clock) -> None:
    async with locating() as (locator, _):

        async def look() -> bool:
            return await locator.is_deleted("orders")

        assert await after_each(clock, look, 0, MANY, SOME, SOME, SOME) == [False, False, False, False, True]


async def test_a_lookup_that_does_not_answer_ends_an_absence(clock: Clock) -> None:
    async with locating() as (locator, lookup):

        async def look() -> bool:
            return await locator.is_deleted("orders")

        assert await after_each(clock, look, 0, SOME, SOME) == [False, False, False]
        lookup.refuse(500, "starting")
        with pytest.raises(LookupFailed):
            await look()
        lookup.refuse()
        assert await after_each(clock, look, SOME, SOME, SOME, SOME) == [False, False, False, True]


@pytest.mark.parametrize("kind", ["found by lookup", "served by its leader"])
async def test_two_short_absences_are_not_added(clock: Clock, kind: str) -> None:
    async with locating() as (locator, lookup):

        async def look() -> bool:
            """Ask for the leader, who then refuses."""
            try:
                leader, _ = await locator.leader("orders", 0)
            except TopicNotFound:
                return True
            locator.distrust("orders", 0, leader)
            return False

        lookup.set_leaders({0: lookup.address}, num=1)
        assert not await look()
        lookup.refuse()
        assert await after_each(clock, look, 0, SOME, SOME) == [False, False, False]
        if kind == "found by lookup":
            lookup.set_leaders({0: lookup.address}, num=1)
            assert not await look()
            lookup.refuse()
        else:
            leader, _ = await locator.leader("orders", 0)

            async def serve(*_: object) -> None:
                pass

            await locator.ask("orders", 0, serve)
            locator.distrust("orders", 0, leader)
        assert await after_each(clock, look, SOME, SOME, SOME, SOME) == [False, False, False, True]
