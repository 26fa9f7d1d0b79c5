"""Members that are added to a header of any client are removed without another byte being changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidHeader
from nsqext.protocol.header_members import add_members, without_members
from nsqext.protocol.headers import decode_headers
from tests.support.header_values import WRITTEN
from tests.support.strategies import odd_headers

_ADDED = {"x-first": "1", "x-last": 'é"\\'}
_stored = st.sampled_from([b"", *(written.header for written in WRITTEN)]) | odd_headers()


def _add(header: bytes) -> bytes:
    return add_members(header, _ADDED, original="x-header")


def _remove(header: bytes) -> bytes:
    return without_members(header, "x-first", "x-", original="x-header")


@given(_stored, st.integers(1, 3))
def test_a_header_is_the_same_after_its_members_were_removed(header: bytes, times: int) -> None:
    found = header
    for _ in range(times):
        found = _add(found)
    assert decode_headers(found).items() >= _ADDED.items()
    for _ in range(times):
        found = _remove(found)
    assert found == header


@given(_stored)
def test_other_members_keep_their_values(header: bytes) -> None:
    before, after = decode_headers(header), decode_headers(_add(header))
    kept = {name: repr(after[name]) for name in before if name not in _ADDED}
    assert kept == {name: repr(value) for name, value in before.items() if name not in _ADDED}


def test_members_of_an_earlier_version_are_removed_between_others() -> None:
    assert _remove(b'{"a":"b","x-first":"1","x-last":"2","##key":"k"}') == b'{"a":"b","##key":"k"}'
    assert _remove(b'{"x-first":"1","x-last":"2","##key":"k"}') == b'{"##key":"k"}'
    assert _remove(b'{"x-last":"2", "a":1}') == b'{"a":1}'
    assert _remove(b'{"x-first":"1"}') == b""


def test_a_header_that_was_not_kept_by_this_package_is_refused() -> None:
    with pytest.raises(InvalidHeader, match="x-header is not Base64"):
        _remove(b'{"x-first":"1","x-header":"?"}')
    with pytest.raises(InvalidHeader, match="x-header is not Base64"):
        _remove(b'{"x-first":"1","x-header":[7]}')
