"""Read messages from the log of partitions, without consuming them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nsqext.admin.requests import ask_all
from nsqext.admin.results import StoredMessage
from nsqext.errors import ProtocolError
from nsqext.lookup.responses import unwrap
from nsqext.protocol.headers import KEY_HEADER, RESERVED_PREFIX, decode_headers, header_text, tag_of

if TYPE_CHECKING:
    from nsqext.admin.requests import ClusterRequests
    from nsqext.types import Address


async def newest_messages(
    requests: ClusterRequests, topic: str, partitions: Sequence[tuple[int, Address, int]], count: int
) -> tuple[StoredMessage, ...]:
    """Return the newest messages, newest first.

    Args:
        requests: client of the cluster.
        topic: the topic.
        partitions: number, HTTP address of the leader and number of messages of each partition to read.
        count: largest number of messages.

    Raises:
        ConnectionFailed: a leader does not respond.
        ProtocolError: a response is invalid.
    """

    async def read(at: tuple[int, Address, int]) -> StoredMessage | None:
        number, http, position = at
        return await _message_at(requests, http, topic, number, position)

    wanted = (
        (number, http, position)
        for number, http, messages in partitions
        for position in range(messages, max(messages - count, 0), -1)
    )
    messages, failed = await ask_all(wanted, read)
    for error in failed.values():
        raise error
    # by partition and offset: for any message of a batch, real servers return the first one
    found = {(message.partition, message.offset): message for message in messages.values() if message is not None}
    newest = sorted(found.values(), key=lambda one: (one.timestamp, one.offset), reverse=True)
    return tuple(newest[:count])


async def _message_at(
    requests: ClusterRequests, http: Address, topic: str, partition: int, number: int
) -> StoredMessage | None:
    """Return a message by its number, counted from 1; None if the log no longer contains it."""
    params: dict[str, str | int] = {
        "topic": topic,
        "partition": partition,
        "search_mode": "count",
        "search_pos": number,
        "needext": "true",
    }
    status, body = await requests.fetch(http, "/message/get", params)
    if status != 200:
        return None
    return read_message(unwrap(status, body, http), partition, http)


def read_message(data: Any, partition: int, node: Address) -> StoredMessage:
    """Read the data of ``/message/get``.

    Raises:
        ProtocolError: the data is invalid, or the header is not JSON.
    """
    try:
        ext = str(data.get("ext") or "")
        headers = decode_headers(ext.encode("utf-8", "surrogatepass")) if ext.lstrip().startswith("{") else {}
        return StoredMessage(
            partition=partition,
            id=int(data["id"]),
            offset=int(data["offset"]),
            timestamp=int(data["timestamp"]),
            trace_id=int(data["trace_id"]),
            body=str(data["body"]),
            headers={name: value for name, value in headers.items() if not name.startswith(RESERVED_PREFIX)},
            key=header_text(headers, KEY_HEADER),
            tag=tag_of(headers) if headers else (ext or None),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"/message/get cannot be read: {error!r}", node=str(node), partition=partition) from error
