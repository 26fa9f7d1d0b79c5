"""Warnings of settings without effect that need an answer of a node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from nsqext.client.consumer.subscriptions.topic_warnings import warn_of_others
from nsqext.errors import PartitionUnavailable
from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.lookup.metadata import MetadataCache

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("connections", "others"), [(0, None), (1, None), (2, 1), (9, 8), (None, None)])
async def test_a_consumer_is_warned_of_others_not_of_itself(
    connections: int | None, others: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def clients(*place: object) -> int:
        assert place == (node, "t", 3, "ch")
        if connections is None:
            raise PartitionUnavailable("down")
        return connections

    node = Address("n", 4151)
    metadata = cast("MetadataCache", SimpleNamespace(channels=SimpleNamespace(clients=clients)))
    request = SimpleNamespace(channel="ch")
    subscription = cast("Subscription", SimpleNamespace(topic="t", partition=3, request=request))
    await warn_of_others(metadata, node, subscription)
    warnings = [record.getMessage().partition(":")[0] for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ([] if others is None else [f"{others} further connections consume t/ch"])
