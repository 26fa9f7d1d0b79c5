"""The coordinator's state in a file, which a new cluster on the same data path reads."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec
from attrs import asdict

from nsqext.broker.coordinator.topics import CoordinatedPartition, TopicSpec, TopicState
from nsqext.broker.engine.storage.files import decode_checked, keep_aside, with_checksum, write_atomically
from nsqext.broker.engine.storage.partition_store import stored_partitions
from nsqext.errors import InvalidSetting
from nsqext.protocol.names import MAX_PARTITIONS, is_valid_channel, is_valid_topic

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.engine.storage.partition_store import StoredPartition

_RETRY = 1.0  # seconds until a failed write is repeated
logger: logging.Logger = logging.getLogger(__name__)

_Partitions = dict[tuple[str, int], CoordinatedPartition]


class StateFile:
    """Reads topics and partition roles at the start, writes them after each change."""

    def __init__(self, coordinator: Coordinator, path: Path) -> None:
        self._coordinator = coordinator
        self._path = path  # replaced as a whole
        self._topics: dict[str, msgspec.Raw] = {}
        self._written = b""
        self._retry = False

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            await anyio.sleep(_RETRY)
            if self._retry:
                self._write()

    def save_all(self) -> None:
        """Write the file; a failed write is repeated by `run`."""
        self._topics = {name: _dump_topic(topic) for name, topic in self._coordinator.topics.items()}
        self._write()

    def save(self, topic: str) -> None:
        """Write the file after a change of a topic; only this topic is encoded again."""
        found = self._coordinator.topics.get(topic)
        if found is None:
            self._topics.pop(topic, None)
        else:
            self._topics[topic] = _dump_topic(found)
        self._write()

    def _write(self) -> None:
        self._retry = False
        data = with_checksum(msgspec.json.encode({"topics": self._topics}))
        if data == self._written:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, data, sync=False)
            self._written = data
        except OSError as error:
            self._retry = True
            logger.warning("%s cannot be written: %s", self._path, error.strerror)

    # Start

    def load(self) -> None:
        """Open the topics of the file.

        If it is missing or damaged, topics are rebuilt from the nodes' files, with a warning; a damaged file is
        renamed. Raises `InvalidSetting` if no node of this cluster has all messages of a partition.
        """
        topics, partitions = self._read() or self._rebuild()
        for topic in topics:
            self._coordinator.topics[topic.name] = topic
        for (name, number), state in partitions.items():
            self._open(name, number, state)

    def _read(self) -> tuple[list[TopicState], _Partitions] | None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidSetting(f"{self._path} cannot be read: {error.strerror}") from error
        try:
            found = decode_checked(data, _Document).topics
            topics = [_load_topic(name, kept) for name, kept in found.items()]
            partitions = {
                (topic.name, _load_number(number, topic)): _load_partition(kept)
                for topic in topics
                for number, kept in found[topic.name].partitions.items()
            }
            return topics, partitions
        except ValueError as error:
            aside = self._keep_aside()
            logger.warning("%s is damaged (%s); it is kept as %s", self._path, error, aside)
            return None

    def _keep_aside(self) -> Path:
        try:
            return keep_aside(self._path, "damaged", move=True)
        except OSError as error:
            raise InvalidSetting(
                f"{self._path} is damaged and cannot be renamed: {error.strerror}",
                hint="move it away or choose another data path",
            ) from error

    def _rebuild(self) -> tuple[list[TopicState], _Partitions]:
        copies: dict[tuple[str, int], dict[str, StoredPartition]] = {}
        for name, member in self._coordinator.members.items():
            folder = member.node.options.data_path
            if folder is not None and folder.is_dir():
                for stored in stored_partitions(folder):
                    copies.setdefault((stored.topic, stored.partition), {})[name] = stored
        partitions = {key: _derive_partition(held) for key, held in copies.items()}
        topics = [_derive_topic(name, copies) for name in dict.fromkeys(name for name, _ in copies)]
        if topics:
            logger.warning(
                "%s was missing or damaged: rebuilt %d topics with %d partitions from the files of the nodes; "
                "registered channels, retention and sync settings of topics have their defaults",
                self._path,
                len(topics),
                len(partitions),
            )
        return topics, partitions

    def _open(self, name: str, number: int, state: CoordinatedPartition) -> None:
        members = self._coordinator.members
        state.replicas = [node for node in state.replicas if node in members]
        leader = state.candidate(members)
        if leader is None:
            raise InvalidSetting(
                f"no node of this cluster has all messages of topic {name} partition {number}",
                hint=f"start at least as many nodes as before; {', '.join(state.in_sync)} had them",
            )
        state.promote(leader, set(members))
        self._coordinator.open_partition(self._coordinator.topics[name], number, state)


def _derive_partition(held: dict[str, StoredPartition]) -> CoordinatedPartition:
    """Return a partition whose leader knows best what consumers have finished.

    Opening it makes a replica with more messages the leader.
    """
    leader = max(held, key=lambda name: sum(channel.count for channel in held[name].channels))
    return CoordinatedPartition(leader, list(held), list(held))


def _derive_topic(name: str, copies: dict[tuple[str, int], dict[str, StoredPartition]]) -> TopicState:
    held = {number: nodes for (topic, number), nodes in copies.items() if topic == name}
    stored = [found for nodes in held.values() for found in nodes.values()]
    places = [node for nodes in held.values() for node in nodes]
    ordered = any(found.ordered for found in stored)
    spec = TopicSpec(
        partition_num=max(held) + 1,
        replica=max(len(nodes) for nodes in held.values()),
        ordered=ordered,
        multi_part=not ordered and len(places) > len(set(places)),
        extend=any(found.extend for found in stored),
    )
    missing = [number for number in range(spec.partition_num) if number not in held]
    if missing:
        logger.warning("topic %s: no node has files of partitions %s", name, ", ".join(map(str, missing)))
    return TopicState(name, spec)


class _Partition(msgspec.Struct):
    leader: str
    replicas: list[str]
    in_sync: list[str]
    epoch: int


class _Topic(msgspec.Struct):
    spec: TopicSpec
    registered: list[str]
    partitions: dict[str, _Partition]


class _Document(msgspec.Struct):
    topics: dict[str, _Topic]


def _dump_topic(topic: TopicState) -> msgspec.Raw:
    partitions = {
        str(number): _Partition(state.leader, state.replicas, state.in_sync, state.epoch)
        for number, state in topic.partitions.items()
    }
    return msgspec.Raw(msgspec.json.encode(_Topic(topic.spec, topic.registered, partitions)))


def _load_topic(name: str, kept: _Topic) -> TopicState:
    for member, value in asdict(kept.spec).items():
        if value < 0:
            raise ValueError(f"{member} of topic {name} is {value!r}")
    if not (is_valid_topic(name) and all(map(is_valid_channel, kept.registered))):
        raise ValueError(f"the name of topic {name!r} or of its channels is not valid")
    return TopicState(name, kept.spec, registered=kept.registered)


def _load_number(text: str, topic: TopicState) -> int:
    if not (text.isdecimal() and int(text) < topic.spec.partition_num <= MAX_PARTITIONS):
        raise ValueError(f"topic {topic.name} has no partition {text!r}")
    return int(text)


def _load_partition(kept: _Partition) -> CoordinatedPartition:
    if not set(kept.in_sync) <= set(kept.replicas) or len(set(kept.replicas)) < len(kept.replicas):
        raise ValueError(f"replicas {kept.replicas} of a partition, of which {kept.in_sync} are in sync")
    return CoordinatedPartition(kept.leader, kept.replicas, kept.in_sync, kept.epoch)
