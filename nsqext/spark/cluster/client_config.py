"""How a job reaches the servers: lookup addresses, and settings of the client as text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import field, frozen

from nsqext.client.from_url import consumer_settings, producer_settings
from nsqext.client.producer.options import ProducerOptions
from nsqext.errors import InvalidSetting
from nsqext.lookup.options import LookupOptions
from nsqext.transport.options import ConnectionOptions

if TYPE_CHECKING:
    from nsqext.settings import Setting

__all__ = ("PREFIX", "ClientConfig", "client_settings", "misplaced", "unknown")

T = TypeVar("T")

PREFIX = "nsqext."
"""Prefix of options that are settings of the client."""

_HIDDEN = "***"


@cache
def client_settings(kind: str) -> Mapping[str, Setting]:
    """Return the settings of the client that have an effect in Spark, by name."""
    if kind == "write":
        return producer_settings()
    groups = ("connection", "lookup")
    known = {name: setting for name, setting in consumer_settings().items() if setting.group in groups}
    return known | {"delivery_decompress": consumer_settings()["delivery_decompress"]}


@frozen
class ClientConfig:
    """How a job reaches the servers. Can be pickled: files and certificates are read in the process that uses them.

    Attributes:
        lookupd: ``host:port`` of nsqlookupd's HTTP side, one or several.
        settings: settings of the client as text, by name without ``nsqext.``; never shown.
        timeout: seconds in which a request must succeed, leader changes and retries included.
    """

    lookupd: tuple[str, ...]
    settings: Mapping[str, str] = field(factory=dict, repr=lambda settings: str(_shown(settings)))
    timeout: float = 60.0

    def transport(self) -> ConnectionOptions:
        """Return the options for connections to nodes.

        Raises:
            InvalidSetting: a setting cannot be read, or contradicts another one.
        """
        return self._group(ConnectionOptions, "connection")

    def lookup(self) -> LookupOptions:
        """Return the options for lookup.

        Raises:
            InvalidSetting: a setting cannot be read, or contradicts another one.
        """
        return self._group(LookupOptions, "lookup")

    def producer(self) -> ProducerOptions:
        """Return the options for publishing.

        Raises:
            InvalidSetting: a setting cannot be read, or contradicts another one.
        """
        own = {name: value for name, value in self._read("write").items() if not producer_settings()[name].group}
        connection, lookup = self.transport(), self.lookup()
        with _named("", own):
            return ProducerOptions(**own, connection=connection, lookup=lookup)

    @property
    def decompress(self) -> bool:
        """Whether bodies that the publishing client compressed are decompressed."""
        return bool(_value(self.settings.get("delivery_decompress", "true"), "delivery_decompress", "read"))

    def _group(self, options: type[T], group: str) -> T:
        known = producer_settings()
        names = {name: known[name].member for name in self.settings if name in known and known[name].group == group}
        values = {member: _value(self.settings[name], name, "write") for name, member in names.items()}
        with _named(f"{group}_", values):
            return options(**values)

    def _read(self, kind: str) -> dict[str, Any]:
        return {name: _value(text, name, kind) for name, text in self.settings.items()}

    def check(self, kind: str) -> None:
        """Check the settings.

        Args:
            kind: ``read`` or ``write``.

        Raises:
            InvalidSetting: a setting is unknown or invalid.
        """
        known, other_kind = client_settings(kind), "read" if kind == "write" else "write"
        for name in self.settings:
            if name not in known and name in client_settings(other_kind):
                raise misplaced(f"{PREFIX}{name}", kind, other_kind)
            if name not in known:
                raise unknown(f"{PREFIX}{name}", (f"{PREFIX}{other}" for other in known))
        self._read(kind)
        if kind == "write":
            self.producer()
        else:
            self.transport()
            self.lookup()


@contextmanager
def _named(prefix: str, values: Mapping[str, Any]) -> Iterator[None]:
    """Put the name of the option before an error message that begins with the name of a member."""
    try:
        yield
    except InvalidSetting as error:
        if error.message.partition("=")[0] in values:
            error.message = f"option {PREFIX}{prefix}{error.message}"
        raise


def _shown(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: _HIDDEN if "secret" in name else value for name, value in settings.items()}


def _value(text: str, name: str, kind: str) -> Any:
    setting = client_settings(kind)[name]
    if setting.read is None:
        raise InvalidSetting(f"option {PREFIX}{name} cannot be written as text")
    try:
        return setting.read(text)
    except ValueError as error:
        shown = _shown({name: text})[name]
        raise InvalidSetting(f"option {PREFIX}{name}={shown!r} cannot be read: {error}") from None


def misplaced(name: str, kind: str, other_kind: str) -> InvalidSetting:
    """Return the error for an option to read in a write, or the reverse."""
    return InvalidSetting(f"option {name} cannot be used to {kind}", hint=f"it belongs to {other_kind} options")


def unknown(name: str, known: Iterable[str]) -> InvalidSetting:
    """Return the error for an unknown option; it names the most similar one."""
    names = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    hint = f"do you mean {names[near[0]]}?" if near else f"known options: {', '.join(sorted(names.values()))}"
    return InvalidSetting(f"option {name} is unknown", hint=hint)
