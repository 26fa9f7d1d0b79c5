"""The settings of producers, consumers and apps, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from nsqext.settings import Schema, settings_of

if TYPE_CHECKING:
    from nsqext.client.consumer.position import Position
    from nsqext.protocol.client.body_compression import Compression
    from nsqext.settings import Setting

SELECTING: tuple[str, ...] = ("sample_rate", "ext_filter", "tag", "partitions", "dispatch")
"""Settings with which a consumer may receive only a part of its channel's messages."""


class HelpText:
    """The docstring of a client with its settings, which are read when it is shown."""

    def __init__(self, text: str | None, settings: Callable[[], Mapping[str, Setting]]) -> None:
        self._text, self._settings = text, settings

    def __get__(self, instance: object, owner: type | None = None) -> str | None:
        from nsqext.client.settings_help import with_settings

        return with_settings(self._text, self._settings())


@cache
def producer_settings() -> Mapping[str, Setting]:
    """Return the settings of producers by name."""
    from nsqext.client.producer.options import ProducerOptions

    return settings_of(ProducerOptions, {"compression": _read_compression})


def _read_compression(text: str) -> Compression:
    from nsqext.protocol.client.body_compression import read_compression  # few programs compress

    return read_compression(text)


@cache
def consumer_settings() -> Mapping[str, Setting]:
    """Return the settings of consumers by name."""
    from nsqext.client.consumer.options import ConsumerOptions

    return settings_of(ConsumerOptions, {"start": _read_position})


def _read_position(text: str) -> Position:
    from nsqext.client.consumer.position import read_position

    return read_position(text)


@cache
def connection_settings() -> Mapping[str, Setting]:
    """Return the settings of connections to nodes, for producers and consumers."""
    return {name: one for name, one in consumer_settings().items() if one.group == "connection"}


@cache
def shared_settings() -> Mapping[str, Setting]:
    """Return the settings of connections and lookup, for producers and consumers."""
    lookup = {name: one for name, one in consumer_settings().items() if one.group == "lookup"}
    return {**connection_settings(), **lookup}


@cache
def handler_settings() -> Mapping[str, Setting]:
    """Return the consumer settings that a handler of an app may override."""
    return {name: one for name, one in consumer_settings().items() if name not in shared_settings()}


@cache
def producer_schema() -> Schema:
    """Return the settings of producers."""
    return Schema("Producer", producer_settings(), consumer_settings)


@cache
def consumer_schema() -> Schema:
    """Return the settings of consumers."""
    return Schema("Consumer", consumer_settings(), producer_settings)


@cache
def app_schema() -> Schema:
    """Return the settings of apps."""
    return Schema("App", {**producer_settings(), **consumer_settings()}, dict)


def settings_for(known: Mapping[str, Setting], given: Mapping[str, Any]) -> Any:
    """Return the given settings that a client has, as keyword arguments."""
    return {name: value for name, value in given.items() if name in known}
