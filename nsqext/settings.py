"""Settings. Precedence: keyword, URL, environment, default.

A setting has the same name everywhere: ``connection_tls`` is a keyword, a parameter of the URL, and
``NSQEXT_CONNECTION_TLS`` in the environment. The first part of the name is its group of options, if it has one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import attrs

from nsqext.arguments import suggest
from nsqext.errors import InvalidSetting
from nsqext.errors.redaction import is_secret_name, redact_url

if TYPE_CHECKING:
    import ssl

__all__ = (
    "PREFIX",
    "Loaded",
    "Reader",
    "Setting",
    "load",
    "settings_as_text",
    "settings_of",
    "unknown_setting",
)

T = TypeVar("T")

Reader = Callable[[str], Any]
"""Parses the text of a value; raises ValueError where it is not valid."""

PREFIX = "NSQEXT_"
_OTHERS = ("NSQEXT_TEST_", "NSQEXT_BENCH_", "NSQEXT_WEB_", "NSQEXT_CONTEXTS_")
_ADDRESSES = ("lookupd", "nsqd")
_SCHEMES = {"nsq": ("lookupd", 4161), "nsqd": ("nsqd", 4150)}
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


@attrs.frozen
class Setting:
    """One setting.

    Attributes:
        name: its name everywhere; in capitals and behind ``NSQEXT_`` in the environment.
        member: attribute of the option class.
        group: attribute of the outer option class that holds the option class; empty for the outer class itself.
        kind: annotation of the attribute.
        default: the default.
        read: parses its text; None for a setting that can only be given as a keyword.
        owner: the option class; None for an argument of the constructor.
    """

    name: str
    member: str
    group: str
    kind: str
    default: object
    read: Reader | None
    owner: type | None = None


@attrs.frozen
class Loaded(Generic[T]):
    """Settings from all places.

    Attributes:
        lookupd: lookup addresses.
        nsqd: nsqd addresses, instead.
        options: the options.
        others: values of constructor arguments that are not in the options.
    """

    lookupd: Any
    nsqd: Any
    options: T
    others: Mapping[str, Any]


def _read_bool(text: str) -> bool:
    if text.lower() not in _TRUE | _FALSE:
        raise ValueError("write true or false")
    return text.lower() in _TRUE


def _read_tls(text: str) -> ssl.SSLContext | bool:
    """Parse true, false, or the path of a file of CA certificates."""
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    import ssl  # imported lazily: it takes longer to load than this module

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


def settings_of(options: type, readers: Mapping[str, Reader] | None = None) -> dict[str, Setting]:
    """Return the settings of an option class and of its groups, by name.

    Args:
        options: the class.
        readers: parsers by name of the setting, where the type does not determine it.
    """
    found: dict[str, Setting] = {}
    for outer in attrs.fields(options):
        factory = getattr(outer.default, "factory", None)
        if factory is None or not attrs.has(factory):
            found[outer.name] = _setting(outer, outer.name, "", options, readers or {})
            continue
        for inner in attrs.fields(factory):
            name = f"{outer.name}_{inner.name}"
            found[name] = _setting(inner, name, outer.name, factory, readers or {})
    return found


def _setting(
    member: attrs.Attribute[Any], name: str, group: str, owner: type, readers: Mapping[str, Reader]
) -> Setting:
    kind = str(member.type)
    return Setting(name, member.name, group, kind, member.default, _reader(kind, name, readers), owner)


def unknown_setting(place: str, name: str, known: Iterable[str]) -> InvalidSetting:
    """Return the error for an unknown setting, which suggests the right one."""
    found = suggest(name, (*known, *_ADDRESSES))
    hint = "see the reference of settings" if found is None else f"did you mean {found}?"
    return InvalidSetting(f"{place}: unknown setting {name!r}", hint=hint)


def _cuts_secret(parts: SplitResult) -> bool:
    """Return whether a secret contains a character that ends the host, so that the rest of it is parsed as a path."""
    behind = parts.path + parts.fragment + parts.query.partition("=")[0]
    return "@" not in parts.netloc and (parts.netloc.startswith(":") or "@" in behind)


def _text_of(value: str, setting: Setting, place: str) -> object:
    if setting.read is None:
        raise InvalidSetting(f"{place}: {setting.name} cannot be written as text", hint="give it as a keyword")
    try:
        return setting.read(value)
    except ValueError as error:
        shown = "***" if is_secret_name(setting.name) else repr(value)
        raise InvalidSetting(f"{place}: {setting.name}={shown} cannot be parsed: {error}") from None


def _from_url(url: str, known: Container[str]) -> dict[str, str]:
    """Return the settings of a URL as text."""
    parts = _split(url)
    shown = redact_url(url, known)
    kind, port = _SCHEMES[parts.scheme]
    userinfo, _, hosts = parts.netloc.rpartition("@")
    given: dict[str, str] = {}
    if hosts:
        hosts = hosts.replace("%5B", "[").replace("%5D", "]")
        given[kind] = ",".join(_with_port(host, port) for host in hosts.split(",") if host)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    user, _, secret = userinfo.partition(":")
    if user:
        raise InvalidSetting(f"{shown}: NSQ has no user names", hint="a secret is written nsq://:SECRET@host:port")
    if secret:
        pairs.append(("connection_auth_secret", unquote(secret)))
    for name, value in pairs:
        if name in given or (name in _ADDRESSES and hosts):
            raise InvalidSetting(f"{shown}: {name} is given twice")
        given[name] = value
    return given


def _split(url: str) -> SplitResult:
    if not isinstance(url, str):
        raise InvalidSetting(f"the URL is a {type(url).__name__}, not text", hint="write nsq://lookupd:4161")
    try:
        # some versions of Python refuse brackets that do not enclose the whole host
        parts = urlsplit(url.replace("[", "%5B").replace("]", "%5D"))
    except ValueError as error:
        raise InvalidSetting(f"the URL cannot be read: {error}") from None
    if parts.netloc.count("%5B") != parts.netloc.count("%5D"):
        raise InvalidSetting("the URL cannot be read: brackets of IPv6 addresses are not closed")
    if parts.scheme not in _SCHEMES:
        raise InvalidSetting(
            f"the URL has the scheme {parts.scheme!r}", hint="write nsq://lookupd:4161 or nsqd://nsqd:4150"
        )
    shown = redact_url(url, ())
    if _cuts_secret(parts):
        raise InvalidSetting(f"{shown}: no host behind the secret", hint="percent-encode /, ?, # and @ in it")
    if parts.path.strip("/") or parts.fragment:
        raise InvalidSetting(f"{shown}: a URL of settings has neither path nor fragment")
    return parts


def _with_port(host: str, port: int) -> str:
    bare = host.rpartition("]")[2]
    return host if ":" in bare else f"{host}:{port}"


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX) and not name.startswith(_OTHERS) and name != f"{PREFIX}URL"
    }


def settings_as_text(url: str | None, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings of a URL and the environment as text, without addresses, for a process that reads them later.

    Args:
        url: see `load`.
        environ: the environment; the one of the process by default.

    Raises:
        InvalidSetting: a URL that cannot be read.
    """
    environ = os.environ if environ is None else environ
    url = url or environ.get(f"{PREFIX}URL")
    found = _from_environment(environ) | (_from_url(url, ()) if url else {})
    return {name: text for name, text in found.items() if name not in _ADDRESSES}


class _Collector:
    """Collect values, in the order of precedence."""

    def __init__(self, own: Mapping[str, Setting], foreign: Mapping[str, Setting]) -> None:
        self._own = own
        self._foreign = foreign
        self.values: dict[str, object] = {}
        self.addresses: dict[str, object] = {}

    def add(self, given: Mapping[str, object], place: str, *, text: bool) -> None:
        """Add the values of one place.

        Raises:
            InvalidSetting: an unknown setting, a value that cannot be parsed, two kinds of addresses.
        """
        addresses = {name: given[name] for name in _ADDRESSES if given.get(name)}
        if len(addresses) > 1:
            raise InvalidSetting(f"{place}: both lookupd and nsqd are given", hint="give one of them")
        self.addresses = self.addresses or addresses
        for name, value in given.items():
            if name in _ADDRESSES:
                continue
            setting = self._own.get(name) or (self._foreign.get(name) if text else None)
            if setting is None:
                raise unknown_setting(place, name, self._own)
            read = _text_of(str(value), setting, place) if text else value
            if name in self._own:
                self.values.setdefault(name, read)

    def build(self, options: type[T]) -> T:
        """Return the options."""
        groups: dict[str, dict[str, object]] = {}
        for name, value in self.values.items():
            setting = self._own[name]
            if setting.owner is not None:
                groups.setdefault(setting.group, {})[setting.member] = value
        outer = groups.pop("", {})
        for group, members in groups.items():
            owner = next(setting.owner for setting in self._own.values() if setting.group == group)
            outer[group] = owner(**members) if owner is not None else members
        return options(**outer)

    def others(self) -> dict[str, Any]:
        """Return the values of constructor arguments that are not in the options."""
        return {name: value for name, value in self.values.items() if self._own[name].owner is None}


def load(
    options: type[T],
    own: Mapping[str, Setting],
    url: str | None,
    keywords: Mapping[str, object],
    *,
    foreign: Mapping[str, Setting],
    environ: Mapping[str, str] | None = None,
) -> Loaded[T]:
    """Load settings from keywords, a URL and the environment.

    Args:
        options: the option class.
        own: its settings, and arguments of the constructor.
        url: ``nsq://lookupd:4161,lookupd2:4161?…``, or ``nsqd://nsqd:4150?…`` to do without lookup; ``NSQEXT_URL`` in
            the environment where it is None.
        keywords: settings by name; values, not text.
        foreign: settings of other clients, which URL and environment may contain as well; checked, not used.
        environ: the environment; the one of the process by default.

    Raises:
        InvalidSetting: an unknown setting, an invalid value, settings that contradict each other.
    """
    environ = os.environ if environ is None else environ
    collector = _Collector(own, foreign)
    collector.add(keywords, "keywords", text=False)
    url = url or environ.get(f"{PREFIX}URL")
    if url:
        known = {*own, *foreign}
        collector.add(_from_url(url, known), redact_url(url, known), text=True)
    collector.add(_from_environment(environ), "environment", text=True)
    return Loaded(
        collector.addresses.get("lookupd", ()),
        collector.addresses.get("nsqd", ()),
        collector.build(options),
        collector.others(),
    )
