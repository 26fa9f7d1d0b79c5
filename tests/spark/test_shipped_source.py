"""The data source that Spark Connect receives together with the package."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import cloudpickle
from pyspark.core.files import SparkFiles

from nsqext.spark import shipped_source

_WORKER = """
import pickle, sys
from pathlib import Path

class Hidden:
    # the package is importable from the unpacked files only
    def find_spec(self, name, path=None, target=None):
        if name == "nsqext" and not any(Path(entry).name.startswith("nsqext-") for entry in sys.path):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
from pyspark import cloudpickle
from pyspark.core.files import SparkFiles
SparkFiles._root_directory, SparkFiles._is_running_on_worker = sys.argv[1], True
found = pickle.loads(Path(sys.argv[2]).read_bytes())
"""
_PLAN = """
source = found({"lookupd": "127.0.0.1:1", "subscribe": "orders", "channel": "shipped"})
schema = source.schema()
sink = found({"lookupd": "127.0.0.1:1", "topic": "orders"})
sent = [source.reader(schema=schema), source.streamReader(schema), sink.streamWriter(schema, False), source]
Path(sys.argv[2]).write_bytes(cloudpickle.dumps(sent))
"""
_TASK = """
import nsqext
assert Path(nsqext.__file__).is_relative_to(sys.argv[1])
print(*(type(one).__name__ for one in found), found[1]._options.channel)
"""


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The class as Spark Connect receives it."""
    file = tmp_path / "sent"
    monkeypatch.setattr(shipped_source.ShippedSource, "archive", b"")
    found = shipped_source.shipped_source()
    try:
        file.write_bytes(cloudpickle.dumps(found))  # type: ignore[no-untyped-call]
    finally:
        cloudpickle.unregister_pickle_by_value(shipped_source)  # type: ignore[no-untyped-call]
    return file


def _run(program: str, root: Path, file: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _WORKER + program, str(root), str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_on_worker(monkeypatch: pytest.MonkeyPatch, files: str) -> None:
    """Run as a process of an executor whose files are in a folder."""
    monkeypatch.setattr(SparkFiles, "_root_directory", files)
    monkeypatch.setattr(SparkFiles, "_is_running_on_worker", True)


def test_processes_without_the_package_load_the_source_its_readers_and_writers(shipped: Path, tmp_path: Path) -> None:
    _run(_PLAN, tmp_path / "driver" / "streaming_job", shipped)
    printed = _run(_TASK, tmp_path / "executor", shipped)
    assert printed.split() == ["NsqReader", "NsqStreamReader", "NsqStreamWriter", "ShippedSource", "shipped"]


def test_an_installed_package_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped_source, "unpack", None)
    source = shipped_source.ShippedSource({"lookupd": "127.0.0.1:1", "subscribe": "orders"})
    assert "value" in source.schema().fieldNames()  # type: ignore[union-attr]


def test_a_missing_dependency_of_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").write_text("import missing_dependency")
    run_on_worker(monkeypatch, str(tmp_path / "files"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for _ in range(2):  # first without the package, then with it
        with pytest.raises(ModuleNotFoundError, match="missing_dependency"):
            shipped_source.load(shipped_source.pack(package), "shop")


def test_a_package_that_lacks_a_dependency_is_not_unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bare_shop.py").write_text("import missing_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(shipped_source, "unpack", None)
    with pytest.raises(ModuleNotFoundError, match="missing_dependency"):
        shipped_source.load(b"", "bare_shop")


def test_a_folder_with_the_name_of_the_package_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "sent" / "hidden_shop"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "orders.py").write_text("COUNT = 3")
    (tmp_path / "work" / "hidden_shop").mkdir(parents=True)
    run_on_worker(monkeypatch, str(tmp_path / "files"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "work"), *sys.path])
    assert shipped_source.load(shipped_source.pack(package), "hidden_shop.orders").COUNT == 3


def test_one_folder_for_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "shop"
    (package / "cli").mkdir(parents=True)
    for name in ("__init__.py", "cli/main.py", "orders.py"):
        (package / name).write_text("")
    run_on_worker(monkeypatch, str(tmp_path / "files"))
    archive = shipped_source.pack(package)
    os.utime(package / "orders.py", (1e9, 1e9))
    assert shipped_source.pack(package) == archive
    first = shipped_source.unpack(archive)
    assert shipped_source.unpack(archive) == first
    assert [path.name for path in (tmp_path / "files").iterdir()] == [first.name]
    assert sorted(path.name for path in (first / "shop").iterdir()) == ["__init__.py", "orders.py"]
    # another process is faster
    found = [False, True]
    monkeypatch.setattr(Path, "exists", lambda path, **_: found.pop(0))
    assert shipped_source.unpack(archive) == first
    assert [path.name for path in (tmp_path / "files").iterdir()] == [first.name]
    monkeypatch.undo()
    run_on_worker(monkeypatch, str(tmp_path / "files"))
    (package / "orders.py").write_text("COUNT = 3")
    assert shipped_source.unpack(shipped_source.pack(package)) != first


def test_a_folder_that_cannot_be_created_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_on_worker(monkeypatch, str(tmp_path))
    archive = shipped_source.pack(tmp_path)
    target = shipped_source.unpack(archive)
    target.rmdir()
    target.symlink_to(tmp_path / "missing")
    with pytest.raises(NotADirectoryError):
        shipped_source.unpack(archive)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_the_state_of_a_reader_is_kept() -> None:
    class Reader:
        def __init__(self) -> None:
            self.range = 5

    sys.modules[__name__].__dict__["Reader"] = Reader
    sent = pickle.loads(cloudpickle.dumps(shipped_source.shipped(Reader(), b"")))  # type: ignore[no-untyped-call]  # noqa: S301
    assert (type(sent), sent.range) == (Reader, 5)
