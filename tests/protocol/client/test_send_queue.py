"""Parts of commands: their bytes, their cost, and what counts as sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsqext.protocol.client.commands import LARGE, Command, LargeCommand, SendQueue, with_body
from nsqext.protocol.layers import DeflateLayer

_BODIES = [bytes([number]) * size for number, size in enumerate((1, 100, 20_000, LARGE - 1, LARGE, 200_000))]
_MOST = 64


def commands_of(numbers: list[int]) -> list[Command]:
    """Return a command for each of the bodies."""
    return [with_body(b"PUB t\n%4d" % number, _BODIES[number % len(_BODIES)]) for number in numbers]


def wire(commands: list[Command]) -> bytes:
    """Return the bytes of commands."""
    return b"".join(map(bytes, commands))


def drain(queue: SendQueue, accepted: int) -> tuple[bytes, int, int]:
    """Take everything as a kernel that accepts a number of bytes; return the bytes, the calls, and the commands."""
    taken, calls, commands = [], 0, 0
    while queue:
        data = b"".join(queue.first(_MOST))[:accepted]
        taken.append(data)
        calls += 1
        commands += queue.sent(len(data))
    return b"".join(taken), calls, commands


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(5_000, 3_000_000))
def test_all_bytes_are_sent_in_order_in_as_few_calls_as_the_kernel_allows(numbers: list[int], accepted: int) -> None:
    queue, commands = SendQueue(), commands_of(numbers)
    queue.put(commands)
    data, calls, ended = drain(queue, accepted)
    assert data == wire(commands)
    assert ended == len(commands)
    assert calls <= len(data) // accepted + 1 + len(numbers) * 2 // _MOST
    assert (bool(queue), queue.begun) == (False, 0)


@given(st.lists(st.integers(0, 5), max_size=200))
def test_small_commands_are_joined_once_and_large_bodies_never(numbers: list[int]) -> None:
    queue, commands = SendQueue(), commands_of(numbers)
    queue.put(commands)
    parts = queue.first(1000)
    bodies = [command.parts[-1] for command in commands if isinstance(command, LargeCommand)]
    own = [part for part in parts if any(part is body for body in bodies)]
    assert [id(part) for part in own] == [id(body) for body in bodies]
    small = [len(command) for command in commands if len(command) < LARGE]
    assert len(parts) <= 2 * (len(commands) - len(small)) + 1 + sum(small) // 262144
    if parts:
        queue.sent(len(parts[0]) - 1)
        rest = queue.first(1000)
        assert len(rest[0]) == 1
        assert all(one is other for one, other in zip(parts[1:], rest[1:], strict=True))  # nothing is joined again


def test_a_command_has_begun_when_its_first_byte_was_sent() -> None:
    queue = SendQueue()
    queue.put(commands_of([1, 5, 0, 5]))
    first, body, head, last = map(len, queue.first(_MOST))
    assert queue.begun == 0
    assert queue.sent(0) == 0
    assert queue.begun == 0
    assert queue.sent(1) == 0
    assert queue.begun == 2  # the small command and the head of the large one are one part
    assert queue.sent(first - 1) == 2
    assert queue.begun == 0
    queue.sent(1)
    assert queue.begun == 0  # the command of this body was counted with its head
    assert queue.sent(body - 1) == 0
    assert queue.sent(head + last) == 2
    assert not queue


def test_a_part_is_encoded_once() -> None:
    queue, commands, peer = SendQueue(), commands_of([0, 1, 5, 2]), DeflateLayer()
    layers = (DeflateLayer(),)
    queue.put(commands)
    received = []
    while queue:
        queue.encode(layers)
        queue.encode(layers)
        data = bytes(queue.first(1)[0][:7])
        received.append(peer.decode(data))
        queue.sent(len(data))
    assert b"".join(received) == wire(commands)


def test_bytes_that_were_encoded_before_stay_as_they_are() -> None:
    queue, peer, layer = SendQueue(), DeflateLayer(), DeflateLayer()
    queue.append(layer.encode(b"first"), 1)
    received = b""
    for further in ([b"second"], []):
        while queue:
            queue.encode((layer,))
            data = bytes(queue.first(1)[0][:2])
            received += peer.decode(data)
            queue.sent(len(data))
        queue.put(further)
    assert received == b"firstsecond"


def test_many_small_commands_make_bounded_parts() -> None:
    queue = SendQueue()
    queue.put([b"x" * 60_000] * 100)
    assert max(map(len, queue.first(1000))) <= 262144 + 60_000
