"""Addresses as users write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nsqext.errors import InvalidSetting
from nsqext.types import Address

__all__ = ("parse_address", "parse_addresses")

_HOST = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?"
_IPV6 = r"[0-9A-Fa-f:.]+(?:%[\w.-]+)?"
_ADDRESS = re.compile(rf"(?:http://)?(?:(?P<name>{_HOST})|\[(?P<ip>{_IPV6})\]):(?P<port>\d{{1,5}})/?", re.ASCII)


def parse_address(text: str, setting: str = "address") -> Address:
    """Return the address in ``host:port``, ``http://host:port`` or ``[IPv6]:port``.

    Raises:
        InvalidSetting: it is none of these; the message names the setting.
    """
    match = _ADDRESS.fullmatch(text.strip()) if isinstance(text, str) else None
    port = int(match["port"]) if match else 0
    if match is None or not 1 <= port <= 65535:
        shown = text.rpartition("@")[2] if isinstance(text, str) else text  # what is before an @ may be a secret
        raise InvalidSetting(
            f"{setting}: {shown!r} is not an address", hint="write host:port, http://host:port or [IPv6]:port"
        )
    return Address(match["name"] or match["ip"], port)


def parse_addresses(given: Sequence[str] | str, setting: str) -> tuple[Address, ...]:
    """Return the addresses of a list, or of a text with commas, each once and in the order given.

    Raises:
        InvalidSetting: one of them is not an address.
    """
    texts = given.split(",") if isinstance(given, str) else given
    if isinstance(given, str):
        texts = [text for text in texts if text.strip()]
    return tuple(dict.fromkeys(parse_address(text, setting) for text in texts))
