"""Error frames of the server role."""

from __future__ import annotations

from nsqext.protocol.server.request_error import RequestError


def test_an_empty_text_leaves_its_blank() -> None:
    assert RequestError("E_TOPIC_NOT_EXIST").frame()[8:] == b"E_TOPIC_NOT_EXIST "
    assert RequestError("E_INVALID", "cannot SUB").frame() == b"\x00\x00\x00\x18\x00\x00\x00\x01E_INVALID cannot SUB"


def test_a_code_can_stand_alone() -> None:
    assert RequestError("E_BAD_PROTOCOL", None).frame()[8:] == b"E_BAD_PROTOCOL"
    assert RequestError("E_BAD_PROTOCOL").frame()[8:] == b"E_BAD_PROTOCOL"
    assert RequestError("too much client connections", None).frame()[8:] == b"too much client connections"


def test_bytes_of_the_client_are_echoed_unchanged() -> None:
    text = b"RDY could not parse count \xff\xc3\xa9".decode("utf-8", "surrogateescape")
    assert RequestError("E_INVALID", text).frame().endswith(b"count \xff\xc3\xa9")


def test_errors_are_fatal_by_default() -> None:
    assert RequestError("E_INVALID").fatal
    assert not RequestError("E_FIN_FAILED", fatal=False).fatal
