"""The data source: it reads the options, and makes the readers and writers that do the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.errors import PySparkNotImplementedError
from pyspark.sql.datasource import DataSource

from nsqext.errors import InvalidSetting
from nsqext.spark.options import SinkOptions, SourceOptions, includes_headers
from nsqext.spark.schema import check_read_schema, check_write_schema, read_schema

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
        SimpleDataSourceStreamReader,
    )
    from pyspark.sql.types import StructType

__all__ = ("FORMAT", "NsqDataSource", "PushingDataSource")

FORMAT = "nsqext"
"""What ``format()`` is given."""


class NsqDataSource(DataSource):
    """Topics of NSQ as a source and a sink of Spark.

    Spark makes objects of it, in several processes; `nsqext.spark.register` makes it known to Spark.
    """

    @classmethod
    def name(cls) -> str:
        """Return what ``format()`` is given."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of rows that are read.

        Raises:
            InvalidSetting: an option is unknown, or cannot be read.
        """
        return read_schema(includes_headers(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads a batch.

        Raises:
            InvalidSetting: the options cannot be right.
        """
        from nsqext.spark.read.batch import NsqReader

        return NsqReader(self._read_options(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return what reads a stream whose ranges can be read again.

        Where the options cannot be right, the reader's methods raise `InvalidSetting`: what this method raises, Spark
        hides behind an ``UnboundLocalError`` of its own.

        Raises:
            PySparkNotImplementedError: ``readMode`` is ``channel``; Spark takes `simpleStreamReader` then.
        """
        from nsqext.spark.read.stream import NsqStreamReader
        from nsqext.spark.refusing import RefusingReader

        try:
            options = self._read_options(schema, streaming=True)
            if options.read_mode == "offset":
                return NsqStreamReader(options)
        except InvalidSetting as error:
            return RefusingReader(error)
        raise PySparkNotImplementedError(
            errorClass="NOT_IMPLEMENTED", messageParameters={"feature": "streamReader with readMode=channel"}
        )

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:
        """Return what reads a stream by consuming a channel.

        Raises:
            InvalidSetting: the options cannot be right.
        """
        from nsqext.spark.read.channel_stream import NsqChannelReader

        return NsqChannelReader(self._read_options(schema, streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return what publishes the rows of a batch.

        Raises:
            InvalidSetting: the options or the columns cannot be right.
        """
        from nsqext.spark.write.sink import NsqWriter

        return NsqWriter(self._write_options(schema, overwrite), tuple(schema.fieldNames()))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return what publishes the rows of a micro-batch.

        Raises:
            InvalidSetting: the options or the columns cannot be right.
        """
        from nsqext.spark.write.sink import NsqStreamWriter

        return NsqStreamWriter(self._write_options(schema, overwrite), tuple(schema.fieldNames()))

    def _read_options(self, schema: StructType, *, streaming: bool = False) -> SourceOptions:
        options = SourceOptions.parse(self.options, streaming=streaming)
        check_read_schema(schema, options.include_headers)
        return options

    def _write_options(self, schema: StructType, overwrite: bool) -> SinkOptions:
        options = SinkOptions.parse(self.options)
        if overwrite:
            raise InvalidSetting("what is in a topic cannot be overwritten", hint="use the mode append, in streams too")
        check_write_schema(schema, options)
        return options


class PushingDataSource(NsqDataSource):
    """The same, for sessions that let sources written in Python filter."""

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads a batch, and leaves out ranges that filters exclude.

        Raises:
            InvalidSetting: the options cannot be right.
        """
        from nsqext.spark.read.batch import NsqPushingReader

        return NsqPushingReader(self._read_options(schema))
