"""nsqlookupd's TCP protocol, both roles, without I/O: nsqd registers topics and channels.

The client (nsqd) sends the magic bytes, then commands as on nsqd's port. A response is ``[4B size][data]``. The
redesigned generation names a partition after the topic.
"""

from __future__ import annotations

import re
from struct import Struct
from typing import NamedTuple

import orjson
from attrs import asdict, fields, frozen

from nsqext.errors import ProtocolError
from nsqext.protocol.json_fields import UnreadableFields, read_fields
from nsqext.protocol.names import is_valid_channel, is_valid_topic
from nsqext.protocol.server.request_error import RequestError

MAGIC = b"  V1"
PING = b"PING\n"
NO_PARTITION = -11
"""Partition that the redesigned nsqlookupd records for an original nsqd (its ``OLD_VERSION_PID``)."""

_I32 = Struct(">i")
_MAX_BODY = 5 * 1024 * 1024
_MAX_LINE = 16 * 1024
_MAX_PARTITIONS = 255
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)
_ALWAYS_SENT = ("broadcast_address", "hostname", "http_port", "tcp_port", "version")


@frozen
class PeerInfo:
    """Body of IDENTIFY (an nsqd) and of its response (the nsqlookupd)."""

    broadcast_address: str = ""  #: for clients
    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    hostname: str = ""
    topology_zone: str = ""  #: original nsqd only
    topology_region: str = ""  #: original nsqd only
    distributed_id: str = ""  #: id in the cluster; redesigned nodes only

    def encode(self) -> bytes:
        members = {name: value for name, value in asdict(self).items() if value or name in _ALWAYS_SENT}
        return orjson.dumps(members, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def decode(cls, data: bytes) -> PeerInfo:
        """Parse the response; raises `ProtocolError`."""
        try:
            return cls(**read_fields(data, _SCHEMA))
        except UnreadableFields as error:
            raise ProtocolError(f"invalid response to IDENTIFY of nsqlookupd: {data[:120]!r}") from error

    @property
    def redesigned(self) -> bool:
        """Whether the node is redesigned, by nsqlookupd's rule."""
        return bool(self.distributed_id) or "HA" in self.version


_SCHEMA = {member.name: type(member.default) for member in fields(PeerInfo)}


# Client role


def identify(peer: PeerInfo) -> bytes:
    """Return IDENTIFY; `MAGIC` must precede it."""
    body = peer.encode()
    return b"IDENTIFY\n%b%b" % (_I32.pack(len(body)), body)


def register(topic: str, channel: str | None = None, partition: int | None = None, *, verb: str = "REGISTER") -> bytes:
    """Return the command; ``partition`` only for the redesigned generation."""
    words = [verb, topic]
    if partition is not None:
        words.append(str(partition))
    if channel:
        words.append(channel)
    return " ".join(words).encode() + b"\n"


def unregister(topic: str, channel: str | None = None, partition: int | None = None) -> bytes:
    """Return UNREGISTER."""
    return register(topic, channel, partition, verb="UNREGISTER")


def response_size(head: bytes) -> int:
    """Return the number of bytes behind the size word; raises `ProtocolError`."""
    size: int = _I32.unpack(head)[0]
    if not 0 <= size <= _MAX_BODY:
        raise ProtocolError(
            f"response of {size} bytes is not within 0..{_MAX_BODY}", hint="the peer may not be nsqlookupd"
        )
    return size


# Server role


def encode_response(data: bytes) -> bytes:
    """Return a response; to refuse, ``data`` is the text of the `RequestError`."""
    return _I32.pack(len(data)) + data


class LookupdCommand(NamedTuple):
    verb: str  #: PING, IDENTIFY, REGISTER or UNREGISTER
    topic: str = ""
    channel: str = ""  #: empty for the whole topic
    partition: int = NO_PARTITION  #: `NO_PARTITION` if not named
    peer: PeerInfo | None = None  #: of IDENTIFY


class LookupdCommandParser:
    """Split received bytes into commands; refuse bad commands with the real servers' errors."""

    __slots__ = ("_body_expected", "_buffer", "_opened", "_partitions", "peer")

    def __init__(self, *, partitions: bool = False) -> None:
        self._buffer = bytearray()
        self._opened = False
        self._body_expected = False
        # REGISTER and UNREGISTER name a partition (redesigned generation), which an original nsqd may omit
        self._partitions = partitions
        self.peer: PeerInfo | None = None  #: body of IDENTIFY

    def receive(self, data: bytes) -> None:
        self._buffer += data

    def next_command(self) -> LookupdCommand | None:
        """Return the next command; None when more bytes are needed.

        After a `RequestError`, send its text with `encode_response`, then close the connection.
        """
        if not self._opened and not self._read_magic():
            return None
        if self._body_expected:
            return self._read_peer()
        newline = self._buffer.find(b"\n", 0, _MAX_LINE)
        if newline < 0:
            if len(self._buffer) >= _MAX_LINE:
                raise RequestError("E_INVALID", "command line too long")
            return None
        line = bytes(self._buffer[:newline]).decode("utf-8", "surrogateescape").strip()
        del self._buffer[: newline + 1]
        return self._read_command(line.split(" "))

    def _read_magic(self) -> bool:
        if len(self._buffer) < len(MAGIC):
            return False
        if not self._buffer.startswith(MAGIC):
            raise RequestError("E_BAD_PROTOCOL", None)
        del self._buffer[: len(MAGIC)]
        self._opened = True
        return True

    def _read_command(self, words: list[str]) -> LookupdCommand | None:
        verb = words[0]
        if verb == "PING":
            return LookupdCommand(verb)
        if verb == "IDENTIFY":
            if self.peer is not None:
                raise RequestError("E_INVALID", "cannot IDENTIFY again")
            self._body_expected = True
            return self._read_peer()
        if verb not in ("REGISTER", "UNREGISTER"):
            raise RequestError("E_INVALID", f"invalid command {verb}")
        if self.peer is None:
            raise RequestError("E_INVALID", "client must IDENTIFY")
        try:
            return _read_registration(verb, words[1:], self._partitions)
        except RequestError:
            if not self._partitions or self.peer.redesigned:
                raise
            return _read_registration(verb, words[1:], False)

    def _read_peer(self) -> LookupdCommand | None:
        if len(self._buffer) < 4:
            return None
        size: int = _I32.unpack_from(self._buffer)[0]
        if not 0 <= size <= _MAX_BODY:
            raise RequestError("E_BAD_BODY", "IDENTIFY failed to read body")
        if len(self._buffer) < 4 + size:
            return None
        body = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        self._body_expected = False
        self.peer = _decode_identify(body)
        return LookupdCommand("IDENTIFY", peer=self.peer)


def _read_registration(verb: str, words: list[str], numbered: bool) -> LookupdCommand:
    """Parse topic, partition if ``numbered``, and maybe a channel."""
    if len(words) < 1 + numbered:
        raise RequestError("E_INVALID", f"{verb} insufficient number of params")
    topic, number = words[0], words[1] if numbered else str(NO_PARTITION)
    channel = words[1 + numbered] if len(words) > 1 + numbered else ""
    if not is_valid_topic(topic):
        raise RequestError("E_BAD_TOPIC", f"{verb} topic name '{topic}' is not valid")
    if channel and not is_valid_channel(channel):
        raise RequestError("E_BAD_CHANNEL", f"{verb} channel name '{channel}' is not valid")
    partition = int(number) if _INTEGER.fullmatch(number) else -1
    if not (0 <= partition < _MAX_PARTITIONS or partition == NO_PARTITION):
        raise RequestError("E_BAD_PARTITIONID", f"{verb} partition id '{number}' is not valid")
    return LookupdCommand(verb, topic, channel, partition)


def _decode_identify(body: bytes) -> PeerInfo:
    try:
        peer = PeerInfo(**read_fields(body, _SCHEMA))
    except UnreadableFields as error:
        raise RequestError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from error
    if not (peer.broadcast_address and peer.tcp_port and peer.http_port and peer.version):
        raise RequestError("E_BAD_BODY", "IDENTIFY missing fields")
    return peer
