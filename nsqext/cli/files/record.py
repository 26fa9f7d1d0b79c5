"""``nsqext record``: write the messages of a topic to files, at least once."""

from __future__ import annotations

import logging
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import anyio
from anyio.to_thread import run_sync

from nsqext import Position
from nsqext.cli.command import Topic, UntilEnd, command, examples
from nsqext.cli.connection import ServerAccess, counted
from nsqext.cli.message_files import MessageFiles, exact_record
from nsqext.cli.parameters import Option
from nsqext.cli.waiting import wait_of, waits
from nsqext.client.signals import stop_on_signals
from nsqext.errors import MessageNotInFlight

logger: logging.Logger = logging.getLogger("nsqext.record")

_MEGABYTE = 1 << 20


@examples(
    "nsqext record orders --to backup/",
    "nsqext record orders --to backup/ --until-end",
    "nsqext replay backup/ --topic orders_copy",
)
@command
async def run(
    connection: ServerAccess,
    topic: Topic,
    to: Annotated[Path, Option(help="Folder of the files; it is created.")],
    channel: Annotated[str, Option(help="Channel to record; its position is the progress.")] = "record",
    until_end: UntilEnd = False,
    rotate_mb: Annotated[
        float, Option(min=0.001, help="Compressed size at which a file is rotated, in megabytes.")
    ] = 256.0,
    rotate_seconds: Annotated[float, Option(min=0, help="Age at which a file is rotated; 0 for no limit.")] = 3600.0,
    batch: Annotated[int, Option(min=1, help="Messages written and synchronized together.")] = 1000,
    linger: Annotated[float, Option(min=0, help="Seconds that a batch waits for further messages.")] = 0.2,
) -> None:
    """Write messages to compressed files with headers, keys, times and partitions, until ^C, SIGTERM or the end.

    Bodies stay compressed as they are stored. A message is finished after its batch is synchronized with the disk: a
    killed recorder loses no message, and records those in flight again: its last two batches, at most. A new channel
    starts with the oldest stored message, on the original NSQ with the next published message. There the messages in
    flight to a killed recorder are redelivered after msg_timeout, 60 seconds by default.
    """
    connection.refuse_loss()
    connection.check_end_is_known(until_end=until_end)
    files = MessageFiles(to, topic, max_bytes=int(rotate_mb * _MEGABYTE), max_age=rotate_seconds)
    to.mkdir(parents=True, exist_ok=True)  # before a message is received
    settings: dict[str, Any] = {"max_in_flight": 2 * batch, "decompress": False}
    if await connection.has_positions(topic):
        settings["start"] = Position.earliest()
    consumer, count = connection.consumer(topic, channel, **settings), 0
    obstacles: list[str] = []
    with closing(files), waits.waiting(wait_of(consumer, obstacles)):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_on_signals, consumer.stop, logger)
            async with consumer:
                if until_end:
                    tasks.start_soon(connection.stop_when_drained, consumer, obstacles)
                async for messages in consumer.batches(max_count=batch, max_wait=linger):
                    await run_sync(files.append, [exact_record(message) for message in messages])
                    with suppress(MessageNotInFlight):  # they are redelivered and recorded again
                        await messages.finish()
                    count += len(messages)
            tasks.cancel_scope.cancel()
    connection.show({"topic": topic, "recorded": count}, f"{counted(count, 'message')} of {topic} recorded")
    connection.check_end(until_end=until_end)
