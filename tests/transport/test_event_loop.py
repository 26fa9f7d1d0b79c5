"""The standing wait for a socket: available on supported event loops, and removed at its end."""

from __future__ import annotations

import socket

import anyio
import anyio.lowlevel
import pytest

from nsqext.transport.event_loop import Watch, watch_readable

pytestmark = pytest.mark.anyio


async def _watched(sock: socket.socket, got: list[bytes], news: anyio.Event) -> Watch | None:
    def readable() -> None:
        got.append(sock.recv(100))
        news.set()

    return watch_readable(sock, readable)


async def test_asyncio_watches_and_trio_does_not(
    pair: tuple[socket.socket, socket.socket], anyio_backend_name: str
) -> None:
    near, far = pair
    got: list[bytes] = []
    news = anyio.Event()
    watch = await _watched(near, got, news)
    if anyio_backend_name == "trio":
        assert watch is None
        return
    assert watch is not None
    with anyio.fail_after(25):
        far.send(b"hi")
        await news.wait()
    assert got == [b"hi"]
    watch.end()
    far.send(b"unheard")
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    assert got == [b"hi"]


async def test_writing_is_watched_between_start_and_stop(
    pair: tuple[socket.socket, socket.socket], anyio_backend_name: str
) -> None:
    watch = watch_readable(pair[0], lambda: None)
    assert (watch is None) == (anyio_backend_name == "trio")
    if watch is None:
        return
    calls = 0
    enough = anyio.Event()

    def writable() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            watch.stop_writing()
            enough.set()

    watch.start_writing(writable)
    watch.start_writing(writable)
    with anyio.fail_after(25):
        await enough.wait()
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    assert calls == 3
    watch.stop_writing()
    watch.end()
