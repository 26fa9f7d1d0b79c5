"""Mistakes in Celery and Taskiq."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "closing one of Celery's queues drops what was received from the others",
        "integrations/celery/transport.py",
        "                    self._inbox.put(item)\n                    continue\n",
        "                    continue\n",
    ),
    Mistake(
        "closing a queue requeues what was received from the others",
        "integrations/celery/transport.py",
        "                if item[1] is not source:\n"
        "                    self._inbox.put(item)\n"
        "                    continue\n",
        "",
    ),
    Mistake(
        "the queue size counts messages in flight",
        "integrations/celery/nsq_clients.py",
        "one.lag - one.in_flight",
        "one.lag",
    ),
    Mistake(
        "the consumer of basic_get stays open without a message",
        "integrations/celery/transport.py",
        "                inbox.get(block=False)[1].requeue()\n            source.consumer.close()\n",
        "                inbox.get(block=False)[1].requeue()\n",
    ),
    Mistake(
        "the consumer of basic_get stays open with no_ack",
        "integrations/celery/transport.py",
        "        if no_ack:\n            source.consumer.close()\n",
        "",
    ),
    Mistake(
        "basic_get receives more than it returns",
        "integrations/celery/transport.py",
        "self._open_source(queue, 1, lambda",
        "self._open_source(queue, 0, lambda",
    ),
    Mistake(
        "a message that came late for basic_get is kept",
        "integrations/celery/transport.py",
        "            with suppress(Empty):\n"
        "                inbox.get(block=False)[1].requeue()\n"
        "            source.consumer.close()",
        "            source.consumer.close()",
    ),
    Mistake(
        "an expired message is delivered",
        "integrations/celery/transport.py",
        "        if message.expired:\n            return\n",
        "",
    ),
    Mistake(
        "a changed prefetch count has no effect on open queues",
        "integrations/celery/transport.py",
        "source.consumer.max_in_flight = prefetch_count or DEFAULT_PREFETCH",
        "pass",
    ),
    Mistake(
        "queue_delete ignores if_empty",
        "integrations/celery/transport.py",
        "        if if_empty and self._size(queue):\n            return\n",
        "",
    ),
    Mistake(
        "a topic that is missing ends the count",
        "integrations/celery/nsq_clients.py",
        "            except TopicNotFound:\n                continue\n            for partition",
        "            except TopicNotFound:\n                return 0\n            for partition",
    ),
    Mistake(
        "a removed binding stays",
        "integrations/celery/transport.py",
        "            one for one in spec.bindings if (one.exchange.name, one.routing_key) != (exchange, routing_key)\n",
        "            one for one in spec.bindings if one.exchange.name != exchange or one.routing_key == routing_key\n",
    ),
    Mistake(
        "the pipe that wakes Celery is not closed",
        "integrations/celery/transport.py",
        "            for end in self._wake:\n                os.close(end)\n            self._wake = None",
        "            self._wake = None",
    ),
    Mistake(
        "a Taskiq worker cannot listen again in its process",
        "integrations/taskiq.py",
        '            raise InvalidState("the broker listens already"',
        '            raise InvalidInput("the broker listens already"',
    ),
    Mistake(
        "a task that is due late is yielded early",
        "integrations/taskiq.py",
        "message.timestamp / 1e9 + delay - time.time()",
        "message.timestamp / 1e9 - time.time()",
    ),
    Mistake(
        "a negative delay of a task is accepted",
        "integrations/taskiq.py",
        "    if not delay >= 0:",
        "    if delay == -1.0 and False:",
    ),
    Mistake(
        "the label key of Taskiq is dropped",
        "integrations/taskiq.py",
        "key=None if key is None else str(key)",
        "key=None",
    ),
    Mistake(
        "the label tag of Taskiq is dropped",
        "integrations/taskiq.py",
        "tag=None if tag is None else str(tag)",
        "tag=None",
    ),
)
