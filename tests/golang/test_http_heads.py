"""Malformed requests are answered as the real servers do; `data/heads.json` has their answers, without dates."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsqext.broker import Cluster
from nsqext.golang.http_heads import BAD_REQUEST, MAX_HEAD, HeadRefused, check_first_line, checked_head, end_of_head

RECORDED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "heads.json").read_text())
_DATE = re.compile(rb"\r\nDate: [^\r]*", re.IGNORECASE)
_HEAD = re.compile(rb"HTTP/1\.1 .*?\r\n\r\n", re.DOTALL)


@pytest.fixture(params=["redesigned", "original"], scope="module")
def ports(request: pytest.FixtureRequest) -> Iterator[dict[str, int]]:
    """HTTP ports of both servers of a generation."""
    generation: str = request.param
    with Cluster(nodes=1, generation=generation) as running:
        (node,) = running.nodes.values()
        http = {"nsqd": node.http, "nsqlookupd": running.lookupd[0]}
        yield {f"{generation} {name}": int(address.rpartition(":")[2]) for name, address in http.items()}


def normal(answer: bytes) -> bytes:
    """Return an answer with sorted headers in lower case, without dates."""

    def sort(head: re.Match[bytes]) -> bytes:
        line, *fields = head[0].strip().split(b"\r\n")
        return b"\r\n".join((line, *sorted(field.lower() for field in fields), b"", b""))

    return _HEAD.sub(sort, _DATE.sub(b"", answer))


def ask(port: int, request: bytes, size: int, *, half_closed: bool, closed: bool) -> tuple[bytes, bool]:
    """Send bytes; return the answer of a size, and whether the server closed the connection."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(5)
        client.sendall(request)
        if half_closed:
            client.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while closed or len(_DATE.sub(b"", answer)) < size:
                chunk = client.recv(1 << 16)
                if not chunk:
                    return answer, True
                answer += chunk
            client.settimeout(0.01)
            rest = client.recv(1)
        except TimeoutError:
            return answer, False
        return answer + rest, not rest


def test_answers_are_those_of_the_real_servers(ports: dict[str, int]) -> None:
    wrong = []
    for case in RECORDED:
        for server, port in ports.items():
            expected, closed = case["answers"][server]["bytes"].encode("latin-1"), case["answers"][server]["closed"]
            request = case["request"].encode("latin-1")
            found, ended = ask(port, request, len(expected), half_closed=case["half_closed"], closed=closed)
            if (normal(found), ended) != (normal(expected), closed):
                wrong.append((case["name"], server, found, ended))
    assert not wrong
    assert len(RECORDED) > 70


def test_a_head_is_as_long_as_in_the_real_servers(ports: dict[str, int]) -> None:
    for port in ports.values():
        for size, end, status in (
            (MAX_HEAD - 100, b"\r\n\r\n", b"HTTP/1.1 200 OK"),
            (MAX_HEAD + 1, b"\r\n\r\n", b"HTTP/1.1 431 Request Header Fields"),
            (MAX_HEAD + 1, b"", b"HTTP/1.1 431 Request Header Fields"),
        ):
            request = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nX: ".ljust(size, b"x") + end
            found, _ = ask(port, request, 20, half_closed=False, closed=b"431" in status)
            assert found.startswith(status)


@pytest.mark.parametrize(
    ("head", "read"),
    [
        (b"GET http://x/ping?a=b HTTP/1.1\nHost: a\n\n", b"GET /ping?a=b HTTP/1.1\r\nHost: a\r\n\r\n"),
        (b"GET http://x HTTP/1.1\r\nHost: a\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
        (b"GET http://x?a=b HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /?a=b HTTP/1.1\r\nHost: a\r\n\r\n"),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: gzip\r\nX: y\r\n\r\n", b"POST / HTTP/1.0\r\nX: y\r\n\r\n"),
        (b"POST / HTTP/1.0\r\nContent-Length: \r\n\r\n", b"POST / HTTP/1.0\r\n\r\n"),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\nTransfer-Encoding: Chunked\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n",
        ),
        (b"OPTIONS * HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: [::1]:80\r\n\r\n"),
    ],
)
def test_heads_are_rewritten_as_go_reads_them(head: bytes, read: bytes) -> None:
    assert checked_head(head) == read
    assert end_of_head(head) == len(head)
    assert end_of_head(head[:-1]) == -1
    assert {end_of_head(head, searched) for searched in range(len(head))} == {len(head)}


def test_a_second_host_is_refused() -> None:
    with pytest.raises(HeadRefused) as caught:
        checked_head(b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n")
    assert caught.value.answer == BAD_REQUEST


@pytest.mark.parametrize("length", [b"9223372036854775808", b"3, 3", b"+3", b"0x3", b"3\r\nContent-Length: 4"])
def test_lengths_that_are_no_number_are_refused(length: bytes) -> None:
    with pytest.raises(HeadRefused) as caught:
        checked_head(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\n\r\n" % length)
    assert caught.value.answer == BAD_REQUEST


@pytest.mark.parametrize("line", [b"  V2IDENTIFY\n", b"GET /ping\r\n", b"\r\n", b"GET ping HTTP/1.1\r\n"])
def test_a_first_line_that_is_no_request_is_refused_before_the_head_ends(line: bytes, ports: dict[str, int]) -> None:
    check_first_line(line.strip(b"\r\n"))
    with pytest.raises(HeadRefused):
        check_first_line(line)
    for port in ports.values():
        found, closed = ask(port, line, len(BAD_REQUEST), half_closed=False, closed=True)
        assert (found, closed) == (BAD_REQUEST, True)
