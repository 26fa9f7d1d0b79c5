"""The coordinator's knowledge in a file, for a cluster that is started again on the same data path."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import orjson
from attrs import asdict

from nsqext.broker.coordinator import policy as decisions
from nsqext.broker.coordinator.topics import PartitionState, TopicSpec, TopicState
from nsqext.broker.engine.storage.files import write_atomically
from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from nsqext.broker.coordinator.coordinator import Coordinator

__all__ = ("StateFile",)

_AGAIN = 1.0
_LOG = logging.getLogger(__name__)


class StateFile:
    """Writes the topics and the roles of their partitions whenever they change.

    Args:
        coordinator: whose knowledge is kept.
        path: the file; it is replaced as a whole, so that a kill leaves the old one or the new one.
    """

    def __init__(self, coordinator: Coordinator, path: Path) -> None:
        self._coordinator = coordinator
        self._path = path
        self._written = b""
        self._owed = False

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Try again what the disk did not take, until cancelled."""
        task_status.started()
        while True:
            await anyio.sleep(_AGAIN)
            if self._owed:
                self.save()

    def save(self) -> None:
        """Write the file, if anything changed; what the disk does not take is tried again."""
        self._owed = False
        try:
            self._save()
        except OSError as error:
            self._owed = True
            _LOG.warning("%s cannot be written: %s", self._path, error.strerror)

    def _save(self) -> None:
        topics = {
            name: {
                "spec": asdict(topic.spec),
                "registered": topic.registered,
                "partitions": {str(number): _kept(state) for number, state in topic.partitions.items()},
            }
            for name, topic in self._coordinator.topics.items()
        }
        data = orjson.dumps({"topics": topics}, option=orjson.OPT_INDENT_2)
        if data == self._written:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, data, sync=False)
        self._written = data

    def load(self) -> None:
        """Open the topics that are in the file; nothing happens when there is none.

        Raises:
            InvalidSetting: it cannot be read, or the cluster is too small for what is in it.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        try:
            topics = orjson.loads(data)["topics"]
            found = [_topic(name, kept) for name, kept in topics.items()]
            states = {
                (name, int(number)): _state(kept)
                for name, topic in topics.items()
                for number, kept in topic["partitions"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidSetting(
                f"{self._path} cannot be read: {error!r}", hint="restore it or choose another path"
            ) from (error)
        for topic in found:
            self._coordinator.topics[topic.name] = topic
        for (name, number), state in states.items():
            self._open(name, number, state)

    def _open(self, name: str, number: int, state: PartitionState) -> None:
        """Open a partition; a node that is in sync leads it, with a higher epoch than before."""
        members = self._coordinator.members
        state.replicas = [node for node in state.replicas if node in members]
        leader = decisions.candidate(state, members)
        if leader is None:
            raise InvalidSetting(
                f"nobody here has all messages of topic {name} partition {number}",
                hint=f"start at least as many nodes as before; {', '.join(state.in_sync)} had them",
            )
        decisions.take_office(state, leader, set(members))
        self._coordinator.open(self._coordinator.topics[name], number, state)


def _kept(state: PartitionState) -> dict[str, Any]:
    return {
        "leader": state.leader,
        "replicas": state.replicas,
        "in_sync": state.in_sync,
        "epoch": state.epoch,
    }


def _topic(name: str, kept: dict[str, Any]) -> TopicState:
    return TopicState(name, TopicSpec(**kept["spec"]), registered=list(kept["registered"]))


def _state(kept: dict[str, Any]) -> PartitionState:
    return PartitionState(str(kept["leader"]), list(kept["replicas"]), list(kept["in_sync"]), int(kept["epoch"]))
