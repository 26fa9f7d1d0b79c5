"""`Lookup`: a lookup client that producers and consumers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Unpack

from attrs import field, frozen

from nsqext.lookup.metadata import MetadataCache, SharedMetadata
from nsqext.lookup.options import LookupOptions
from nsqext.settings import Given, Schema, build, settings_of

if TYPE_CHECKING:
    from nsqext.lookup.settings import LookupSettings
    from nsqext.types import Address


@frozen
class _SharedOptions:
    lookup: LookupOptions = field(factory=LookupOptions)


@cache
def lookup_schema() -> Schema:
    """Return the settings of the lookup client."""
    return Schema("Lookup", settings_of(_SharedOptions), direct=False)


class Lookup(SharedMetadata):
    """A lookup client that producers and consumers share; pass it to them instead of lookup addresses.

    They share the list of lookup nodes, a poll per topic, and the pool of HTTP connections. The first client that opens
    opens it, the last client that closes closes it, and it can be opened again. At any time, all clients must be in the
    same event loop, as the blocking clients of a process are.

    Args:
        lookupd: nsqlookupd's HTTP addresses (a list, or a text with commas), or a URL with addresses and settings.
        env: prefix of the environment variables with further settings; see `nsqext.Producer`.
        settings: see `LookupSettings`.

    Raises:
        InvalidSetting: no address, an invalid address, or an invalid value.
        UnknownSetting: unknown setting; the error suggests a known name.
    """

    def __init__(
        self, lookupd: str | Sequence[str] = (), *, env: str | None = None, **settings: Unpack[LookupSettings]
    ) -> None:
        schema = lookup_schema()
        given = schema.collect(lookupd, (), env, settings)
        self._options = build(_SharedOptions, schema.own, given.values)
        super().__init__(MetadataCache(given.lookupd, options=self._options.lookup), schema.own, given.values)

    def __repr__(self) -> str:
        return f"Lookup({','.join(map(str, self.addresses))!r})"

    @property
    def settings(self) -> Mapping[str, object]:
        """All settings by name, with defaults; secrets are ``***``."""
        return lookup_schema().effective(self._options)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The lookup addresses."""
        return self.metadata.addresses

    def switch(self, lookupd: str | Sequence[str]) -> None:
        """Use other lookup nodes, for example of another cluster.

        All topics are looked up immediately. Clients move to the reported leaders, and keep the current leaders of
        topics that the new nodes do not find. Thread-safe.

        Raises:
            InvalidSetting: no address, or an invalid address; the addresses stay unchanged.
        """
        self.metadata.switch(lookupd)


def share_lookup(given: Given) -> Given:
    """Return settings with a `Lookup` in place of lookup addresses."""
    if not given.lookupd or isinstance(given.lookupd, Lookup):
        return given
    own: dict[str, Any] = {name: value for name, value in given.values.items() if name in lookup_schema().own}
    rest = {name: value for name, value in given.values.items() if name not in own}
    return Given(Lookup(given.lookupd, **own), (), rest)
