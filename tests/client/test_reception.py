"""The messages that are here: rows, and what stops them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext import BackoffOptions, ConsumerOptions
from nsqext.client.backoff import Backoff
from nsqext.client.flow import ReadyFlow
from nsqext.client.places import Source
from nsqext.client.reception import Reception
from nsqext.client.subscription import Subscription
from tests.client.owned import Book, made

if TYPE_CHECKING:
    from nsqext.errors import NsqError


def reception(failed: list[NsqError]) -> Reception:
    """A reception without lanes and workers."""
    flow = ReadyFlow[Subscription](10, Backoff(BackoffOptions()))
    return Reception(Source("t", "ch", None, ConsumerOptions()), flow, failed.append)


def test_messages_wait_in_one_row() -> None:
    failed: list[NsqError] = []
    here = reception(failed)
    here.arrived([made(Book(), 1), made(Book(), 2)])
    here.arrived([made(Book(), 3)])
    assert [message.internal_id for message in here.inbox.messages] == [1, 2, 3]
    assert not here.ticked(1.0, 0.0)
    assert failed == []


def test_nothing_is_taken_in_after_the_stop() -> None:
    here = reception([])
    here.arrived([made(Book(), 1)])
    here.stop()
    assert here.stopped
    here.arrived([made(Book(), 2)])
    assert not here.inbox.messages
