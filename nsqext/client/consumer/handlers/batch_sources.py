"""Where the workers of a batch handler take batches from: a queue, or a lane whose keys keep their order.

The messages of a lane's batch have an outcome each. One that is requeued is handled again before the later ones of its
key: those of the same batch that were not answered are held back with it, and handed out again behind it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from nsqext.client.consumer.handlers.batches import BatchLimits
    from nsqext.client.consumer.handlers.key_lanes import KeyLanes
    from nsqext.client.consumer.handlers.workers import MessageQueue
    from nsqext.client.consumer.message import Message

_clock = time.monotonic


class BatchCollector:
    """Takes messages from a queue when they make a batch.

    Messages stay in the queue until then: cancelling `collect` loses none.
    """

    def __init__(
        self,
        queue: MessageQueue,
        ended: Callable[[], bool],
        request_more: Callable[[], float],
        take: Callable[[int], list[Message]] | None = None,
    ) -> None:
        self._queue = queue
        self._ended = ended  # whether no further batch is handed out
        # sends answers and raises RDY; returns for how many seconds to wait for more messages
        self._request_more = request_more
        # removes up to a number of messages and returns those that can be handed out; by default from the queue
        self._take = queue.take if take is None else take
        self._turn = anyio.Lock()

    def of_lane(self, lanes: KeyLanes, lane: MessageQueue) -> LaneBatches:
        """Return the batches of a lane, which are complete by the same rules."""
        return LaneBatches(lanes, lane, self._ended, self._request_more)

    async def collect(self, limits: BatchLimits, deadline: float = float("inf")) -> list[Message]:
        """Return the next messages; none at the end of the consumer, or by the deadline on the monotonic clock.

        A batch is handed out early when all messages that may be in flight were received. Concurrent calls take turns.
        """
        messages = self._queue.messages
        async with self._turn:
            while not self._ended():
                if len(messages) < limits.max_count and await self._wait(limits, deadline):
                    continue
                taken = self._take(limits.max_count)
                if taken or _clock() >= deadline:
                    return taken
                if messages and (budget := messages[0].budget) is not None:
                    self._request_more()
                    with anyio.move_on_after(deadline - _clock()):
                        await budget.wait()
        return []

    def held_back(self) -> Collection[Message]:
        """Return nothing: no message waits for another one."""
        return ()

    def end(self) -> None:
        """Do nothing: answers were sent when they were given."""

    async def _wait(self, limits: BatchLimits, deadline: float) -> bool:
        """Wait for further messages; return False if the batch should not wait longer."""
        patience, now, messages = self._request_more(), _clock(), self._queue.messages
        pause = deadline - now
        if messages:
            pause = min(pause, messages[0].delivered + limits.max_wait - now, patience)
        if pause <= 0:
            return False
        with anyio.move_on_after(pause) as scope:
            await self._queue.wait()
        return not scope.cancelled_caught


class LaneBatches(BatchCollector):
    """Takes batches from a lane: messages of the keys that it serves, in their order."""

    def __init__(
        self, lanes: KeyLanes, lane: MessageQueue, ended: Callable[[], bool], request_more: Callable[[], float]
    ) -> None:
        super().__init__(lane, ended, request_more, lambda count: lanes.take_batch(lane, count))
        self._lanes = lanes
        self._lane = lane

    def held_back(self) -> Collection[Message]:
        """Return the messages of the last batch that wait for an earlier one of their key, which was requeued."""
        return self._lanes.held_back(self._lane)

    def end(self) -> None:
        """Let requeued messages of the last batch, and those that are held back, wait for their time."""
        self._lanes.end_batch(self._lane)
