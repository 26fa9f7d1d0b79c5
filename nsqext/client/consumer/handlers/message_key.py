"""Keys of messages that are handled in lanes: how they are read, and which lane a key belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from nsqext.errors import InvalidInput, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.options import KeyOf

__all__ = ("key_reader", "lane_number")


def key_reader(key: str | KeyOf) -> Callable[[Message], bytes]:
    """Return a function that reads the key of a message from a header, or by the user's function.

    The key of a message without one is its id. If the user's function fails, `InvalidInput` is raised.
    """

    def read(message: Message) -> bytes:
        try:
            found = message.header_value(key) if isinstance(key, str) else message.with_unpacked_body(key)
            if found is None:
                return message.id
            return found.encode("utf-8", "surrogatepass") if isinstance(found, str) else bytes(found)
        except ProtocolError:  # a header that servers refuse to store
            return message.id
        except Exception as error:
            raise InvalidInput(
                f"the key function failed for {message!r}: {error!r}",
                topic=message.topic,
                partition=message.partition,
                hint="the function key= must return str, bytes or None",
            ) from error

    return read


def lane_number(key: bytes, count: int) -> int:
    """Return the lane of a key.

    The hash is independent of the one that divides keys among consumers (MurmurHash3). Otherwise a consumer whose keys
    are a range of hashes would use only a part of its lanes.
    """
    return (crc32(key) * 0x9E3779B1 >> 8) % count
