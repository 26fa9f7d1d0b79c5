"""A command parser that accepts every topic, and an encoder of the parsed commands."""

from __future__ import annotations

from collections.abc import Iterable

from nsqext.protocol.client import commands as write
from nsqext.protocol.server.command_parser import (
    BATCH_VERBS,
    PUBLISH_VERBS,
    BatchReader,
    Command,
    CommandParser,
    CommandTarget,
    PublishItem,
    check_publish_size,
    check_room,
)
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.protocol.server.request_error import RequestError
from tests.support.commands import ext_body, internal_create_topic, multi_body, trace_body

__all__ = ("OpenRules", "Reading", "read_commands", "write_command")


class OpenRules:
    """Checks sizes like the server, and treats every topic as an extend topic (or as a plain one)."""

    def __init__(self, limits: ServerLimits | None = None, *, extend: bool = True) -> None:
        self.limits = limits or ServerLimits()
        self.extend = extend

    def check_line(self, words: list[bytes]) -> None:
        """Accept every line."""

    def check_end(self, words: list[bytes], batch: BatchReader | None, *, sized: bool) -> None:
        """Accept every end of a command."""

    def check_size(self, words: list[bytes], size: int) -> BatchReader | None:
        """Check the size; batches are read item by item."""
        verb = words[0]
        if verb not in PUBLISH_VERBS:
            if size > self.limits.max_body_size:
                raise RequestError("E_BAD_BODY", f"{verb.decode()} body too big {size} > {self.limits.max_body_size}")
            if size <= 0:
                raise RequestError("E_BAD_BODY", f"{verb.decode()} invalid body size {size}")
            return None
        check_publish_size(verb, size, self.limits)
        check_room(verb, size)
        topic = words[1].decode("latin-1") if len(words) > 1 else ""
        return BatchReader(verb, self.limits, CommandTarget(topic, self.extend)) if verb in BATCH_VERBS else None


class Reading:
    """Result of parsing a stream: commands with their lengths in bytes, and the error that ended it."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.sizes: list[int] = []
        self.error: RequestError | None = None
        self.rest = b""


def read_commands(pieces: Iterable[bytes], rules: OpenRules | None = None, *, raw_ids: bool = True) -> Reading:
    """Parse a stream of commands that is received in pieces, up to the first error."""
    parser = CommandParser(rules or OpenRules(), raw_ids=raw_ids)
    reading = Reading()
    for piece in pieces:
        parser.receive(piece)
        if reading.error is not None:
            continue
        try:
            while True:
                before = parser.buffered
                command = parser.next_command()
                if command is None:
                    break
                reading.commands.append(command)
                reading.sizes.append(before - parser.buffered)
        except RequestError as error:
            reading.error = error
    reading.rest = parser.take_rest()
    return reading


def _item(verb: bytes, item: PublishItem) -> bytes:
    if verb == b"MPUB_TRACE":
        return trace_body(item.trace_id, item.body)
    return ext_body(item.header, item.body) if verb == b"MPUB_EXT" else item.body


def _write_line(words: list[str]) -> bytes | None:
    verb, rest = words[0], words[1:]
    if verb in ("SUB", "SUB_ADVANCED", "SUB_ORDERED") and 2 <= len(rest) <= 4:
        partition = int(rest[2]) if len(rest) > 2 else None
        return write.sub(rest[0], rest[1], partition, verb=verb, start=rest[3] if len(rest) == 4 else None)
    if verb == "RDY" and len(rest) == 1:
        return write.rdy(int(rest[0]))
    if verb == "INTERNAL_CREATE_TOPIC" and len(rest) == 3:
        return internal_create_topic(rest[0], int(rest[1]), rest[2] == "true")
    return {"NOP": write.NOP, "CLS": write.CLS, "PING": b"PING\n"}.get(verb)


def write_command(command: Command) -> bytes | None:
    """Encode a command like the client; None if this package never sends it."""
    words, body, items = command
    verb = words[0]
    if verb in (b"FIN", b"TOUCH"):
        return (write.fin if verb == b"FIN" else write.touch)(words[1])
    if verb == b"REQ":
        return write.req(words[1], int(words[2])) if len(words) == 3 and words[2] else None
    if verb == b"IDENTIFY" and body is not None:
        return write.identify(body)
    if verb == b"AUTH" and body is not None:
        return write.auth(body)
    if verb not in PUBLISH_VERBS:
        return _write_line([word.decode() for word in words])
    if not 2 <= len(words) <= 3:
        return None
    line = write.publish_line(verb.decode(), words[1].decode(), int(words[2]) if len(words) == 3 else None)
    if items is not None:
        return write.sized(line, multi_body([_item(verb, item) for item in items]))
    return write.sized(line, body or b"")
