"""Addresses as users write them, and everything that is none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidSetting
from nsqext.lookup.addresses import parse_address, parse_addresses
from nsqext.types import Address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:4161", Address("127.0.0.1", 4161)),
        ("http://lookup-1.example.com:4161", Address("lookup-1.example.com", 4161)),
        ("http://lookup:4161/", Address("lookup", 4161)),
        (" nsq_lookupd:1 ", Address("nsq_lookupd", 1)),
        ("[::1]:4161", Address("::1", 4161)),
        ("http://[fe80::1%eth0]:65535", Address("fe80::1%eth0", 65535)),
    ],
)
def test_addresses_are_read(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lookup",
        "lookup:",
        ":4161",
        "lookup:0",
        "lookup:65536",
        "lookup:99999999",
        "lookup:-1",
        "lookup:+1",
        "lookup:٤١٦١",
        "https://lookup:4161",
        "nsq://lookup:4161",
        "lookup:4161/lookup",
        "http://lookup:4161?x=1",
        "::1:4161",
        "[::1]",
        "[lookup]:4161",
        "a b:4161",
        "lookup:4161\nHost: x",
        "http://http://lookup:4161",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"lookupd: .* is not an address: write host:port"):
        parse_address(text, "lookupd")


def test_something_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="4161 is not an address"):
        parse_addresses([4161], "nsqd")  # type: ignore[list-item]


def test_a_password_is_not_shown() -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse_address("http://user:secret@lookup:4161")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("given", ["a:1,b:2", " a:1 , b:2 ,", ["a:1", "http://b:2"], ("a:1", "b:2", "a:1")])
def test_lists_and_text_with_commas(given: Sequence[str] | str) -> None:
    assert parse_addresses(given, "lookupd") == (Address("a", 1), Address("b", 2))


@given(host=st.ip_addresses(), port=st.integers(1, 65535))
def test_what_an_address_prints_can_be_read(host: object, port: int) -> None:
    address = Address(str(host), port)
    assert parse_address(str(address)) == address


@given(text=st.text(max_size=30))
def test_any_text_gives_an_address_or_invalid_setting(text: str) -> None:
    with suppress(InvalidSetting):
        assert 1 <= parse_address(text).port <= 65535
