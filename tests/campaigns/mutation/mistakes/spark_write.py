"""Mistakes in Spark's sink."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "a chunk has a message more than a batch may have",
        "spark/write/row_mapper.py",
        "chunk.count >= most)",
        "chunk.count > most)",
    ),
    Mistake(
        "a chunk is larger than acknowledged at once",
        "spark/write/row_mapper.py",
        "chunk.size + size > limit",
        "chunk.size > limit",
    ),
    Mistake(
        "the number of a row begins at 0 in each batch",
        "spark/write/row_mapper.py",
        "self._columns, self._first, self._made = columns, self._row, None",
        "self._columns, self._first, self._made = columns, 0, None",
    ),
    Mistake(
        "ids of the previous batch are used",
        "spark/write/row_mapper.py",
        "self._columns, self._first, self._made = columns, self._row, None",
        "self._columns, self._first = columns, self._row",
    ),
    Mistake(
        "a row's own id is replaced",
        "spark/write/row_mapper.py",
        "if headers is None or name not in headers:",
        "if True:",
    ),
    Mistake(
        "the column topic wins over the option",
        "spark/write/row_mapper.py",
        'self._options.topic or _only(found.get("topic"))',
        '_only(found.get("topic")) or self._options.topic',
    ),
    Mistake(
        "a description has the task of the first run",
        "spark/write/row_mapper.py",
        "if name != task} or None}",
        "} or None}",
    ),
    Mistake(
        "a negative trace id is refused",
        "spark/write/row_mapper.py",
        "        trace = trace_id & _U64 if trace_id else None\n        if meta.extend_support:",
        "        trace = trace_id or None\n        if meta.extend_support:",
    ),
    Mistake(
        "the warning of equal rows is repeated",
        "spark/write/row_mapper.py",
        "            self._warned = True\n",
        "",
    ),
    Mistake(
        "a large row without room for a trace id gets one",
        "spark/write/row_mapper.py",
        "elif trace is None and meta.partition_num and len(value) <= self._most_traced:",
        "elif trace is None and meta.partition_num:",
    ),
    Mistake(
        "a description that is too large is sent",
        "spark/write/row_mapper.py",
        "if len(described) <= max_size:",
        "if True:",
    ),
    Mistake(
        "a header that occurs twice wins",
        "spark/write/row_mapper.py",
        "        if name in headers:\n            raise",
        "        if False:\n            raise",
    ),
    Mistake(
        "the error of the last row is raised",
        "spark/write/publisher.py",
        "row = min(failures)",
        "row = max(failures)",
    ),
    Mistake(
        "stored messages of a failed batch are not counted",
        "spark/write/publisher.py",
        "self._count(topic, [outcome for",
        "(topic, [outcome for",
    ),
    Mistake(
        "an unknown outcome is a failed publish",
        "spark/write/publisher.py",
        "named = (InvalidInput, DeliveryUnknown, ",
        "named = (InvalidInput, ",
    ),
    Mistake(
        "a bad row of the topic of bad rows is described again",
        "spark/write/publisher.py",
        "            if where[0] != target[0]:\n",
        "            if True:\n",
    ),
    Mistake(
        "the rest behind a bad row is lost",
        "spark/write/publisher.py",
        "                if rest.rows:\n",
        "                if not rest.rows:\n",
    ),
    Mistake(
        "the last chunk is not awaited",
        "spark/write/publisher.py",
        "            if pending is not None:\n                wait_logging(pending, task)\n        except",
        "            pass\n        except",
    ),
    Mistake(
        "the rate is that of chunks",
        "spark/write/publisher.py",
        "max(due, now) + chunk.count / rate",
        "max(due, now) + 1 / rate",
    ),
    Mistake(
        "idle time is made up for",
        "spark/write/publisher.py",
        "due = max(due, now) + chunk.count",
        "due = due + chunk.count",
    ),
    Mistake(
        "the id of a task is not in its rows' ids",
        "spark/write/row_ids.py",
        'prefix = f"{self.job}/0/{self.partition or 0}"',
        'prefix = f"{self.job}/0/0"',
    ),
    Mistake(
        "a trace id may be 0",
        "spark/write/row_ids.py",
        "        found[found == 0] = 1\n",
        "",
    ),
    Mistake(
        "rows of another column are equal",
        "spark/write/row_ids.py",
        "(_hashed(columns[name]) + scope_hash(name))",
        "_hashed(columns[name])",
    ),
    Mistake(
        "headers above the limit are sent",
        "spark/write/packing.py",
        "if headers.max() > MAX_HEADER_BYTES:",
        "if False:",
    ),
    Mistake(
        "the largest message of a slice is that of all",
        "spark/write/packing.py",
        "int(self._largest[start:stop].max())",
        "int(self._largest.min())",
    ),
)
