"""Which client gets which key: the lines of messages of one key each, and the key ranges of the clients.

A line holds the messages of one key that were read and not given out (the replay set), in the order of the queue, and
knows which client holds the key. While somebody does, nobody else gets a message of it, so the order of a key outlives
every move of the ranges.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from nsqext.broker.engine.sending import dispatch_tag
from nsqext.broker.engine.tag_selector import TagSelector
from nsqext.dispatch import KeyRanges, position_of
from nsqext.errors import ProtocolError
from nsqext.protocol.headers import decode_headers, tag_of
from nsqext.protocol.messages import EXT_JSON

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.broker.engine.consumer_state import Client
    from nsqext.broker.engine.in_flight import Flight

__all__ = ("KeyLine", "KeySelector", "key_of")


def key_of(flight: Flight, header: str) -> bytes:
    """Return the key of a message: a header's value (text or a whole number), or what its internal id makes.

    The dispatch tag is read on the way, so that the header is decoded once.
    """
    record = flight.entry.record
    if record.version == EXT_JSON:
        try:
            headers: dict[str, Any] = decode_headers(record.header)
        except ProtocolError:
            headers = {}
        flight.tag = tag_of(headers) or ""
        value = headers.get(header)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            return str(value).encode("utf-8", "surrogatepass")
    return b"\0id\0%d" % record.internal_id


class KeyLine:
    """The messages of one key.

    Attributes:
        key: the key.
        position: where it lies in the hash space.
        pending: messages that wait to be given out, in the order of the queue.
        flying: messages at the client that holds the key.
        blocked: messages that came back and wait for their delay; what is behind them waits, too.
        holder: the client that holds the key; None for nobody.
        queued: the client in whose line it stands; None for nobody.
    """

    __slots__ = ("blocked", "flying", "holder", "key", "pending", "position", "queued")

    def __init__(self, key: bytes) -> None:
        self.key: bytes = key
        self.position: int = position_of(key)
        self.pending: deque[Flight] = deque()
        self.flying: set[Flight] = set()
        self.blocked: set[Flight] = set()
        self.holder: Client | None = None
        self.queued: Client | None = None

    def put(self, flight: Flight) -> None:
        """Take a message in at its place in the order of the queue."""
        pending, offset = self.pending, flight.entry.offset
        place = len(pending)
        while place and pending[place - 1].entry.offset > offset:
            place -= 1
        pending.insert(place, flight)

    @property
    def runs(self) -> bool:
        """Whether its first message may go out as far as the key itself is concerned."""
        if not self.pending:
            return False
        first = self.pending[0].entry.offset
        return not self.blocked or all(first < flight.entry.offset for flight in self.blocked)


class KeySelector(TagSelector):
    """The clients of a channel of type key_failover: key ranges for each dispatch tag, and for those without one.

    Args:
        clock: seconds that never go backwards.
        header: the extend header that carries the key.

    Attributes:
        waiting: messages in the replay set.
    """

    __slots__ = ("_clock", "_free", "_header", "_heaps", "_key_lines", "_ranges", "_ready", "waiting")

    def __init__(self, clock: Callable[[], float], header: str) -> None:
        super().__init__()
        self.waiting: int = 0
        self._clock = clock
        self._header = header
        self._key_lines: dict[bytes, KeyLine] = {}
        self._ranges: dict[str, KeyRanges[Client]] = {}
        self._heaps: dict[Client, list[tuple[int, int, KeyLine]]] = {}  # by the offset of a line's first message
        self._free: dict[Client, None] = {}  # those that can take messages
        self._ready: dict[Client, None] = {}  # those that got a line or room of late

    # clients

    def add(self, client: Client) -> None:
        """Take a client in: it gets the upper half of the busiest one's range."""
        self._heaps[client] = []
        self._ranges.setdefault(client.tag, KeyRanges(clock=self._clock)).add_consumer(client)
        self._ranges_moved()
        self.offer(client)

    def remove(self, client: Client) -> None:
        """Let a client go: a neighbour takes its range over; what it holds stays with it until it is given back."""
        if self._heaps.pop(client, None) is None:
            return
        self._free.pop(client, None)
        self._ready.pop(client, None)
        ranges = self._ranges[client.tag]
        ranges.remove_consumer(client)
        if not ranges:
            del self._ranges[client.tag]
        self._ranges_moved()

    def _ranges_moved(self) -> None:
        self.tagged: bool = any(self._ranges)
        for heap in self._heaps.values():
            heap.clear()
        for line in self._key_lines.values():
            line.queued = None
            self._queue(line)

    def offer(self, client: Client) -> None:
        """Note that a client can take a message, if it can."""
        if client.in_flight < client.window and client in self._heaps:
            self._free[client] = self._ready[client] = None

    def renew(self, client: Client) -> None:
        """Note that a client can take a message, if it can; nobody waits in line here."""
        self.offer(client)

    @property
    def hungry(self) -> bool:
        """Whether any client can take a message."""
        while self._free:
            client = next(iter(self._free))
            if client.in_flight < client.window:
                return True
            del self._free[client]
        return False

    def next_ready(self) -> Client | None:
        """Return a client that can take a message and has one waiting, None when there is none."""
        while self._ready:
            client = next(iter(self._ready))
            if client.in_flight < client.window and self._heaps[client]:
                return client
            del self._ready[client]
        return None

    def serves(self, flight: Flight, line: KeyLine) -> Client | None:
        """Return the client that a message of a key is for; None while only clients of other tags are there."""
        ranges = self._ranges.get(dispatch_tag(flight)) if self.tagged else None
        if ranges is None:
            ranges = self._ranges.get("")
        return None if ranges is None else ranges.at(line.position)

    # messages

    def put(self, flight: Flight) -> None:
        """Take a message into the replay set: one that was read, or one that came back."""
        line = flight.line
        if line is None or self._key_lines.get(line.key) is not line:
            key = key_of(flight, self._header)
            line = self._key_lines.get(key)
            if line is None:
                line = self._key_lines[key] = KeyLine(key)
            flight.line = line
        line.put(flight)
        self.waiting += 1
        if line.pending[0] is flight:
            line.queued = None  # it may be for another client than the one behind it
        self._queue(line)

    def _queue(self, line: KeyLine) -> None:
        if line.queued is not None or not line.runs:
            return
        first = line.pending[0]
        client = self.serves(first, line)
        if client is not None and line.holder in (None, client):
            heappush(self._heaps[client], (first.entry.offset, id(line), line))
            line.queued = client
            self._ready[client] = None

    def next_for(self, client: Client) -> Flight | None:
        """Take the first message out that is for a client; it holds the key from now on."""
        heap = self._heaps.get(client)
        while heap:
            line = heappop(heap)[2]
            if line.queued is not client:
                continue  # it was queued anew meanwhile
            line.queued = None
            if not line.runs or self.serves(line.pending[0], line) is not client:
                self._queue(line)  # something older came back, for somebody else perhaps
                continue
            flight = line.pending.popleft()
            self.waiting -= 1
            line.flying.add(flight)
            line.holder = client
            return flight
        return None

    def delivered(self, client: Client, flight: Flight) -> None:
        """Note that a message that was taken out went to the client, and let the next one of its key follow."""
        ranges = self._ranges.get(client.tag)
        if ranges is not None and client in ranges:
            ranges.record_dispatch(client)
        self._settle(flight)

    def release(self, flight: Flight) -> None:
        """Note that a message is not at its client any more, nor waits for a delay."""
        line = flight.line
        if line is None:
            return
        line.flying.discard(flight)
        line.blocked.discard(flight)
        if not line.flying:
            line.holder = None
        self._settle(flight)

    def block(self, flight: Flight) -> None:
        """Let a message that its client gave back hold up its key until `release`."""
        line = flight.line
        if line is not None and flight in line.flying:
            line.flying.remove(flight)
            line.blocked.add(flight)
            if not line.flying:
                line.holder = None

    def _settle(self, flight: Flight) -> None:
        line = flight.line
        if line is None or self._key_lines.get(line.key) is not line:
            return
        if line.pending:
            self._queue(line)
        elif not line.flying and not line.blocked:
            del self._key_lines[line.key]

    def clear(self) -> None:
        """Forget all messages."""
        self._key_lines.clear()
        self.waiting = 0
        for heap in self._heaps.values():
            heap.clear()

    # numbers

    def ranges(self) -> list[tuple[str, float, float, Client, float]]:
        """Return tag, low, high, client and messages a second of each range, in order."""
        return [
            (tag, low, high, client, ranges.rate(client))
            for tag, ranges in sorted(self._ranges.items())
            for low, high, client in ranges.ranges()
        ]

    def waiting_for(self) -> dict[Client | None, int]:
        """Return how many messages of the replay set wait for each client; None stands for those that have none."""
        found: dict[Client | None, int] = {}
        for line in self._key_lines.values():
            if line.pending:
                client = self.serves(line.pending[0], line)
                found[client] = found.get(client, 0) + len(line.pending)
        return found

    @property
    def held(self) -> int:
        """Keys that a client holds."""
        return sum(line.holder is not None for line in self._key_lines.values())
