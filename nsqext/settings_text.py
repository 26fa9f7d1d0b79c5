"""Settings as text: in URLs and in the environment; loaded only for these."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, unquote_plus, urlsplit

from nsqext.arguments import is_secret_name
from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from urllib.parse import SplitResult

PREFIX = "NSQEXT_"
"""Default prefix of environment variables."""
_ADDRESSES = ("lookupd", "nsqd")
# variables of other parts of the package
_OTHERS = ("NSQEXT_TEST_", "NSQEXT_BENCH_", "NSQEXT_WEB_", "NSQEXT_CONTEXTS_", "NSQEXT_WORKER", "NSQEXT_OUTBOX")
# variables that Kubernetes sets for a service with the prefix's name
_KUBERNETES = r"(PORT|SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)"
_SCHEMES = {"nsq": ("lookupd", 4161), "nsqd": ("nsqd", 4150)}
_PARAMETER = r"([?&;])([^=&;#\s]*)=([^&;#\s]*)"
_MASK = "***"


def redact_url(url: str, known: Container[str] | None = None) -> str:
    """Return a URL or address without user, password and secret parameters.

    Everything before the last ``@`` is removed: a password may contain any character. Only values of ``known``
    parameters are shown: a misspelt name may hold a secret; None shows every parameter without a secret's name.
    """

    def masked(match: re.Match[str]) -> str:
        name = unquote_plus(match[2])
        hidden = is_secret_name(name) or (known is not None and name not in known)
        return f"{match[1]}{match[2]}={_MASK if hidden else match[3]}"

    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    # parameters first: the @ in a secret parameter must not show what follows it
    rest = re.sub(_PARAMETER, masked, rest)
    if "@" in rest:
        rest = f"{_MASK}@{rest.rpartition('@')[2]}"
    elif rest.startswith(":"):
        rest = _MASK  # a secret without a host
    return f"{scheme}{separator}{rest}"


def is_url(given: object) -> bool:
    """Return whether an address is a URL of settings."""
    return isinstance(given, str) and given.strip().partition("://")[0] in _SCHEMES


def url_texts(url: str, known: Container[str] | None) -> tuple[dict[str, str], str]:
    """Return the settings of a URL, and the URL without secrets; see `redact_url` for ``known``."""
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
        pairs.append(("auth_secret", unquote(secret)))
    for name, value in pairs:
        if name in given or (name in _ADDRESSES and hosts):
            raise InvalidSetting(f"{shown}: {name} is given twice")
        given[name] = value
    return given, shown


def _split(url: str) -> SplitResult:
    if not isinstance(url, str):
        raise InvalidSetting(f"the URL is a {type(url).__name__}, not text", hint="write nsq://lookupd:4161")
    try:
        # some versions of Python refuse brackets that do not enclose the whole host
        parts = urlsplit(url.strip().replace("[", "%5B").replace("]", "%5D"))
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


def _cuts_secret(parts: SplitResult) -> bool:
    """Return whether a secret has a character that ends the host, so that its rest is parsed as a path."""
    behind = parts.path + parts.fragment + parts.query.partition("=")[0]
    return "@" not in parts.netloc and (parts.netloc.startswith(":") or "@" in behind)


def environment_texts(
    environ: Mapping[str, str], prefix: str, known: Container[str] | None
) -> Iterator[tuple[dict[str, str], str]]:
    """Return the settings of the environment's URL, then the environment's, each with its place."""
    if not isinstance(prefix, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*_", prefix):
        raise InvalidSetting(f"env={prefix!r} is not a prefix of variables", hint='write env="ORDERS_"')
    if url := environ.get(f"{prefix}URL"):
        yield url_texts(url, known)
    yield _variables(environ, prefix), "environment"


def _variables(environ: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the environment's settings, without the URL."""
    found = {}
    for variable, value in environ.items():
        name = variable.removeprefix(prefix)
        if name == variable or name == "URL" or re.fullmatch(_KUBERNETES, name):
            continue
        if prefix == PREFIX and variable.startswith(_OTHERS):
            continue
        found[name.lower()] = value
    return found


def settings_as_text(url: str | None, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings of a URL and the environment (by default the process's) as text, for another process.

    Addresses are left out. Raises InvalidSetting.
    """
    environ = os.environ if environ is None else environ
    url = url or environ.get(f"{PREFIX}URL")
    found = _variables(environ, PREFIX) | (url_texts(url, ())[0] if url else {})
    return {name: text for name, text in found.items() if name not in _ADDRESSES}
