"""One subscription: the bytes that it sends, and the handling of received frames."""

from __future__ import annotations

from struct import pack
from typing import Unpack

import anyio
import pytest

from nsqext import Consumer, ConsumerSettings
from nsqext.protocol.client.body_compression import compress_body
from nsqext.protocol.client.commands import CLS
from nsqext.protocol.headers import encode_headers
from tests.support.consumers import quick, quick_sharing, tape
from tests.support.fake_nsqd import (
    PLAIN,
    REDESIGNED,
    Peer,
    ScriptedNode,
    error,
    message,
    scripted_lookup,
    scripted_node,
)

pytestmark = pytest.mark.anyio


async def serve(node: ScriptedNode, verb: str = "SUB") -> Peer:
    """Serve a subscription up to its first RDY."""
    peer = await node.accept()
    await peer.expect(verb)
    await peer.answer()
    await peer.expect("RDY")
    return peer


def consumer(node: ScriptedNode, **settings: Unpack[ConsumerSettings]) -> Consumer:
    """Return a consumer of one scripted node."""
    given: ConsumerSettings = {"max_in_flight": 7, "start_timeout": 0.0, **settings}
    return Consumer("t", "ch", nsqd=str(node), **quick_sharing(**given))


async def test_commands_from_subscription_to_close() -> None:
    first, second = bytes(7) + b"\x0a" + bytes(8), bytes(7) + b"\x02" + bytes(8)  # a newline within the first id
    async with scripted_node(granted=PLAIN) as node, anyio.create_task_group() as tasks, consumer(node) as subject:
        peer = await serve(node)
        await peer.raw(message(10) + message(2))
        one, two = await subject.__anext__(), await subject.__anext__()
        await one.touch()
        await one.finish()
        await two.requeue(1.5)
        assert await tape(peer, 3) == ["TOUCH 10", "FIN 10", "REQ 2"]
        found = subject.statistics()
        assert (found.received, found.finished, found.requeued, found.bytes_received) == (2, 1, 1, 2 * (26 + 4))
        tasks.start_soon(_take_leave, peer)
    assert b"".join(peer.received) == b"".join(
        (
            b"SUB t ch\nRDY 7\n",
            b"TOUCH " + first + b"\nFIN " + first + b"\nREQ " + second + b" 1500\n",
            b"RDY 0\n",
            CLS,
        )
    )


async def _take_leave(peer: Peer) -> None:
    await peer.expect("RDY")
    await peer.expect("CLS")
    await peer.answer(b"CLOSE_WAIT")
    await peer.expect_end()


@pytest.mark.parametrize("command", ["FIN", "REQ"])
async def test_a_connection_whose_answer_nsqd_refused_is_renewed_once_nothing_is_in_flight(command: str) -> None:
    """What a soak showed: nsqd sent a message of its queue twice, counted one for ever, and no more with RDY 1."""
    async with scripted_node(granted=PLAIN) as node, consumer(node) as subject:
        peer = await serve(node)
        await peer.raw(message(1) + message(2))
        one, two = await anext(subject), await anext(subject)
        await (one.finish() if command == "FIN" else one.requeue())
        await peer.expect(command)
        await peer.raw(error(f"E_{command}_FAILED {command} 1 failed ID not in flight"))
        await two.touch()
        await peer.expect("TOUCH")
        assert len(subject.connections) == 1, "the other message is in flight"
        await two.finish()
        await peer.expect("FIN")
        await peer.expect_end()
        peer = await serve(node)
        await peer.raw(message(3))
        assert (await anext(subject)).internal_id == 3
        await peer.close()


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_position_is_read_before_a_body_is_unpacked(ordered: bool) -> None:
    packed = compress_body("gzip", b"x" * 500)
    assert packed is not None
    header = encode_headers(packed[1])
    part = b"\x04" + len(header).to_bytes(2, "big") + header + pack(">QI", 700, 99)
    async with scripted_lookup() as lookup, scripted_node(granted=REDESIGNED) as node:
        lookup.set_leaders({0: node}, num=1, extend=True, ordered=ordered)
        options = quick(start_timeout=0.0, queue_position=True)
        async with Consumer("t", "ch", lookupd=str(lookup), **options) as subject:
            peer = await node.accept()
            await peer.expect("SUB_ORDERED" if ordered else "SUB_ADVANCED")
            await peer.answer()
            await peer.expect("RDY")
            await peer.raw(message(1, packed[0], position=part))
            found = await subject.__anext__()
            assert (found.offset, found.size, found.body, found.headers) == (700, 99, b"x" * 500, {})
            await peer.close()
