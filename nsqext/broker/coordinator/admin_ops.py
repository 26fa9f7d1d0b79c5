"""Operations on topics, channels and nodes; a refused operation raises `Refusal` with the real server's text."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio

from nsqext.broker.coordinator.topics import CoordinatedPartition, TopicSpec, TopicState
from nsqext.broker.engine.storage.log import Refusal
from nsqext.errors import InvalidSetting
from nsqext.protocol.names import is_valid_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.coordinator.replication import ReplicaSet
    from nsqext.broker.engine.options import ChannelKind

KEY_NOT_FOUND = "Key not found"
UNSTABLE = "the cluster is unstable"
_NO_NODE = "ErrType:9 ErrCode:1 : No node is available for topic"
_MOVE_TIMEOUT = 90.0  # seconds for the new replica of a moved partition to be in sync
_MAX_PARTITIONS = 255
_MAX_RETENTION_DAYS = 60
MAX_SYNC_EVERY = 4000


def create_topic(coordinator: Coordinator, name: str, spec: TopicSpec) -> None:
    """Create a topic; an equal topic may exist (captured: topic_create)."""
    if not is_valid_topic(name):
        raise Refusal("invalid topic name")
    if spec.partition_num >= _MAX_PARTITIONS:
        raise Refusal("max partition allowed exceed")
    if len(coordinator.usable()) < spec.nodes_needed():
        raise Refusal(_NO_NODE)
    topic = coordinator.topics.get(name)
    if topic is not None and topic.spec != spec:
        raise Refusal("already exist")
    is_new = topic is None
    topic = topic or TopicState(name, spec)
    coordinator.topics[name] = topic
    try:
        _place(coordinator, topic)
    except Refusal:
        if is_new:
            coordinator.remove_topic(topic)
        raise


def _place(coordinator: Coordinator, topic: TopicState) -> None:
    placed = topic.spec.place(coordinator.load(), topic.partitions)
    if placed is None:
        raise Refusal(_NO_NODE)
    for partition, nodes in placed.items():
        with _hosting():
            coordinator.open_partition(topic, partition, CoordinatedPartition(nodes[0], list(nodes), list(nodes)))


@contextmanager
def _hosting() -> Iterator[None]:
    try:
        yield
    except InvalidSetting as error:
        raise Refusal(str(error)) from error


def delete_topic(coordinator: Coordinator, name: str) -> None:
    """Delete a topic and close its consumers."""
    coordinator.remove_topic(_topic(coordinator, name, KEY_NOT_FOUND))


def _topic(coordinator: Coordinator, name: str, missing: str) -> TopicState:
    topic = coordinator.topics.get(name)
    if topic is None:
        raise Refusal(missing)
    return topic


def update_topic(coordinator: Coordinator, name: str, **changes: Any) -> None:
    """Change members of a topic's `TopicSpec`; an upgrade to extend is final (captured: upgrade_meta)."""
    if not is_valid_topic(name):
        raise Refusal("invalid topic name")
    if changes.get("retention_days", 0) > _MAX_RETENTION_DAYS:
        raise Refusal("max retention days allowed exceed")
    if changes.get("sync_every", 0) > MAX_SYNC_EVERY:
        raise Refusal("max sync every allowed exceed")
    topic = _topic(coordinator, name, "topic is not created")
    before = topic.spec
    topic.change(**changes | {"extend": before.extend or changes.get("extend", False)})
    if len(coordinator.usable()) < topic.spec.nodes_needed():
        topic.spec = before
        raise Refusal(_NO_NODE)
    for replicas in coordinator.partitions(name):
        if topic.spec.extend and not before.extend:
            for hosted in replicas.hosts.values():
                hosted.partition.upgrade_extend()
        try:
            _resize(coordinator, replicas, topic.spec.replica)
        except Refusal:
            topic.change(replica=before.replica)
            raise
        finally:
            coordinator.apply_roles(replicas)
    if topic.spec.disable_channel_auto_create:
        _make_registered(coordinator, name)


def _resize(coordinator: Coordinator, replicas: ReplicaSet, wanted: int) -> None:
    """Change the number of a partition's replicas; the leader stays."""
    state, free = replicas.state, coordinator.free_nodes(replicas)
    while len(state.replicas) < wanted and free:
        with _hosting():
            coordinator.host(replicas, free[0])
        state.replicas.append(free.pop(0))
    for name in [name for name in reversed(state.replicas) if name != state.leader]:
        if len(state.replicas) > wanted:
            _drop(coordinator, replicas, name)
    if len(state.in_sync) >= coordinator.topics[replicas.topic].spec.quorum:
        state.resigned = False


def _drop(coordinator: Coordinator, replicas: ReplicaSet, name: str) -> None:
    state = replicas.state
    state.replicas.remove(name)
    state.joining.discard(name)
    if name in state.in_sync:
        state.in_sync.remove(name)
    coordinator.unhost(replicas, name)


def register_channels(coordinator: Coordinator, name: str, channels: list[str]) -> None:
    """Register exactly these channels for a topic."""
    coordinator.topics[name].registered = sorted(channels)
    _make_registered(coordinator, name)
    coordinator.notify_watchers(name)


def _make_registered(coordinator: Coordinator, name: str) -> None:
    """Create a topic's registered channels; delete the others, except ephemeral channels."""
    topic = coordinator.topics[name]
    for replicas in coordinator.partitions(name):
        leader = replicas.leader
        for channel in topic.registered:
            leader.channel(channel)
        for label, found in list(leader.channels.items()):
            if label not in topic.registered and not found.ephemeral:
                leader.delete_channel(label)
        coordinator.mirror(replicas)


def create_channel(coordinator: Coordinator, name: str, channel: str, kind: ChannelKind) -> None:
    """Create a channel of a type on all partitions of a topic or on none; change an existing channel to this type.

    A topic that registers channels registers it. Refused as by `Partition.check_kind`, or if a partition has no leader.
    """
    topic = coordinator.topics[name]
    sets = list(coordinator.partitions(name))
    for replicas in sets:
        if not coordinator.reachable(replicas.state.leader):
            raise Refusal(f"partition {replicas.partition} of topic {name} has no leader")
        replicas.leader.check_kind(channel, kind)
    if topic.spec.disable_channel_auto_create and channel not in topic.registered:
        topic.registered = sorted([*topic.registered, channel])
    for replicas in sets:
        replicas.leader.admit(channel, kind)
        coordinator.mirror(replicas)
    coordinator.notify_watchers(name)


def expand_topic(coordinator: Coordinator, name: str, partition_num: int) -> None:
    """Add partitions to a topic; refused while the cluster is unstable."""
    if not is_valid_topic(name):
        raise Refusal("invalid topic name")
    if partition_num >= _MAX_PARTITIONS:
        raise Refusal("max partition allowed exceed")
    if not coordinator.stable:
        raise Refusal(UNSTABLE)
    topic = _topic(coordinator, name, "topic is not created")
    before = topic.spec
    if partition_num < before.partition_num:
        raise Refusal("the partition number can not be reduced")
    topic.change(partition_num=partition_num)
    try:
        _place(coordinator, topic)
    except Refusal:
        topic.spec = before
        raise
    for replicas in coordinator.partitions(name):
        coordinator.apply_roles(replicas)


async def move_partition(
    coordinator: Coordinator, name: str, partition: int, source: str, target: str, *, leader: bool
) -> None:
    """Move a replica of a partition, or with ``leader`` its leadership, to another node; return when done.

    A target without a replica takes over the source's. Cancellation leaves the old or the new state.
    """
    if source == target:
        raise Refusal("move to and from node can not be the same")
    replicas = coordinator.replica_sets.get((name, partition))
    if replicas is None:
        raise Refusal(KEY_NOT_FOUND)
    _check_move(coordinator, replicas, source, target, leader)
    state = replicas.state
    added = target not in state.replicas
    if added:
        with _hosting():
            coordinator.host(replicas, target)
        state.replicas.append(target)
    coordinator.start_catch_ups(replicas)

    def exists() -> bool:
        return coordinator.exists(replicas)

    try:
        with anyio.move_on_after(_MOVE_TIMEOUT):
            while exists() and target not in state.in_sync and target in state.replicas:
                await replicas.changes.wait()
    finally:
        ready = exists() and target in state.in_sync
        if ready:
            if leader:
                coordinator.elect(replicas, target)
            if added and source in state.replicas:
                _drop(coordinator, replicas, source)
            coordinator.apply_roles(replicas)
        elif exists() and added and target in state.replicas:
            _drop(coordinator, replicas, target)
            coordinator.apply_roles(replicas)
    if not exists():
        raise Refusal(KEY_NOT_FOUND)
    if not ready:
        raise Refusal("timeout waiting move topic")


def _check_move(coordinator: Coordinator, replicas: ReplicaSet, source: str, target: str, leader: bool) -> None:
    state = replicas.state
    if leader and source != state.leader:
        raise Refusal("move from not the topic leader")
    if not leader:
        if source == state.leader:
            raise Refusal("can not move leader without moveleader param")
        if source not in state.in_sync:
            raise Refusal("the move source node has no replica for the topic")
        if target in state.in_sync:
            raise Refusal("the move destination has the topic data already")
    if not coordinator.reachable(target):
        raise Refusal("the move destination is not found in cluster")
    if not coordinator.reachable(source):
        raise Refusal("the move source data is lost in cluster")


async def remove_node(coordinator: Coordinator, name: str) -> None:
    """Move a node's partitions to other nodes, as far as these have room."""
    member = coordinator.members.get(name)
    if member is None or member.removing:
        return
    member.removing = True
    for replicas in coordinator.replica_sets_on(name):
        free = coordinator.free_nodes(replicas)
        if free:
            leads = replicas.state.leader == name
            with suppress(Refusal):
                await move_partition(coordinator, replicas.topic, replicas.partition, name, free[0], leader=leads)
