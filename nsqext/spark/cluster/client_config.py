"""Lookup addresses of a job, and client settings as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from nsqext.arguments import is_secret_name, suggest
from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.settings import consumer_settings, producer_settings, shared_settings
from nsqext.errors import InvalidSetting
from nsqext.settings import build, parse

if TYPE_CHECKING:
    from nsqext.settings import Setting

PREFIX = "nsqext."
"""Prefix of options that are client settings."""


@cache
def client_settings(kind: str) -> Mapping[str, Setting]:
    """Return the client settings with an effect in Spark, by name."""
    if kind == "write":
        return producer_settings()
    return {**shared_settings(), "decompress": consumer_settings()["decompress"]}


@frozen
class ClientConfig:
    """How a job reaches the servers. Picklable: files and certificates are read in the process that uses them."""

    lookupd: tuple[str, ...]  #: `host:port` of nsqlookupd's HTTP side
    #: client settings by name, without `nsqext.`; Spark has them as text. Not shown, as they may be secrets.
    settings: Mapping[str, Any] = field(
        factory=dict, repr=lambda given: str({name: "***" if is_secret_name(name) else given[name] for name in given})
    )
    timeout: float = 60.0  #: seconds for a request with leader changes and retries

    def keywords(self, kind: str) -> Any:
        """Return the settings of a producer to write, or a consumer to read, as keyword arguments."""
        known = producer_settings() if kind == "write" else consumer_settings()
        place = f"option {PREFIX}"
        return {
            name: parse(value, known[name], place) if isinstance(value, str) else value
            for name, value in self.settings.items()
            if name in known
        }

    def producer(self) -> ProducerOptions:
        with _named():
            return build(ProducerOptions, producer_settings(), self.keywords("write"))

    def consumer(self) -> ConsumerOptions:
        """Return the options for reading, with connections and lookup."""
        with _named():
            return build(ConsumerOptions, consumer_settings(), self.keywords("read"))

    def check(self, kind: str) -> None:
        known, others = client_settings(kind), client_settings("read" if kind == "write" else "write")
        for name in self.settings:
            if name not in known:
                prefixed = ([f"{PREFIX}{one}" for one in found] for found in (known, others))
                raise wrong_option(f"{PREFIX}{name}", kind, *prefixed)
        if kind == "write":
            self.producer()
        else:
            self.consumer()


@contextmanager
def _named() -> Iterator[None]:
    """Replace a setting's name at the start of an error message by the option's name."""
    try:
        yield
    except InvalidSetting as error:
        if error.message.partition("=")[0] in {*producer_settings(), *consumer_settings()}:
            error.message = f"option {PREFIX}{error.message}"
        raise


def wrong_option(name: str, kind: str, known: Iterable[str], others: Iterable[str]) -> InvalidSetting:
    """Return the error for an option that is unknown, or of the other kind of query."""
    other = next((other for other in others if other.lower() == name.lower()), None)
    if other is not None:
        hint = f"it belongs to {'read' if kind == 'write' else 'write'} options"
        return InvalidSetting(f"option {other} cannot be used to {kind}", hint=hint)
    names = {one.lower(): one for one in known}
    near = suggest(name, names)
    hint = f"do you mean {names[near]}?" if near else f"known options: {', '.join(sorted(names.values()))}"
    return InvalidSetting(f"option {name} is unknown", hint=hint)
