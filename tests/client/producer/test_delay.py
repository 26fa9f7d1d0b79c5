"""Messages for a relay: what is published instead of them, and what is refused before anything is."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import Any, Literal

import pytest

from nsqext import OutgoingMessage
from nsqext.client.producer.delay import cancellation, check_for_topic, check_way, delayed_body, relayed
from nsqext.client.producer.delayed_request import due_after
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.publishing import Publishing
from nsqext.errors import ExtendNotSupported, InvalidBody, InvalidInput, InvalidName, InvalidPartition
from nsqext.protocol.delay_record import DelayCancel, DelayedMessage, decode_delay
from nsqext.types import TopicMeta


def _publishing(topic: str = "t", partition: int | None = None, identity: str | None = None, **members: Any) -> Any:
    message = OutgoingMessage(**{"body": b"x", **members})
    return Publishing(topic=topic, messages=[message], batch=False, partition=partition, identity=identity)


@pytest.mark.parametrize(
    ("way", "delay", "identity", "text"),
    [
        ("consumer", 5.0, None, None),
        ("relay", None, None, None),
        ("relay", 5.0, "a", None),
        ("postman", 5.0, None, "neither 'consumer' nor 'relay'"),
        ("consumer", 5.0, "a", "identity= is for messages that a relay delays"),
        ("relay", None, "a", "identity= is for messages that a relay delays"),
    ],
)
def test_an_argument_that_would_be_ignored_is_refused(
    way: str, delay: float | None, identity: str | None, text: str | None
) -> None:
    if text is None:
        check_way(way, delay, identity)
        return
    with pytest.raises(InvalidInput, match=text):
        check_way(way, delay, identity)


@pytest.mark.parametrize(
    ("way", "delay", "identity", "by_relay"),
    [
        ("relay", 1.5, None, True),
        ("relay", 0.0, "order-17", True),  # the relay knows whether it was published or cancelled
        ("relay", 0, None, False),
        ("relay", None, None, False),
        ("consumer", 1.5, None, False),
    ],
)
def test_the_relay_publishes_what_is_delayed_or_has_an_identity(
    way: Literal["consumer", "relay"], delay: float | None, identity: str | None, by_relay: bool
) -> None:
    publishing = _publishing(identity=identity)
    publishing.delay = delay
    body = relayed(ProducerOptions(delay_via=way), publishing)
    assert (body is not None) is by_relay
    if body is not None and identity is not None:
        record, _ = decode_delay(body)
        assert (record.identity, isinstance(record, DelayedMessage)) == (identity, True)


def test_a_record_has_all_parts_of_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    headers = MappingProxyType({"a": "b"})
    whole = _publishing(partition=3, identity="i" * 200, headers=headers, tag="red", trace_id=0, key="k")
    record, body = decode_delay(delayed_body(whole, 1.5))
    assert (record, body) == (
        DelayedMessage(
            identity="i" * 200,
            topic="t",
            due=1_001_500,
            headers={"a": "b"},
            tag="red",
            trace_id=0,
            key=b"k",
            partition=3,
        ),
        b"x",
    )
    stored, _ = decode_delay(delayed_body(_publishing(header=b"{}"), 1.5))
    assert isinstance(stored, DelayedMessage) and stored.header == b"{}"
    plain = [decode_delay(delayed_body(_publishing(), 1.5))[0] for _ in range(2)]
    assert len({record.identity for record in plain}) == 2
    assert plain == [DelayedMessage(identity=record.identity, topic="t", due=1_001_500) for record in plain]


@pytest.mark.parametrize(
    ("publishing", "delay", "kind"),
    [
        (_publishing(identity=""), 1.0, InvalidInput),
        (_publishing(identity="i" * 201), 1.0, InvalidInput),
        (Publishing(topic="t", messages=[OutgoingMessage(b"x")], batch=False, identity=5), 1.0, InvalidInput),  # type: ignore[arg-type]
        (_publishing("a b"), 1.0, InvalidName),
        (_publishing(), -1.0, InvalidInput),
        (_publishing(key=""), 1.0, InvalidInput),
    ],
)
def test_what_no_relay_could_publish_is_refused(publishing: Publishing, delay: float, kind: type[InvalidInput]) -> None:
    with pytest.raises(kind):
        delayed_body(publishing, delay)


_PLAIN, _EXTEND, _ORDERED = TopicMeta(2), TopicMeta(2, extend_support=True), TopicMeta(2, ordered=True)


@pytest.mark.parametrize(
    ("meta", "publishing", "kind"),
    [
        (_PLAIN, _publishing(), None),
        (_PLAIN, _publishing(headers={}), None),
        (_PLAIN, _publishing(headers={"a": "b"}), ExtendNotSupported),
        (_PLAIN, _publishing(tag="red"), ExtendNotSupported),
        (_EXTEND, _publishing(headers={"a": "b"}, tag="red"), None),
        (_EXTEND, _publishing(body=b""), InvalidBody),
        (_PLAIN, _publishing(key="k"), None),
        (_ORDERED, _publishing(), InvalidPartition),
        (_ORDERED, _publishing(key="k"), None),
        (_ORDERED, _publishing(partition=0), None),
    ],
)
def test_a_topic_refuses_what_it_would_refuse_later(
    meta: TopicMeta, publishing: Publishing, kind: type[InvalidInput] | None
) -> None:
    if kind is None:
        check_for_topic(ProducerOptions(), meta, publishing)
        return
    with pytest.raises(kind):
        check_for_topic(ProducerOptions(), meta, publishing)


def test_a_cancellation_says_when_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert decode_delay(cancellation("a")) == (DelayCancel(identity="a", time=1_000_000), b"")
    with pytest.raises(InvalidInput):
        cancellation("")


def test_a_message_is_not_due_before_its_delay_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0004)
    assert due_after(2.0) == 1002001
