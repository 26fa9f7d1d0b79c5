"""What is common to the relays of an outbox and of delayed messages."""

from __future__ import annotations

from collections.abc import Iterator

from nsqext.app.relay import lease_time, refuses_message
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


def test_a_lease_is_longer_than_a_publish() -> None:
    assert lease_time(30.0) > 30.0
