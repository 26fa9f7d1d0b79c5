"""Methods of the administration client that list, create and change topics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, KeysView, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Unpack

import anyio

from nsqext.admin.channels import ChannelAdmin
from nsqext.admin.nodes import change_everywhere, move_partition
from nsqext.admin.options import NewTopicSettings, TopicSettings, topic_arguments
from nsqext.admin.requests import ask_all, ask_each, generation_of, http_of, unsupported
from nsqext.admin.results import TopicInfo
from nsqext.arguments import check_number, check_time
from nsqext.errors import InvalidInput, LookupFailed, PartitionUnavailable, TopicNotFound, TopicNotReady
from nsqext.lookup.metadata import topic_changed
from nsqext.lookup.partition_map import merged
from nsqext.protocol.names import MAX_PARTITIONS, check_channel, check_topic

if TYPE_CHECKING:
    from nsqext.admin.requests import ClusterRequests
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.types import Address

EXPAND = "/topic/partition/expand"
CREATE = "/topic/create"


class TopicAdmin(ChannelAdmin):
    """Methods of `nsqext.Admin` for topics."""

    async def topics(self) -> dict[str, TopicInfo]:
        """Return all topics by sorted name.

        Raises:
            LookupFailed: no lookup node returned a usable response.
        """
        requests = self._open()
        names = await requests.client.lists.topics()
        found, failed = await ask_all(names, self.topic)
        for error in failed.values():
            if not isinstance(error, TopicNotFound):  # deleted since it was listed
                raise error
        return {name: found[name] for name in names if name in found}

    async def topic(self, topic: str) -> TopicInfo:
        """Return a topic.

        Raises:
            InvalidName, TopicNotFound, LookupFailed: see `Admin`.
        """
        where, channels = await self._open().find_with_channels(topic)
        nodes = tuple(sorted({*where.leaders.values(), *where.nodes}))
        generation = generation_of(where)
        meta = where.meta if generation == "redesigned" else None
        return TopicInfo(topic, generation, meta, dict(sorted(where.leaders.items())), nodes, channels)

    async def channels(self, topic: str) -> tuple[str, ...]:
        """Return a topic's sorted channels; raises the errors of `topic`."""
        return (await self.topic(topic)).channels

    async def create_topic(
        self,
        topic: str,
        *,
        channels: Iterable[str] = (),
        exist_ok: bool = False,
        wait: float = 150.0,
        **settings: Unpack[NewTopicSettings],
    ) -> None:
        """Create a topic; return once every partition accepts publishes and the channels exist.

        The redesigned NSQ refuses publishes to a topic without channels: give ``channels``, or start a consumer before
        the first publish. The original generation creates the topic on every node and ignores all options except names.

        Args:
            exist_ok: an existing topic is not an error; its partitions and flags stay.
            wait: seconds to wait for publishes to be accepted; a real cluster takes 2 to 12 s, longer while its nodes
                change. 0 for no wait; ``channels`` must be empty then.
            settings: see `NewTopicSettings`.

        Raises:
            InvalidInput: invalid name or number, or existing topic.
            LookupFailed: the cluster refused, or no lookup node responded.
            PartitionUnavailable: the created topic did not accept publishes in time.
        """
        requests = self._open()
        if isinstance(channels, str):
            raise InvalidInput(f"channels={channels!r} is one text", topic=topic, hint=f"give channels=[{channels!r}]")
        names = [check_channel(channel) for channel in channels]
        check_time("wait", wait)
        if names and not wait:
            raise InvalidInput("channels are created once the topic has leaders", topic=topic, hint="give wait > 0")
        given = topic_arguments("create_topic", NewTopicSettings, settings)
        chosen = {argument: value for argument, value in given.items() if value != "false"}
        params = {"topic": check_topic(topic), "partition_num": 1, "replicator": 1, **chosen}
        await _create(requests, topic, params, exist_ok=exist_ok)
        if wait > 0:
            with anyio.move_on_after(wait) as scope:
                await self._complete(topic, CREATE, params, names)
            if scope.cancelled_caught:
                raise PartitionUnavailable(
                    f"the topic was created, but does not accept publishes after {wait:g} s",
                    topic=topic,
                    hint="check that enough nodes run for its replicas",
                )
        else:
            await _create_at_nodes(requests, topic)

    async def _complete(
        self, topic: str, path: str, params: Mapping[str, str | int], channels: Collection[str], partitions: int = 0
    ) -> None:
        """Wait until the partitions of an accepted request take publishes and number ``partitions``; add channels."""
        requests = self._open()

        async def again() -> None:  # a repeat changes no partition
            with suppress(LookupFailed, TopicNotFound):  # it exists with other flags, or the cluster is unstable
                await requests.change_lookup(path, params)

        await _wait_writable(requests, topic, partitions, again)
        for channel in channels:
            await self.create_channel(topic, channel)
        if channels:
            await _wait_offered(requests, topic, again)

    async def delete_topic(self, topic: str, *, missing_ok: bool = False) -> bool:
        """Delete a topic with all its messages and channels; return whether it existed.

        Args:
            missing_ok: a missing topic is not an error.

        Raises:
            InvalidName, TopicNotFound, LookupFailed, ConnectionFailed: see `Admin`.
        """
        requests = self._open()
        try:
            holders = await _holders(requests, await requests.find(topic))  # before lookup forgets tombstones
            with _changing(topic):
                await requests.change_lookup("/topic/delete", {"topic": topic, "partition": "**"})
                await ask_each(holders, partial(_delete_at, requests, topic))
        except TopicNotFound:
            if missing_ok:
                return False
            raise
        return True

    async def upgrade_topic(self, topic: str) -> None:
        """Add extend support (headers, tags and keys) to a topic of the redesigned NSQ. It cannot be undone.

        Returns once lookup reports it and the connections of all consumers have ended: the server would send them
        nothing, not even an error. They connect again, with extend support. The order of a channel of an unordered
        topic (`set_channel`) ends: set it again. Producers of this process use the change at once, others with their
        next poll of lookup.

        Raises:
            PartitionUnavailable: the topic was upgraded, but connections to a leaderless partition remain: their
                consumers receive again within a minute.
            TopicNotFound, OperationNotSupported, LookupFailed: see `Admin`.
        """
        requests = self._open()
        where, channels = await requests.find_redesigned(
            topic, "upgrade_topic", "the original NSQ has no extend headers"
        )
        if where.meta.extend_support:
            return

        async def check() -> None:
            if not (await requests.find(topic)).meta.extend_support:
                raise PartitionUnavailable("lookup does not report extend support yet", topic=topic)

        await _update_meta(requests, topic, {"upgradeext": "true"}, check)
        for channel in channels:
            await self._end_connections(topic, channel, ordered=where.meta.ordered)

    async def _end_connections(self, topic: str, channel: str, *, ordered: bool) -> None:
        """End consumers' connections, as the server does when the order of a channel changes."""
        requests = self._open()

        async def change(node: Address, params: dict[str, str | int]) -> None:
            with anyio.CancelScope(shield=True):  # a channel that remained ordered would be slow
                for order in ("false", "true") if ordered else ("true", "false"):
                    try:
                        await requests.post(node, "/channel/setorder", {**params, "order": order})
                    except InvalidInput:
                        return  # the partition has no such channel, or it cannot be ordered

        await requests.at_leaders(topic, channel, change)

    async def set_topic(self, topic: str, **settings: Unpack[TopicSettings]) -> None:
        """Change settings of a topic of the redesigned NSQ; None leaves a setting unchanged.

        Returns once lookup reports the change. Replicas are added and removed afterwards, in the background.

        Args:
            settings: see `TopicSettings`.

        Raises:
            InvalidInput: invalid number, or no setting given.
            LookupFailed: refused, for example for lack of nodes, or no lookup node responds.
            PartitionUnavailable: lookup does not report the change in time.
            TopicNotFound, OperationNotSupported: see `Admin`.
        """
        params = topic_arguments("set_topic", TopicSettings, settings)
        if not params:
            raise InvalidInput("no setting to change is given", topic=topic)
        requests = self._open()
        await requests.find_redesigned(topic, "set_topic", "topics of the original NSQ have no settings")
        wanted = settings.get("replicas"), settings.get("registered_channels_only")

        async def check() -> None:
            meta = (await requests.find(topic)).meta
            shown = (meta.replica, meta.disable_channel_auto_create)
            if any(value is not None and value != now for value, now in zip(wanted, shown, strict=True)):
                raise PartitionUnavailable("lookup does not report the change yet", topic=topic)

        await _update_meta(requests, topic, params, check)

    async def expand_topic(self, topic: str, partitions: int, *, wait: float = 300.0) -> None:
        """Raise the number of partitions of a topic of the redesigned NSQ.

        Returns once every new partition accepts publishes and has the topic's channels, without which lookup hides it
        from producers. Clients of this process use the new partitions at once, others with their next poll of lookup.

        Args:
            partitions: new number, at least the present number, at most 254.
            wait: seconds until publishes are accepted; a real cluster, which expands no topic while it places other
                partitions, may take two minutes.

        Raises:
            InvalidInput: invalid number.
            PartitionUnavailable: not done in time. The call can be repeated.
            TopicNotFound, OperationNotSupported, LookupFailed: see `Admin`.
        """
        number = check_number("partitions", partitions, 1, MAX_PARTITIONS, InvalidInput)
        check_time("wait", wait)
        requests = self._open()
        where, _ = await requests.find_redesigned(topic, "expand_topic", "the original NSQ has no partitions")
        if number < where.partition_num:
            raise InvalidInput(
                f"the topic has {where.partition_num} partitions: their number cannot be reduced", topic=topic
            )
        sent = False
        with _changing(topic), anyio.move_on_after(wait) as scope:
            params: dict[str, str | int] = {"topic": topic, "partition_num": number}
            await requests.change_settled(EXPAND, params, topic, bounded=False)
            sent = True
            channels = await self.channels(topic)  # known now: a cluster with a leaderless partition refuses to expand
            await self._complete(topic, EXPAND, params, channels, number)
        if scope.cancelled_caught:
            if not sent:
                raise PartitionUnavailable(f"not expanded: the cluster is unstable for {wait:g} s", topic=topic)
            raise PartitionUnavailable(
                f"the topic was expanded, but not every partition accepts publishes after {wait:g} s",
                topic=topic,
                hint="are enough nodes up? The same call can be repeated",
            )

    async def move_partition(
        self, topic: str, partition: int, source: str, target: str, *, wait: float = 300.0
    ) -> None:
        """Move a replica of a partition of the redesigned NSQ to another node, or make the other node its leader.

        If ``source`` leads the partition, ``target`` becomes the leader, with the replica of ``source`` unless it has a
        replica. Returns when done. Clients of this process use the new leader at once, others when the old leader
        refuses them.

        Args:
            source: ``host:port`` of the TCP side of a node with a replica, as `replicas` returns it.
            target: ``host:port`` of the TCP side of the other node.
            wait: seconds for the move; a real cluster refuses moves while it is unstable.

        Raises:
            InvalidInput: lookup lists no such node, the topic has no such partition, or ``source`` has no replica.
            PartitionUnavailable: not moved in time.
            TopicNotFound, OperationNotSupported, LookupFailed, ConnectionFailed: see `Admin`.
        """
        check_time("wait", wait)
        requests = self._open()
        await requests.find_redesigned(topic, "move_partition", "the original NSQ has no partitions")
        with _changing(topic), anyio.move_on_after(wait) as scope:
            await move_partition(requests, topic, partition, source, target)
        if scope.cancelled_caught:
            raise PartitionUnavailable(
                f"the partition has not moved after {wait:g} s", topic=topic, partition=partition, node=target
            )

    async def trace_topic(self, topic: str, *, channel: str | None = None, enabled: bool = True) -> None:
        """Make the nodes of the redesigned NSQ log the messages of a topic or channel.

        Nodes keep this in memory: it ends with a restart.

        Args:
            channel: log its deliveries and responses; by default publishes to the topic.
            enabled: False stops it.

        Raises:
            InvalidInput: unknown channel.
            ConnectionFailed, PartitionUnavailable: a node does not respond; the others are changed.
            InvalidName, TopicNotFound, OperationNotSupported: see `Admin`.
        """
        requests = self._open()
        await requests.find_redesigned(topic, "trace_topic")
        params: dict[str, str | int] = {"topic": topic}
        if channel is not None:
            params["channel"] = check_channel(channel)
            if await self._lacks_channel(topic, channel):  # nodes accept an unknown channel
                raise InvalidInput(f"the topic has no channel {channel}", topic=topic, hint="check its name")
        path = f"/message/trace/{'enable' if enabled else 'disable'}"
        await change_everywhere(requests, path, params, lookupd=False)

    async def pause_topic(self, topic: str) -> None:
        """Stop a topic of the original generation from passing messages to its channels.

        Raises:
            OperationNotSupported: the redesigned NSQ pauses channels only.
            TopicNotFound, ConnectionFailed: see `Admin`.
        """
        await self._switch_topic(topic, "pause")

    async def unpause_topic(self, topic: str) -> None:
        """Make a paused topic pass messages to its channels again; raises the errors of `pause_topic`."""
        await self._switch_topic(topic, "unpause")

    async def _switch_topic(self, topic: str, action: str) -> None:
        requests = self._open()
        where = await requests.find(topic)
        if generation_of(where) == "redesigned":
            raise unsupported(f"{action}_topic", "the redesigned NSQ pauses channels, not topics", topic)
        await requests.post_to_nodes(where, f"/topic/{action}")

    async def empty_topic(self, topic: str) -> None:
        """Discard the waiting messages of a topic and its channels.

        On the redesigned NSQ, where channels read from a log, every channel skips to the end of the log.

        Raises:
            TopicNotFound, PartitionUnavailable, ConnectionFailed: see `Admin`.
        """
        requests = self._open()
        where = await requests.settled(partial(requests.led, topic), topic)  # leaders report the channels
        channels = await self.channels(topic)
        try:  # before the channels, to which it passes its messages
            await requests.post_to_nodes(where, "/topic/empty")
        finally:
            _, failed = await ask_all(channels, lambda channel: self.empty_channel(topic, channel))
        for error in failed.values():
            raise error

    async def tombstone(self, topic: str, node: str, *, restore: bool = False) -> None:
        """Hide a topic's node temporarily from consumers and producers, before it is taken out of service.

        Args:
            node: ``host:port`` of the node's HTTP side.
            restore: show a hidden node again. The original NSQ shows it again after a while, 45 s by default.

        Raises:
            InvalidInput: lookup knows no such node, or does not list the topic on it.
            OperationNotSupported: ``restore`` on the original generation.
            TopicNotFound, LookupFailed: see `Admin`.
        """
        requests = self._open()
        where = await requests.find(topic)
        if generation_of(where) == "original" and restore:
            raise unsupported("tombstone(restore=True)", "the original NSQ shows a hidden node again by itself", topic)
        infos = [info for info in await requests.client.lists.nodes() if info.http is not None]
        known = sorted(str(info.http) for info in infos)
        # servers ignore a node that is unknown, or not offered to producers
        if node not in known:
            raise InvalidInput(f"no node has the HTTP address {node!r}", topic=topic, hint=f"known: {', '.join(known)}")
        holders = {str(info.http) for info in infos if topic in info.topics or info.tcp in where.leaders.values()}
        if not restore and node not in holders:
            hint = f"nodes with it: {', '.join(sorted(holders)) or 'not any'}"
            raise InvalidInput(f"lookup does not list the topic on {node}", topic=topic, hint=hint)
        params: dict[str, str | int] = {"topic": topic, "node": node}
        with _changing(topic):
            await requests.change_lookup("/topic/tombstone", params | {"restore": "true"} if restore else params)


@contextmanager
def _changing(topic: str) -> Iterator[None]:
    """Make the clients of this process look a topic up again at the end, also after an error: it may be changed."""
    try:
        yield
    finally:
        topic_changed(topic)


async def _update_meta(
    requests: ClusterRequests, topic: str, params: Mapping[str, str | int], check: Callable[[], Awaitable[None]]
) -> None:
    """Change a topic's meta; repeat ``check`` until lookup reports the change."""
    with _changing(topic):
        await requests.change_lookup("/topic/meta/update", {"topic": topic, **params})
        await requests.settled(check, topic)


async def _create(requests: ClusterRequests, topic: str, params: Mapping[str, str | int], *, exist_ok: bool) -> None:
    """Register a topic at the lookup service with arguments of ``/topic/create``."""
    exists = InvalidInput("the topic exists", topic=topic, hint="exist_ok=True, or --if-not-exists, keeps it")
    if not exist_ok:
        # the server accepts an existing topic with the same numbers and flags (captured: topic_create)
        with suppress(TopicNotFound):
            await requests.find(topic)
            raise exists
    try:
        await requests.change_lookup(CREATE, params)
    except LookupFailed as error:
        if "No node is available" in error.message and not params.keys() & {"multipart", "orderedmulti"}:
            raise _too_few_nodes(error, topic, params, len(await requests.client.lists.nodes())) from error
        if "already exist" not in error.message:
            raise
        if not exist_ok:
            raise exists from error


def _too_few_nodes(error: LookupFailed, topic: str, params: Mapping[str, str | int], nodes: int) -> LookupFailed:
    partitions, replicas = int(params["partition_num"]), int(params["replicator"])
    if replicas > nodes:
        return LookupFailed(
            f"{replicas} replicas need {replicas} nodes, but the cluster has {nodes}",
            topic=topic,
            hint="use fewer replicas",
        )
    if partitions * replicas <= nodes:
        return error
    needed = f"{partitions} partitions with {replicas} replicas" if replicas > 1 else f"{partitions} partitions"
    return LookupFailed(
        f"{needed} need {partitions * replicas} nodes, but the cluster has {nodes}",
        topic=topic,
        hint="allow several partitions on one node (multipart, --multipart), or use fewer",
    )


async def _holders(requests: ClusterRequests, where: PartitionMap) -> set[Address]:
    """Return the HTTP addresses of original nodes with a topic, also of nodes that a tombstone hides."""
    found = {http_of(where, node) for node in where.nodes}
    if generation_of(where) == "original":
        for info in await requests.client.lists.nodes():
            if info.http is not None and where.topic in info.tombstoned:
                found.add(info.http)
    return found


async def _delete_at(requests: ClusterRequests, topic: str, node: Address) -> None:
    try:
        await requests.post(node, "/topic/delete", {"topic": topic})
    except PartitionUnavailable as error:
        if "TOPIC_NOT_FOUND" not in error.message:  # another call has deleted it
            raise


async def _create_at_nodes(requests: ClusterRequests, topic: str) -> KeysView[Address]:
    """Create a topic on the nodes of the original NSQ, and return them."""
    infos = await requests.client.lists.nodes()
    original = {info.tcp: info.http for info in infos if not info.redesigned and info.http is not None}
    await ask_each(original, lambda tcp: requests.post(original[tcp], "/topic/create", {"topic": topic}))
    return original.keys()


async def _wait_writable(
    requests: ClusterRequests, topic: str, partitions: int, again: Callable[[], Awaitable[None]]
) -> None:
    """Create a topic on original nodes, then wait until each partition's leader accepts publishes.

    Original nodes register the topic at lookup some time after its creation: the next change would not reach them.
    """
    original = set(await _create_at_nodes(requests, topic))

    async def check() -> None:
        try:
            where = await requests.led(topic)
        except PartitionUnavailable:
            if not original:  # nodes may have registered since
                original.update(await _create_at_nodes(requests, topic))
            raise
        if where.partition_num < partitions:
            raise PartitionUnavailable(f"lookup does not report {partitions} partitions yet", topic=topic)
        unregistered = original.difference(where.nodes)
        if unregistered and not where.leaders:
            raise PartitionUnavailable("lookup does not list the node yet", topic=topic, node=str(min(unregistered)))
        for number, node in where.leaders.items():
            params: dict[str, str | int] = {"topic": topic, "partition": number}
            # the leader refuses the missing trace id; other nodes refuse earlier (captured: http_pubtrace)
            with suppress(InvalidInput):
                await requests.post(http_of(where, node), "/pubtrace", params, b"x")

    await requests.settled(check, topic, passing=TopicNotFound, again=again, bounded=False)


async def _wait_offered(requests: ClusterRequests, topic: str, again: Callable[[], Awaitable[None]]) -> None:
    """Wait until lookup offers every partition of a topic with channels to producers.

    A leader accepts messages before the cluster has enabled its partition: lookup does not offer the partition then.
    """

    async def check() -> None:
        where = merged(topic, "w", await requests.client.lookup(topic, "w"))
        if len(where.leaders) < where.partition_num:
            raise PartitionUnavailable(
                f"lookup offers {len(where.leaders)} of {where.partition_num} partitions to producers", topic=topic
            )

    await requests.settled(check, topic, passing=TopicNotReady, again=again, bounded=False)
