"""The settings of producers, consumers and apps, by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from nsqext.client.consumer.options import ConsumerOptions, ConsumerSettings
from nsqext.client.consumer.position import read_position
from nsqext.client.producer.options import ProducerOptions, ProducerSettings
from nsqext.settings import Reader, Schema, Setting, settings_of

__all__ = (
    "AppSettings",
    "app_schema",
    "connection_settings",
    "consumer_schema",
    "consumer_settings",
    "handler_settings",
    "producer_schema",
    "producer_settings",
    "settings_for",
    "shared_settings",
)

_READERS: Mapping[str, Reader] = {"start": read_position, "compression": str}


class AppSettings(ProducerSettings, ConsumerSettings, total=False):
    """Settings of an app: those of its producer and of its consumers. One that both have applies to both."""


@cache
def producer_settings() -> Mapping[str, Setting]:
    """Return the settings of producers by name."""
    return settings_of(ProducerOptions, _READERS)


@cache
def consumer_settings() -> Mapping[str, Setting]:
    """Return the settings of consumers by name."""
    return settings_of(ConsumerOptions, _READERS)


@cache
def connection_settings() -> Mapping[str, Setting]:
    """Return the settings of connections to nodes, which producers and consumers have."""
    return {name: one for name, one in consumer_settings().items() if one.group == "connection"}


@cache
def shared_settings() -> Mapping[str, Setting]:
    """Return the settings of connections and of the lookup client, which producers and consumers have."""
    lookup = {name: one for name, one in consumer_settings().items() if one.group == "lookup"}
    return {**connection_settings(), **lookup}


@cache
def handler_settings() -> Mapping[str, Setting]:
    """Return the settings of consumers that a handler of an app may have of its own."""
    return {name: one for name, one in consumer_settings().items() if name not in shared_settings()}


@cache
def producer_schema() -> Schema:
    """Return the settings of producers."""
    return Schema("Producer", producer_settings(), consumer_settings())


@cache
def consumer_schema() -> Schema:
    """Return the settings of consumers."""
    return Schema("Consumer", consumer_settings(), producer_settings())


@cache
def app_schema() -> Schema:
    """Return the settings of apps."""
    return Schema("App", {**producer_settings(), **consumer_settings()}, {})


def settings_for(known: Mapping[str, Setting], given: Mapping[str, Any]) -> Any:
    """Return the given settings that a client has, as keyword arguments of its class.

    Args:
        known: its settings by name.
        given: settings by name, also of other clients.
    """
    return {name: value for name, value in given.items() if name in known}
