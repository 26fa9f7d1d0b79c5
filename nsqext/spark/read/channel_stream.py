"""Topics as a stream that is consumed: `spark.readStream` with ``readMode=channel``.

For servers on which ranges cannot be read again: the original NSQ, and topics that accept registered channels only. The
planning process of the query holds the messages of a batch in flight, and finishes them after Spark has completed the
batch. Messages that are unfinished when the process ends are delivered again in another batch: at least once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import SimpleDataSourceStreamReader

from nsqext.errors import InvalidInput
from nsqext.spark.pyspark_features import SupportsTriggerAvailableNow
from nsqext.spark.read.channel_batches import ChannelReader, rows_of

if TYPE_CHECKING:
    import pyarrow as pa

    from nsqext.spark.options import SourceOptions

logger: logging.Logger = logging.getLogger("nsqext.spark")

_VERSION = 1


class NsqChannelReader(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
    """Consumes topics batch by batch, at least once."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._channel: ChannelReader | None = None
        self._ends = False
        self._ended = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_channel": None, "_ends": False, "_ended": False}

    def initialOffset(self) -> dict[str, Any]:
        """Return the start of a new query: offsets count messages."""
        return _dump(0)

    def prepareForTriggerAvailableNow(self) -> None:
        """Exclude messages that are published from now on."""
        self._ends = True
        self._opened().freeze()

    def read(self, start: Mapping[str, Any]) -> tuple[Iterator[pa.RecordBatch], dict[str, Any]]:
        """Return the next batch and its end; Spark calls this after it has completed the previous batch."""
        number = _load(start)
        messages = [] if self._ended else self._opened().take(number)
        if self._ends and not messages:
            # later messages belong to the next query, which may start before this process ends
            self._ended = True
            self.stop()
        return iter(rows_of(self._options, messages)), _dump(number + len(messages))

    def readBetweenOffsets(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """Return nothing: the server delivers the messages of an incomplete batch again, in another batch."""
        logger.warning(
            "the batch from %d to %d was not completed when the query ended: its messages are delivered again",
            _load(start),
            _load(end),
        )
        return iter(())

    def commit(self, end: Mapping[str, Any]) -> None:
        """Finish the messages of a completed batch."""
        if self._channel is not None:
            self._channel.finish(_load(end))

    def stop(self) -> None:
        """Close the connections; unfinished messages are delivered again."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            channel.close()

    def _opened(self) -> ChannelReader:
        if self._channel is None:
            self._channel = ChannelReader(self._options)
        return self._channel


def _dump(number: int) -> dict[str, Any]:
    return {"v": _VERSION, "consumed": number}


def _load(offset: Mapping[str, Any]) -> int:
    number = offset.get("consumed")
    if offset.get("v") != _VERSION or not isinstance(number, int):
        raise InvalidInput(
            f"{offset!r} is not an offset of a consumed channel",
            hint="a checkpoint belongs to one readMode: use that mode, or a new checkpoint",
        )
    return number
