"""Configuration files of the original programs: TOML with the names of flags, with underscores for hyphens."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsqext.cli.servers.flags import parse_value
from nsqext.errors import InvalidSetting

__all__ = ("with_config_file",)

_NAMES = {
    "id": "node-id",
    "nsqlookupd_tcp_addresses": "lookupd-tcp-address",
    "auth_http_addresses": "auth-http-address",
    "e2e_processing_latency_percentiles": "e2e-processing-latency-percentile",
}


def with_config_file(flags: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return the flags, completed by the values of the configuration file (``-config``).

    Args:
        flags: flags of the command line.
        kinds: see `nsqext.cli.servers.flags.parse_flags`; other names in the file are ignored.

    Raises:
        InvalidSetting: the file or one of its values is invalid.
    """
    path = flags.get("config")
    if not path:
        return dict(flags)
    found: dict[str, Any] = {}
    for key, value in _load(path).items():
        name = _NAMES.get(key, key.replace("_", "-"))
        meant = key in _NAMES or name not in _NAMES.values()
        if meant and name in kinds:
            try:
                found[name] = _read(kinds[name], value)
            except ValueError as error:
                raise InvalidSetting(f"option resolution failed to coerce {value} for {key} - {error}") from error
    return found | dict(flags)


def _load(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise InvalidSetting(f"failed to load config file {path} - open {path}: {reason}") from error
    except ValueError as error:
        raise InvalidSetting(f"failed to load config file {path} - {error}") from error


def _read(kind: str, value: Any) -> Any:
    """Return a value of the file as the value of its flag; a duration without a unit is in milliseconds."""
    if kind == "list":
        return list(value) if isinstance(value, list) else str(value).split(",")
    if kind == "duration" and type(value) is int:
        return value / 1000
    if isinstance(value, bool):
        value = str(value).lower()
    return parse_value(kind, str(value))
