"""Errors that end a consumer, and errors that are retried, with or without a lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest
from nsqext.client.consumer.subscriptions.refusals import NOT_LEADER, STALE_META, Refusals, is_fatal
from nsqext.errors.server import (
    AuthFailed,
    BadTopic,
    ExtendForbidden,
    ExtendRequired,
    InvalidCommand,
    NotLeader,
    OrderRequired,
    Unauthorized,
)
from nsqext.types import Address, TopicMeta

if TYPE_CHECKING:
    from nsqext.errors import NsqError


@pytest.mark.parametrize("kind", [BadTopic, Unauthorized])
def test_permanent_errors_are_fatal(kind: type[NsqError]) -> None:
    assert is_fatal(kind("no"), opened=True)
    assert is_fatal(kind("no"), opened=False)


@pytest.mark.parametrize("kind", [AuthFailed, InvalidCommand])
def test_settings_accepted_once_are_not_fatal(kind: type[NsqError]) -> None:
    assert is_fatal(kind("no"), opened=False)
    assert not is_fatal(kind("no"), opened=True)


def test_errors_that_another_lookup_resolves() -> None:
    assert isinstance(NotLeader("no"), NOT_LEADER)
    assert not isinstance(NotLeader("no"), STALE_META)
    assert isinstance(ExtendRequired("no"), STALE_META)
    assert not isinstance(ExtendRequired("no"), NOT_LEADER)
    assert not is_fatal(NotLeader("no"), opened=False)


def test_the_requirements_of_several_partitions_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    options, plain, extend = ConsumerOptions(), TopicMeta(2), TopicMeta(2, extend_support=True)
    for error, meta, corrected in (
        (OrderRequired("no"), plain, TopicMeta(2, ordered=True)),
        (ExtendRequired("no"), plain, extend),
        (ExtendForbidden("no"), extend, plain),
    ):
        caplog.clear()
        refusals = Refusals(options)
        refusals.corrected(meta)
        for partition in (0, 1):
            request = SubscribeRequest("t", "ch", partition, Address("n", 1), meta, options=options)
            assert refusals.heed(error, request) is error
        assert (refusals.corrected(meta), len(caplog.records)) == (corrected, 1)
