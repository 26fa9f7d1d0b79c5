"""Combine the settings of an app and its handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.client.producer.options import ProducerOptions

__all__ = ("consumer_options", "shared_options")

A = TypeVar("A", bound=attrs.AttrsInstance)
_SHARED = ("connection", "lookup")


def shared_options(producer: ProducerOptions, consumer: ConsumerOptions) -> tuple[ProducerOptions, ConsumerOptions]:
    """Return the options with ``connection`` and ``lookup`` copied from the one that sets them to the other.

    Raises:
        InvalidSetting: both set one of them, to different values.
    """
    groups: dict[str, Any] = {}
    for name in _SHARED:
        first, second = getattr(producer, name), getattr(consumer, name)
        default = type(first)()
        if default not in (first, second) and first != second:
            raise InvalidSetting(
                f"producer_options.{name} and consumer_options.{name} differ", hint="set only one of them"
            )
        groups[name] = second if first == default else first
    return attrs.evolve(producer, **groups), attrs.evolve(consumer, **groups)


def consumer_options(app: ConsumerOptions, handler: ConsumerOptions, place: str) -> ConsumerOptions:
    """Return the options of one handler: its own where they differ from the defaults, otherwise those of the app.

    Args:
        app: options of the app.
        handler: options given for the handler.
        place: topic and channel, for errors.

    Raises:
        InvalidSetting: the handler has other ``connection`` or ``lookup`` options than the app, or the combined
            options contradict each other.
    """
    for name in _SHARED:
        own = getattr(handler, name)
        if own not in (type(own)(), getattr(app, name)):
            raise InvalidSetting(
                f"the handler of {place} has {name} options of its own",
                hint=f"set them for the app: App(consumer_options=ConsumerOptions({name}=...))",
            )
    return _combined(app, handler)


def _combined(below: A, above: A) -> A:
    """Return ``below`` with every member of ``above`` that is not its default."""
    defaults = type(above)()
    changes: dict[str, Any] = {}
    for member in attrs.fields(type(above)):
        value, default = getattr(above, member.name), getattr(defaults, member.name)
        if value == default:
            continue
        if attrs.has(type(default)) and type(value) is type(default):
            value = _combined(getattr(below, member.name), value)
        changes[member.name] = value
    combined: A = attrs.evolve(below, **changes)  # type: ignore[misc]
    return combined
