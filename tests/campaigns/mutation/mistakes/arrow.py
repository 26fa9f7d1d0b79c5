"""Mistakes in Arrow."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "times are cut to seconds",
        "arrow.py",
        "str(int(value.timestamp() * 1000))",
        "str(int(value.timestamp()) * 1000)",
    ),
    Mistake(
        "a time without a zone is local",
        "arrow.py",
        "        if value.tzinfo is None:\n",
        "        if False:\n",
    ),
    Mistake(
        "the read timeout is in seconds",
        "arrow.py",
        "round(value * 1000)",
        "round(value)",
    ),
    Mistake(
        "consume ends before all messages of the start",
        "arrow.py",
        "            number += len(messages)\n",
        "",
    ),
    Mistake(
        "a reader is not closed",
        "arrow.py",
        "    finally:\n        reader.close()\n\n\ndef write",
        "    finally:\n        pass\n\n\ndef write",
    ),
    Mistake(
        "until_empty follows new messages",
        "arrow.py",
        "            reader.freeze()\n",
        "            pass\n",
    ),
    Mistake(
        "max_messages has no effect",
        "arrow.py",
        'given["max_offsets_per_trigger"] = given.pop("max_messages")',
        'given.pop("max_messages")',
    ),
    Mistake(
        "pairs of topics and partitions are read whole",
        "arrow.py",
        "{topic: list(partitions) for topic, partitions in topics.items()}",
        "{topic: [0] for topic, partitions in topics.items()}",
    ),
    Mistake(
        "several lookup addresses are one",
        "arrow.py",
        '",".join(map(str, addresses))',
        "str(addresses[0])",
    ),
    Mistake(
        "numbers of partitions are text",
        "arrow.py",
        'if name in ("partition", "trace_id"):',
        'if name in ("trace_id",):',
    ),
    Mistake(
        "the first batch is written twice",
        "arrow.py",
        "itertools.chain([first], batches)",
        "itertools.chain([first, first], batches)",
    ),
    Mistake(
        "the first batch is not written",
        "arrow.py",
        "itertools.chain([first], batches)",
        "batches",
    ),
    Mistake(
        "write ignores the job",
        "arrow.py",
        "sink.job or uuid4().hex",
        "uuid4().hex",
    ),
    Mistake(
        "bounds are swapped",
        "arrow.py",
        "found.partition: (found.start, found.end)",
        "found.partition: (found.end, found.start)",
    ),
    Mistake(
        "an option of another function is accepted",
        "arrow.py",
        "        if name not in allowed:\n",
        "        if name not in allowed and name not in known:\n",
    ),
)
