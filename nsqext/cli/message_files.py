"""Messages as JSON records, and files of recorded messages: JSON lines, a gzip member per batch, or several.

A killed process leaves at most one incomplete member, with messages that were not acknowledged, at the end of its file;
readers ignore it. No other process appends to a file.
"""

from __future__ import annotations

import base64
import gzip
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from attrs import frozen

from nsqext import OutgoingMessage
from nsqext.arguments import suggest
from nsqext.errors import InvalidInput, ProtocolError
from nsqext.protocol.headers import add_key, encode_headers, header_json

if TYPE_CHECKING:
    from nsqext import Message


def message_record(message: Message) -> dict[str, Any]:
    """Return a message as a record: position, time, body and all properties."""
    record: dict[str, Any] = {
        "topic": message.topic,
        "partition": message.partition,
        "id": message.id.hex(),
        "attempts": message.attempts,
        "timestamp": message.timestamp,
        "trace_id": message.trace_id,
        "offset": message.offset if message.offset >= 0 else None,
    }
    try:
        record |= {"tag": message.tag, "key": message.key, "headers": dict(message.headers)}
    except ProtocolError:
        # a header that is not JSON is kept
        record |= {"tag": None, "key": None, "headers": {}, "header_base64": encoded(message.header)}
    return record | body_fields(message.body)


def exact_record(message: Message) -> dict[str, Any]:
    """Return a message, not decompressed, as a record from which `outgoing_message` makes the same bytes."""
    record = message_record(message)
    if _remade(record) != message.header:
        record["header_base64"] = encoded(message.header)
    return record


def _remade(record: Mapping[str, Any]) -> bytes | None:
    """Return the extend header of a publish of headers, tag, trace id and key; None without a header."""
    trace_id, key = record["trace_id"] or None, record["key"]
    if not (record["headers"] or record["tag"] is not None or key is not None):
        return b"" if trace_id is None else None  # in a batch, a trace id may become a header
    try:
        header = encode_headers(record["headers"], tag=record["tag"], trace_id=trace_id)
        return header if key is None else add_key(header, key.encode())
    except InvalidInput:
        return None


def encoded(data: bytes) -> str:
    """Return bytes as text for JSON."""
    return base64.b64encode(data).decode()


def _decoded(record: Mapping[str, Any], name: str) -> bytes | None:
    try:
        return None if record.get(name) is None else base64.b64decode(record[name], validate=True)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{name} cannot be decoded: {error}") from error


def outgoing_message(record: object) -> OutgoingMessage:
    """Return the message of a record, in which an extend header in bytes (``header_base64``) replaces headers."""
    if not isinstance(record, Mapping):
        raise InvalidInput("a message record must be a JSON object")
    for name in record.keys() - _MEMBERS:
        likely = suggest(str(name), _MEMBERS)
        raise InvalidInput(
            f"a message record has no member {name!r}", hint=f"did you mean {likely}?" if likely else "leave it out"
        )
    body, content = record.get("body"), _decoded(record, "body_base64")
    if content is None:
        if not isinstance(body, str):
            raise InvalidInput("a message record needs body (text) or body_base64")
        content = body.encode()
    headers = record.get("headers")
    if headers is not None and not isinstance(headers, Mapping):
        raise InvalidInput("headers must be a JSON object")
    trace_id = record.get("trace_id") or None
    if trace_id is not None and not isinstance(trace_id, int):
        raise InvalidInput("trace_id must be a number")
    header, key = _decoded(record, "header_base64"), _text(record, "key")
    if header is not None:
        return OutgoingMessage(content, None, None, None if header else trace_id, key or None, header=header)
    texts = {name: _as_text(value) for name, value in headers.items()} if headers else None
    return OutgoingMessage(content, texts, _text(record, "tag"), trace_id, key)


_MEMBERS = frozenset(
    {
        *("body", "body_base64", "headers", "header_base64", "tag", "key", "trace_id"),
        *("topic", "partition", "id", "offset", "timestamp", "attempts", "channels"),  # of a message that was received
    }
)


def _text(record: Mapping[str, Any], name: str) -> str | None:
    value = record.get(name)
    return None if value is None else _as_text(value)


def _as_text(value: object) -> str:
    """Return text as it is, and another value as JSON."""
    text = header_json(value)
    return "null" if text is None else text


def body_fields(body: bytes) -> dict[str, str]:
    """Return a body for JSON: ``body`` for text, ``body_base64`` otherwise."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": encoded(body)}


def synchronize(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_synced(path: Path, data: bytes) -> None:
    """Replace a file atomically and durably."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(data)
    synchronize(temporary)
    temporary.replace(path)
    synchronize(path.parent)


SUFFIX = ".jsonl.gz"
_CHUNK = 1 << 18
MOST_UNPACKED: int = 1 << 30
"""Bytes of a decompressed member that readers accept."""
MOST_PACKED: int = 1 << 26
"""Bytes of records after which a batch continues in another member."""


class MessageFiles:
    """Writes records to files rotated by size and age."""

    def __init__(self, folder: Path, topic: str, *, max_bytes: int, max_age: float) -> None:
        self._folder = folder
        self._topic = topic.replace("#", "_")
        self._max_bytes = max_bytes
        self._max_age = max_age  # seconds; 0 without limit
        self._file: FileIO | None = None
        self._began = 0.0
        self._size = 0
        self.path: Path | None = None

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        import msgspec

        file = self._file or self._open()
        lines = (msgspec.json.encode(record, enc_hook=str) + b"\n" for record in records)
        for member in _joined(lines):
            data = gzip.compress(member, compresslevel=6)
            written = 0
            while written < len(data):  # a write to an almost full disk may be partial
                written += file.write(data[written:])
            self._size += len(data)
        os.fsync(file.fileno())
        if self._size >= self._max_bytes or (self._max_age and time.monotonic() - self._began >= self._max_age):
            self.close()

    def _open(self) -> FileIO:
        self._folder.mkdir(parents=True, exist_ok=True)
        moment = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")
        self.path = self._folder / f"{self._topic}.{moment}Z{SUFFIX}"
        self._file = FileIO(self.path, "xb")
        synchronize(self._folder)  # makes the name of the file durable
        self._began, self._size = time.monotonic(), 0
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _joined(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines together, in parts that readers accept and that fit into memory."""
    part, size = list[bytes](), 0
    for line in lines:
        if size + len(line) > MOST_PACKED and part:
            yield b"".join(part)
            part, size = [], 0
        part.append(line)
        size += len(line)
    if part:
        yield b"".join(part)


@frozen
class Entry:
    """A recorded message."""

    file: str
    number: int  #: line number, from 1
    record: dict[str, Any]


def files_in(paths: Sequence[Path]) -> list[Path]:
    """Return the files of messages; files of a folder in the order of writing."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    missing = [path for path in found if not path.is_file()]
    if missing or not found:
        raise InvalidInput(
            f"no files of recorded messages: {', '.join(map(str, missing or paths))}", hint="give a file or a folder"
        )
    if len({path.name for path in found}) < len(found):
        raise InvalidInput("two files have the same name", hint="replay them one after the other")
    return found


def read_entries(path: Path, skip: int = 0) -> Iterator[Entry]:
    """Yield the messages of a file, compressed or not, without an incomplete last member."""
    import msgspec

    for number, line in enumerate(_lines(path), 1):
        if number <= skip:
            continue
        try:
            record = msgspec.json.decode(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{path.name}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise InvalidInput(f"{path.name}, line {number} is not a message record")
        yield Entry(path.name, number, record)


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if compressed:
            for member in _members(file, path):
                yield from member.splitlines()
        else:
            for line in file:
                if line.strip():
                    yield line


def _members(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the content of each complete gzip member; refuse a member larger than any batch."""
    rest = b""
    while rest or (rest := file.read(_CHUNK)):
        decoder, parts, size = zlib.decompressobj(wbits=31), list[bytes](), 0
        while not decoder.eof:
            try:
                unpacked = decoder.decompress(rest, _CHUNK)
            except zlib.error as error:
                raise InvalidInput(f"{path.name} is damaged: {error}") from error
            parts.append(unpacked)
            size += len(unpacked)
            if size > MOST_UNPACKED:
                raise InvalidInput(
                    f"a batch of {path.name} unpacks to more than {MOST_UNPACKED} bytes",
                    hint="the file may be hostile",
                )
            rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
            needs_more = not decoder.eof and not rest and len(unpacked) < _CHUNK
            if needs_more and not (rest := file.read(_CHUNK)):
                return  # incomplete: its writer was killed
        yield b"".join(parts)
