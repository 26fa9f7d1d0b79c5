"""Fake servers for tests: an nsqd with scripted responses, and a lookup node that returns it.

::

    async with scripted_node() as node, Producer(nsqd=[str(node.address)]) as producer, create_task_group() as tasks:
        tasks.start_soon(producer.publish, "t", b"body")
        peer = await node.accept()                       # the next connection, after its handshake
        command = await peer.expect("PUB")               # the next command; another command fails the test
        await peer.answer()                              # OK; also error("E_..."), message(...), raw(bytes)

A node with a script runs it for each connection: ``scripted_node(obey({"PUB": error("E_INVALID")}))``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from struct import pack
from typing import Any

import anyio
import orjson
from anyio import create_task_group
from anyio.abc import ByteStream, Listener, SocketAttribute, SocketStream

from nsqext.errors.server import server_error
from nsqext.protocol.frames import HEARTBEAT, MAGIC_V2, FrameType, encode_frame
from nsqext.protocol.server.command_parser import BatchReader, Command, CommandParser
from nsqext.types import Address
from tests.support.fake_lookupd import lookup_json
from tests.support.loopback import own_host

__all__ = (
    "PLAIN",
    "REDESIGNED",
    "Peer",
    "PeerClosed",
    "ScriptedLookup",
    "ScriptedNode",
    "error",
    "message",
    "obey",
    "ok",
    "scripted_lookup",
    "scripted_node",
    "until",
)

REDESIGNED: Mapping[str, Any] = {"version": "0.3.7-HA.1.13.0", "max_rdy_count": 2500, "msg_timeout": 60000}
"""Response to IDENTIFY of a node of the redesigned generation."""
PLAIN: Mapping[str, Any] = {"version": "1.3.0", "max_rdy_count": 2500, "msg_timeout": 60000}
"""Response to IDENTIFY of a node of the original NSQ."""

_PATIENCE = 25.0


def ok(data: bytes = b"OK") -> bytes:
    """Return a response frame."""
    return encode_frame(FrameType.RESPONSE, data)


def error(text: str) -> bytes:
    """Return an error frame; a code without a text is followed by a space, as by the redesigned server."""
    return encode_frame(FrameType.ERROR, (text if " " in text else text + " ").encode())


def message(
    number: int,
    body: bytes = b"body",
    *,
    attempts: int = 1,
    trace_id: int = 0,
    position: bytes = b"",
    text_id: bool = False,
) -> bytes:
    """Return a message frame with ``number`` as its id: a binary one, or with ``text_id`` one of the original NSQ."""
    number_bytes = b"%016x" % number if text_id else pack(">QQ", number, trace_id)
    data = pack(">qH", 1_700_000_000_000_000_000 + number, attempts) + number_bytes
    return encode_frame(FrameType.MESSAGE, data + position + body)


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds; raise after a deadline. It is tested less often the longer that takes."""
    pause = 0.002
    with anyio.fail_after(_PATIENCE):
        while not condition():
            await anyio.sleep(pause)
            pause = min(1.2 * pause, 0.02)


class PeerClosed(Exception):
    """The client closed the connection while a script waited for a command."""


class _Anything:
    """Rules that accept every command."""

    def check_line(self, words: list[bytes]) -> None:
        pass

    def check_size(self, words: list[bytes], size: int) -> BatchReader | None:
        return None

    def check_end(self, words: list[bytes], batch: BatchReader | None, *, sized: bool) -> None:
        pass


class Peer:
    """A connection of a client, on the server's side.

    Attributes:
        identify: data of the client's IDENTIFY.
        commands: commands after the handshake that `expect` and `next` have returned, oldest first.
        received: bytes received after the handshake, one element for each read.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.identify: dict[str, Any] = {}
        self.commands: list[Command] = []
        self.received: list[bytes] = []
        self._parser = CommandParser(_Anything())

    async def read_magic(self) -> None:
        """Read the protocol magic."""
        head = b""
        while len(head) < len(MAGIC_V2):
            head += await self._read()
        assert head.startswith(MAGIC_V2), head
        self._parser.receive(head[len(MAGIC_V2) :])

    async def handshake(self, granted: Mapping[str, Any]) -> None:
        """Read magic and IDENTIFY, and respond."""
        await self.read_magic()
        command = await self.expect("IDENTIFY")
        self.identify = orjson.loads(command.body or b"{}")
        self.commands.clear()
        self.received.clear()
        await self.raw(ok(orjson.dumps(dict(granted))))

    async def next(self) -> Command:
        """Return the next command other than NOP.

        Raises:
            PeerClosed: the client closed the connection.
        """
        while True:
            command = self._parser.next_command()
            if command is None:
                self._parser.receive(await self._read())
            elif command.words != [b"NOP"]:
                self.commands.append(command)
                return command

    async def expect(self, *names: str) -> Command:
        """Return the next command, which must be one of these."""
        with anyio.fail_after(_PATIENCE):
            command = await self.next()
        assert command.words[0].decode() in names, f"{command.words} instead of {names}"
        return command

    async def expect_nop(self) -> None:
        """Wait for the NOP after a heartbeat."""
        with anyio.fail_after(_PATIENCE):
            while (command := self._parser.next_command()) is None:
                self._parser.receive(await self._read())
        assert command.words == [b"NOP"], command.words

    async def expect_end(self) -> None:
        """Wait until the client closes; a further command fails the test."""
        with anyio.fail_after(_PATIENCE):
            try:
                command = await self.next()
            except PeerClosed:
                return
        raise AssertionError(f"{command.words} received instead of the end of the connection")

    async def answer(self, data: bytes = b"OK") -> None:
        """Send a response."""
        await self.raw(ok(data))

    async def error(self, text: str) -> None:
        """Send an error frame."""
        await self.raw(error(text))

    async def heartbeat(self) -> None:
        """Send a heartbeat."""
        await self.raw(ok(HEARTBEAT))

    async def raw(self, data: bytes) -> None:
        """Send bytes unchanged."""
        try:
            await self.stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as gone:
            raise PeerClosed from gone

    def stop_reading(self) -> None:
        """Stop reading from the socket; asyncio's streams would otherwise read ahead."""
        transport = getattr(self.stream, "_transport", None)
        if transport is not None:
            transport.pause_reading()

    async def close(self) -> None:
        """Close the connection."""
        await self.stream.aclose()

    async def _read(self) -> bytes:
        try:
            data = await self.stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as gone:
            raise PeerClosed from gone
        self.received.append(data)
        return data


Script = Callable[[Peer], Awaitable[None]]
Answer = bytes | None | Callable[[Command], bytes | None]

_SILENT = frozenset((b"RDY", b"FIN", b"REQ", b"TOUCH", b"NOP"))


def obey(answers: Mapping[str, Answer | Sequence[Answer]] | None = None) -> Script:
    """Return a script that responds to each command, with OK unless another response is given.

    Args:
        answers: response frame by command name, or a function of the command; None for no response. The elements of a
            list are used once each, over all connections, and the last one repeatedly. After an error frame, the
            connection is closed if the real server would close it.
    """
    rows: dict[str, list[Answer]] = {}
    for name, given in (answers or {}).items():
        rows[name] = list(given) if isinstance(given, (list, tuple)) else [given]  # type: ignore[list-item]

    async def run(peer: Peer) -> None:
        while True:
            command = await peer.next()
            name = command.words[0].decode()
            row = rows.get(name)
            answer: Answer = (row.pop(0) if len(row) > 1 else row[0]) if row else None
            if row is None and command.words[0] not in _SILENT:
                answer = ok(b"CLOSE_WAIT" if name == "CLS" else b"OK")
            data = answer(command) if callable(answer) else answer
            if data is not None:
                await peer.raw(data)
                if _closes(data):
                    await peer.close()
                    return

    return run


def _closes(frame: bytes) -> bool:
    return frame[4:8] == b"\0\0\0\1" and server_error(frame[8:]).closes_connection


class ScriptedNode:
    """A fake nsqd.

    Attributes:
        address: address that it listens on.
        peers: connections so far, oldest first.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.peers: list[Peer] = []
        self._send, self._receive = anyio.create_memory_object_stream[Peer](100)

    def __str__(self) -> str:
        return str(self.address)

    async def accept(self) -> Peer:
        """Return the next connection after its handshake; for a node without a script."""
        with anyio.fail_after(_PATIENCE):
            return await self._receive.receive()

    async def accept_subscribed(self) -> Peer:
        """Return the next connection once a consumer has subscribed and sent RDY on it."""
        peer = await self.accept()
        await peer.expect("SUB")
        await peer.answer()
        await peer.expect("RDY")
        return peer

    @property
    def commands(self) -> list[Command]:
        """Commands of all connections after their handshakes."""
        return [command for peer in self.peers for command in peer.commands]

    async def _serve(self, stream: ByteStream, script: Script | None, granted: Mapping[str, Any] | None) -> None:
        peer = Peer(stream)
        self.peers.append(peer)
        try:
            if granted is not None:
                await peer.handshake(granted)
            if script is None:
                await self._send.send(peer)
                return
            await script(peer)
        except PeerClosed:
            pass

    def _close(self) -> None:
        self._send.close()
        self._receive.close()


@asynccontextmanager
async def scripted_node(
    script: Script | None = None, *, granted: Mapping[str, Any] | None = REDESIGNED, port: int = 0
) -> AsyncIterator[ScriptedNode]:
    """Run a fake nsqd on a free port.

    Args:
        script: runs for each connection after its handshake; without a script the test calls `accept`.
        granted: the response to IDENTIFY; None leaves the handshake to the script.
        port: port to listen on, for a node that restarts; 0 for a free port.
    """
    host = own_host(port)
    listener = await anyio.create_tcp_listener(local_host=host, local_port=port, reuse_port=False)
    node = ScriptedNode(Address(host, _port(listener)))

    async def serve(stream: SocketStream) -> None:
        await node._serve(stream, script, granted)

    async with _serving(listener, serve):
        try:
            yield node
        finally:
            node._close()


def _port(listener: Listener[SocketStream]) -> int:
    return listener.extra(SocketAttribute.local_port)  # noqa: S610


@asynccontextmanager
async def _serving(
    listener: Listener[SocketStream], serve: Callable[[SocketStream], Awaitable[None]]
) -> AsyncIterator[None]:
    """Serve until the block ends; an error of a script is raised unchanged, not in a group."""
    streams: list[SocketStream] = []

    async def take(stream: SocketStream) -> None:
        streams.append(stream)
        await serve(stream)

    try:
        async with create_task_group() as tasks:
            tasks.start_soon(listener.serve, take)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        only: BaseException = group
        while isinstance(only, BaseExceptionGroup) and len(only.exceptions) == 1:
            only = only.exceptions[0]
        raise only from None
    finally:
        with anyio.CancelScope(shield=True):
            await listener.aclose()
            for stream in streams:
                await stream.aclose()


class ScriptedLookup:
    """A fake lookup node: responds to ``/lookup`` with the last given response, and records the requests.

    Attributes:
        address: address of its HTTP side.
        questions: requested paths with queries, oldest first.
        delay: seconds until each response.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.delay = 0.0
        self.questions: list[str] = []
        self._answer: tuple[int, Any] = (404, {"message": "Key not found"})
        self._others: dict[str, Any] = {}

    def __str__(self) -> str:
        return str(self.address)

    def set_leaders(
        self,
        partitions: Mapping[int, ScriptedNode | Address] | None = None,
        *,
        num: int = 0,
        nodes: Sequence[ScriptedNode | Address] = (),
        extend: bool = False,
        ordered: bool = False,
    ) -> None:
        """Set the response for all topics: leaders by partition, or nodes without partitions."""
        leaders = {key: str(node) for key, node in (partitions or {}).items()}
        data = lookup_json(leaders, num=num, nodes=[str(node) for node in nodes], extend=extend)
        data["meta"]["ordered"] = ordered
        if not num:
            del data["meta"], data["partitions"]
        self._answer = (200, data)

    def refuse(self, status: int = 404, message: str = "Key not found") -> None:
        """Make ``/lookup`` fail."""
        self._answer = (status, {"message": message})

    def set_response(self, path: str, data: Any) -> None:
        """Set the response of another path, for example ``/nodes``."""
        self._others[path] = data

    async def _serve(self, stream: ByteStream) -> None:
        async with stream:
            buffer = b""
            try:
                while True:
                    while b"\r\n\r\n" not in buffer:
                        buffer += await stream.receive()
                    head, _, buffer = buffer.partition(b"\r\n\r\n")
                    response = self._respond(head.split(b" ")[1].decode())
                    await anyio.sleep(self.delay)
                    await stream.send(response)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return

    def _respond(self, target: str) -> bytes:
        self.questions.append(target)
        path = target.partition("?")[0]
        status, data = (404, {"message": "NOT_FOUND"})
        if path == "/lookup":
            status, data = self._answer
        elif path in self._others:
            status, data = 200, self._others[path]
        body = orjson.dumps(data)
        return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@asynccontextmanager
async def scripted_lookup(port: int = 0) -> AsyncIterator[ScriptedLookup]:
    """Run a fake lookup node on a free port, or a given one; no topic is found until `ScriptedLookup.set_leaders`."""
    host = own_host(port)
    listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
    lookup = ScriptedLookup(Address(host, _port(listener)))
    async with _serving(listener, lookup._serve):
        yield lookup
