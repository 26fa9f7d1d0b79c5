"""Transports for task queues: `nsqext.integrations.celery` and `nsqext.integrations.taskiq`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from nsqext.arguments import check_counts, check_kinds
from nsqext.client.consumer.message import ACCEPTED_DELAY

if TYPE_CHECKING:
    import logging

    from nsqext.errors import NsqError
    from nsqext.types import TopicMeta

__all__ = ("QueueTopics", "kept_delay", "log_lost")


@frozen(kw_only=True)
class QueueTopics:
    """How queues' topics are created; numbers and extend headers apply to the redesigned NSQ."""

    topic_create: bool = True  #: if False, they must exist
    topic_partitions: int = 1  #: of each topic
    topic_replicas: int = 1  #: of each partition
    topic_extend: bool = True  #: with extend headers

    def __attrs_post_init__(self) -> None:
        check_kinds(self)
        check_counts(self, "topic_partitions", "topic_replicas")

    def arguments(self, channel: str) -> dict[str, Any]:
        """Return the arguments of `nsqext.Admin.create_topic`; an existing topic stays unchanged."""
        return {
            "partitions": self.topic_partitions,
            "replicas": self.topic_replicas,
            "extend": self.topic_extend,
            "channels": [channel],
            "exist_ok": True,
        }


def kept_delay(meta: TopicMeta, delay: float) -> float:
    """Return the seconds for which servers keep a task; less than its delay where workers must return it."""
    if not meta.partition_num:
        return min(delay, ACCEPTED_DELAY)
    return delay if meta.extend_support and not meta.ordered else 0.0


def log_lost(logger: logging.Logger, error: NsqError, queue: str) -> None:
    """Log that a message was acknowledged too late."""
    logger.error(
        "queue %s: a message was acknowledged after the server had taken it back, and is delivered again: %s; a task "
        "may run for the server's -max-msg-timeout (15 minutes by default)",
        queue,
        error,
    )
