"""Locks of keys: entered in the order of the queue; a place that is given up does not block the others."""

from __future__ import annotations

import anyio
import pytest

from nsqext.client.producer.keys import KeyLock
from nsqext.errors import PublishFailed

pytestmark = pytest.mark.anyio

_KEY = ("t", b"k")
_OTHER = ("t", b"other")


async def test_places_are_entered_in_order() -> None:
    lock, order = KeyLock(), list[int]()
    assert lock.try_enter(_KEY)
    assert not lock.try_enter(_KEY)

    async def take(number: int) -> None:
        await places[number].enter(10)
        order.append(number)
        places[number].leave()

    places = [lock.queue([_KEY, _OTHER] if number % 2 else [_KEY]) for number in range(5)]
    async with anyio.create_task_group() as tasks:
        for number in reversed(range(5)):
            tasks.start_soon(take, number)
        lock.leave(_KEY)
    assert order == [0, 1, 2, 3, 4]
    assert len(lock) == 0


@pytest.mark.parametrize("granted", [False, True])
async def test_a_place_that_is_given_up_does_not_block_the_next(granted: bool) -> None:
    lock = KeyLock()
    first, second, third = (lock.queue([_KEY]) for _ in range(3))
    if granted:
        first.leave()
        second.leave()
    else:
        second.leave()
        first.leave()
    await third.enter(0)
    third.leave()
    third.leave()
    assert len(lock) == 0


async def test_a_wait_that_takes_too_long_is_reported() -> None:
    lock = KeyLock()
    first, second = lock.queue([_OTHER]), lock.queue([_KEY, _OTHER])
    with pytest.raises(PublishFailed, match="earlier publishes of its key are still running"):
        await second.enter(0.01)
    assert not lock.try_enter(_KEY)
    second.leave()
    assert lock.try_enter(_KEY)
    first.leave()
    assert lock.try_enter(_OTHER)


def test_the_last_place_of_a_key() -> None:
    lock = KeyLock()
    first = lock.queue([_KEY])
    assert lock.is_last(first, _KEY)
    second = lock.queue([_KEY])
    assert not lock.is_last(first, _KEY)
    assert lock.is_last(second, _KEY)
    second.leave()
    assert lock.is_last(first, _KEY)
    first.leave()
    assert not lock.is_last(first, _KEY)
