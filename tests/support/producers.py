"""Producers with scripted servers, for tests of the producer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel

from nsqext import (
    Producer,
    ProducerOptions,
)
from nsqext.lookup.options import LookupOptions
from tests.support.fake_nsqd import (
    Answer,
    ScriptedLookup,
    ScriptedNode,
    obey,
    scripted_lookup,
    scripted_node,
)

__all__ = ("bodies", "bounded", "options_of", "producing", "publish_keyed")

_QUICK = LookupOptions(max_pause=0.02)


def options_of(**members: Any) -> ProducerOptions:
    """Return options with short pauses."""
    return ProducerOptions(**{"timeout": 5.0, "retry_wait": 0.005, "max_retry_wait": 0.05, "lookup": _QUICK, **members})


@asynccontextmanager
async def bounded() -> AsyncIterator[None]:
    """Fail the test if the block takes too long."""
    with anyio.fail_after(30):
        yield


def bodies(node: ScriptedNode, verb: str = "PUB") -> list[bytes]:
    """Return the bodies of all commands of a kind that a node received."""
    return [command.body or b"" for command in node.commands if command.words[0] == verb.encode()]


@asynccontextmanager
async def producing(
    *answers: dict[str, Answer | list[Answer]], options: ProducerOptions | None = None, extend: bool = False
) -> AsyncIterator[tuple[Producer, list[ScriptedNode], ScriptedLookup]]:
    """Yield a producer and one node per script; node n leads partition n."""
    first, last = obey(answers[0]), obey(answers[-1])
    async with bounded(), scripted_lookup() as lookup, scripted_node(first) as one, scripted_node(last) as two:
        nodes = [one, two][: len(answers)]
        lookup.set_leaders(dict(enumerate(nodes)), num=len(nodes), extend=extend)
        async with Producer(str(lookup), options=options or options_of()) as producer:
            yield producer, nodes, lookup


async def publish_keyed(producer: Producer, body: bytes) -> None:
    """Publish with the key ``k``."""
    await producer.publish("t", body, key="k")
