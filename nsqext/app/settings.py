"""The settings of an app."""

from __future__ import annotations

from nsqext.client.consumer.options import ConsumerSettings
from nsqext.client.producer.options import ProducerSettings


class AppSettings(ProducerSettings, ConsumerSettings, total=False):
    """Settings of an app: those of its producer and of its consumers. One that both have applies to both."""
