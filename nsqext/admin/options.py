"""Settings of the administration client, and of topics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypedDict

from attrs import field, frozen

from nsqext.arguments import check_number, check_time
from nsqext.client.settings import app_schema
from nsqext.errors import InvalidInput, InvalidSetting
from nsqext.lookup.options import LookupOptions
from nsqext.lookup.settings import LookupSettings
from nsqext.protocol.names import MAX_PARTITIONS
from nsqext.settings import Schema, Setting, settings_of, unknown_setting

if TYPE_CHECKING:
    from nsqext.admin.results import NodeStatus


class AdminSettings(LookupSettings, total=False):
    """Settings of the administration client; times in seconds. ``lookup_request_timeout`` is 15 by default."""

    timeout: float
    """Time for a change, including the wait for leaders."""


class TopicSettings(TypedDict, total=False):
    """Settings of a topic of the redesigned NSQ that can be changed; None leaves a setting unchanged."""

    replicas: int | None
    """Copies of each partition, 1 to 5; 1 by default."""
    retention_days: int | None
    """Days for which consumed messages are kept, 1 to 60; the nodes' own setting by default."""
    sync_every: int | None
    """Messages after which a node flushes the queue to its disk, 1 to 4000; the nodes' by default."""
    registered_channels_only: bool | None
    """Consumers cannot create channels; `Admin.create_channel` registers them."""


class NewTopicSettings(TopicSettings, total=False):
    """Settings of a new topic of the redesigned NSQ."""

    partitions: int
    """Number of partitions, 1 to 254; 1 by default."""
    extend: bool
    """Messages may carry JSON extend headers."""
    ordered: bool
    """Consumers receive the messages of a partition in order; one node may hold several partitions."""
    multipart: bool
    """One node may hold several partitions."""


# argument of the lookup service, and the largest number; None for True or False
_TOPIC_ARGUMENTS = {
    "partitions": ("partition_num", MAX_PARTITIONS),
    "replicas": ("replicator", 5),
    "retention_days": ("retention", 60),
    "sync_every": ("syncdisk", 4000),
    "extend": ("extend", None),
    "ordered": ("orderedmulti", None),
    "multipart": ("multipart", None),
    "registered_channels_only": ("disable_channel_auto_create", None),
}
_ONE = {"partitions": 1, "replicas": 1}  # of topics of the original NSQ too


def redesigned_settings(settings: Mapping[str, object]) -> list[str]:
    """Return the names of the settings of a new topic that the original NSQ lacks."""
    given = {name: value for name, value in settings.items() if value is not None and value is not False}
    return [name for name, value in given.items() if value != _ONE.get(name)]


def refuse_redesigned(names: Sequence[str], topic: str, nodes: Iterable[NodeStatus]) -> None:
    """Refuse `redesigned_settings` on a cluster of the original NSQ; raises InvalidInput.

    `Admin.create_topic` ignores them, so that a program can create the topics of both generations.
    """
    if names and {node.generation for node in nodes} == {"original"}:
        raise InvalidInput(
            f"the original NSQ has no {', '.join(names)} of topics", topic=topic, hint="create the topic without them"
        )


def topic_arguments(place: str, kind: type, settings: Mapping[str, object]) -> dict[str, str | int]:
    """Return the request's arguments for settings of ``place``, a method; raises InvalidInput or UnknownSetting."""
    arguments: dict[str, str | int] = {}
    for name, value in settings.items():
        if name not in kind.__annotations__:
            raise unknown_setting(place, name, kind.__annotations__)
        argument, most = _TOPIC_ARGUMENTS[name]
        if value is not None and most is None:
            arguments[argument] = "true" if value else "false"
        elif value is not None and most is not None:
            arguments[argument] = check_number(name, value, 1, most, InvalidInput)
    return arguments


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
    """Return the settings of administration clients, with the settings of other clients."""
    return Schema("Admin", admin_settings(), lambda: app_schema().own, direct=False)
