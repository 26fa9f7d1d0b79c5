"""Producers with scripted servers, for tests of the producer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Unpack

import anyio
import anyio.lowlevel

from nsqext import Producer, ProducerSettings
from tests.support.consumers import OF_LOOKUP, PATIENT_LOOKUP
from tests.support.fake_nsqd import (
    Answer,
    ScriptedLookup,
    ScriptedNode,
    obey,
    scripted_lookup,
    scripted_node,
)

__all__ = ("bodies", "bounded", "producing", "publish_keyed", "quick", "quick_direct")


def quick(**settings: Unpack[ProducerSettings]) -> dict[str, Any]:
    """Return settings with short pauses and long timeouts."""
    return {
        "timeout": 50.0,
        "lookup_timeout": 50.0,
        **PATIENT_LOOKUP,
        "retry_wait": 0.005,
        "max_retry_wait": 0.05,
        "lookup_max_pause": 0.02,
        **settings,
    }


def quick_direct(**settings: Unpack[ProducerSettings]) -> dict[str, Any]:
    """Return the settings of `quick` for nodes without lookup."""
    return {name: value for name, value in quick(**settings).items() if name not in OF_LOOKUP}


@asynccontextmanager
async def bounded() -> AsyncIterator[None]:
    """Fail the test if the block takes too long."""
    with anyio.fail_after(60):
        yield


def bodies(node: ScriptedNode, verb: str = "PUB") -> list[bytes]:
    """Return the bodies of all commands of a kind that a node received."""
    return [command.body or b"" for command in node.commands if command.words[0] == verb.encode()]


@asynccontextmanager
async def producing(
    *answers: dict[str, Answer | list[Answer]], extend: bool = False, **settings: Unpack[ProducerSettings]
) -> AsyncIterator[tuple[Producer, list[ScriptedNode], ScriptedLookup]]:
    """Yield a producer and one node per script; node n leads partition n."""
    first, last = obey(answers[0]), obey(answers[-1])
    async with bounded(), scripted_lookup() as lookup, scripted_node(first) as one, scripted_node(last) as two:
        nodes = [one, two][: len(answers)]
        lookup.set_leaders(dict(enumerate(nodes)), num=len(nodes), extend=extend)
        async with Producer(str(lookup), **quick(**settings)) as producer:
            yield producer, nodes, lookup


async def publish_keyed(producer: Producer, body: bytes) -> None:
    """Publish with the key ``k``."""
    await producer.publish("t", body, key="k")
