"""A stream that cannot be read, because its options cannot be right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from nsqext.errors import InvalidSetting

__all__ = ("RefusingReader",)


class RefusingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Answers every question with the same error.

    Args:
        error: the error.
    """

    def __init__(self, error: InvalidSetting) -> None:
        self._error = error

    def _refuse(self) -> NoReturn:
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:
        """Raise the error."""
        self._refuse()

    def prepareForTriggerAvailableNow(self) -> None:
        """Raise the error."""
        self._refuse()

    def initialOffset(self) -> dict[str, Any]:
        """Raise the error."""
        self._refuse()

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Raise the error."""
        self._refuse()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        """Raise the error."""
        self._refuse()

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """Raise the error."""
        self._refuse()
