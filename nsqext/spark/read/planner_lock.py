"""A lock of a machine's planning process for a channel, because each stream needs a separate channel.

A self-join of a stream, and two queries of one DataFrame, have several planning processes, which all would move the
anchors.
"""

from __future__ import annotations

import os
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from nsqext.errors import InvalidState
from nsqext.spark.pyspark_features import runs_as

if TYPE_CHECKING:
    from nsqext.spark.options import SourceOptions

_PLANNER = "pyspark.sql.streaming.python_streaming_source_runner"
_PATIENCE = 10.0  # seconds for a stopped or killed query's process to end
_PAUSE = 0.1


def is_planner() -> bool:
    """Return whether Spark has started this process to plan a stream."""
    return runs_as(_PLANNER)


class PlannerLock:
    """Locks a file in the temporary folder, until release or the end of the process."""

    def __init__(self, options: SourceOptions) -> None:
        reads = options.subscribe_pattern or sorted(options.topics)
        identity = repr((sorted(options.client.lookupd), options.channel, reads))
        name = f"nsqext-{os.getuid() if hasattr(os, 'getuid') else 0}-{sha256(identity.encode()).hexdigest()[:24]}.lock"
        self._options = options
        self._path = Path(tempfile.gettempdir(), name)
        self._file: int | None = None

    def acquire(self, patience: float = _PATIENCE) -> None:
        """Lock the file.

        Raises:
            InvalidState: another process has it.
        """
        try:
            import fcntl
        except ImportError:  # Windows
            return
        file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(file)
                    raise self._used() from None
                time.sleep(_PAUSE)
            else:
                self._file = file
                return

    def release(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _used(self) -> InvalidState:
        return InvalidState(
            f"another stream on this machine reads through the channel {self._options.channel}: a self-join, two "
            "queries of one DataFrame, or another program",
            hint='call load() for each use, with an option("channel", …) of its own, or share the rows within a query: '
            "foreachBatch with persist()",
        )
