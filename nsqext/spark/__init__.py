"""Topics as sources and sinks of Spark: ``spark.read/readStream/write/writeStream.format("nsqext")``.

Needs PySpark 4.0 or later and Java 17. Names are imported on first use.
"""

from __future__ import annotations

import typing as _typing
from importlib import import_module as _import_module

if _typing.TYPE_CHECKING:
    from nsqext.spark.registration import register, root_cause
    from nsqext.spark.source import NsqDataSource
    from nsqext.spark.write.sink import dedupe

__all__ = ("NsqDataSource", "dedupe", "register", "root_cause")

_HOME = {
    "NsqDataSource": "nsqext.spark.source",
    "dedupe": "nsqext.spark.write.sink",
    "register": "nsqext.spark.registration",
    "root_cause": "nsqext.spark.registration",
}


def __getattr__(name: str) -> _typing.Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'nsqext.spark' has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(_import_module(home), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: pip install 'nsqext[spark]'", name=error.name) from error
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
