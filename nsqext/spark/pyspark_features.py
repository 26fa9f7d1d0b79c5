"""Features of the installed PySpark: only this module knows what versions 4.0 and 4.1 lack.

PySpark 4.2 has read limits and `SupportsTriggerAvailableNow`. Earlier versions call ``latestOffset()`` without
arguments, and a stream with ``availableNow`` runs one micro-batch. PySpark 4.1 has filters of batches, and a separate
class for Arrow writers of streams.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from attrs import frozen
from pyspark.sql import datasource

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from nsqext.spark.options import SourceOptions

__all__ = (
    "HAS_PUSHDOWN",
    "HAS_READ_LIMITS",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
    "check_stream",
    "runs_as",
)

HAS_READ_LIMITS = find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether Spark passes the start and limit of a micro-batch, and announces ``availableNow``."""
HAS_PUSHDOWN = hasattr(datasource, "Filter")
"""Whether Spark passes the filters of a batch."""

if TYPE_CHECKING or HAS_READ_LIMITS:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
else:

    class ReadLimit: ...

    class ReadAllAvailable(ReadLimit): ...

    @frozen
    class ReadMaxRows(ReadLimit):
        max_rows: int

    @frozen
    class ReadMinRows(ReadLimit):
        min_rows: int

    @frozen
    class ReadMaxBytes(ReadLimit):
        """Approximate number of bytes."""

        max_bytes: int

    class SupportsTriggerAvailableNow:
        """A reader with notice of ``availableNow``; unused by Spark."""


if TYPE_CHECKING or hasattr(datasource, "DataSourceStreamArrowWriter"):
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
else:

    class DataSourceStreamArrowWriter(datasource.DataSourceStreamWriter, datasource.DataSourceArrowWriter):
        """A stream writer of record batches; PySpark 4.0 passes them to every Arrow writer."""


def runs_as(module: str) -> bool:
    """Return whether Spark has started this process to run one of its modules."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return module in sys.modules or (main is not None and main.name == module)


def check_stream(options: SourceOptions) -> None:
    """Check that the installed PySpark can run a stream with these options."""
    if HAS_READ_LIMITS:
        return
    if options.min_offsets_per_trigger is not None:
        raise InvalidSetting(
            "option minOffsetsPerTrigger needs PySpark 4.2 or later: older versions do not announce availableNow, with "
            "which the option does not apply",
            hint="remove it, or upgrade PySpark",
        )
    if options.read_mode == "channel":
        # such a query ends before its only batch is committed
        raise InvalidSetting(
            "readMode=channel needs PySpark 4.2 or later: with availableNow, older versions would read the same "
            "messages in each run",
            hint="remove it, or upgrade PySpark",
        )
