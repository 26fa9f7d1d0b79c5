"""Writes the table of settings, from what the typed dictionaries say about their members."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docs.generated_section import with_section
from nsqext import ConnectionSettings, ConsumerSettings, HandlerSettings, LookupSettings, ProducerSettings
from nsqext.client.settings import consumer_settings, producer_settings
from nsqext.client.settings_help import default_of, descriptions
from nsqext.settings_text import PREFIX

if TYPE_CHECKING:
    from nsqext.settings import Setting

PAGE = Path(__file__).parent / "reference" / "settings.md"

TEN = {
    "timeout": "a caller cannot wait that long for a publish",
    "on_unknown": "a message must not be stored twice: `settle`, or `raise` and decide yourself",
    "concurrency": "handlers wait for a database or a service: as many as that side takes",
    "max_in_flight": "a consumer is far away, or has many lanes: about 50 for each handler",
    "key": "messages of a key have to be handled in their order",
    "start": "a new channel has to receive messages that are stored already: `earliest`",
    "msg_timeout": "handlers run for long and `auto_touch` is off, or a stuck handler has to be noticed sooner",
    "max_attempts": "a message that always fails has to be given up",
    "dead_letter": "given up messages are kept: together with `max_attempts`",
    "tls": "the network between client and nodes is not yours",
}
"""The settings that programs set most, each with its reason."""
_SHARED = (ConnectionSettings, LookupSettings)


def _default(setting: Setting) -> str:
    value, _, unit = default_of(setting).partition(" ")
    return f"`{value}` {unit}".strip() if value else ""


def row(setting: Setting, said: str) -> str:
    """Return the line of a setting."""
    name = f"`{setting.name}`" + ("" if setting.read is not None else " (keyword only)")
    return f"| {name} | {_default(setting)} | {said.replace('|', chr(92) + '|')} |"


def section(title: str, settings: Iterable[Setting], *documented: Any) -> list[str]:
    """Return the table of some settings below a title; raise `LookupError` for a setting that is not described."""
    said, rows = descriptions(*documented), []
    for one in settings:
        if one.name not in said:
            places = " or ".join(f"{place.__module__}.{place.__name__}" for place in documented)
            raise LookupError(
                f"setting {one.name}: add it with its type, and a string below that describes it, to {places}"
            )
        rows.append(row(one, said[one.name]))
    return [f"## {title}", "", "| setting | default | meaning |", "| --- | --- | --- |", *rows, ""]


def most_used(producer: Mapping[str, Setting], consumer: Mapping[str, Setting]) -> list[str]:
    """Return the table of the settings that programs set most."""
    lines = ["## The ten settings that you will use", ""]
    lines += ["| setting | of | default | set it when |", "| --- | --- | --- | --- |"]
    for name, reason in TEN.items():
        clients = [client for client, known in (("producers", producer), ("consumers", consumer)) if name in known]
        default = _default(producer.get(name) or consumer[name])
        lines.append(f"| `{name}` | {', '.join(clients)} | {default} | {reason} |")
    return [*lines, ""]


def table() -> str:
    """Return all tables."""
    own, others = producer_settings(), consumer_settings()
    both = [one for name, one in own.items() if name in others and others[name].owner is one.owner]
    producer = [one for one in own.values() if one not in both]
    consumer = [one for name, one in others.items() if name not in {one.name for one in both}]
    lines = most_used(own, others)
    lines += section("Connections and lookup", both, *_SHARED)
    lines += section("Producers", producer, ProducerSettings)
    lines += section("Consumers", consumer, HandlerSettings, ConsumerSettings)
    return "\n".join(lines)


def page() -> str:
    """Return the page with the table as it has to be."""
    return with_section(PAGE, table())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}, whose variables begin with {PREFIX}\n")
