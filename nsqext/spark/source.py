"""The data source: parses options, creates readers and writers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from attrs import evolve
from pyspark.errors import PySparkNotImplementedError
from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.types import StructField, StructType

from nsqext.errors import InvalidSetting
from nsqext.spark.columns import check_write_schema, chosen_columns, read_schema
from nsqext.spark.options import (
    TABLE_OPTION,
    SinkOptions,
    SourceOptions,
    check_load,
    columns_of,
    of_table,
    table_options,
)
from nsqext.spark.pyspark_features import SupportsTriggerAvailableNow, check_stream, runs_as

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamWriter,
        DataSourceWriter,
        SimpleDataSourceStreamReader,
    )

logger: logging.Logger = logging.getLogger("nsqext.spark")

_METADATA = "nsqext.options"
_FOLDER = "streaming_job"
_ROOT = "userFiles"  # first part of the driver's folder of files; a Connect session has a folder below it
_PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class NsqDataSource(DataSource):
    """NSQ topics as a source and sink of Spark.

    Spark creates instances in several processes, and finds this class through the module ``pyspark_nsqext``. All
    methods except `name` raise `InvalidSetting` for an unknown, invalid or contradictory option or column.
    """

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        share_with_streams()

    @classmethod
    def name(cls) -> str:
        """Return the argument of ``format()``."""
        return "nsqext"

    def schema(self) -> StructType:
        """Return the schema of read rows."""
        if TABLE_OPTION not in self.options:
            check_load(self.options)
            return read_schema(*columns_of(self.options))
        given = table_options(self.options)
        return _with_table_options(read_schema(*columns_of(of_table(given, "read"))), given)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        from nsqext.spark.read.readers import NsqPushdownReader, NsqReader

        options = self._read_options(schema)
        # Spark refuses a reader with ``pushFilters`` where it will not call that method
        return NsqPushdownReader(options) if runs_as(_PUSHDOWN_WORKER) else NsqReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a stream whose ranges can be read again.

        The methods of the reader raise `InvalidSetting`, which Spark would replace here by an ``UnboundLocalError``.

        Raises:
            PySparkNotImplementedError: ``readMode`` is ``channel``; Spark then calls `simpleStreamReader`.
        """
        from nsqext.spark.read.readers import NsqStreamReader

        try:
            options = self._read_options(schema, streaming=True)
            if options.read_mode == "offset":
                return NsqStreamReader(options)
        except InvalidSetting as error:
            return InvalidStreamReader(error)
        raise PySparkNotImplementedError(
            errorClass="NOT_IMPLEMENTED", messageParameters={"feature": "streamReader with readMode=channel"}
        )

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:
        from nsqext.spark.read.readers import NsqChannelReader

        return NsqChannelReader(self._read_options(schema, streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from nsqext.spark.write.sink import NsqWriter

        options = self._write_options(schema)
        if overwrite:
            raise InvalidSetting("a topic cannot be overwritten", hint='use mode("append")')
        return NsqWriter(options, tuple(schema.fieldNames()))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of a micro-batch; with ``overwrite`` (``complete``) it has all rows of the result."""
        from nsqext.spark.write.sink import NsqStreamWriter

        return NsqStreamWriter(self._write_options(schema, streaming=True), tuple(schema.fieldNames()))

    def _read_options(self, schema: StructType, *, streaming: bool = False) -> SourceOptions:
        given = {**of_table(_kept_options(schema), "read"), **self.options}
        if not given:
            raise _no_options("query")
        options = SourceOptions.parse(given, streaming=streaming)
        if streaming:
            check_stream(options)
        return evolve(options, columns=chosen_columns(schema, options.columns, options.headers_as_array))

    def _write_options(self, schema: StructType, *, streaming: bool = False) -> SinkOptions:
        # INSERT has no options; a write with options may have rows of a table that is not its target
        given = self.options or of_table(_kept_options(schema), "write")
        if not given:
            raise _no_options("write")
        options = SinkOptions.parse(given, streaming=streaming)
        check_write_schema(schema, options.topic)
        return options


def _with_table_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """Return a table's schema, with its options, which Spark passes only here, in the first column's metadata."""
    first, *others = schema.fields
    metadata = {_METADATA: dict(options)}
    return StructType([StructField(first.name, first.dataType, first.nullable, metadata), *others])


def _kept_options(schema: StructType) -> Mapping[str, str]:
    found: Mapping[str, str] = next((field.metadata[_METADATA] for field in schema if _METADATA in field.metadata), {})
    return found


def _no_options(what: str) -> InvalidSetting:
    return InvalidSetting(
        f"the {what} has no options",
        hint="only a table that was created without columns keeps its options: CREATE TABLE … USING nsqext OPTIONS (…)",
    )


class InvalidStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader of a stream with an invalid option: every method raises its error."""

    def __init__(self, error: InvalidSetting) -> None:
        self._error = error

    def _raise(self, *args: object, **values: object) -> NoReturn:
        raise self._error

    getDefaultReadLimit: Callable[..., NoReturn] = _raise
    prepareForTriggerAvailableNow: Callable[..., NoReturn] = _raise
    initialOffset: Callable[..., NoReturn] = _raise
    latestOffset: Callable[..., NoReturn] = _raise
    partitions: Callable[..., NoReturn] = _raise
    read: Callable[..., NoReturn] = _raise


def share_with_streams() -> None:
    """Link the file with this package, if Spark delivered it to this process with ``--py-files``.

    The process that plans a stream has a separate folder, ``streaming_job`` beside or below the folder of the files,
    which Spark never fills (observed in 4.0 to 4.3): it could not unpickle the source.
    """
    try:
        from pyspark.core.files import SparkFiles
    except ImportError:  # a client of Spark Connect
        return
    if SparkFiles._is_running_on_worker and SparkFiles._root_directory is not None:
        link_for_streams(Path(SparkFiles._root_directory), Path(__file__))


def link_for_streams(root: Path, module: Path) -> None:
    """Link the delivered file of a module below ``root`` to where a stream's planning process searches it."""
    if not module.is_relative_to(root):
        return
    name = module.relative_to(root).parts[0]
    if (root / name).is_dir():  # of spark.archives, or unpacked by `nsqext.spark.shipped_source`
        return
    link = (root if root.name.startswith(_ROOT) else root.parent) / _FOLDER / name
    try:
        if link.exists() and link.samefile(root / name):
            return
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)  # of an ended session, or of another version
        link.symlink_to(root / name)
    except OSError as error:
        logger.warning("streams will not find %s: %s cannot be created: %s", name, link, error)
