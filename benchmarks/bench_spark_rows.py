"""CPU of a row that Spark reads, in this process and without servers: ``python -m benchmarks.bench_spark_rows``.

Splits the bytes of messages, decodes and orders them, makes the commands that finish them, and builds Arrow data, with
reads of 64 and of 512 KiB. To compare two commits, alternate them several times on a quiet machine.
"""

from __future__ import annotations

import argparse
import struct
import time
from statistics import median
from typing import cast

from nsqext.protocol.client.client_protocol import ClientProtocol
from nsqext.spark.read.arrow import RowFormat, to_batches
from nsqext.spark.read.frames import Blocks, Reassembler, decode_frames, finish_commands

_BODY = b"x" * 200
_RECORD = 230
_STEPS = ("split", "decode", "order", "collect", "finish", "Arrow")


def frame(number: int) -> bytes:
    """Return the frame of a message of a plain topic."""
    head = struct.pack(">qHQQqI", 1_700_000_000_000_000_000 + number, 1, number + 1, 0, number * _RECORD, _RECORD)
    return struct.pack(">II", len(head) + len(_BODY) + 4, 2) + head + _BODY


def read(pieces: list[bytes], rows: int) -> tuple[float, list[float]]:
    """Return the microseconds of CPU per row, and the elapsed microseconds of each step."""
    protocol, reassembler = ClientProtocol("n"), Reassembler(0, rows, 2000)
    reassembler.begin(0)
    blocks, row_format, spent, found = Blocks(0, 2000, 4 << 20, 1), RowFormat(), [0.0] * len(_STEPS), 0
    began, clock = time.process_time(), time.perf_counter
    for piece in pieces:
        times = [clock()]
        frames = protocol.receive_data(piece)
        times.append(clock())
        delivery = decode_frames(cast("list[bytes]", frames), extend=False)
        times.append(clock())
        runs = reassembler.take(delivery)
        times.append(clock())
        for run in runs:
            blocks.add(run)
        if reassembler.done:
            blocks.close()
        times.append(clock())
        finish_commands(delivery)
        times.append(clock())
        while (block := blocks.pop()) is not None:
            found += sum(batch.num_rows for batch in to_batches(block.columns, block.first, "t", 0, row_format))
        times.append(clock())
        for step in range(len(_STEPS)):
            spent[step] += times[step + 1] - times[step]
    cpu = time.process_time() - began
    if found != rows:
        raise SystemExit(f"{found} rows of {rows}")
    return cpu / rows * 1e6, [seconds / rows * 1e6 for seconds in spent]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    stream = b"".join(map(frame, range(given.rows)))
    for size in (65_536, 524_288):
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        found = [read(pieces, given.rows) for _ in range(given.rounds + 1)][1:]  # the first one fills caches
        steps = ", ".join(f"{name} {median(spent[step] for _, spent in found):.3f}" for step, name in enumerate(_STEPS))
        total = [cpu for cpu, _ in found]
        print(f"reads of {size >> 10} KiB: {median(total):.3f} µs of CPU per row, least {min(total):.3f}; {steps}")


if __name__ == "__main__":
    main()
