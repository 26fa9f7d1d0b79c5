"""Paths of header filters; expectations were produced by the server's own library."""

from __future__ import annotations

import pytest

from nsqext.broker.engine.header_filter import text_at


@pytest.mark.parametrize(
    ("path", "header", "found"),
    [
        ("k", b'{"k":"a"}', "a"),
        ("k", b'{"k":"a","k":"b"}', "a"),
        ("k", b'{"k":5,"k":"b"}', None),
        ("k", b'{"K":"a"}', None),
        ("k", b'["k"]', None),
        ("k", b'"k"', None),
        ("k", b'{"\\u006b":"\\u0061"}', "a"),
        ("k", b'{"k":"\xe4\xb8\xad"}', "中"),
        ("k", b'{"k":', None),
        ("k", b"[" * 100_000, None),
        ("o.k", b'{"o":{"k":"a"}}', "a"),
        ("o.k", b'{"o.k":"a"}', None),
        ("o\\.k", b'{"o.k":"a"}', "a"),
        ("o.k", b'{"o":{"x":1},"o":{"k":"a"}}', "a"),
        ("o.k", b'{"o":{"k":null},"o":{"k":"a"}}', None),
        ("o.k", b'{"o":5}', None),
        ("l.1", b'{"l":["a","b"]}', "b"),
        ("l.2", b'{"l":["a","b"]}', None),
        ("l.#", b'{"l":["a","b"]}', None),
        ("l.0.k", b'{"l":[{"k":"a"}]}', "a"),
        ("l.0.k", b'{"l":[{"x":"a"},{"k":"a"}]}', None),
        ("0", b'["a"]', "a"),
        ("0", b'{"0":"a"}', "a"),
        ("..0.k", b'{"k":"a"}', "a"),
        ("k*", b'{"l":"x","k1":"a"}', "a"),
        ("k?", b'{"k":"x","k1":"a"}', "a"),
        ("?", b'{"\xc3\xa9":"a"}', None),
        ("k\\*", b'{"k1":"x","k*":"a"}', "a"),
        ("*.k", b'{"o":{},"p":{"k":"a"}}', "a"),
        ("k\\", b'{"k":"a"}', "a"),
        ("k.", b'{"k":{"":"a"}}', "a"),
    ],
)
def test_path_selects_text(path: str, header: bytes, found: str | None) -> None:
    assert text_at(path, header) == found
