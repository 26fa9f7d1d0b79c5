"""A lookup client that producers and consumers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Never

from nsqext.arguments import options_of, unknown_arguments
from nsqext.errors import InvalidSetting
from nsqext.lookup.metadata import MetadataCache
from nsqext.lookup.options import LookupOptions

if TYPE_CHECKING:
    from nsqext.types import Address

__all__ = ("Lookup", "metadata_cache")


class Lookup:
    """A lookup client shared by several producers and consumers; give it to them instead of lookup addresses.

    Producers and consumers that share a `Lookup` have one list of lookup nodes, one poll for each topic, and one pool
    of HTTP connections; otherwise each has its own. It is opened by the first client that opens, closed by the last one
    that closes, and can be opened again. At any time, all clients must be in one event loop, as the blocking clients of
    a process are.

    Args:
        lookupd: nsqlookupd's HTTP addresses; a list, or a text with commas.
        options: options of the lookup client.

    Raises:
        InvalidSetting: no address, an invalid one, or options of another class.
        TypeError: an unknown argument; the error suggests the right one.
    """

    def __init__(self, lookupd: str | Sequence[str], *, options: LookupOptions | None = None, **unknown: Never) -> None:
        if unknown:
            raise unknown_arguments(Lookup, unknown, options=LookupOptions)
        self.options: LookupOptions = options_of(options, LookupOptions)
        self._metadata = MetadataCache(lookupd, options=self.options)

    def __repr__(self) -> str:
        return f"Lookup({','.join(map(str, self.addresses))!r})"

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The lookup addresses."""
        return self._metadata.addresses

    @property
    def metadata(self) -> MetadataCache:
        """The shared cache."""
        return self._metadata

    def switch(self, lookupd: str | Sequence[str]) -> None:
        """Use other lookup nodes, for example those of another cluster.

        All topics are looked up immediately. Producers and consumers move to the leaders that these nodes report, and
        keep the current leaders of topics that these nodes do not find. Thread-safe.

        Args:
            lookupd: lookup addresses, as for the constructor.

        Raises:
            InvalidSetting: no address, or an invalid one; the addresses are not changed.
        """
        self._metadata.switch(lookupd)


def metadata_cache(
    lookupd: str | Sequence[str] | Lookup, nsqd: str | Sequence[str], options: LookupOptions
) -> MetadataCache:
    """Return the cache for these settings: the cache of a `Lookup`, or a new one.

    Raises:
        InvalidSetting: neither or both kinds of addresses, an invalid address, or options that differ from those of the
            `Lookup`.
    """
    if not isinstance(lookupd, Lookup):
        return MetadataCache(lookupd, nsqd, options)
    if nsqd:
        raise InvalidSetting("both lookupd and nsqd are given", hint="give one of them")
    if options not in (lookupd.options, LookupOptions()):
        raise InvalidSetting(
            "the lookup options differ from those of the Lookup", hint="give them to the Lookup: options=..."
        )
    return lookupd.metadata
