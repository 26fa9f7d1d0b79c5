"""The server role of nsqlookupd's TCP protocol ("  V1"), without I/O: bytes in, bytes out."""

from __future__ import annotations

from struct import Struct

import orjson
from attrs import define, field

from nsqext.broker.lookupd.registry import PeerInfo, Registration, Registry
from nsqext.protocol.go_structs import UnreadableFields, read_fields
from nsqext.protocol.names import is_valid_channel, is_valid_topic
from nsqext.protocol.server.request_error import Fault

__all__ = ("MAGIC_V1", "LookupSession", "OwnInfo")

MAGIC_V1 = b"  V1"
_SIZE = Struct(">i")
_MAX_LINE = 64 * 1024
_MAX_BODY = 1024 * 1024
_SCHEMA: dict[str, type] = {
    "remote_address": str,
    "hostname": str,
    "broadcast_address": str,
    "tcp_port": int,
    "http_port": int,
    "version": str,
    "topology_zone": str,
    "topology_region": str,
}


@define
class OwnInfo:
    """What a lookup node tells about itself in the answer to IDENTIFY."""

    tcp_port: int
    http_port: int
    version: str
    broadcast_address: str
    hostname: str

    def encode(self) -> bytes:
        """Return it as JSON."""
        members = ("broadcast_address", "hostname", "http_port", "tcp_port", "version")
        return orjson.dumps({name: getattr(self, name) for name in members})


def _respond(data: bytes) -> bytes:
    return _SIZE.pack(len(data)) + data


@define(eq=False)
class LookupSession:
    """One connection of a node.

    Attributes:
        registry: where it registers.
        remote: its end of the connection.
        own: what it is told.
        peer: what it told about itself; None before IDENTIFY.
        closing: the connection is to be closed behind the answers.
        partitions: nodes name a partition behind the topic (redesigned generation).
    """

    registry: Registry
    remote: str
    own: OwnInfo
    peer: PeerInfo | None = None
    closing: bool = False
    partitions: bool = False
    _buffer: bytearray = field(factory=bytearray, alias="buffer")
    _opened: bool = field(default=False, alias="opened")

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the node; returns the answers."""
        self._buffer += data
        if not self._opened:
            if len(self._buffer) < len(MAGIC_V1):
                return b""
            self._opened = True
            if not self._buffer.startswith(MAGIC_V1):
                self.closing = True
                return _respond(b"E_BAD_PROTOCOL")
            del self._buffer[: len(MAGIC_V1)]
        answers: list[bytes] = []
        while not self.closing:
            try:
                answer = self._next()
            except Fault as fault:
                self.closing = True
                answer = str(fault).encode("utf-8", "surrogateescape")
            if answer is None:
                break
            answers.append(_respond(answer))
        return b"".join(answers)

    def end(self) -> None:
        """The connection is gone."""
        if self.peer is not None:
            self.registry.forget(self.peer)

    def _next(self) -> bytes | None:
        """Run the next command that is complete; returns its answer."""
        stop = self._buffer.find(b"\n")
        if stop < 0:
            if len(self._buffer) > _MAX_LINE:
                raise Fault("E_INVALID", "command is too long")
            return None
        words = bytes(self._buffer[:stop]).decode("utf-8", "surrogateescape").strip().split(" ")
        taken = stop + 1
        body = b""
        if words[0] == "IDENTIFY":
            self._may_identify()
            if len(self._buffer) < taken + _SIZE.size:
                return None
            size = _SIZE.unpack_from(self._buffer, taken)[0]
            if not 0 <= size <= _MAX_BODY:
                raise Fault("E_BAD_BODY", "IDENTIFY failed to read body")
            if len(self._buffer) < taken + _SIZE.size + size:
                return None
            taken += _SIZE.size + size
            body = bytes(self._buffer[taken - size : taken])
        del self._buffer[:taken]
        return self._run(words, body)

    def _run(self, words: list[str], body: bytes) -> bytes:
        if words[0] == "PING":
            if self.peer is not None:
                self.peer.seen = self.registry.wall()
            return b"OK"
        if words[0] == "IDENTIFY":
            return self._identify(body)
        if words[0] == "REGISTER":
            return self._register(words)
        if words[0] == "UNREGISTER":
            return self._unregister(words)
        raise Fault("E_INVALID", f"invalid command {words[0]}")

    def _may_identify(self) -> None:
        if self.peer is not None:
            raise Fault("E_INVALID", "cannot IDENTIFY again")

    def _identify(self, body: bytes) -> bytes:
        try:
            told = read_fields(body, _SCHEMA)
        except UnreadableFields as error:
            raise Fault("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from error
        members = {name: told.get(name, kind()) for name, kind in _SCHEMA.items()} | {"remote_address": self.remote}
        if not all(members[name] for name in ("broadcast_address", "tcp_port", "http_port", "version")):
            raise Fault("E_BAD_BODY", "IDENTIFY missing fields")
        self.peer = PeerInfo(self.remote, members, self.registry.wall())
        self.registry.add(Registration("client"), self.peer)
        return self.own.encode()

    def _names(self, words: list[str]) -> tuple[PeerInfo, Registration, Registration]:
        """Return who speaks, and the topic and channel; a channel that ends in ``*`` was not named."""
        if self.peer is None:
            raise Fault("E_INVALID", "client must IDENTIFY")
        command = words[0]
        if len(words) < 2:
            raise Fault("E_INVALID", f"{command} insufficient number of params")
        if self.partitions and len(words) < 3:
            raise Fault("E_INVALID", f"{command} insufficient number of params")
        rest = words[3:] if self.partitions else words[2:]
        topic, channel = words[1], rest[0] if rest else ""
        if not is_valid_topic(topic):
            raise Fault("E_BAD_TOPIC", f"{command} topic name '{topic}' is not valid")
        if channel and not is_valid_channel(channel):
            raise Fault("E_BAD_CHANNEL", f"{command} channel name '{channel}' is not valid")
        if not self.partitions:
            return self.peer, Registration("topic", topic), Registration("channel", topic, channel or "*")
        number = words[2]
        if not (number.isascii() and number.isdigit()):
            raise Fault("E_BAD_PARTITIONID", f"{command} partition id '{number}' is not valid")
        held = Registration("channel", topic, f"{number}:{channel or '*'}")
        return self.peer, Registration("topic", topic, number), held

    def _register(self, words: list[str]) -> bytes:
        peer, topic, channel = self._names(words)
        if not channel.subkey.endswith("*"):
            self.registry.add(channel, peer)
        self.registry.add(topic, peer)
        return b"OK"

    def _unregister(self, words: list[str]) -> bytes:
        peer, topic, channel = self._names(words)
        if not channel.subkey.endswith("*"):
            self.registry.remove(channel, peer)
            return b"OK"
        for registration in self.registry.find("channel", topic.key, "*"):
            if registration.subkey.startswith(channel.subkey.removesuffix("*")):
                self.registry.leave(registration, peer)
        self.registry.remove(topic, peer)
        return b"OK"
