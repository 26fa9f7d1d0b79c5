"""Reference pages that must match the code: classes, headers, log messages."""

from __future__ import annotations

import importlib
import re

import pytest

from docs import logs_table, settings_table
from nsqext import LookupSettings
from nsqext.client.consumer.handlers.dead_letter import DEAD_LETTER_PREFIX
from nsqext.client.settings import consumer_settings
from nsqext.protocol import messages
from nsqext.protocol.client import body_compression
from nsqext.spark.options import ID_HEADER
from tests.support.programs import ROOT
from tests.support.tables import table

_API = ROOT / "docs" / "reference" / "api"
# errors, App, Router and Admin are described on the page of their own module
_ELSEWHERE = {"__version__", "errors", "Admin", "App", "Router"} | set(importlib.import_module("nsqext.errors").__all__)


@table("module", ["nsqext", "admin", "app", "broker", "middleware", "observability", "spark", "sync", "testing", "web"])
def test_every_public_name_has_a_page(module: str) -> None:
    public = set(importlib.import_module("nsqext" if module == "nsqext" else f"nsqext.{module}").__all__)
    listed = set(re.findall(r"^   (\w+)$", (_API / f"{module}.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert public - listed <= (_ELSEWHERE if module == "nsqext" else set())


def test_the_log_messages_are_up_to_date() -> None:
    """``python -m docs.logs_table`` writes the page."""
    assert logs_table.PAGE.read_text(encoding="utf-8") == logs_table.page()


def test_a_setting_without_a_default_has_no_unit_in_its_place() -> None:
    assert "| `msg_timeout` |  |" in settings_table.page()
    assert "| `output_buffer_timeout` | `0.01` s |" in settings_table.page()


def test_a_setting_without_description_names_where_to_add_it() -> None:
    settings = [consumer_settings()["max_attempts"]]
    text = f"setting max_attempts: add it .* to {LookupSettings.__module__}.LookupSettings"
    with pytest.raises(LookupError, match=text):
        settings_table.section("Consumers", settings, LookupSettings)


def test_every_header_of_the_package_is_described() -> None:
    text = (ROOT / "docs" / "reference" / "headers.md").read_text(encoding="utf-8")
    dead_letter = [
        f"{DEAD_LETTER_PREFIX}{name}" for name in ("error", "topic", "channel", "partition", "attempts", "id", "time")
    ]
    defined = [messages.TAG_HEADER, messages.TRACE_ID_HEADER, messages.KEY_HEADER, ID_HEADER]
    defined += [body_compression.COMPRESS_HEADER, body_compression.SIZE_HEADER]
    assert [name for name in defined + dead_letter if f"`{name}`" not in text] == []
