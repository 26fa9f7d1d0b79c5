"""Settings of producers and consumers, and the loaders of `from_url`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.position import Position
from nsqext.client.producer.options import ProducerOptions
from nsqext.settings import Loaded, Reader, Setting, load, settings_of, unknown_setting

__all__ = (
    "consumer_settings",
    "load_clients",
    "load_consumer",
    "load_producer",
    "producer_settings",
    "read_position",
)


def read_position(text: str) -> Position:
    """Parse ``earliest``, ``latest``, ``timestamp:SECONDS``, ``offset:BYTES`` or ``message:NUMBER``."""
    kind, _, number = text.partition(":")
    if text == "earliest":
        return Position.earliest()
    if text == "latest":
        return Position.latest()
    if kind == "timestamp":
        return Position.at(float(number))
    if kind == "offset":
        return Position.offset(int(number))
    if kind == "message":
        return Position.message(int(number))
    raise ValueError("write earliest, latest, timestamp:SECONDS, offset:BYTES or message:NUMBER")


_READERS: Mapping[str, Reader] = {"start": read_position, "compression": str}
_DIRECT = (
    Setting("tag", "tag", "", "str | None", None, str),
    Setting("max_in_flight", "max_in_flight", "", "int", 200, int),
    Setting("concurrency", "concurrency", "", "int", 1, int),
)


@cache
def producer_settings() -> dict[str, Setting]:
    """Return the settings of producers by name."""
    return settings_of(ProducerOptions, _READERS)


@cache
def consumer_settings() -> dict[str, Setting]:
    """Return the settings of consumers by name."""
    return {setting.name: setting for setting in _DIRECT} | settings_of(ConsumerOptions, _READERS)


def load_producer(
    url: str | None, keywords: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> Loaded[ProducerOptions]:
    """Load the settings of a producer; see `nsqext.settings.load`."""
    return load(ProducerOptions, producer_settings(), url, keywords, foreign=consumer_settings(), environ=environ)


def load_consumer(
    url: str | None, keywords: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> Loaded[ConsumerOptions]:
    """Load the settings of a consumer; see `nsqext.settings.load`."""
    return load(ConsumerOptions, consumer_settings(), url, keywords, foreign=producer_settings(), environ=environ)


def load_clients(
    url: str | None, keywords: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> tuple[Loaded[ProducerOptions], Loaded[ConsumerOptions]]:
    """Load the settings of a producer and of consumers; a setting that both have is set for both.

    Raises:
        InvalidSetting: as for `nsqext.settings.load`.
    """
    producing, consuming = producer_settings(), consumer_settings()
    own = {name: value for name, value in keywords.items() if name in producing or name not in consuming}
    others = {name: value for name, value in keywords.items() if name not in producing or name in consuming}
    addresses = {name: keywords[name] for name in ("lookupd", "nsqd") if name in keywords}
    unknown = [name for name in keywords if name not in {*producing, *consuming, *addresses}]
    if unknown:
        raise unknown_setting("keywords", unknown[0], (*producing, *consuming))
    return load_producer(url, own, environ), load_consumer(url, others | addresses, environ)
