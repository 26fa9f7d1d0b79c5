"""Kombu's messages survive the way through NSQ."""

from __future__ import annotations

import datetime
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.integrations.celery.envelope import (
    QueueSpec,
    decode_message,
    due_time,
    encode_message,
    expires_after,
    foreign_message,
)
from nsqext.protocol.headers import encode_headers
from tests.support.tables import table

if TYPE_CHECKING:
    from nsqext.integrations.celery.envelope import Binding

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def message(body: str | bytes, headers: dict[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    """Return a message as kombu prepares it."""
    info = {"exchange": "", "routing_key": "celery"}
    return {
        "body": body,
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": headers or {},
        "properties": {"delivery_info": info, "delivery_tag": "t", "body_encoding": None, **properties},
    }


@given(st.text(max_size=50) | st.binary(max_size=50), st.dictionaries(st.text(max_size=5), JSON), st.booleans())
def test_body_headers_and_properties_are_kept(body: str | bytes, headers: dict[str, Any], extend: bool) -> None:
    sent = message(body, headers, correlation_id="c", reply_to="r", priority=0)
    stored, extended = encode_message({**sent, "properties": {**sent["properties"], "signal": object()}}, extend=extend)
    assert stored.startswith(b'{"kombu":1,') or (stored and extended), "the format that workers of other versions read"
    received = decode_message(stored, extended or {})
    assert received is not None
    del sent["properties"]["delivery_tag"], sent["properties"]["body_encoding"]
    assert received == sent
    assert type(received["body"]) is type(body)
    if extend and body:
        assert stored == (body.encode() if isinstance(body, str) else body)  # other clients read it


@pytest.mark.parametrize("text", ["x" * 70_000, '"' * 29_000, "é" * 29_000, "\x01" * 9_000])
def test_headers_that_are_too_long_for_an_extend_header_are_sent_in_the_body(text: str) -> None:
    sent = message("body", {"stamps": text})
    stored, extended = encode_message(sent, extend=True)
    encode_headers(extended)  # raises for what servers refuse
    received = decode_message(stored, extended or {})
    assert received is not None
    assert (received["body"], received["headers"]) == ("body", {"stamps": text})


@pytest.mark.parametrize(
    ("transient", "bound", "topics"),
    [
        (False, [], ["q"]),
        (True, [], ["q"]),
        (False, ["logs"], ["exchange.logs", "q"]),
        (True, ["logs"], ["exchange.logs"]),
    ],
)
def test_a_transient_queue_with_bindings_has_no_topic_of_its_own(
    transient: bool, bound: list[str], topics: list[str]
) -> None:
    bindings = [SimpleNamespace(topic=f"exchange.{name}") for name in bound]
    assert QueueSpec("q", transient, cast("list[Binding]", bindings)).topics == topics


@table(
    ("body", "headers"),
    [
        (b"plain", {}),
        (b'{"kombu":', {}),
        (b'{"kombu":2,"body":"","headers":{},"properties":{"delivery_info":{"routing_key":"x"}}}', {}),
        (b'{"kombu":1,"body":"!","headers":{},"properties":{"delivery_info":{"routing_key":"x"}}}', {}),
        (b"x", {"kombu": "{}"}),
        (b"x", {"kombu": orjson.dumps({"headers": 1, "properties": {"delivery_info": {"routing_key": 1}}}).decode()}),
    ],
)
def test_bodies_of_other_publishers_are_binary_data(body: bytes, headers: dict[str, str]) -> None:
    assert decode_message(body, headers) is None
    found = foreign_message(body, "orders")
    assert (found["body"], found["content-encoding"]) == (body, "binary")
    assert found["properties"]["delivery_info"] == {"exchange": "", "routing_key": "orders"}


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the system does not change its time zone")
def test_the_time_of_a_task_is_read_from_its_eta(monkeypatch: pytest.MonkeyPatch) -> None:
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=60)
    due = due_time({"headers": {"eta": later.isoformat()}})
    assert due is not None
    assert 55 < due - time.time() <= 60
    monkeypatch.setenv("TZ", "JST-9")
    time.tzset()
    naive = due_time({"headers": {"eta": later.replace(tzinfo=None).isoformat()}})
    monkeypatch.undo()
    time.tzset()
    assert naive == due
    assert (
        due_time({"headers": {"eta": None}})
        is due_time({"headers": None})
        is due_time({"headers": {"eta": "x"}})
        is None
    )


@pytest.mark.parametrize(("expiration", "seconds"), [("1500", 1.5), (None, None), ("soon", None)])
def test_the_expiration_is_read_in_milliseconds(expiration: str | None, seconds: float | None) -> None:
    assert expires_after(message(b"", expiration=expiration)) == seconds
    assert expires_after(foreign_message(b"", "q")) is None
