"""The TCP protocol of nsqlookupd, both roles, without I/O: how nodes announce themselves, their topics and channels.

Magic, then commands as nsqd's; the answers have a size and no type word: ``[4B size][data]``. Both generations speak
it; the redesigned one names a partition behind the topic.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, NamedTuple

import orjson
from attrs import asdict, frozen

from nsqext.errors import ProtocolError, ServerError
from nsqext.errors.server import server_error
from nsqext.protocol.client.commands import DEFAULT_MAX_BODY_SIZE
from nsqext.protocol.go_structs import UnreadableFields, read_fields
from nsqext.protocol.names import is_valid_channel, is_valid_topic
from nsqext.protocol.server.command_parser import MAX_LINE
from nsqext.protocol.server.request_error import Fault

__all__ = ("LookupCommand", "LookupCommandParser", "LookupReplyParser", "PeerInfo", "encode_reply", "read_reply")

_I32 = Struct(">i")
_MAX_PARTITIONS = 255
_SCHEMA = {
    "broadcast_address": str,
    "hostname": str,
    "tcp_port": int,
    "http_port": int,
    "version": str,
    "topology_zone": str,
    "topology_region": str,
    "distributed_id": str,
}


@frozen
class PeerInfo:
    """What a node tells nsqlookupd about itself, and nsqlookupd a node.

    Attributes:
        broadcast_address: host that clients connect to.
        tcp_port: its TCP port.
        http_port: its HTTP port.
        version: version of the program.
        hostname: name of the host.
        topology_zone: zone that the original nsqd was told to be in.
        topology_region: region that the original nsqd was told to be in.
        distributed_id: id in the cluster; redesigned nodes only.
    """

    broadcast_address: str = ""
    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    hostname: str = ""
    topology_zone: str = ""
    topology_region: str = ""
    distributed_id: str = ""

    def encode(self) -> bytes:
        """Return the JSON that travels, as the body of IDENTIFY and as its answer."""
        return orjson.dumps({name: value for name, value in asdict(self).items() if value})

    @classmethod
    def decode(cls, data: bytes) -> PeerInfo:
        """Read the answer to IDENTIFY.

        Raises:
            ProtocolError: it cannot be read.
        """
        try:
            return cls(**read_fields(data, _SCHEMA))
        except UnreadableFields as error:
            raise ProtocolError(f"nsqlookupd's answer to IDENTIFY cannot be read: {data[:120]!r}") from error


class LookupCommand(NamedTuple):
    """A command of a node.

    Attributes:
        verb: PING, IDENTIFY, REGISTER or UNREGISTER.
        topic: of REGISTER and UNREGISTER.
        channel: of REGISTER and UNREGISTER; empty without one.
        partition: of REGISTER and UNREGISTER; -1 from a node of the original generation.
        peer: of IDENTIFY.
    """

    verb: str
    topic: str = ""
    channel: str = ""
    partition: int = -1
    peer: PeerInfo | None = None


def encode_reply(data: bytes) -> bytes:
    """Return an answer of nsqlookupd; an error is its text, ``str(fault).encode()``."""
    return _I32.pack(len(data)) + data


def read_reply(data: bytes, node: str | None = None) -> bytes:
    """Return the data of an answer.

    Raises:
        ServerError: it is an error.
    """
    if data.startswith(b"E_"):
        error: ServerError = server_error(data, node=node)
        raise error
    return data


class LookupReplyParser:
    """The node's side: cuts the answers of nsqlookupd out of a stream.

    Args:
        max_size: largest answer that is accepted, in bytes.
    """

    __slots__ = ("_buffer", "_max", "error")

    def __init__(self, max_size: int = DEFAULT_MAX_BODY_SIZE) -> None:
        self._buffer = bytearray()
        self._max = max_size
        self.error: ProtocolError | None = None
        """Why the stream cannot be read any further."""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes, return the answers that are complete now. Never raises: look at ``error``."""
        replies: list[bytes] = []
        if self.error is not None:
            return replies
        self._buffer += data
        position = 0
        while len(self._buffer) - position >= 4:
            size: int = _I32.unpack_from(self._buffer, position)[0]
            if not 0 <= size <= self._max:
                self.error = ProtocolError(
                    f"an answer of {size} bytes is not within 0..{self._max}", hint="the peer may not be nsqlookupd"
                )
                self._buffer.clear()
                return replies
            stop = position + 4 + size
            if stop > len(self._buffer):
                break
            replies.append(bytes(self._buffer[position + 4 : stop]))
            position = stop
        del self._buffer[:position]
        return replies


class LookupCommandParser:
    """The server's side: magic and commands of one node, with the original server's errors.

    Args:
        partitions: REGISTER and UNREGISTER name a partition (redesigned generation).
        max_body_size: largest body of IDENTIFY, in bytes.

    Attributes:
        peer: what the node said in IDENTIFY; None before.
    """

    __slots__ = ("_buffer", "_greeted", "_identify", "_max_body_size", "_partitions", "peer")

    def __init__(self, *, partitions: bool = False, max_body_size: int = DEFAULT_MAX_BODY_SIZE) -> None:
        self._buffer = bytearray()
        self._greeted = False
        self._identify = False
        self._partitions = partitions
        self._max_body_size = max_body_size
        self.peer: PeerInfo | None = None

    def receive(self, data: bytes) -> None:
        """Take bytes from the node."""
        self._buffer += data

    def next_command(self) -> LookupCommand | None:
        """Return the next command, None when more bytes are needed.

        Raises:
            Fault: the command is refused; the connection ends behind the answer.
        """
        if not self._greeted and not self._take_magic():
            return None
        if self._identify:
            return self._take_peer()
        newline = self._buffer.find(b"\n", 0, MAX_LINE)
        if newline < 0:
            if len(self._buffer) >= MAX_LINE:
                raise Fault("", "command line too long")
            return None
        line = bytes(self._buffer[:newline]).strip().decode("utf-8", "surrogateescape")
        del self._buffer[: newline + 1]
        return self._read(line.split(" "))

    def _take_magic(self) -> bool:
        if len(self._buffer) < 4:
            return False
        if self._buffer[:4] != b"  V1":
            raise Fault("E_BAD_PROTOCOL", None)
        del self._buffer[:4]
        self._greeted = True
        return True

    def _read(self, words: list[str]) -> LookupCommand | None:
        verb = words[0]
        if verb == "PING":
            return LookupCommand(verb)
        if verb == "IDENTIFY":
            if self.peer is not None:
                raise Fault("E_INVALID", "cannot IDENTIFY again")
            self._identify = True
            return self._take_peer()
        if verb not in ("REGISTER", "UNREGISTER"):
            raise Fault("E_INVALID", f"invalid command {verb}")
        if self.peer is None:
            raise Fault("E_INVALID", "client must IDENTIFY")
        return self._read_registration(verb, words[1:])

    def _read_registration(self, verb: str, words: list[str]) -> LookupCommand:
        if len(words) < (2 if self._partitions else 1):
            raise Fault("E_INVALID", f"{verb} insufficient number of params")
        topic = words[0]
        rest = words[2:] if self._partitions else words[1:]
        channel = rest[0] if rest else ""
        if not is_valid_topic(topic):
            raise Fault("E_BAD_TOPIC", f"{verb} topic name '{topic}' is not valid")
        if channel and not is_valid_channel(channel):
            raise Fault("E_BAD_CHANNEL", f"{verb} channel name '{channel}' is not valid")
        if not self._partitions:
            return LookupCommand(verb, topic, channel)
        if not (words[1].isascii() and words[1].isdigit() and int(words[1][-9:]) < _MAX_PARTITIONS):
            raise Fault("E_BAD_PARTITIONID", f"{verb} partition id '{words[1]}' is not valid")
        return LookupCommand(verb, topic, channel, int(words[1]))

    def _take_peer(self) -> LookupCommand | None:
        if len(self._buffer) < 4:
            return None
        size: int = _I32.unpack_from(self._buffer)[0]
        if not 0 <= size <= self._max_body_size:
            raise Fault("E_BAD_BODY", f"IDENTIFY invalid body size {size}")
        if len(self._buffer) < 4 + size:
            return None
        body = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        self._identify = False
        self.peer = _read_peer(body)
        return LookupCommand("IDENTIFY", peer=self.peer)


def _read_peer(body: bytes) -> PeerInfo:
    try:
        fields: dict[str, Any] = read_fields(body, _SCHEMA)
    except UnreadableFields as error:
        raise Fault("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from error
    peer = PeerInfo(**fields)
    if not (peer.broadcast_address and peer.tcp_port and peer.http_port and peer.version):
        raise Fault("E_BAD_BODY", "IDENTIFY missing fields")
    return peer
