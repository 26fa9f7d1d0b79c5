"""What operators do in some schedules while faults happen: they seek, pause, create and delete channels."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import anyio

from nsqext import Admin, Consumer, NsqError, Position

if TYPE_CHECKING:
    from nsqext.testing.simulation import World
    from tests.campaigns.simulation.consumers import Client
    from tests.campaigns.simulation.history import Channel, History

__all__ = ("Operators",)

_SEEKABLE = ("plain", "upgraded")
"""Topics whose channels promise no order: lanes finish old messages without their handlers."""
_MOST = 20


class Operators:
    """Operators of one schedule.

    Args:
        world: the world.
        history: their seeks are disturbances.
        make: makes a client that consumes a topic and channel.
    """

    def __init__(self, world: World, history: History, make: Callable[[str, str], Client]) -> None:
        self._world = world
        self._history = history
        self._make = make
        self._paused: list[Channel] = []
        self.working: bool = True

    def duties(self, habits: tuple[str, ...], consumers: list[tuple[str, Consumer]]) -> list[Any]:
        """Return what runs while faults happen."""
        duties: list[Callable[[], Coroutine[Any, Any, None]]] = []
        seekable = [consumer for topic, consumer in consumers if topic in _SEEKABLE]
        if "seek" in habits:
            duties += [self._seeking(consumer) for consumer in seekable]
        if "pausing" in habits:
            duties.append(self._pause)
        if "channels" in habits and any(topic == "plain" for topic, _ in consumers):
            duties.append(self._create_and_delete)
        return duties

    async def _rest(self) -> None:
        await anyio.sleep(self._world.random.uniform(0.1, 1.0))

    def _seeking(self, consumer: Consumer) -> Callable[[], Coroutine[Any, Any, None]]:
        async def seek() -> None:
            """Move a channel back to its beginning."""
            while self.working:
                await self._rest()
                began = self._world.now
                with anyio.move_on_after(5.0):
                    await consumer.seek(Position.earliest())
                self._history.disturbances.append((began, self._world.now))

        return seek

    async def _pause(self) -> None:
        """Pause and resume channels."""
        async with Admin(self._world.cluster.lookupd) as admin:
            while self.working:
                await self._rest()
                channel = self._world.random.choice(self._history.channels) if self._history.channels else None
                if channel is None:
                    return
                self._paused.append(channel)
                try:
                    await admin.pause_channel(channel.topic, channel.name)
                    began = self._world.now
                    await self._rest()
                    self._history.pauses.append((channel.topic, channel.name, began, self._world.now))
                    await admin.unpause_channel(channel.topic, channel.name)
                except NsqError:
                    continue  # a node is down

    async def _create_and_delete(self) -> None:
        """Create a channel, consume it, and delete it while it is consumed."""
        async with Admin(self._world.cluster.lookupd) as admin:
            while self.working:
                try:
                    await admin.create_channel("plain", "extra")
                    async with self._make("plain", "extra"):
                        await self._rest()
                        await admin.delete_channel("plain", "extra", missing_ok=True)
                        await self._rest()
                except NsqError:
                    await self._rest()

    async def resume_channels(self) -> None:
        """Resume what was paused; faults have ended.

        Raises:
            NsqError: a channel cannot be resumed.
        """
        if not self._paused:
            return
        async with Admin(self._world.cluster.lookupd) as admin:
            for channel in self._paused:
                for last in [*[False] * _MOST, True]:
                    try:
                        await admin.unpause_channel(channel.topic, channel.name)
                        break
                    except NsqError:
                        if last:
                            raise
                        await anyio.sleep(1.0)
