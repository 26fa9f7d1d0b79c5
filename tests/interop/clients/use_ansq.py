# mypy: ignore-errors
"""Publishes four messages with ansq and consumes them, requeuing one; run in an environment that has ansq."""

import asyncio
import json
import sys
import time

import ansq

given = json.loads(sys.argv[1])


async def main():
    writer = await ansq.create_writer(nsqd_tcp_addresses=[given["nsqd"]])
    await writer.pub(given["topic"], "again")
    await writer.mpub(given["topic"], "one", "two", "three")
    await writer.close()
    lookup = {"lookupd_http_addresses": [given["lookupd"]], "lookupd_poll_interval": 1000}
    where = lookup if given["lookup"] else {"nsqd_tcp_addresses": [given["nsqd"]]}
    reader = await ansq.create_reader(topic=given["topic"], channel="ch", **where)
    seen = []
    async for message in reader.messages():
        seen.append([message.body.decode(), message.attempts, time.monotonic()])
        if message.body == b"again" and message.attempts == 1:
            await message.req(300)
            continue
        await message.fin()
        if len(seen) == 5:
            break
    await reader.close()
    sys.stdout.write(json.dumps(seen))


asyncio.run(main())
