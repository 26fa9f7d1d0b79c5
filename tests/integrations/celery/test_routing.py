"""Exchanges, queues and bindings as topics and channels."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsqext.integrations.celery.envelope import Binding, Exchange, channel_name, nsq_name, topic_of
from nsqext.protocol.names import check_channel, check_topic
from tests.support.tables import table

REPLIES = Exchange("reply.celery.pidbox", durable=False)
EVENTS = Exchange("celeryev", "topic")
BROADCAST = Exchange("celery.pidbox", "fanout", durable=False)


@given(st.text(min_size=1, max_size=120))
def test_every_name_becomes_one_that_servers_accept(name: str) -> None:
    assert check_topic(nsq_name(name))
    assert check_channel(channel_name(name, transient=True))
    assert nsq_name(nsq_name(name)) == nsq_name(name)


@given(st.lists(st.text("aé@/#.", min_size=1, max_size=80), min_size=2, max_size=8, unique=True))
def test_different_names_stay_different(names: list[str]) -> None:
    assert len({nsq_name(name) for name in names}) == len(names)


def test_a_name_is_kept_if_an_ephemeral_channel_may_have_it() -> None:
    longest = 54 * "a"
    assert (nsq_name(longest), len(channel_name(longest, transient=True))) == (longest, 64)
    assert nsq_name(longest + "a") != longest + "a"


@table(
    ("exchange", "routing_key", "topic"),
    [
        (Exchange(), "celery", "celery"),
        (Exchange("celery"), "celery", "celery"),
        (Exchange("media"), "video", "media.video"),
        (Exchange("media"), "", "media"),
        (REPLIES, "0c7e", "reply.celery.pidbox"),
        (EVENTS, "worker.heartbeat", "celeryev"),
        (BROADCAST, "", "celery.pidbox"),
    ],
)
def test_the_topic_follows_from_exchange_and_routing_key(exchange: Exchange, routing_key: str, topic: str) -> None:
    assert topic_of(exchange, routing_key) == topic


@table(
    ("pattern", "matching", "other"),
    [
        ("#", ["", "a", "a.b.c"], []),
        ("a.*", ["a.b"], ["a", "a.b.c", "b.a"]),
        ("a.#", ["a", "a.b", "a.b.c"], ["b", "ab"]),
        ("*.b.#", ["a.b", "a.b.c"], ["b", "a.c"]),
        ("#.c", ["c", "a.c", "a.b.c"], ["c.d", "ac"]),
        ("a.b", ["a.b"], ["a", "a.b.c", "a+b"]),
        ("*", ["a"], ["", "a.b"]),
    ],
)
def test_patterns_select_words(pattern: str, matching: list[str], other: list[str]) -> None:
    binding = Binding(EVENTS, pattern)
    assert [key for key in matching if not binding.selects("celeryev", key)] == []
    assert [key for key in other if binding.selects("celeryev", key)] == []


def test_bindings_select_their_exchange_alone() -> None:
    assert Binding(BROADCAST, "").selects("celery.pidbox", "anything")
    assert not Binding(BROADCAST, "").selects("other", "anything")
    assert Binding(REPLIES, "mine").selects("reply.celery.pidbox", "mine")
    assert not Binding(REPLIES, "mine").selects("reply.celery.pidbox", "theirs")
