"""Blocking producer, consumer and admin client, with the names and parameters of the asynchronous clients.

They call the asynchronous clients in one shared event loop, whose thread runs while any object is open. All objects are
thread-safe.

Methods raise the errors of the asynchronous methods, and `InvalidState` if the object is not open or the call is in the
event loop's thread. A blocked call cannot be cancelled from another thread; an exception in its own thread, such as
KeyboardInterrupt, cancels it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Unpack

from nsqext.admin import Admin as AsyncAdmin
from nsqext.sync.consumer import Consumer
from nsqext.sync.loop import BlockingClient, Method, Same
from nsqext.sync.message import Message, MessageBatch
from nsqext.sync.producer import Batcher, Producer

if TYPE_CHECKING:
    from nsqext.admin.options import AdminSettings


__all__ = ("Admin", "Batcher", "Consumer", "Message", "MessageBatch", "Producer")


class Admin(BlockingClient[AsyncAdmin]):
    """Lists and changes topics, channels and nodes; arguments, results and errors as of `nsqext.Admin`."""

    _what = "admin client"

    def __init__(
        self, lookupd: str | Sequence[str] = (), *, env: str | None = None, **settings: Unpack[AdminSettings]
    ) -> None:
        super().__init__(AsyncAdmin(lookupd, env=env, **settings))

    settings: Same[Mapping[str, object]] = Same()

    topics: Final = Method(AsyncAdmin.topics)
    topic: Final = Method(AsyncAdmin.topic)
    channels: Final = Method(AsyncAdmin.channels)
    create_topic: Final = Method(AsyncAdmin.create_topic)
    delete_topic: Final = Method(AsyncAdmin.delete_topic)
    upgrade_topic: Final = Method(AsyncAdmin.upgrade_topic)
    expand_topic: Final = Method(AsyncAdmin.expand_topic)
    move_partition: Final = Method(AsyncAdmin.move_partition)
    trace_topic: Final = Method(AsyncAdmin.trace_topic)
    pause_topic: Final = Method(AsyncAdmin.pause_topic)
    unpause_topic: Final = Method(AsyncAdmin.unpause_topic)
    empty_topic: Final = Method(AsyncAdmin.empty_topic)
    set_topic: Final = Method(AsyncAdmin.set_topic)
    tombstone: Final = Method(AsyncAdmin.tombstone)
    create_channel: Final = Method(AsyncAdmin.create_channel)
    set_channel: Final = Method(AsyncAdmin.set_channel)
    limit_consumers: Final = Method(AsyncAdmin.limit_consumers)
    finish_message: Final = Method(AsyncAdmin.finish_message)
    redeliver_unfinished: Final = Method(AsyncAdmin.redeliver_unfinished)
    empty_delayed: Final = Method(AsyncAdmin.empty_delayed)
    deliver_delayed: Final = Method(AsyncAdmin.deliver_delayed)
    delete_channel: Final = Method(AsyncAdmin.delete_channel)
    pause_channel: Final = Method(AsyncAdmin.pause_channel)
    unpause_channel: Final = Method(AsyncAdmin.unpause_channel)
    empty_channel: Final = Method(AsyncAdmin.empty_channel)
    skip_channel: Final = Method(AsyncAdmin.skip_channel)
    unskip_channel: Final = Method(AsyncAdmin.unskip_channel)
    seek_channel: Final = Method(AsyncAdmin.seek_channel)
    nodes: Final = Method(AsyncAdmin.nodes)
    remove_node: Final = Method(AsyncAdmin.remove_node)
    disable_writes: Final = Method(AsyncAdmin.disable_writes)
    enable_writes: Final = Method(AsyncAdmin.enable_writes)
    set_log_level: Final = Method(AsyncAdmin.set_log_level)
    node_option: Final = Method(AsyncAdmin.node_option)
    set_node_option: Final = Method(AsyncAdmin.set_node_option)
    replicas: Final = Method(AsyncAdmin.replicas)
    stats: Final = Method(AsyncAdmin.stats)
    all_stats: Final = Method(AsyncAdmin.all_stats)
    peek: Final = Method(AsyncAdmin.peek)
