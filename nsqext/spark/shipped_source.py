"""The data source with this package in it, for Spark Connect: server and workers need not have the package.

Spark gives a Connect session's files to the tasks of batches, but not of streams. Therefore `register` sends a class
that contains the package. cloudpickle sends this module by value: it must not import the package at module level.
"""

from __future__ import annotations

import io
import pickle
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pyspark import cloudpickle
from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

T = TypeVar("T")

_SOURCE = "nsqext.spark.source"
_NOT_SHIPPED = ("broker", "cli", "testing", "web")  # subpackages that the source does not use


def shipped_source() -> type[DataSource]:
    """Return the class to register with Spark Connect."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    ShippedSource.archive = pack(Path(__file__).parent.parent)
    return ShippedSource


def pack(package: Path) -> bytes:
    """Return the package's modules as a zip file, identical for identical files."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*.py")):
            name = path.relative_to(package)
            if name.parts[0] not in _NOT_SHIPPED:
                entry = zipfile.ZipInfo(str(Path(package.name, name)))
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return data.getvalue()


def load(archive: bytes, module: str) -> Any:
    """Import a module of the package; unpack the package if this process cannot import it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
    sys.path.insert(0, str(unpack(archive)))
    # a folder with the package's name may have been imported instead
    for name in [name for name in sys.modules if name.partition(".")[0] == module.partition(".")[0]]:
        del sys.modules[name]
    invalidate_caches()
    return import_module(module)


def unpack(archive: bytes) -> Path:
    """Unpack the package to the application's folder of files; return the folder."""
    from pyspark.core.files import SparkFiles

    folder = Path(SparkFiles.getRootDirectory())
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"nsqext-{sha256(archive).hexdigest()[:16]}"
    if not target.exists():
        partial = Path(tempfile.mkdtemp(dir=folder))
        with zipfile.ZipFile(io.BytesIO(archive)) as found:
            found.extractall(partial)
        try:
            partial.rename(target)
        except OSError:
            shutil.rmtree(partial)
            if not target.exists():  # otherwise another process was faster
                raise
    return target


def shipped(found: T, archive: bytes) -> T:
    """Return a reader or writer that is sent with the package."""
    kind = type(found)

    def reduce(self: Any) -> tuple[Any, ...]:
        # as bytes: the state cannot be loaded before the package
        return restore, (archive, kind.__module__, kind.__name__, pickle.dumps(self.__getstate__()))

    found.__class__ = type(kind.__name__, (kind,), {"__reduce__": reduce})
    return found


def restore(archive: bytes, module: str, name: str, state: bytes) -> Any:
    kind = getattr(load(archive, module), name)
    found = kind.__new__(kind)
    found.__dict__.update(pickle.loads(state))  # noqa: S301 (from Spark)
    return found


class ShippedSource(DataSource):
    """`nsqext.spark.NsqDataSource` with its package."""

    archive: ClassVar[bytes] = b""

    @classmethod
    def name(cls) -> str:
        return "nsqext"

    def _source(self) -> DataSource:
        found: DataSource = load(self.archive, _SOURCE).NsqDataSource(self.options)
        return found

    def schema(self) -> StructType | str:
        return self._source().schema()


def _sent(name: str) -> Callable[..., Any]:
    """Return a method that sends the reader or writer from the source's method of this name."""

    def method(self: ShippedSource, *arguments: Any, **keywords: Any) -> Any:
        return shipped(getattr(self._source(), name)(*arguments, **keywords), self.archive)

    return method


for _name in ("reader", "streamReader", "simpleStreamReader", "writer", "streamWriter"):
    setattr(ShippedSource, _name, _sent(_name))
