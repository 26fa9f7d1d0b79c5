"""Small values that cross the rooms."""

from __future__ import annotations

import attrs
import pytest

from nsqext.types import Address, Receipt, TopicMeta


def test_addresses_are_formatted_as_clients_accept_them() -> None:
    assert str(Address("127.0.0.1", 4150)) == "127.0.0.1:4150"
    assert str(Address("::1", 4150)) == "[::1]:4150"


def test_addresses_are_values() -> None:
    assert {Address("a", 1): "x"}[Address("a", 1)] == "x"
    assert sorted([Address("b", 1), Address("a", 2), Address("a", 1)])[0] == Address("a", 1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Address("a", 1).port = 2  # type: ignore[misc]


def test_unreported_values_are_none() -> None:
    assert TopicMeta() == TopicMeta(0, 0, False, False, False, False)
    receipt = Receipt("t", None, "n:1")
    assert (receipt.message_id, receipt.trace_id, receipt.offset, receipt.size) == (None, 0, None, None)
