"""Locks of keys: entered in the order of the queue; a place that is given up does not block the others."""

from __future__ import annotations

import pytest

from nsqext.client.producer.keys import KeyLock
from nsqext.errors import PublishFailed

pytestmark = pytest.mark.anyio

_KEY = ("t", b"k")
_OTHER = ("t", b"other")


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
