"""Settings of the administration client."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from attrs import field, frozen

from nsqext.arguments import check_time
from nsqext.client.settings import app_schema
from nsqext.errors import InvalidSetting
from nsqext.lookup.options import LookupOptions, LookupSettings
from nsqext.settings import Schema, Setting, settings_of


class AdminSettings(LookupSettings, total=False):
    """Settings of the administration client; times in seconds. ``lookup_request_timeout`` is 15 by default."""

    timeout: float
    """Time that a change may take, including the wait for leaders."""


@frozen
class AdminOptions:
    """The values of `AdminSettings`."""

    timeout: float = 30.0
    lookup: LookupOptions = field(factory=LookupOptions)

    def __attrs_post_init__(self) -> None:
        check_time("timeout", self.timeout)
        if self.lookup.node_filter is not None:
            raise InvalidSetting("node_filter has no effect in Admin", hint="administration works on all nodes")


@cache
def admin_settings() -> Mapping[str, Setting]:
    """Return the settings of administration clients by name."""
    return settings_of(AdminOptions)


@cache
def admin_schema() -> Schema:
    """Return the settings of administration clients, with those of other clients."""
    return Schema("Admin", admin_settings(), lambda: app_schema().own, direct=False)
