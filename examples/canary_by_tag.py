"""Send every fifth order to the new version of a service, by tag, and the rest to the old one.

Two consumers share the channel ``billing``: one with the tag ``canary``, one without a tag. Runs on a cluster of
its own. With ``--lookupd HOST:PORT`` it uses that one, which needs a topic ``orders`` with extend support and a channel
``billing`` that no other program consumes at the moment.
"""

from __future__ import annotations

import argparse
import sys
from uuid import uuid4

import anyio

import nsqext
from nsqext.broker import Cluster

ORDERS = 20


async def collect(consumer: nsqext.Consumer, run: str, into: list[str | None], wanted: int) -> None:
    """Finish messages until ``wanted`` messages of this run are received; collect their tags."""
    async for message in consumer:
        await message.finish()
        if message.headers.get("run") == run:
            into.append(message.tag)
        if len(into) == wanted:
            return


async def canary(lookupd: str | list[str]) -> bool:
    """Publish the orders, consume them in both versions, report whether each version received its own."""
    run = uuid4().hex
    tags = ["canary" if number % 5 == 0 else None for number in range(ORDERS)]
    old: list[str | None] = []
    new: list[str | None] = []
    # both are subscribed before the first publish: without a consumer for its tag, a message goes to the untagged one
    async with (
        nsqext.Consumer("orders", "billing", lookupd=lookupd) as old_version,
        nsqext.Consumer("orders", "billing", lookupd=lookupd, tag="canary") as new_version,
        nsqext.Producer(lookupd=lookupd) as producer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(collect, old_version, run, old, tags.count(None))
        tasks.start_soon(collect, new_version, run, new, tags.count("canary"))
        for number, tag in enumerate(tags):
            await producer.publish("orders", b"order %d" % number, headers={"run": run}, tag=tag)
    print(f"old version: {len(old)} orders, {old.count('canary')} of them tagged")
    print(f"new version: {len(new)} orders, {new.count('canary')} of them tagged")
    return set(old) == {None} and set(new) == {"canary"}


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookupd", help="HTTP address of a running nsqlookupd, host:port")
    given: str | None = parser.parse_args().lookupd
    if given is not None:
        return 0 if anyio.run(canary, given) else 1
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("orders", partitions=2, extend=True, channels=["billing"])
        return 0 if anyio.run(canary, cluster.lookupd) else 1


if __name__ == "__main__":
    sys.exit(main())
