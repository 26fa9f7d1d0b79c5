"""What is refused with a PySpark that cannot do it."""

from __future__ import annotations

import pyspark
import pytest

from nsqext.errors import InvalidSetting
from nsqext.spark import NsqDataSource
from nsqext.spark.options import SourceOptions
from nsqext.spark.pyspark_features import HAS_READ_LIMITS, check_stream

OPTIONS = {"lookupd": "127.0.0.1:1", "subscribe": "orders", "channel": "spark"}


@pytest.mark.parametrize("given", [{"minOffsetsPerTrigger": "5"}, {"readMode": "channel"}])
def test_options_that_depend_on_the_trigger_are_refused(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = SourceOptions.parse(OPTIONS | given, streaming=True)
    monkeypatch.setattr("nsqext.spark.pyspark_features.HAS_READ_LIMITS", True)
    check_stream(options)
    monkeypatch.setattr("nsqext.spark.pyspark_features.HAS_READ_LIMITS", False)
    check_stream(SourceOptions.parse(OPTIONS, streaming=True))
    source = NsqDataSource(OPTIONS | given)
    with pytest.raises(InvalidSetting, match=r"needs PySpark 4\.2"):
        source.streamReader(source.schema()).initialOffset()


def test_read_limits_are_part_of_new_versions() -> None:
    version = tuple(map(int, pyspark.__version__.split(".")[:2]))
    assert (version >= (4, 2)) == HAS_READ_LIMITS
