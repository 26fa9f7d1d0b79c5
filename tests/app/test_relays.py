"""What is common to the relays of an outbox and of delayed messages."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from math import inf
from pathlib import Path

import pytest

from nsqext import Producer, ProducerSettings
from nsqext.app.relay import check_on_disk, lease_time, publish_timeout, refuses_message
from nsqext.errors import InvalidSetting, NsqError


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


def test_a_search_for_outcomes_without_a_limit_is_refused() -> None:
    """What a killed relay had leased would be published by no other."""
    producer = Producer("127.0.0.1:1", on_unknown="settle", settle_timeout=inf)
    with pytest.raises(InvalidSetting, match="settle_timeout=inf"):
        publish_timeout(producer)


@pytest.mark.parametrize("name", [":memory:", ""])
def test_a_store_that_ends_with_its_connection_is_refused(name: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(name)) as lost, closing(sqlite3.connect(tmp_path / "store")) as kept:
        with pytest.raises(InvalidSetting, match="is not a file"):
            check_on_disk(lost, name)
        check_on_disk(kept, "store")
