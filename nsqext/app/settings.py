"""What the settings of an app mean; see `nsqext.transport.settings`."""

from __future__ import annotations

from nsqext.client.consumer.settings import ConsumerSettings
from nsqext.client.producer.settings import ProducerSettings


class AppSettings(ProducerSettings, ConsumerSettings, total=False):
    """Settings of an app's producer and consumers; a setting of both applies to both."""
