"""What is common to the relays of an outbox and of delayed messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nsqext import Producer, ProducerSettings
from nsqext.app.relay import lease_time, publish_timeout, refuses_message
from nsqext.errors import NsqError


def kinds(base: type[NsqError]) -> Iterator[type[NsqError]]:
    yield base
    for kind in base.__subclasses__():
        if kind.__module__.startswith("nsqext.errors"):
            yield from kinds(kind)


def test_only_errors_about_a_message_refuse_it() -> None:
    """Any other error passes: a message that was set aside for it would be late until an operator sees it."""
    final = {kind.__name__ for kind in kinds(NsqError) if refuses_message(kind.__new__(kind))}
    about_arguments = "InvalidInput InvalidName InvalidHeader InvalidBody InvalidPartition ExtendNotSupported"
    of_servers = "BadTopic BadBody BadMessage BadTag ExtendRefused InvalidJsonHeader RecordTooLarge"
    assert final == {*about_arguments.split(), "DelayNotSupported", *of_servers.split()}


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [({"timeout": 30.0}, 30.0), ({"timeout": 30.0, "on_unknown": "settle", "settle_timeout": 12.0}, 42.0)],
)
def test_a_publish_takes_as_long_as_the_search_for_its_outcome(settings: ProducerSettings, seconds: float) -> None:
    assert publish_timeout(Producer("127.0.0.1:1", **settings)) == seconds


def test_a_lease_is_longer_than_a_publish() -> None:
    assert lease_time(30.0) > 30.0
