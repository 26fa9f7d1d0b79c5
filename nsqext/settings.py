"""Settings. Precedence: keyword, URL, environment, default.

A setting has the same name everywhere: ``request_timeout`` is a keyword of the constructor, a parameter of the URL, and
``NSQEXT_REQUEST_TIMEOUT`` in the environment. Values are kept by name until option objects are made, so that given
values take precedence over defaults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import attrs

from nsqext.arguments import is_secret_name, suggest
from nsqext.errors import InvalidSetting, UnknownSetting

if TYPE_CHECKING:
    import ssl


T = TypeVar("T")

Reader = Callable[[str], Any]
"""Parses the text of a value; raises ValueError if invalid."""
Foreign = Callable[[], Mapping[str, "Setting"]]

ADDRESSES = ("lookupd", "nsqd")
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_PREFIXES = ("backoff", "lookup")  # groups of options that prefix their settings
_RENAMED = {"backoff_mode": "backoff", "lookup_address_map": "address_map", "lookup_node_filter": "node_filter"}


class Setting(NamedTuple):
    """A setting; a named tuple, because an attrs class takes five times as long at each import."""

    name: str  #: in capitals and with the prefix in the environment
    member: str  #: attribute of the option class
    group: str  #: attribute of the outer option class for this class; empty for the outer class itself
    kind: str  #: annotation of the attribute
    default: object
    read: Reader | None  #: None if it is only a keyword
    owner: type  #: the option class


@attrs.frozen
class Given:
    """Settings from all places."""

    lookupd: Any
    nsqd: Any  #: instead of ``lookupd``
    values: Mapping[str, Any] = attrs.field(repr=False)  #: by name; some are secrets


def _read_bool(text: str) -> bool:
    if text.lower() not in _TRUE | _FALSE:
        raise ValueError("write true or false")
    return text.lower() in _TRUE


def _read_tls(text: str) -> ssl.SSLContext | bool:
    """Parse true, false, or the path of a file of CA certificates."""
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    import ssl  # loading takes longer than this module

    try:
        return ssl.create_default_context(cafile=text)
    except OSError as error:
        raise ValueError(f"write true, false, or a file of certificates: {error}") from error


def _read_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


_READERS: dict[str, Reader] = {
    "ssl.SSLContext": _read_tls,
    "bool": _read_bool,
    "float": float,
    "int": int,
    "tuple[int, ...]": _read_numbers,
    "str": str,
}


def _reader(kind: str, name: str, readers: Mapping[str, Reader]) -> Reader | None:
    parts = kind.split(" | ")
    found = readers.get(name) or next((_READERS[part] for part in parts if part in _READERS), None)
    if found is None and kind.startswith("Literal["):
        found = str
    if found is None or "None" not in parts:
        return found
    inner = found
    return lambda text: None if text.lower() == "none" else inner(text)


def setting_name(group: str, member: str) -> str:
    """Return the name of the setting of an option."""
    name = f"{group}_{member}" if group in _PREFIXES else member
    return _RENAMED.get(name, name)


def settings_of(options: type, readers: Mapping[str, Reader] | None = None) -> dict[str, Setting]:
    """Return the settings of an option class and its groups, by name.

    ``readers`` parse settings whose type does not determine the parser.
    """
    found: dict[str, Setting] = {}
    for outer in attrs.fields(options):
        factory = getattr(outer.default, "factory", None)
        group, owner = (outer.name, factory) if factory is not None and attrs.has(factory) else ("", options)
        for member in attrs.fields(owner) if group else (outer,):
            name = setting_name(group, member.name)
            if name in found:
                raise TypeError(f"two settings of {options.__name__} have the name {name}")
            kind = str(member.type)
            read = _reader(kind, name, readers or {})
            found[name] = Setting(name, member.name, group, kind, member.default, read, owner)
    return found


def unknown_setting(place: str, name: str, known: Iterable[str]) -> UnknownSetting:
    """Return the error for an unknown setting, with a known name as its hint."""
    found = suggest(name, (*known, *ADDRESSES, "middleware", "env"))
    hint = "see the reference of settings" if found is None else f"did you mean {found}?"
    return UnknownSetting(f"{place}: unknown setting {name!r}", hint=hint)


# An option object from values by name


def build(options: type[T], known: Mapping[str, Setting], values: Mapping[str, object]) -> T:
    """Return an option object with its groups from values by name and defaults. Raises InvalidSetting."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        groups.setdefault(known[name].group, {})[known[name].member] = value
    outer = groups.pop("", {})
    for group, members in groups.items():
        owner = next(setting.owner for setting in known.values() if setting.group == group)
        try:
            outer[group] = owner(**members)
        except InvalidSetting as error:
            error.message = _with_flat_name(error.message, group, known)
            raise
    return options(**outer)


def _with_flat_name(message: str, group: str, known: Mapping[str, Setting]) -> str:
    """Return an error message with the setting's name in place of a leading member name."""
    names = {setting.member: setting.name for setting in known.values() if setting.group == group}
    return re.sub(r"^\w+", lambda word: names.get(word[0], word[0]), message)


def parse(value: str, setting: Setting, place: str) -> object:
    """Parse a setting's text; raises InvalidSetting, whose text begins with ``place``."""
    if setting.read is None:
        raise InvalidSetting(f"{place}{setting.name} cannot be written as text", hint="give it as a keyword")
    try:
        return setting.read(value)
    except ValueError as error:
        shown = "***" if is_secret_name(setting.name) else repr(value)
        raise InvalidSetting(f"{place}{setting.name}={shown} cannot be parsed: {error}") from None


# All places


class _Collector:
    """Collects values in the order of precedence."""

    def __init__(self, own: Mapping[str, Setting], foreign: Foreign | None) -> None:
        self._own = own
        self._foreign = foreign
        self.values: dict[str, object] = {}
        self.addresses: dict[str, object] = {}

    def add(self, given: Mapping[str, object], place: str, *, text: bool) -> None:
        """Add the values of a place; raises InvalidSetting."""
        addresses = {name: given[name] for name in ADDRESSES if given.get(name)}
        if len(addresses) > 1:
            raise InvalidSetting(f"{place}: both lookupd and nsqd are given", hint="give one of them")
        self.addresses = self.addresses or addresses
        for name, value in given.items():
            if name in ADDRESSES:
                continue
            setting = self._own.get(name)
            if setting is None and text:
                if self._foreign is None:
                    continue
                setting = self._foreign().get(name)
            if setting is None:
                raise unknown_setting(place, name, self._own)
            read = parse(str(value), setting, f"{place}: ") if text else value
            if name in self._own:
                self.values.setdefault(name, read)


def _is_url(address: str) -> bool:
    from nsqext.settings_text import is_url

    return is_url(address)


def _frozen(value: object) -> object:
    if isinstance(value, Mapping):
        return MappingProxyType(dict(value))
    return tuple(value) if isinstance(value, list) else value


@attrs.frozen
class Schema:
    """The settings of a kind of client."""

    client: str  #: its class, for errors
    own: Mapping[str, Setting]
    #: settings of other clients, checked but not used in URL and environment; None ignores unknown names there
    foreign: Foreign | None = None
    direct: bool = True  #: can work without lookup

    def collect(
        self,
        lookupd: Any,
        nsqd: Any,
        env: str | None,
        keywords: Mapping[str, object],
        environ: Mapping[str, str] | None = None,
        *,
        url: str | None = None,
        required: bool = True,
    ) -> Given:
        """Collect settings from keywords, a URL and the environment.

        Args:
            lookupd: lookup addresses, a `nsqext.Lookup`, or a URL: ``nsq://lookupd:4161,lookupd2:4161?…``, or
                ``nsqd://nsqd:4150?…``.
            env: prefix of environment variables; None reads ``NSQEXT_*`` if no address is given.
            keywords: settings by name; values, not text.
            environ: the environment; by default the process's.
            url: a URL beside addresses, which take precedence; for command lines.

        Raises:
            UnknownSetting: not a setting of this client, or in URL and environment of any client.
            InvalidSetting: unreadable text, no address, both kinds of addresses, or nsqd addresses for a client that
                needs lookup.
        """
        collector = _Collector(self.own, self.foreign)
        given_url = isinstance(lookupd, str) and "://" in lookupd and _is_url(lookupd)
        if given_url and nsqd:
            raise InvalidSetting(f"{self.client}: both a URL and nsqd are given", hint="give one of them")
        addresses = {"lookupd": () if given_url else lookupd, "nsqd": nsqd}
        collector.add({**addresses, **keywords}, self.client, text=False)
        url = lookupd if given_url else url
        if url or env is not None or not collector.addresses:
            self._add_texts(collector, url, os.environ if environ is None else environ, env, required=required)
        addresses = collector.addresses
        if "nsqd" in addresses and not self.direct:
            raise InvalidSetting(f"{self.client}: nsqd addresses were given", hint="give addresses of nsqlookupd")
        return Given(addresses.get("lookupd", ()), addresses.get("nsqd", ()), collector.values)

    def _add_texts(
        self, collector: _Collector, url: str | None, environ: Mapping[str, str], env: str | None, *, required: bool
    ) -> None:
        """Add the settings of a URL, and of the environment if it is named or there is no address."""
        from nsqext.settings_text import PREFIX, environment_texts, url_texts

        known = None if self.foreign is None else {*self.own, *self.foreign()}
        if url:
            collector.add(*url_texts(url, known), text=True)
        prefix = PREFIX if env is None else env
        if env is not None or not collector.addresses:
            for texts, place in environment_texts(environ, prefix, known):
                collector.add(texts, place, text=True)
        if required and not collector.addresses:
            raise InvalidSetting(
                f"{self.client}: no address of lookup or nsqd is given",
                hint=f"give {self.client}(lookupd='host:4161') or a URL such as {self.client}('nsq://host:4161'), or "
                f"set {prefix}LOOKUPD, {f'{prefix}NSQD ' * self.direct}or {prefix}URL in the environment",
            )

    def effective(self, options: object) -> Mapping[str, object]:
        """Return an option object's values by name; secrets are ``***``. Tables and lists are immutable copies."""
        values: dict[str, object] = {}
        for name, setting in self.own.items():
            owner = getattr(options, setting.group) if setting.group else options
            value = getattr(owner, setting.member)
            values[name] = "***" if value is not None and is_secret_name(name) else _frozen(value)
        return MappingProxyType(values)
