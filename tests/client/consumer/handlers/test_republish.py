"""What is published for a received message."""

from __future__ import annotations

import pytest

from nsqext.client.consumer.handlers.republish import as_stored
from nsqext.protocol.messages import EXT_TAG
from tests.support.messages import RecordingOwner, make_message


@pytest.mark.parametrize(
    ("tag", "trace_id", "header"),
    [
        (b"red", 0, b'{"##client_dispatch_tag":"red"}'),
        (b"red", 7, b'{"##client_dispatch_tag":"red","##trace_id":"7"}'),
        (b"", 7, b'{"##trace_id":"7"}'),
        (b"", 0, b""),
    ],
)
def test_the_header_of_a_tag_alone_becomes_a_header_of_json(tag: bytes, trace_id: int, header: bytes) -> None:
    message = make_message(RecordingOwner(), trace_id=trace_id)
    message.version, message.header = EXT_TAG, tag
    again = as_stored(message)
    assert (again.body, again.header, again.trace_id, again.key) == (b"body", header, None, None)
