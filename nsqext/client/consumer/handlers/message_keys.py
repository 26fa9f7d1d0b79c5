"""The keys of messages, and the lanes of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from nsqext.arguments import check_plain_function
from nsqext.errors import InvalidInput, InvalidSetting, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.client.consumer.message import KeyOf, Message


def check_key(key: object) -> None:
    """Raise InvalidSetting unless a setting is the name of a header or a plain function."""
    if callable(key):
        check_plain_function("key", key)
    elif not (isinstance(key, str) and key):
        raise InvalidSetting(f"key={key!r} is neither the name of a header nor a function")


def key_reader(key: str | KeyOf) -> Callable[[Message], bytes]:
    """Return a function that reads a message's key from a header, or by the user's function.

    A message without a key has its id as key. Raises InvalidInput if the user's function fails.
    """

    def read(message: Message) -> bytes:
        try:
            found: str | bytes | None
            if isinstance(key, str):
                found = message.header_value(key)
            else:
                found = key(message) if message.budget is None else message.budget.call_unpacked(key, message)
            if found is None:
                return message.id
            # refuses numbers: ``bytes(n)`` would be n zeros
            return found.encode("utf-8", "surrogatepass") if isinstance(found, str) else bytes(memoryview(found))
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

    The hash is independent of the hash that divides keys among consumers (MurmurHash3): otherwise a consumer with a
    range of hashes would use only some of its lanes.
    """
    return (crc32(key) * 0x9E3779B1 >> 8) % count
