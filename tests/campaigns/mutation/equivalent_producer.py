"""The mutants of the producer that change nothing that a caller could observe, each with the reason."""

from __future__ import annotations

__all__ = ("PRODUCER",)

PRODUCER: dict[tuple[str, str, str], str] = {
    (
        "client/producer/route.py",
        "Lt to LtE",
        "if other.node.in_flight < target.node.in_flight:",
    ): "of nodes with as many requests any may be used",
    (
        "client/producer/route.py",
        "GtE to Gt",
        "if len(body) >= LARGE:",
    ): "the size from which on a body counts as large is chosen",
    (
        "client/producer/options.py",
        "GtE to Gt",
        "if len(self._by_topic) >= _MOST_TOPICS:",
    ): "the bound of a cache is chosen",
    (
        "client/producer/batch.py",
        "number + 1",
        "sizes = [raw_size(len(body), 0, target.meta.extend_support) for body in self._bodies]",
    ): "a record of version 0 has no header, whose size does not count",
    (
        "client/producer/route.py",
        "plus and minus",
        "other = targets[(number + 1) % count]",
    ): "any other target may be compared",
    (
        "client/producer/producer.py",
        "number + 1",
        "_IDLE_TURNS = 3",
    ): "the number of turns of the event loop before a producer closes is chosen",
    (
        "client/producer/producer.py",
        "number + 1",
        "turns = 0",
    ): "the number of turns of the event loop before a producer closes is chosen",
    (
        "client/producer/sender.py",
        "number + 1",
        "_MOVES = 3  # failures after which a publish for any partition pauses, too, before a retry",
    ): "the number of attempts without a pause is chosen",
    ("client/producer/settling.py", "number + 1", "self._next = 0"): "it is set before it is read",
    ("client/producer/settling.py", "number + 1", "self._end = 0"): "it is set before it is read",
    (
        "client/producer/settling.py",
        "Lt to LtE",
        "if self._end < self._next:",
    ): "at the end the search is complete, and its error is dropped",
    ("client/producer/http_connection.py", "left out", "del breaks"): "the name is not used",
    (
        "client/producer/delay.py",
        "number + 1",
        "identity=os.urandom(16).hex() if identity is None else check_identity(identity),",
    ): "the length of a random identity is chosen",
    (
        "client/producer/route.py",
        "number + 1",
        "self._next: int = previous._next if previous is not None else chance.getrandbits(20)",
    ): "the range of the first turn is chosen",
    (
        "client/producer/route.py",
        "Gt to GtE",
        "if self._least_pending and count > 1:",
    ): "one target is not less busy than itself",
    ("client/producer/batch.py", "number + 1", "index = 0"): "it is set before it is read",
    (
        "client/producer/producer.py",
        "Lt to LtE",
        "while turns < _IDLE_TURNS:",
    ): "the number of turns of the event loop before a producer closes is chosen",
    (
        "client/producer/producer.py",
        "number + 1",
        "turns += 1",
    ): "the number of turns of the event loop before a producer closes is chosen",
    (
        "client/producer/producer.py",
        "number + 1",
        "largest = self._options.max_message_size - 1  # logs of extend topics need another byte",
    ): "speed only: a body of this size is published on the slow path",
    (
        "client/producer/producer.py",
        "number + 1",
        "largest = min(largest, self._options.compression_min - 1)",
    ): "speed only: a body of this size is published on the slow path",
    (
        "client/producer/producer.py",
        "number + 1",
        "or not 0 < len(body) <= self._plain_size",
    ): "speed only: a body of one byte is published on the slow path",
}
"""Module, operator and line of code -> why nothing differs."""
