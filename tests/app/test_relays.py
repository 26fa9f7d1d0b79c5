"""What is common to the relays of an outbox and of delayed messages."""

from __future__ import annotations

import pytest

from nsqext.app.relay import refuses_message
from nsqext.errors import InvalidBody, InvalidPartition, InvalidSetting, NsqError, OperationNotSupported, TopicNotFound
from nsqext.errors.server import BadMessage, PubFailed, Unauthorized


@pytest.mark.parametrize("error", [InvalidBody("too large"), InvalidPartition("no key"), BadMessage("E_BAD_MESSAGE")])
def test_an_error_about_a_message_refuses_it(error: NsqError) -> None:
    assert refuses_message(error)


@pytest.mark.parametrize(
    "error",
    [
        InvalidSetting("node_filter"),
        OperationNotSupported("on_unknown='settle'"),
        TopicNotFound("no topic"),
        PubFailed("E_PUB_FAILED"),
        Unauthorized("E_UNAUTHORIZED"),
    ],
)
def test_an_error_about_the_relay_or_the_cluster_refuses_no_message(error: NsqError) -> None:
    assert not refuses_message(error)
