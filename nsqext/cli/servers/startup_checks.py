"""Startup checks of the original programs, with the original error texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsqext.cli.servers.flags import FlagError, parse_value
from nsqext.cli.servers.redesigned_flags import check_alone
from nsqext.errors import InvalidSetting

_LEVELS = ("debug", "info", "warn", "error", "fatal")
_TLS_VERSIONS = ("", "tls1.0", "tls1.1", "tls1.2", "tls1.3")


def check_nsqlookupd(flags: dict[str, Any]) -> None:
    """Check the command line of nsqlookupd."""
    check_alone(flags)
    level = flags.get("log-level")
    if flags.get("generation", "nsq") == "nsq" and level is not None and level.lower() not in _LEVELS:
        known = ", ".join(_LEVELS)
        raise FlagError(f"invalid value \"{level}\" for flag -log-level: invalid log level '{level}' ({known})")


def check_nsqd(flags: dict[str, Any]) -> None:
    """Check the command line of nsqd, and normalize ``tls-required``."""
    check_nsqlookupd(flags)
    if "tls-required" in flags:
        flags["tls-required"] = _tls_required(flags["tls-required"])
    if flags.get("generation", "nsq") != "nsq":
        return
    version = flags.get("tls-min-version", "")
    if version.lower() not in _TLS_VERSIONS:
        reason = f'unknown tlsVersionOption "{version.lower()}"'
        raise FlagError(f'invalid value "{version}" for flag -tls-min-version: {reason}')
    if "worker-id" in flags:  # the redesigned NSQ has a number
        try:
            parse_value("bool", flags["worker-id"])
        except ValueError as error:
            raise FlagError(f'invalid boolean value "{flags["worker-id"]}" for -worker-id: {error}') from None


def _tls_required(text: str) -> str:
    word = text.lower()
    if word == "tcp-https":
        return word
    try:
        return "true" if parse_value("bool", word) else "false"
    except ValueError:
        reason = f'strconv.ParseBool: parsing "{word}": invalid syntax'
        raise FlagError(f'invalid boolean value "{text}" for -tls-required: {reason}') from None


def check_values(flags: Mapping[str, Any]) -> None:
    """Check the settings of nsqd, from its command line and its configuration file."""
    encrypted = flags.get("tls-cert") or flags.get("tls-key")
    if not encrypted and (flags.get("tls-client-auth-policy") or flags.get("tls-required", "false") != "false"):
        raise InvalidSetting("cannot require TLS client connections without TLS key and cert")
    if flags.get("generation", "nsq") != "nsq":
        return
    if not 1 <= flags.get("max-deflate-level", 6) <= 9:
        raise InvalidSetting("--max-deflate-level must be [1,9]")
    if not 0 <= flags.get("node-id", 0) < 1024:
        raise InvalidSetting("--node-id must be [0,1024)")
    if flags.get("auth-http-request-method", "get") not in ("get", "post"):
        raise InvalidSetting("--auth-http-request-method must be post or get")
    for text in flags.get("e2e-processing-latency-percentile", ()):
        try:
            sound = 0 < float(text) <= 1
        except ValueError:
            raise InvalidSetting(f"Could not parse: {text}") from None
        if not sound:
            raise InvalidSetting(f"invalid E2E processing latency percentile: {text}")
