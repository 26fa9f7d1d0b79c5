"""A copy catches up with its leader and is taken in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from nsqext.broker.coordinator.replication import copy
from nsqext.broker.engine.errors import Refusal

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.coordinator.replication import ReplicaSet

__all__ = ("join",)

_AGAIN = 1.0
_LOG = logging.getLogger(__name__)


async def join(coordinator: Coordinator, replicas: ReplicaSet, name: str) -> None:
    """Bring a copy up to date and count it as in sync.

    Writes wait during the last step (captured: failover_r3_term_leader).

    Ends without success when the leader changes, when one of the two falls silent or when the topic goes; then whoever
    changed that starts it anew. Where the disk does not take the copy, it is tried again after a second.
    """
    key = (replicas.topic, replicas.partition, name)
    state = replicas.state
    epoch = state.epoch

    def goes_on() -> bool:
        return (
            coordinator.sets.get(key[:2]) is replicas
            and state.epoch == epoch
            and name in state.replicas
            and coordinator.reachable(name)
            and coordinator.reachable(state.leader)
        )

    try:
        if goes_on() and await _catch_up(coordinator, replicas, name, goes_on):
            coordinator.joining.discard(key)
            coordinator.take_in(replicas, name)
            return
    except Refusal as refusal:
        _LOG.warning("%s cannot catch up: %s", name, refusal.text)
        state.joining.discard(name)
        if coordinator.sets.get(key[:2]) is replicas:
            coordinator.apply(replicas)
        await anyio.sleep(_AGAIN)
    finally:
        coordinator.joining.discard(key)
    state.joining.discard(name)
    if coordinator.sets.get(key[:2]) is replicas:
        coordinator.apply(replicas)


async def _catch_up(coordinator: Coordinator, replicas: ReplicaSet, name: str, goes_on: Callable[[], bool]) -> bool:
    replicas.align(name)
    source, target = replicas.leader, replicas.hosts[name].partition
    while not copy(source, target):
        await anyio.lowlevel.checkpoint()
        if not goes_on():
            return False
    replicas.state.joining.add(name)
    coordinator.apply(replicas)
    await anyio.sleep(coordinator.options.join_pause)
    if not goes_on():
        return False
    while not copy(source, target):
        pass
    return True
