"""Queues of clients, one for each tag."""

from __future__ import annotations

from nsqext.broker.engine.channel.in_flight import SubscribedClient, TagSelector
from tests.support.engine_partition import Consumer


def client(number: int, tag: str = "", ready: int = 1) -> SubscribedClient:
    consumer = Consumer(number, tag=tag)
    consumer.ready = ready
    consumer.refresh()
    return consumer


def test_tags_have_queues_while_they_have_clients() -> None:
    groups, plain, one, two = TagSelector(), client(1), client(2, "a"), client(3, "a")
    groups.add(plain)
    assert not groups.tagged
    for member in (one, two):
        groups.add(member)
    assert groups.tagged
    assert [groups.pick("a"), groups.pick("a"), groups.pick("a")] == [one, two, None]
    assert groups.pick("b") is plain
    groups.remove(one)
    assert groups.pick("a") is None
    groups.remove(two)
    assert not groups.tagged
    groups.offer(plain)
    assert groups.pick("a") is plain


def test_a_stalled_client_is_not_queued() -> None:
    groups, member = TagSelector(), client(1, "a")
    groups.add(member)
    groups.remove(member)
    member.stall()
    groups.renew(member)
    assert groups.pick("a") is None


def test_a_removed_client_is_not_queued() -> None:
    groups, member = TagSelector(), client(1)
    groups.add(member)
    groups.remove(member)
    assert groups.pick("") is None
