"""The blocking administration client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, Unpack

from nsqext.admin import Admin as AsyncAdmin
from nsqext.sync.loop import BlockingClient

if TYPE_CHECKING:
    from nsqext.admin import NodeStatus, StoredMessage, TopicInfo, TopicStats
    from nsqext.admin.options import AdminSettings
    from nsqext.client.consumer.position import Position

__all__ = ("Admin",)


class Admin(BlockingClient):
    """Lists and changes topics, channels and nodes; methods, results and errors are those of `nsqext.Admin`.

    Args:
        lookupd: lookup addresses, ``host:port`` of nsqlookupd's HTTP side; a list, or text with commas.
        timeout: seconds that a change may take, including the wait for leaders.
        options: time and size limits of a single request.

    Raises:
        InvalidSetting: no address, or an invalid one.
    """

    _what = "admin client"

    def __init__(
        self, lookupd: str | Sequence[str] = (), *, env: str | None = None, **settings: Unpack[AdminSettings]
    ) -> None:
        super().__init__()
        self._admin = AsyncAdmin(lookupd, env=env, **settings)

    @property
    def settings(self) -> Mapping[str, object]:
        """The values of all settings by name, defaults included; secrets are ``***``."""
        return self._admin.settings

    def __enter__(self) -> Self:
        self._enter(self._admin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit(kind, error, trace)

    def topics(self) -> dict[str, TopicInfo]:
        """See `nsqext.Admin.topics`."""
        return self._run(self._admin.topics)

    def topic(self, topic: str) -> TopicInfo:
        """See `nsqext.Admin.topic`."""
        return self._run(self._admin.topic, topic)

    def channels(self, topic: str) -> tuple[str, ...]:
        """See `nsqext.Admin.channels`."""
        return self._run(self._admin.channels, topic)

    def create_topic(
        self,
        topic: str,
        *,
        partitions: int = 1,
        replicas: int = 1,
        extend: bool = False,
        ordered: bool = False,
        multipart: bool = False,
        retention_days: int | None = None,
        sync_every: int | None = None,
        registered_channels_only: bool = False,
        channels: Iterable[str] = (),
        exist_ok: bool = False,
        wait: float = 150.0,
    ) -> None:
        """See `nsqext.Admin.create_topic`."""
        self._run(
            self._admin.create_topic,
            topic,
            partitions=partitions,
            replicas=replicas,
            extend=extend,
            ordered=ordered,
            multipart=multipart,
            retention_days=retention_days,
            sync_every=sync_every,
            registered_channels_only=registered_channels_only,
            channels=channels,
            exist_ok=exist_ok,
            wait=wait,
        )

    def delete_topic(self, topic: str, *, missing_ok: bool = False) -> None:
        """See `nsqext.Admin.delete_topic`."""
        self._run(self._admin.delete_topic, topic, missing_ok=missing_ok)

    def upgrade_topic(self, topic: str) -> None:
        """See `nsqext.Admin.upgrade_topic`."""
        self._run(self._admin.upgrade_topic, topic)

    def expand_topic(self, topic: str, partitions: int, *, wait: float = 300.0) -> None:
        """See `nsqext.Admin.expand_topic`."""
        self._run(self._admin.expand_topic, topic, partitions, wait=wait)

    def move_partition(self, topic: str, partition: int, source: str, target: str, *, wait: float = 300.0) -> None:
        """See `nsqext.Admin.move_partition`."""
        self._run(self._admin.move_partition, topic, partition, source, target, wait=wait)

    def trace_topic(self, topic: str, *, channel: str | None = None, enabled: bool = True) -> None:
        """See `nsqext.Admin.trace_topic`."""
        self._run(self._admin.trace_topic, topic, channel=channel, enabled=enabled)

    def pause_topic(self, topic: str) -> None:
        """See `nsqext.Admin.pause_topic`."""
        self._run(self._admin.pause_topic, topic)

    def unpause_topic(self, topic: str) -> None:
        """See `nsqext.Admin.unpause_topic`."""
        self._run(self._admin.unpause_topic, topic)

    def empty_topic(self, topic: str) -> None:
        """See `nsqext.Admin.empty_topic`."""
        self._run(self._admin.empty_topic, topic)

    def set_topic(
        self,
        topic: str,
        *,
        replicas: int | None = None,
        retention_days: int | None = None,
        sync_every: int | None = None,
        registered_channels_only: bool | None = None,
    ) -> None:
        """See `nsqext.Admin.set_topic`."""
        self._run(
            self._admin.set_topic,
            topic,
            replicas=replicas,
            retention_days=retention_days,
            sync_every=sync_every,
            registered_channels_only=registered_channels_only,
        )

    def tombstone(self, topic: str, node: str, *, restore: bool = False) -> None:
        """See `nsqext.Admin.tombstone`."""
        self._run(self._admin.tombstone, topic, node, restore=restore)

    def create_channel(
        self, topic: str, channel: str, *, dispatch: str | None = None, key_header: str | None = None
    ) -> None:
        """See `nsqext.Admin.create_channel`."""
        self._run(self._admin.create_channel, topic, channel, dispatch=dispatch, key_header=key_header)

    def set_channel(
        self, topic: str, channel: str, *, ordered: bool | None = None, rate_limit_kib: int | None = None
    ) -> None:
        """See `nsqext.Admin.set_channel`."""
        self._run(self._admin.set_channel, topic, channel, ordered=ordered, rate_limit_kib=rate_limit_kib)

    def limit_consumers(self, topic: str, channel: str, ready: int, *, address_prefix: str = "") -> None:
        """See `nsqext.Admin.limit_consumers`."""
        self._run(self._admin.limit_consumers, topic, channel, ready, address_prefix=address_prefix)

    def finish_message(self, topic: str, channel: str, message: bytes | int) -> None:
        """See `nsqext.Admin.finish_message`."""
        self._run(self._admin.finish_message, topic, channel, message)

    def redeliver_unfinished(self, topic: str, channel: str) -> None:
        """See `nsqext.Admin.redeliver_unfinished`."""
        self._run(self._admin.redeliver_unfinished, topic, channel)

    def empty_delayed(self, topic: str, channel: str) -> None:
        """See `nsqext.Admin.empty_delayed`."""
        self._run(self._admin.empty_delayed, topic, channel)

    def deliver_delayed(self, topic: str, channel: str, *, within_hours: int = 1) -> None:
        """See `nsqext.Admin.deliver_delayed`."""
        self._run(self._admin.deliver_delayed, topic, channel, within_hours=within_hours)

    def delete_channel(self, topic: str, channel: str, *, missing_ok: bool = False) -> None:
        """See `nsqext.Admin.delete_channel`."""
        self._run(self._admin.delete_channel, topic, channel, missing_ok=missing_ok)

    def pause_channel(self, topic: str, channel: str) -> None:
        """See `nsqext.Admin.pause_channel`."""
        self._run(self._admin.pause_channel, topic, channel)

    def unpause_channel(self, topic: str, channel: str) -> None:
        """See `nsqext.Admin.unpause_channel`."""
        self._run(self._admin.unpause_channel, topic, channel)

    def empty_channel(self, topic: str, channel: str) -> None:
        """See `nsqext.Admin.empty_channel`."""
        self._run(self._admin.empty_channel, topic, channel)

    def skip_channel(self, topic: str, channel: str) -> None:
        """See `nsqext.Admin.skip_channel`."""
        self._run(self._admin.skip_channel, topic, channel)

    def unskip_channel(self, topic: str, channel: str) -> None:
        """See `nsqext.Admin.unskip_channel`."""
        self._run(self._admin.unskip_channel, topic, channel)

    def seek_channel(
        self, topic: str, channel: str, position: Position, *, partitions: Sequence[int] | None = None
    ) -> None:
        """See `nsqext.Admin.seek_channel`."""
        self._run(self._admin.seek_channel, topic, channel, position, partitions=partitions)

    def nodes(self) -> tuple[NodeStatus, ...]:
        """See `nsqext.Admin.nodes`."""
        return self._run(self._admin.nodes)

    def remove_node(self, node: str) -> None:
        """See `nsqext.Admin.remove_node`."""
        self._run(self._admin.remove_node, node)

    def disable_writes(self, *, ordered_only: bool = False) -> None:
        """See `nsqext.Admin.disable_writes`."""
        self._run(self._admin.disable_writes, ordered_only=ordered_only)

    def enable_writes(self) -> None:
        """See `nsqext.Admin.enable_writes`."""
        self._run(self._admin.enable_writes)

    def set_log_level(self, level: Literal["error", "warning", "info", "debug"]) -> None:
        """See `nsqext.Admin.set_log_level`."""
        self._run(self._admin.set_log_level, level)

    def node_option(self, node: str, name: str) -> object:
        """See `nsqext.Admin.node_option`."""
        return self._run(self._admin.node_option, node, name)

    def set_node_option(self, node: str, name: str, value: object) -> object:
        """See `nsqext.Admin.set_node_option`."""
        return self._run(self._admin.set_node_option, node, name, value)

    def replicas(self, topic: str) -> dict[int, tuple[str, ...]]:
        """See `nsqext.Admin.replicas`."""
        return self._run(self._admin.replicas, topic)

    def stats(self, topic: str, channel: str | None = None) -> TopicStats:
        """See `nsqext.Admin.stats`."""
        return self._run(self._admin.stats, topic, channel)

    def all_stats(self) -> dict[str, TopicStats]:
        """See `nsqext.Admin.all_stats`."""
        return self._run(self._admin.all_stats)

    def peek(self, topic: str, *, count: int = 20, partition: int | None = None) -> tuple[StoredMessage, ...]:
        """See `nsqext.Admin.peek`."""
        return self._run(self._admin.peek, topic, count=count, partition=partition)
