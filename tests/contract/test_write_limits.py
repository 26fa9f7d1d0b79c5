"""The largest messages. The last file, because new channels of a real server begin with messages not yet flushed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nsqext import Producer
from nsqext.errors import InvalidBody
from nsqext.errors.server import RecordTooLarge

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest

pytestmark = pytest.mark.anyio

_LIMIT = 1 << 20
_HEADER = {"k": "v"}
_HEADER_SIZE = 2 + len(b'{"k":"v"}')


async def test_the_largest_messages_are_stored(cluster_under_test: ClusterUnderTest) -> None:
    """The log of an extend topic needs one byte more than the command."""
    plain, extend = cluster_under_test.plain, cluster_under_test.extend
    largest = b"x" * (_LIMIT - 1)
    async with Producer(cluster_under_test.lookupd) as producer:
        assert len(await producer.publish_many(plain, [largest + b"x"])) == 1
        assert (await producer.publish(plain, largest + b"x")).topic == plain
        assert (await producer.publish(extend, largest)).topic == extend
        assert (await producer.publish(extend, largest[_HEADER_SIZE:], headers=_HEADER)).topic == extend
        assert len(await producer.publish_many(extend, [largest])) == 1
        for call in (
            producer.publish(plain, largest + b"xx"),
            producer.publish(extend, largest + b"x"),
            producer.publish(extend, largest[_HEADER_SIZE - 1 :], headers=_HEADER),
            producer.publish_many(extend, [largest + b"x"]),
        ):
            with pytest.raises(InvalidBody, match="is larger than 1048576"):
                await call


async def test_a_record_that_the_server_refuses_is_not_sent_again(cluster_under_test: ClusterUnderTest) -> None:
    """A server with a lower limit than the client refuses the record when it writes it (captured text)."""
    body = b"x" * (_LIMIT - _HEADER_SIZE)
    async with Producer(cluster_under_test.lookupd, max_message_size=2 * _LIMIT) as producer:
        with pytest.raises(RecordTooLarge, match="invalid message write size") as caught:
            await producer.publish(cluster_under_test.extend, body, headers=_HEADER)
        assert caught.value.size == _LIMIT + 27
        assert producer.statistics().retries == 0
        assert producer.statistics().unknown == 0
