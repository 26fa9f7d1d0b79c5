"""Mutants that change nothing that a caller could observe, each with the reason; they are not put in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.campaigns.mutation.equivalent_broker import BROKER
from tests.campaigns.mutation.equivalent_consumer import CONSUMER
from tests.campaigns.mutation.equivalent_producer import PRODUCER

if TYPE_CHECKING:
    from tests.campaigns.mutation.operators import Mutant

__all__ = ("EQUIVALENT", "reason_of")

EQUIVALENT: dict[tuple[str, str, str], str] = {
    **BROKER,
    **CONSUMER,
    **PRODUCER,
    (
        "delays/store.py",
        "left out",
        'self._database.execute("PRAGMA synchronous=FULL")',
    ): "it is what SQLite does without; a build may choose otherwise",
    (
        "delays/store.py",
        "number + 1",
        "path, timeout=_BUSY, isolation_level=None, check_same_thread=False, cached_statements=32",
    ): "the size of a cache is chosen",
    (
        "delays/store.py",
        "number + 1",
        'run.execute("INSERT INTO store SELECT ? WHERE NOT EXISTS (SELECT * FROM store)", (token_hex(6),))',
    ): "the length of a random name is chosen",
    (
        "delays/store.py",
        "number + 1",
        "return self._cancel(run, identity, round(time.time() * 1000))",
    ): "the time only decides when the identity is forgotten",
    (
        "transactions/relay.py",
        "Lt to LtE",
        "elif not failed and seconds < timeout / 8:",
    ): "the time from which on more is published at once is chosen",
    (
        "transactions/relay.py",
        "number + 1",
        "elif not failed and seconds < timeout / 8:",
    ): "the time from which on more is published at once is chosen",
    (
        "transactions/inbox.py",
        "GtE to Gt",
        "if self._unmerged[key] >= _MERGE_EVERY:",
    ): "the number of messages between two merges is chosen",
    (
        "transactions/positions.py",
        "number + 1",
        "return Requeue(0, backoff=False)",
    ): "the connection has ended: REQ is not sent",
    (
        "transactions/store.py",
        "number + 1",
        'names = _named("n", sequences[first : first + 500])',
    ): "a row is deleted twice",
    ("transactions/handler_transaction.py", "number + 1", "name = token_hex(8)"): "the length of a name is chosen",
    (
        "transactions/positions.py",
        "number + 1",
        'await execute(session, _INSERT, {**_probe(name)._asdict(), **_Row(0, 0, "", 0)._asdict()})',
    ): "nothing reads the numbers of a probe",
    ("delays/store.py", "number + 1", "_WAITING, _PUBLISHING, _ENDING = 0, 1, 2"): "the numbers only have to differ",
    ("delays/relay.py", "number + 1", "self._store.take(published, 0, 0.0, 0.0)"): "no message was due in 1970",
    ("delays/store.py", "left out", "self._database.executescript(_INDEXES)"): "speed only",
    (
        "delays/relay.py",
        "Is to IsNot",
        "if refused and kind is DelayedMessage:  # both channels receive each record",
    ): "the other channel sets it aside",
    (
        "integrations/celery/envelope.py",
        "number + 1",
        "return any(_matches(rest, words[skipped:]) for skipped in range(len(words) + 1))",
    ): "no word is left either way",
    (
        "integrations/celery/nsq_clients.py",
        "Gt to GtE",
        "return (kept_delay(meta, wait) or None) if wait > 0 else None",
    ): "no delay either way",
    (
        "integrations/celery/nsq_clients.py",
        "Gt to GtE",
        "if lifetime is not None and time.time() > message.timestamp / 1e9 + lifetime:",
    ): "the moment itself",
    ("integrations/celery/nsq_clients.py", "left out", "self._flush()"): "the next message does it; counts regard it",
    (
        "integrations/celery/nsq_clients.py",
        "left out",
        "self._on_collect.cancel()",
    ): "what would be called at the end of the process does nothing else",
    (
        "integrations/celery/transport.py",
        "left out",
        "self._consumers.discard(consumer_tag)",
    ): "it is cancelled again when the channel closes, without effect",
    ("integrations/celery/transport.py", "number + 1", "os.read(reading, 65536)"): "the size of a read is chosen",
    ("lookup/client.py", "number + 1", "self._lists = 0"): "the number only has to differ",
    (
        "lookup/client.py",
        "number + 1",
        "digest = blake2b(body, digest_size=16).digest()",
    ): "the size of the digest is chosen",
    ("lookup/client.py", "GtE to Gt", "if len(self._parsed) >= _MAX_PARSED:"): "the bound of a cache is chosen",
    ("lookup/poller.py", "number + 1", "self._listed = 0"): "the number only has to differ",
    ("lookup/partition_map.py", "number + 1", "self._round = 0"): "the numbers only have to rise",
    ("lookup/partition_map.py", "number + 1", "self._round += 1"): "the numbers only have to rise",
    ("lookup/partition_map.py", "Gt to GtE", "if len(self._sources) > _MAX_SOURCES:"): "none is removed then",
    ("lookup/client.py", "number + 1", "self._lists += 1"): "the number only has to differ",
    (
        "key_ranges.py",
        "LtE to Lt",
        "if busiest * count <= _BUSY:",
    ): "the share from which on a consumer is too busy is chosen",
    (
        "key_ranges.py",
        "Gt to GtE",
        "if after > _WORTH * busiest:",
    ): "the share from which on a move is worth it is chosen",
    (
        "key_ranges.py",
        "LtE to Lt",
        "while CELLS - cell >= consumers and taken + cells[cell] / 2 <= fair:",
    ): "both borders are equally far from the fair share",
    (
        "lookup/client.py",
        "Gt to GtE",
        "if node.epoch > known.epoch:",
    ): "descriptions of a node of the same epoch are equal",
    (
        "lookup/options.py",
        "Is to IsNot",
        'if None in kinds or len({one["port"] is None for one in kinds if one is not None}) > 1:',
    ): "whether both have a port or both have none",
    (
        "spark/read/anchor.py",
        "number + 1",
        "counts = {key: starts.get(key, existing.get(key, 0)) for key in keys}",
    ): "each partition has an anchor or is started",
    ("spark/read/batch_plan.py", "Lt to LtE", "if since is not None and start < end:"): "an empty range stays empty",
    ("spark/read/batch_plan.py", "Lt to LtE", "if until is not None and start < end:"): "an empty range stays empty",
    (
        "spark/read/planning.py",
        "Lt to LtE",
        "if limit < len(behind):",
    ): "with as many messages as partitions, each gets one either way",
    ("spark/read/planning.py", "GtE to Gt", "if steps_back or begin >= state.end:"): "an empty range stays empty",
    (
        "spark/read/frames.py",
        "number + 1",
        "frames = None if parts[0]._frames is None else [*chain.from_iterable(part._frames or () for part in parts)]",
    ): "all deliveries of a reader have bodies, or none has",
    (
        "spark/read/arrow.py",
        "Gt to GtE",
        "while count and int(ends[-1]) - before > _BATCH_BYTES:",
    ): "a batch without rows is dropped",
    (
        "spark/read/arrow.py",
        "GtE to Gt",
        'return header.find(_TAG) >= 0 or header.find(_COMPRESS) >= 0 or header.find(b"\\\\u") >= 0',
    ): "a header begins with its version",
    (
        "spark/read/arrow.py",
        "number + 1",
        'return header.find(_TAG) >= 0 or header.find(_COMPRESS) >= 0 or header.find(b"\\\\u") >= 0',
    ): "a header begins with its version",
    (
        "spark/read/anchor.py",
        "number + 1",
        "and ((moved := self._moved_to.get(key, -1)) < count or (moved == count and key in self._unmoved))",
    ): "no offset is negative",
    (
        "spark/read/range_reader.py",
        "number + 1",
        "_READ_AHEAD = 1  # blocks received while the caller processes one",
    ): "the number is chosen",
    (
        "spark/read/range_reader.py",
        "number + 1",
        "_OPEN_RANGES = 6  # ranges of a task read concurrently, because opening a range takes several round trips",
    ): "the number is chosen",
    (
        "spark/read/range_reader.py",
        "other bool",
        "self._paused = False  # waiting blocks hold back further messages",
    ): "it is set before it is read",
    (
        "spark/read/channel_batches.py",
        "number + 1",
        "self._number = 0  # of the first held message; offsets refer to it",
    ): "it is set before it is read",
    (
        "spark/read/stream_planner.py",
        "number + 1",
        "_PAUSE_FACTOR = 3  # shortest pause relative to the requests' duration, because there may be many partitions",
    ): "the length of a pause is chosen",
    (
        "spark/read/stream_planner.py",
        "Gt to GtE",
        "if lag.count > 1 and stop < (await admin.message(*key, last)).offset:",
    ): "a single message is read in any case; saves a request",
    (
        "spark/read/stream_planner.py",
        "number + 1",
        "if lag.count > 1 and stop < (await admin.message(*key, last)).offset:",
    ): "of two messages the first one is read in any case, and the second one is not",
    (
        "spark/read/stream_planner.py",
        "Lt to LtE",
        "if lag.count > 1 and stop < (await admin.message(*key, last)).offset:",
    ): "a batch that ends where the last message begins does not contain it",
    (
        "lookup/partition_map.py",
        "number + 1",
        "version: int = field(default=0, eq=False)  #: increases with each change",
    ): "the numbers only have to rise",
    ("lookup/poller.py", "number + 1", "self._rounds = 0"): "the numbers only have to rise",
    ("lookup/poller.py", "number + 1", "_POLLS = 4  # topics polled concurrently"): "the number is chosen",
    ("lookup/responses.py", "other bool", "@frozen(cache_hash=True)"): "speed only",
}
"""Module, operator and line of code -> why nothing differs."""


def reason_of(mutant: Mutant) -> str | None:
    """Return why a mutant has no effect, or None."""
    return EQUIVALENT.get((mutant.module, mutant.operator, mutant.text))
