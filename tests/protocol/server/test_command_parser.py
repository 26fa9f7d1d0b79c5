"""The command parser of the server role: boundaries of commands, and early refusals."""

from __future__ import annotations

import pytest

from nsqext.protocol.client import commands
from nsqext.protocol.server.command_parser import MAX_LINE, MAX_LINE_ORIGINAL, Command, CommandParser
from nsqext.protocol.server.request_error import RequestError
from tests.support.command_reader import OpenRules, read_commands
from tests.support.commands import ext_body, multi_body
from tests.support.tables import table

_ID = b"\n FIN\r\nREQ \x00\x80\xff\n\n"


def _words(data: bytes, *, raw_ids: bool = True) -> list[list[bytes]]:
    reading = read_commands([data], raw_ids=raw_ids)
    assert reading.error is None
    return [command.words for command in reading.commands]


@table(
    ("line", "words"),
    [
        (b"NOP\n", [b"NOP"]),
        (b"NOP\r\n", [b"NOP"]),
        (b"\n", [b""]),
        (b"SUB  t c \n", [b"SUB", b"", b"t", b"c", b""]),
        (b"RDY 1\r\r\n", [b"RDY", b"1\r"]),
        (b"pub t\n", [b"pub", b"t"]),
        (b"TOUC x\n", [b"TOUC", b"x"]),
        (b"FI\n", [b"FI"]),
    ],
)
def test_a_line_is_split_on_every_blank(line: bytes, words: list[bytes]) -> None:
    assert _words(line + b"NOP\n") == [words, [b"NOP"]]


def test_raw_ids_may_contain_any_byte() -> None:
    assert len(_ID) == 16
    data = commands.fin(_ID) + commands.req(_ID, 90) + commands.touch(_ID) + commands.NOP
    assert _words(data) == [[b"FIN", _ID], [b"REQ", _ID, b"90"], [b"TOUCH", _ID], [b"NOP"]]


@table(
    ("line", "words"),
    [
        (b"REQ " + _ID + b"\n", [b"REQ", _ID]),
        (b"REQ " + _ID + b" \n", [b"REQ", _ID, b""]),
        (b"REQ " + _ID + b"x12\n", [b"REQ", _ID, b"12"]),
        (b"REQ " + _ID + b" 1 2\r\n", [b"REQ", _ID, b"1 2\r"]),
        (b"FIN " + _ID + b" more words\n", [b"FIN", _ID]),
        (b"FINISH of sixteen__y\n", [b"FIN", b"SH of sixteen__y"]),
        (b"TOUCH sixteen_bytes_id and more\n", [b"TOUCH", b"sixteen_bytes_id"]),
        (b"TOUCH " + _ID + b"?", [b"TOUCH", _ID]),
    ],
)
def test_odd_lines_with_ids_are_cut_where_the_redesigned_server_cuts_them(line: bytes, words: list[bytes]) -> None:
    assert _words(line + b"NOP\n") == [words, [b"NOP"]]


def test_the_original_server_reads_ids_as_words() -> None:
    data = b"FIN 0123456789abcdef\nREQ 0123456789abcdef 5\r\nTOUCH 01\nFIN\n"
    assert _words(data, raw_ids=False) == [
        [b"FIN", b"0123456789abcdef"],
        [b"REQ", b"0123456789abcdef", b"5"],
        [b"TOUCH", b"01"],
        [b"FIN"],
    ]


def test_bodies_are_cut_by_their_size() -> None:
    data = commands.sized(b"PUB t\n", b"NOP\n\x00") + commands.auth(b"x" * 200_000) + commands.NOP
    for piece in (1, 5, 4096, len(data)):
        reading = read_commands([data[start : start + piece] for start in range(0, len(data), piece)])
        assert reading.commands == [
            Command([b"PUB", b"t"], b"NOP\n\x00"),
            Command([b"AUTH"], b"x" * 200_000),
            Command([b"NOP"]),
        ]


def test_a_batch_is_cut_by_its_items_not_by_its_size() -> None:
    body = multi_body([b"a", b"bc"])
    reading = read_commands([b"MPUB t\n\x00\x00\x00\x05" + body + commands.NOP])
    assert [item.body for item in reading.commands[0].items or ()] == [b"a", b"bc"]
    assert reading.commands[1].words == [b"NOP"]


def test_a_line_is_refused_before_its_size_is_received() -> None:
    class Rules(OpenRules):
        def check_line(self, words: list[bytes]) -> None:
            raise RequestError("E_INVALID", "no")

    parser = CommandParser(Rules())
    parser.receive(b"PUB t\n")
    with pytest.raises(RequestError, match="E_INVALID no"):
        parser.next_command()


def test_a_size_is_refused_before_its_body_is_received() -> None:
    parser = CommandParser(OpenRules())
    parser.receive(b"PUB t\n\x7f\xff\xff\xff")
    with pytest.raises(RequestError, match="E_BAD_MESSAGE message too big 2147483647 > 1048576"):
        parser.next_command()


def test_behind_a_refused_item_the_rest_of_the_batch_stays_in_the_stream() -> None:
    body = multi_body([ext_body(b"{}", b"a"), b"\x00\x00PING\n"])
    parser = CommandParser(OpenRules(extend=False))
    parser.receive(commands.sized(b"MPUB_EXT t\n", body))
    with pytest.raises(RequestError, match="E_EXT_NOT_SUPPORT") as caught:
        parser.next_command()
    assert not caught.value.fatal
    command = parser.next_command()
    assert command == Command([b"\x00\x00\x00\x07\x00\x00PING"])


@pytest.mark.parametrize("start", [b"x", b"FIN ", b"REQ ", b"TOUCH "])
@pytest.mark.parametrize("piece", [1000, MAX_LINE * 2])
def test_an_endless_line_ends_the_connection_silently(start: bytes, piece: int) -> None:
    data = start + b"x" * (MAX_LINE * 2)
    reading = read_commands([data[at : at + piece] for at in range(0, MAX_LINE + 2000, piece)])
    assert reading.error is not None
    assert reading.error.code == ""
    assert not reading.commands


@pytest.mark.parametrize(("longest", "raw_ids"), [(MAX_LINE, True), (MAX_LINE_ORIGINAL, False)])
def test_a_line_may_take_all_of_the_servers_buffer(longest: int, raw_ids: bool) -> None:
    line = b"x" * (longest - 1) + b"\n"
    for pieces in ([line], [line[:-1], line[-1:]]):
        assert [command.words for command in read_commands(pieces, raw_ids=raw_ids).commands] == [[line[:-1]]]
    assert read_commands([b"x" + line], raw_ids=raw_ids).error is not None


def test_remaining_bytes_belong_to_the_next_layer() -> None:
    parser = CommandParser(OpenRules())
    parser.receive(commands.identify(b"{}") + b"\x16\x03\x01")
    assert parser.next_command() == Command([b"IDENTIFY"], b"{}")
    assert parser.buffered == 3
    assert parser.take_rest() == b"\x16\x03\x01"
    parser.receive(b"NOP\n")
    assert parser.next_command() == Command([b"NOP"])
