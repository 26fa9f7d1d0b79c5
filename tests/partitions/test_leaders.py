"""When a topic that lookup does not know counts as deleted."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from nsqext.errors import LookupFailed, PartitionUnavailable, TopicNotFound
from nsqext.lookup.options import LookupOptions
from nsqext.partitions import Leader, LeaderLocator
from nsqext.types import Address
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
    async with locating() as (locator, _):
        pauses = 0, MANY, SOME, SOME, SOME
        assert await after_each(clock, look, *pauses) == [False, False, False, False, True], "a pause is no absence"


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


async def test_a_leader_that_failed_is_not_known_until_lookup_was_asked() -> None:
    async with locating() as (locator, lookup):
        keys = [("orders", 0), ("orders", 1)]
        assert locator.known(keys) == {}
        lookup.set_leaders({0: lookup.address, 1: lookup.address}, num=2)
        leader, _ = await locator.leader("orders", 0)
        assert locator.known(keys).keys() == {*keys}
        locator.distrust("orders", 0, Leader(Address("127.0.0.1", 1), leader.http))  # it led before
        assert locator.known(keys).keys() == {*keys}
        locator.distrust("orders", 0, leader)
        assert locator.known(keys).keys() == {("orders", 1)}
        asked = len(lookup.questions)
        assert (await locator.leader("orders", 0))[0] == leader
        assert len(lookup.questions) > asked
        assert locator.known(keys).keys() == {*keys}


async def test_a_new_leader_that_fails_while_lookup_is_asked_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async with locating() as (locator, lookup):
        lookup.set_leaders({0: lookup.address}, num=1)
        leader, _ = await locator.leader("orders", 0)
        other, refresh = Address("127.0.0.1", 1), locator._metadata.refresh

        async def refresh_and_fail(*arguments: Any) -> None:
            await refresh(*arguments)
            locator.distrust("orders", 0, Leader(other, leader.http))

        monkeypatch.setattr(locator._metadata, "refresh", refresh_and_fail)
        locator.distrust("orders", 0, leader)
        lookup.set_leaders({0: other}, num=1)
        assert (await locator.leader("orders", 0))[0].tcp == other
        assert locator.known([("orders", 0)]) == {}


async def test_lookup_is_asked_again_for_a_partition_without_a_leader() -> None:
    async with locating() as (locator, lookup):
        lookup.set_leaders({1: lookup.address}, num=2)
        with pytest.raises(PartitionUnavailable):
            await locator.leader("orders", 0)
        lookup.set_leaders({0: lookup.address, 1: lookup.address}, num=2)
        assert (await locator.leader("orders", 0))[0].tcp == lookup.address


@pytest.mark.parametrize("times", [(0.0, 3600.0), (3600.0, 0.0)])
@pytest.mark.parametrize(("hint", "shown"), [("ask again", "ask again"), (None, "check the option lookupd")])
async def test_an_error_without_a_hint_names_the_option_while_no_lookup_node_has_answered(
    hint: str | None, shown: str, times: tuple[float, float]
) -> None:
    locator = LeaderLocator("h:1", LookupOptions(), timeout=times[0], first_contact=times[1])
    attempts: list[int] = []

    async def attempt() -> None:
        attempts.append(1)
        raise LookupFailed("no answer", hint=hint)

    with anyio.fail_after(25), pytest.raises(LookupFailed, match=shown):
        await locator.retry(attempt)
    assert len(attempts) == 1, "the first contact ends in time, and with the timeout"
    await locator.aclose()


async def test_pauses_between_attempts_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def pause(first: float, longest: float, attempts: int) -> float:
        counts.append(attempts)
        return 0.0

    monkeypatch.setattr("nsqext.partitions.leaders.pause_after", pause)
    async with locating() as (locator, _):

        async def attempt() -> int:
            if len(counts) < 3:
                raise LookupFailed("no answer")
            return 7

        assert await locator.retry(attempt) == 7
    assert counts == [1, 2, 3]


async def test_retries_are_logged_after_some_seconds_and_at_intervals(caplog: pytest.LogCaptureFixture) -> None:
    async with locating() as (locator, _):
        for waited in (1.0, 3.0, 4.0):
            locator.log_retry(waited, 30.0, LookupFailed("no answer"))
    assert caplog.messages == ["no success for 3 s, trying again until 30 s are over: no answer"]


async def test_a_pattern_matches_whole_names() -> None:
    async with locating() as (locator, lookup):
        lookup.set_response("/topics", {"topics": ["orders", "orders_old", "old_orders"]})
        assert await locator.matching(re.compile("orders")) == ["orders"]
