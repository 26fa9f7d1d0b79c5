"""A disk in memory with the semantics of fsync: unsynced data is lost or torn at a loss of power.

``fsync`` of a file makes its content and name durable, as on ext4 and XFS. A later rename may be lost, unless the
folder is synced. Folders and removals are durable at once.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Generator, Iterator
from fnmatch import fnmatch
from pathlib import PosixPath
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field

if TYPE_CHECKING:
    from nsqext.testing.simulation.network import Network

_FIRST_FD = 2_000_000
_TORN = 0.5  # share of files with unsynced bytes that keep a part of them


def _failure(number: int, path: object) -> OSError:
    return OSError(number, os.strerror(number), str(path))


@define(eq=False)
class _File:
    data: bytearray = field(factory=bytearray)
    durable: bytes = b""


@define
class _Status:
    st_size: int


class SimulatedDisk:
    """Files of all nodes; the first part of a path below the root names the node.

    Args:
        network: its time advances while a disk is slow.
        random: what a loss of power leaves.

    Attributes:
        full: nodes with a full disk.
        failing: nodes whose disk fails to write.
        slow: longest time of an fsync, in seconds, by node.
        power_losses: virtual times at which a node lost its power.
    """

    def __init__(self, network: Network, random: Random) -> None:
        self.full: set[str] = set()
        self.failing: set[str] = set()
        self.slow: dict[str, float] = {}
        self.power_losses: list[float] = []
        self._network = network
        self._random = random
        self._files: dict[str, _File] = {}
        self._folders: dict[str, None] = {}
        self._named: dict[str, _File] = {}  # names that are durable
        self._open: dict[int, tuple[str, _File | None]] = {}
        self._next = _FIRST_FD
        path_type = type("SimulatedPath", (SimulatedPath,), {"disk": self})
        self.root: SimulatedPath = path_type("/simulated")
        self._folders[str(self.root)] = None

    # Faults

    def _node(self, path: str) -> str:
        parts = path.split("/", 3)
        return parts[2] if len(parts) > 3 else ""

    def _check(self, path: str) -> None:
        node = self._node(path)
        if node in self.full:
            raise _failure(errno.ENOSPC, path)
        if node in self.failing:
            raise _failure(errno.EIO, path)

    def heal(self, node: str) -> None:
        self.full.discard(node)
        self.failing.discard(node)
        self.slow.pop(node, None)

    def lose_power(self, node: str) -> None:
        """Lose unsynced data, or a part of it; close the node's files."""
        random = self._random
        begin = f"{self.root}/{node}/"
        paths = {path for path in (*self._files, *self._named) if path.startswith(begin)}
        for path in sorted(paths):
            current, named = self._files.get(path), self._named.get(path)
            kept = current if current is named or random.random() < _TORN else named
            if kept is None:
                self._files.pop(path, None)
                self._named.pop(path, None)
                continue
            self._files[path] = self._named[path] = kept
            kept.data[:] = self._left(kept, random)
            kept.durable = bytes(kept.data)
        for fd in [fd for fd, (path, _) in self._open.items() if path.startswith(begin)]:
            del self._open[fd]
        self._network.note(f"power lost {node}")
        self.power_losses.append(self._network.now)

    def _left(self, file: _File, random: Random) -> bytes:
        if file.data == file.durable or random.random() >= _TORN:
            return file.durable
        if file.data.startswith(file.durable):
            return bytes(file.data[: random.randint(len(file.durable), len(file.data))])
        return bytes(file.data)

    # Functions of os

    def open(self, path: SimulatedPath, flags: int) -> int:
        name = str(path)
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._check(name)
        found = self._files.get(name)
        if found is None:
            if self.is_folder(path):
                return self._take(name, None)
            if not flags & os.O_CREAT:
                raise _failure(errno.ENOENT, path)
            found = self._files[name] = _File()
        return self._take(name, found)

    def _take(self, name: str, file: _File | None) -> int:
        self._next += 1
        self._open[self._next] = name, file
        return self._next

    def owns(self, fd: object) -> bool:
        return isinstance(fd, int) and _FIRST_FD < fd <= self._next

    def write(self, fd: int, data: bytes) -> int:
        """Append bytes; a full disk may take a part of them."""
        if fd not in self._open:
            raise _failure(errno.EIO, fd)
        path, file = self._open[fd]
        if file is None:
            raise _failure(errno.EISDIR, path)
        if self._node(path) in self.full and len(data) > 1 and self._random.random() < _TORN:
            part = self._random.randint(1, len(data) - 1)
            file.data += data[:part]
            return part
        self._check(path)
        file.data += data
        return len(data)

    def fsync(self, fd: int) -> None:
        """Make durable a file's content and name, or a folder's names; ignore descriptors closed by a loss of power."""
        if fd not in self._open:
            return
        path, file = self._open[fd]
        if self._node(path) in self.failing:
            raise _failure(errno.EIO, path)
        longest = self.slow.get(self._node(path))
        if longest is not None:
            self._network.now += self._random.uniform(0.0, longest)
        if file is None:
            for name, named in self._files.items():
                if name.startswith(f"{path}/"):
                    self._named[name] = named
            return
        file.durable = bytes(file.data)
        if self._files.get(path) is file:
            self._named[path] = file

    def ftruncate(self, fd: int, size: int) -> None:
        _, file = self._open.get(fd, ("", None))
        if file is None:
            raise _failure(errno.EIO, fd)
        del file.data[size:]

    def fstat(self, fd: int) -> _Status:
        file = self._open[fd][1]
        return _Status(len(file.data) if file is not None else 0)

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)

    # Methods of paths

    def find(self, path: SimulatedPath) -> _File:
        found = self._files.get(str(path))
        if found is None:
            raise _failure(errno.ENOENT, path)
        return found

    def put(self, path: SimulatedPath, data: bytes) -> int:
        self._check(str(path))
        self._files[str(path)] = _File(bytearray(data))
        return self.open(path, os.O_WRONLY)

    def exists(self, path: SimulatedPath) -> bool:
        return str(path) in self._files or self.is_folder(path)

    def is_folder(self, path: SimulatedPath) -> bool:
        return str(path) in self._folders

    def make_folder(self, path: SimulatedPath) -> None:
        self._check(str(path))
        for folder in (path, *path.parents):
            self._folders[str(folder)] = None

    def names(self, path: SimulatedPath) -> list[str]:
        if not self.is_folder(path):
            raise _failure(errno.ENOENT, path)
        begin = f"{path}/"
        rest = (name[len(begin) :] for name in (*self._files, *self._folders) if name.startswith(begin))
        return list(dict.fromkeys(name.partition("/")[0] for name in rest))

    def move(self, path: SimulatedPath, target: str) -> None:
        """Rename a file; the old names remain durable."""
        self._check(str(path))
        self._files[target] = self.find(path)
        del self._files[str(path)]

    def remove(self, path: SimulatedPath) -> None:
        if self._files.pop(str(path), None) is None:
            raise _failure(errno.ENOENT, path)
        self._named.pop(str(path), None)

    def remove_folder(self, path: SimulatedPath) -> None:
        if self.names(path):
            raise _failure(errno.ENOTEMPTY, path)
        del self._folders[str(path)]

    def replacements(self) -> list[tuple[str, Callable[..., Any]]]:
        """Return stand-ins for the functions of `os` that take a path or descriptor."""

        def stand_in(name: str, simulated: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
            real = getattr(os, name)

            def function(file: Any, *args: Any, **settings: Any) -> Any:
                if isinstance(file, SimulatedPath) or self.owns(file):
                    return simulated(file, *args)
                return real(file, *args, **settings)

            return name, function

        return [
            stand_in("open", lambda path, flags, mode=0: self.open(path, flags)),
            stand_in("truncate", lambda path, size: self.find(path).data.__delitem__(slice(size, None))),
            stand_in("write", self.write),
            stand_in("fsync", self.fsync),
            stand_in("ftruncate", self.ftruncate),
            stand_in("fstat", self.fstat),
            stand_in("close", self.close),
        ]


class _Writer(io.BytesIO):
    def __init__(self, path: SimulatedPath) -> None:
        super().__init__()
        self._disk = path.disk
        self._fd = path.disk.put(path, b"")

    def write(self, data: Any, /) -> int:
        return self._disk.write(self._fd, bytes(data))

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if not self.closed:
            self._disk.close(self._fd)
        super().close()


class SimulatedPath(PosixPath):
    """A path of a simulated disk."""

    disk: ClassVar[SimulatedDisk]

    def exists(self, **settings: Any) -> bool:
        return self.disk.exists(self)

    def is_dir(self, **settings: Any) -> bool:
        return self.disk.is_folder(self)

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        self.disk.make_folder(self)

    def iterdir(self) -> Generator[Any, None, None]:
        for name in self.disk.names(self):
            yield self / name

    def glob(self, pattern: str, **settings: Any) -> Iterator[Any]:  # type: ignore[override]
        first, _, rest = pattern.partition("/")
        for path in self.iterdir():
            if fnmatch(path.name, first):
                if not rest:
                    yield path
                elif path.is_dir():
                    yield from path.glob(rest)

    def open(self, mode: str = "r", *args: Any, **settings: Any) -> Any:
        return _Writer(self) if "w" in mode else io.BytesIO(self.read_bytes())

    def read_bytes(self) -> bytes:
        return bytes(self.disk.find(self).data)

    def write_bytes(self, data: Any) -> int:
        with self.open("wb") as out:
            return int(out.write(data))

    def replace(self, target: Any) -> Any:
        self.disk.move(self, str(target))
        return target

    rename = replace

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok or self.disk.exists(self):
            self.disk.remove(self)

    def rmdir(self) -> None:
        self.disk.remove_folder(self)
