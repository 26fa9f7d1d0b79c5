"""NSQ as a broker of Taskiq: ``broker = NsqBroker("127.0.0.1:4161")``."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, Unpack

from attrs import evolve
from taskiq import AckableMessage, AsyncBroker, BrokerMessage

from nsqext import Admin, AppSettings, Consumer, Lookup, Message, Producer
from nsqext.arguments import is_delay
from nsqext.client.consumer.message import ACCEPTED_DELAY
from nsqext.client.settings import app_schema, consumer_settings, producer_settings, settings_for
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState, MessageNotInFlight
from nsqext.integrations import QueueTopics, kept_delay, log_lost
from nsqext.lookup.lookup import share_lookup
from nsqext.protocol.messages import DUE_HEADER
from nsqext.protocol.names import check_channel, check_topic

__all__ = ("NsqBroker",)

logger: logging.Logger = logging.getLogger("nsqext.taskiq")

_LOSING = ("sample_rate", "ext_filter")  # servers finish what a worker does not take
_OF_HANDLERS = ("max_attempts", "requeue_delay", "max_requeue_delay", "requeue_jitter", "backoff", "concurrency")


class NsqBroker(AsyncBroker):
    """Sends tasks to NSQ topics and receives them through a channel; Taskiq acknowledges them.

    A task is redelivered if a worker dies before its acknowledgement. Labels of a task, set with ``@broker.task(...)``
    or ``task.kicker().with_labels(...)``:

    - ``queue``: its topic, from ``queues``.
    - ``delay``: seconds after which it runs; see `nsqext.Producer.publish`. Workers requeue a task that is delivered
      earlier: on a topic without extend headers, or beyond the longest delay of the original NSQ. Of an ordered topic
      they keep it, and its partition waits.
    - ``key``: tasks of a key share a partition, in the order of the calls.
    - ``tag``: workers with this tag receive it; needs extend support.

    Args:
        lookupd: addresses of nsqlookupd, a URL, or a `nsqext.Lookup`, as for `nsqext.App`.
        nsqd: nsqd addresses without lookup; original NSQ.
        queues: the topics of a worker; tasks without the label ``queue`` go to the first topic.
        channel: the channel of the workers.
        topic_create: create missing topics and channels at the start of a process; needs lookup.
        topic_partitions: partitions of each created topic, on the redesigned NSQ.
        topic_replicas: copies of each partition, on the redesigned NSQ.
        settings: settings of producers and consumers.

    Raises:
        InvalidSetting: unknown or invalid setting, no address, or a setting that has no effect or would lose tasks.
        InvalidName: a queue or channel that servers refuse.
    """

    def __init__(
        self,
        lookupd: str | Sequence[str] | Lookup = (),
        *,
        nsqd: str | Sequence[str] = (),
        queues: Sequence[str] = ("taskiq",),
        channel: str = "taskiq",
        topic_create: bool = True,
        topic_partitions: int = 1,
        topic_replicas: int = 1,
        **settings: Unpack[AppSettings],
    ) -> None:
        super().__init__()
        if isinstance(queues, str):
            raise InvalidSetting(f"queues={queues!r} is one text", hint=f"give queues=[{queues!r}]")
        self.queues: tuple[str, ...] = tuple(check_topic(queue) for queue in queues)
        self.channel: str = check_channel(channel)
        self._given = evolve(app_schema(), client="NsqBroker").collect(lookupd, nsqd, None, settings)
        for name in _LOSING:
            if self._given.values.get(name):
                raise InvalidSetting(f"tasks would be lost with the setting {name}", hint="leave it out")
        for name in _OF_HANDLERS:
            if name in self._given.values:
                raise InvalidSetting(
                    f"the setting {name} has no effect: Taskiq runs and acknowledges the tasks",
                    hint="use its middleware for retries, and --max-async-tasks of its worker",
                )
        self._topics = QueueTopics(
            topic_create=topic_create, topic_partitions=topic_partitions, topic_replicas=topic_replicas
        )
        self._make_clients()

    def _make_clients(self) -> None:
        shared = share_lookup(self._given)
        self._lookup: Lookup | None = shared.lookupd or None
        addresses = {"lookupd": shared.lookupd, "nsqd": shared.nsqd}
        self._producer = Producer(**addresses, **settings_for(producer_settings(), shared.values))
        # Taskiq closes it after it has waited for its tasks; unacknowledged tasks then go back at once
        own = {"close_timeout": 0.0, **settings_for(consumer_settings(), shared.values)}
        self._consumer = Consumer(self.queues, self.channel, **addresses, **own)
        self._started = self._closed = self._listening = False

    async def startup(self) -> None:
        """Open the producer and create missing queues; also again, after `shutdown` or an error.

        Raises:
            NsqError: the servers do not respond, or cannot create a queue.
        """
        if self._started:
            await super().startup()  # a receiver starts its broker again
            return
        if self._closed:
            self._make_clients()
        self._started = True
        try:
            await self._open()
        except BaseException:
            await self._close()
            raise
        await super().startup()

    async def _open(self) -> None:
        lookup = self._lookup
        if self._topics.topic_create and lookup is not None:
            async with Admin(list(map(str, lookup.addresses)), **lookup.given) as admin:
                for queue in self.queues:
                    await admin.create_topic(queue, **self._topics.arguments(self.channel))
        await self._producer.start()

    async def _close(self) -> None:
        self._started, self._closed = False, True
        await self._consumer.aclose()
        await self._producer.aclose()

    async def shutdown(self) -> None:
        """Close the connections; unacknowledged tasks are redelivered."""
        await super().shutdown()
        await self._close()

    async def kick(self, message: BrokerMessage) -> None:
        """Send a task, and wait until it is stored.

        Raises:
            InvalidInput: a label has an invalid value; nothing was sent.
            NsqError: as for `nsqext.Producer.publish`.
        """
        labels = message.labels
        queue = labels.get("queue", self.queues[0])
        if queue not in self.queues:
            raise InvalidInput(f"the task {message.task_name} has the queue {queue!r}", hint=f"queues={self.queues}")
        key, tag = labels.get("key"), labels.get("tag")
        delay = _delay_of(labels)
        if delay:
            delay = kept_delay(await self._producer.meta(queue), delay)
        await self._producer.publish(
            queue,
            message.message,
            key=None if key is None else str(key),
            tag=None if tag is None else str(tag),
            delay=delay or None,
        )

    async def listen(self) -> AsyncGenerator[bytes | AckableMessage, None]:
        """Yield due tasks, touched until `AckableMessage.ack` finishes them.

        When closed, it requests no further tasks; yielded tasks can be acknowledged until `shutdown`.

        Raises:
            InvalidState: it listens already, or has ended to listen since `startup`.
            NsqError: the consumer cannot continue.
        """
        if self._listening:
            raise InvalidState(
                "the broker listens already, or has ended to listen",
                hint="create one broker for each worker process; after shutdown() and startup() it listens again",
            )
        self._listening = True
        await self._consumer.start()
        # tasks of ordered topics that are not due, with the monotonic time when they are
        early: list[tuple[float, Message]] = []
        try:
            while True:
                now = time.monotonic()
                early = [(when, message) for when, message in early if not message.expired]
                due = [message for when, message in early if when <= now]
                early = early[len(due) :]
                pause = early[0][0] - now if early else None
                # one by one, and not by iteration: fetched messages are touched
                for message in due or await self._consumer.fetch(1, pause):
                    wait = self._wait_of(message)
                    if wait > 0 and message.in_order:  # servers ignore a delay there
                        early.append((time.monotonic() + wait, message))
                        early.sort(key=itemgetter(0))
                    elif wait > 0:
                        with suppress(MessageNotInFlight):  # the server delivers it again
                            await message.requeue(min(wait, ACCEPTED_DELAY))
                    else:
                        yield AckableMessage(data=message.body, ack=partial(_finish, message))
        finally:
            self._consumer.pause()

    def _wait_of(self, message: Message) -> float:
        if b"delay" not in message.body:
            return 0.0
        try:
            if message.header_value(DUE_HEADER) is not None:
                return 0.0
            delay = _delay_of(self.formatter.loads(message.body).labels)
        except Exception:  # no task of Taskiq: its worker logs it
            return 0.0
        return message.timestamp / 1e9 + delay - time.time()


async def _finish(message: Message) -> None:
    try:
        await message.finish()
    except MessageNotInFlight as error:
        log_lost(logger, error, message.topic)


def _delay_of(labels: dict[str, Any]) -> float:
    try:
        delay = float(labels.get("delay", 0))
    except (TypeError, ValueError):
        delay = -1.0
    if not is_delay(delay):
        raise InvalidInput(f"the label delay={labels['delay']!r} is not a number of seconds")
    return delay
