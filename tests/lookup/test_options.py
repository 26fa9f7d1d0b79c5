"""Options of the lookup client are checked, and addresses are parsed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidSetting
from nsqext.lookup.options import LookupOptions, LookupUrl, parse_addresses, parse_lookup_addresses, url_of
from nsqext.types import Address


def parse(text: str) -> Address:
    """Return the lookup address of a text."""
    (address,) = parse_lookup_addresses([text])
    return address


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("poll_interval", 0),
        ("poll_interval", math.nan),
        ("max_poll_interval", 0),
        ("request_timeout", -1.0),
        ("retry_failed", 0.0),
        ("straggler_timeout", -0.1),
        ("max_pause", -1),
        ("poll_jitter", 1.0),
        ("poll_jitter", -0.1),
        ("max_failures", 0),
        ("max_answer_size", 0),
        ("max_lookup_nodes", 0),
        ("max_nodes", 0),
        ("max_concurrent", 0),
        ("ca", True),
        ("ca", "no-such-file.pem"),
        ("auth_over_http", "yes"),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=f"{name}={value!r}"):
        LookupOptions(**{name: value})


def test_the_bounds_are_allowed() -> None:
    assert LookupOptions(poll_jitter=0, straggler_timeout=0, max_pause=0, max_failures=1).max_failures == 1


def test_a_file_of_ca_certificates(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    context = LookupOptions(ca=str(path)).tls_context()
    assert context is not None
    assert len(context.get_ca_certs()) == 1


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("[::1]:4161", True),
        ("https://lookup.example.com", True),
        ("lookup.example.com", False),
        ("http://10.0.0.1/nsq", False),
    ],
)
def test_a_token_is_sent_in_clear_to_loopback_only(address: str, allowed: bool) -> None:
    options = LookupOptions(auth_secret="hush")
    if allowed:
        options.check_auth([parse(address)])
        return
    with pytest.raises(InvalidSetting, match="auth_secret would be sent in clear") as caught:
        options.check_auth([parse(address)])
    assert "hush" not in str(caught.value)
    LookupOptions(auth_secret="hush", auth_over_http=True).check_auth([parse(address)])
    LookupOptions().check_auth([parse(address)])


# Addresses


@pytest.mark.parametrize(
    ("text", "address", "url"),
    [
        ("127.0.0.1:4161", Address("127.0.0.1", 4161), "http://127.0.0.1:4161"),
        ("lookup", Address("lookup", 4161), "http://lookup:4161"),
        ("http://lookup", Address("lookup", 4161), "http://lookup:4161"),
        ("[::1]", Address("::1", 4161), "http://[::1]:4161"),
        ("http://lookup-1.example.com:4171", Address("lookup-1.example.com", 4171), None),
        ("http://lookup:4161/", Address("lookup", 4161), None),
        (" nsq_lookupd:1 ", Address("nsq_lookupd", 1), None),
        ("[::1]:4161", Address("::1", 4161), None),
        ("http://[fe80::1%eth0]:65535", Address("fe80::1%eth0", 65535), None),
        ("https://lookup", LookupUrl("lookup", 443, "https"), "https://lookup:443"),
        ("https://gw:8443/a/b/", LookupUrl("gw", 8443, "https", "/a/b"), "https://gw:8443/a/b"),
        ("http://gw/nsq", LookupUrl("gw", 4161, "http", "/nsq"), "http://gw:4161/nsq"),
    ],
)
def test_lookup_addresses(text: str, address: Address, url: str | None) -> None:
    assert parse(text) == address
    assert url is None or url_of(address) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lookup:",
        ":4161",
        "lookup:0",
        "lookup:65536",
        "lookup:99999999",
        "lookup:-1",
        "lookup:+1",
        "lookup:٤١٦١",
        "nsq://lookup:4161",
        "http://lookup:4161?x=1",
        "::1:4161",
        "[lookup]:4161",
        "a b:4161",
        "lookup:4161\nHost: x",
        "http://http://lookup:4161",
        "https://lookup/a b",
    ],
)
def test_invalid_lookup_addresses_are_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"lookupd: .* is not an address: .*write host"):
        parse(text)


@pytest.mark.parametrize("text", ["", "node", "http://node:4150", "node:4150/x", "[::1]", "node:0"])
def test_invalid_node_addresses_are_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"nsqd: .* is not an address: write host:port"):
        parse_addresses([text], "nsqd")


@pytest.mark.parametrize("text", ["::1:4150", "fe80::2:4150", "2001:db8::1"])
def test_ipv6_without_brackets_is_shown_with_a_hint(text: str) -> None:
    with pytest.raises(InvalidSetting, match=rf"nsqd: '{text}' is not an address: an IPv6 address needs brackets"):
        parse_addresses([text], "nsqd")


def test_what_may_be_a_secret_without_a_host_is_not_shown() -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse_addresses([":swordfish"], "nsqd")
    assert "swordfish" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [([4161], "4161 is not an address"), *((given, "write text such as") for given in (4161, b"a:1", {"a:1": 1}))],
)
def test_a_value_that_is_not_text_is_refused(given: Any, text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        parse_addresses(given, "nsqd")


def test_a_password_is_not_shown() -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse("http://user:hush@lookup:4161")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("given", ["a:1,b:2", " a:1 , b:2 ,", ["a:1", "b:2"], ("a:1", "b:2", "a:1")])
def test_lists_and_text_with_commas(given: Sequence[str] | str) -> None:
    assert parse_addresses(given, "nsqd") == parse_lookup_addresses(given) == (Address("a", 1), Address("b", 2))


@given(host=st.ip_addresses(), port=st.integers(1, 65535))
def test_a_printed_address_can_be_parsed(host: object, port: int) -> None:
    address = Address(str(host), port)
    assert parse(str(address)) == address
    secured = LookupUrl(str(host), port, "https", "/x")
    assert parse(str(secured)) == secured


@given(text=st.text(max_size=30))
def test_any_text_gives_an_address_or_invalid_setting(text: str) -> None:
    with suppress(InvalidSetting):
        assert 1 <= parse(text).port <= 65535
