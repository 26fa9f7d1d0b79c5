"""One view of the lookup service for several producers and consumers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsqext.errors import InvalidSetting
from nsqext.lookup.metadata import MetadataCache
from nsqext.lookup.options import LookupOptions

if TYPE_CHECKING:
    from nsqext.types import Address

__all__ = ("Lookup", "find_directory")


class Lookup:
    """The lookup service, to be shared: give it to producers and consumers in place of lookup addresses.

    Each of them asks the lookup service by itself otherwise. Those that share a `Lookup` have one list of lookup nodes,
    one poll for each topic, and one pool of HTTP connections. The first of them that opens opens it, and the last one
    that closes closes it; then it may be used again. All of them have to be in one event loop at a time; the blocking
    producers and consumers of a process are.

    Args:
        lookupd: lookup addresses, ``host:port`` of nsqlookupd's HTTP side; a list, or text with commas.
        options: how they are asked.

    Raises:
        InvalidSetting: no address, or an address that is none.
    """

    def __init__(self, lookupd: str | Sequence[str], *, options: LookupOptions | None = None) -> None:
        self.options: LookupOptions = options or LookupOptions()
        self._directory = MetadataCache(lookupd, options=self.options)

    def __repr__(self) -> str:
        return f"Lookup({','.join(map(str, self.addresses))!r})"

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The lookup addresses."""
        return self._directory.addresses

    @property
    def directory(self) -> MetadataCache:
        """What its users find topics in."""
        return self._directory

    def switch(self, lookupd: str | Sequence[str]) -> None:
        """Ask other lookup nodes from now on, of another cluster perhaps.

        All topics are asked about at once; producers and consumers move to the nodes that lead them there, and stay
        where they are while those nodes do not know a topic. May be called from any thread.

        Args:
            lookupd: lookup addresses, as for the constructor.

        Raises:
            InvalidSetting: no address, or an address that is none; nothing is changed then.
        """
        self._directory.switch(lookupd)


def find_directory(
    lookupd: str | Sequence[str] | Lookup, nsqd: str | Sequence[str], options: LookupOptions
) -> MetadataCache:
    """Return the directory for somebody with these settings: a shared one, or one of its own.

    Raises:
        InvalidSetting: neither or both kinds of addresses, an address that is none, or options beside a `Lookup` that
            has others.
    """
    if not isinstance(lookupd, Lookup):
        return MetadataCache(lookupd, nsqd, options)
    if nsqd:
        raise InvalidSetting("both lookupd and nsqd are given", hint="give one of them")
    if options not in (lookupd.options, LookupOptions()):
        raise InvalidSetting(
            "lookup options are given beside a Lookup that has others", hint="give them to the Lookup: options=..."
        )
    return lookupd.directory
