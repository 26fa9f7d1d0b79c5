"""The standing wait for a socket: available on supported event loops, and removed at its end."""

from __future__ import annotations

import socket
import threading

import anyio
import anyio.lowlevel
import pytest

from nsqext.transport.event_loop import Watch, call_in_loop, watch_readable

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

    unused = watch_readable(pair[1], lambda: None)
    assert unused is not None
    unused.start_writing(lambda: None)
    unused.end()
    assert not unused.turns.loop.remove_writer(pair[1].fileno())
    watch.start_writing(writable)
    watch.start_writing(writable)
    with anyio.fail_after(25):
        await enough.wait()
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    assert calls == 3
    watch.stop_writing()
    watch.end()


async def test_a_function_is_called_in_its_loop_at_once_or_soon_and_not_after_its_end(anyio_backend_name: str) -> None:
    loop = anyio.lowlevel.current_token().native_token
    called: list[threading.Thread] = []

    def note() -> None:
        called.append(threading.current_thread())

    async def elsewhere() -> object:
        call_in_loop(loop, note)
        return anyio.lowlevel.current_token().native_token

    for here in (None, loop):
        call_in_loop(here, note)
    assert len(called) == 2
    ended = await anyio.to_thread.run_sync(lambda: anyio.run(elsewhere, backend=anyio_backend_name))
    with anyio.fail_after(25):
        while len(called) < 3:
            await anyio.lowlevel.checkpoint()
    call_in_loop(ended, note)
    assert called == [threading.current_thread()] * 3
