"""A copy catches up with its leader and is taken in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from nsqext.broker.coordinator.replicas import copy

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.coordinator.replicas import ReplicaSet

__all__ = ("join",)


async def join(coordinator: Coordinator, replicas: ReplicaSet, name: str) -> None:
    """Bring a copy up to date and count it as in sync.

    Writes wait during the last step (captured: failover_r3_term_leader).

    Ends without success when the leader changes, when one of the two falls silent or when the topic goes; then whoever
    changed that starts it anew.
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
