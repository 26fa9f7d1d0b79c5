"""A process that is killed while it writes: all acknowledged messages are restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import Process, environment
from tests.support.engine_partition import Bench

WRITER = """
import sys
from pathlib import Path
from nsqext.broker.engine.storage.segments import DiskOptions
from nsqext.broker.engine.options import PartitionOptions
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.broker.engine.partition import Partition

options = PartitionOptions(data_path=Path(sys.argv[1]), disk=DiskOptions(max_file_bytes=200_000, sync_interval=0.001))
partition = Partition("orders", 0, options)
partition.channel("ch")
first = partition.log.end_count
for number in range(first, first + 1_000_000):
    stored = partition.put([NewMessage(b"%d " % number + b"x" * (number % 3000))])
    partition.commit(stored)
    print(stored.message_id, flush=True)
    partition.tick()
"""


@pytest.mark.parametrize("acknowledged", [1, 1000])
def test_acknowledged_messages_survive_a_kill(tmp_path: Path, acknowledged: int) -> None:
    last = 1
    program, data = tmp_path / "writer.py", tmp_path / "data"
    program.write_text(WRITER)
    for _ in range(2):
        with Process((str(program), str(data)), environment()) as writer:
            assert writer.stdout is not None
            for line in writer.stdout:
                last = int(line)
                if last % acknowledged == 0:
                    writer.kill()
                    break
    again = Bench(data_path=data)
    assert again.partition.log.end_count >= last - 1
    consumer = again.consume(ready=2500)
    numbers = []
    while consumer.got:
        for message in consumer.take():
            numbers.append(int(message.body.split()[0]))
            again.channel().finish(consumer, message.internal_id)
    assert numbers == list(range(again.partition.log.end_count))
