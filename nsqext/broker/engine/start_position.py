"""Start positions: ``virtual_queue:70``, ``msgcount:3``, ``timestamp:1700000000`` or ``special:-1``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from nsqext.broker.engine.errors import Refusal
from nsqext.protocol.server.go_format import parse_int

if TYPE_CHECKING:
    from nsqext.broker.engine.storage.log import Log

_KINDS = ("timestamp", "special", "virtual_queue", "msgcount")
_SEGMENT = 500_000
"""Entries of one file of the real server's commit log; a position before the first file is not found."""


@frozen
class StartPosition:
    """A position of SUB_ADVANCED and ``/channel/setoffset``."""

    # ``timestamp`` (seconds since 1970), ``virtual_queue`` (bytes), ``msgcount`` (from 1; 0 means 1) or ``special``
    kind: str
    value: int  # its number

    @classmethod
    def parse(cls, text: str) -> StartPosition:
        """Read ``kind:number``; raises `Refusal` with the real server's text (captured: sub_advanced_offset_errors)."""
        kind, colon, number = text.partition(":")
        if not colon or ":" in number or kind not in _KINDS:
            raise Refusal(f"invalid consume offset:{text}")
        try:
            return cls(kind, parse_int(number, "ParseInt"))
        except ValueError as error:
            raise Refusal(str(error)) from None

    def find(self, log: Log, *, clustered: bool = True) -> tuple[int, int]:
        """Return the offset and the number of messages before it; a position inside a record selects the next record.

        A node without a cluster finds only the end. Raises `Refusal` with the real server's text.
        """
        if self.kind == "special":
            if self.value != -1:
                raise Refusal("not supported offset type")
            return log.end_offset, log.end_count
        if not clustered:
            raise Refusal("Not supported while coordinator disabled")
        nanoseconds = self.value * 1_000_000_000
        if self.kind == "timestamp" and (nanoseconds + (1 << 63)) % (1 << 64) < 1 << 63:
            # seconds that do not fit as nanoseconds in 64 bits turn negative at the real server, which refuses that
            raise Refusal(f"Invalid timestamp {self.value}")
        if self.kind != "timestamp" and -(-self.value // _SEGMENT) < -1:
            raise Refusal("search commit log data not found")
        if log.end_count == log.start_count:
            raise Refusal("commit log end of file")
        if self.kind == "timestamp":
            offset = log.find_timestamp(nanoseconds)
        elif self.kind == "msgcount":
            offset = log.find_count(max(self.value - 1, 0))
        else:
            offset = log.find_offset(max(self.value, log.start_offset))
        return offset, log.count_before(offset)


AT_END = StartPosition("special", -1)
