"""The package `nsqext.protocol` against bytes that a real server sent and accepted."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from nsqext.errors import ProtocolError, ServerError
from nsqext.errors.server import SERVER_ERRORS, server_error
from nsqext.protocol.client.client_protocol import ClientProtocol, FrameParser, Reply
from nsqext.protocol.client.commands import NOP
from nsqext.protocol.frames import HEARTBEAT, FrameType, decode_trace_reply, encode_frame, encode_trace_reply
from nsqext.protocol.identify import Negotiated
from nsqext.protocol.layers import DeflateLayer, SnappyLayer
from nsqext.protocol.messages import RawMessage, decode_into
from nsqext.protocol.record import decode_record, encode_record, raw_size
from nsqext.protocol.server.command_parser import CommandTarget, PublishItem, parse_publish
from nsqext.protocol.server.negotiate import ClientSettings, ServerLimits, identify_reply, negotiate
from nsqext.protocol.server.request_error import RequestError
from tests.captures import Conversation, Step, conversation, conversations, disk_records
from tests.support.command_reader import OpenRules, read_commands, write_command
from tests.support.message_frames import encode_message
from tests.support.tables import table

ALL = [pytest.param(one, id=one.name) for one in conversations()]
_MAGIC = b"  V2"
_SILENT = frozenset((b"FIN", b"REQ", b"TOUCH", b"RDY", b"NOP"))


def _joined(steps: list[Step], what: str) -> bytes:
    return b"".join(step.data for step in steps if step.what == what)


def _frame(step: Step) -> tuple[int, bytes]:
    parser = FrameParser()
    (frame,) = parser.feed(step.data)
    return frame


# Frames


@table("recorded", ALL)
def test_every_frame_of_the_server_is_read_in_any_chunks(recorded: Conversation) -> None:
    for steps in recorded.connections().values():
        received = _joined(steps, "recv")
        whole, bytewise = FrameParser(), FrameParser()
        frames = whole.feed(received)
        assert [frame for byte in received for frame in bytewise.feed(bytes((byte,)))] == frames
        assert whole.error is bytewise.error is None
        assert whole.buffered == bytewise.buffered == 0
        assert b"".join(encode_frame(kind, data) for kind, data in frames) == received


# Commands


# sent by the recorder in a form that this package never writes: without the topic's name
_ODD_LINES = {
    b"", b"AUTH x", b"BOGUS", b"BOGUS x y", b"INTERNAL_CREATE_TOPIC T 0", b"INTERNAL_CREATE_TOPIC authtopic 0",
    b"INTERNAL_CREATE_TOPIC bad 0 zz", b"INTERNAL_CREATE_TOPIC newtopic 0", b"NOP\r", b"NOPE  two blanks", b"PUB",
    b"PUB T -1", b"PUB T 0\r", b"PUB T zz", b"PUB_TIMEOUT t 0", b"RDY", b"RDY x", b"SUB", b"SUB T", b"SUB T ch -2",
    b"SUB T ch zz", b"SUB_ADVANCED T ch zz special:-1", b"SUB_ORDER t c 0", b"pub t",
}  # fmt: skip


@table("recorded", ALL)
def test_every_command_is_read_by_the_server_role_and_written_alike_by_the_client_role(recorded: Conversation) -> None:
    for steps in recorded.connections().values():
        sent = _joined(steps, "send")
        if not sent.startswith(_MAGIC):
            assert recorded.name in ("bad_magic", "magic_and_unknown")
            continue
        reading = read_commands([sent[4:]])
        position = 4
        for command, size in zip(reading.commands, reading.sizes, strict=True):
            original, position = sent[position : position + size], position + size
            line = re.sub(rb"k_\w+", b"T", original.partition(b"\n")[0])
            if line not in _ODD_LINES:
                assert write_command(command) == original
        assert reading.error is not None or reading.rest == b""


@table("recorded", ALL)
def test_a_body_that_the_server_refused_is_refused_with_the_same_frame(recorded: Conversation) -> None:
    for steps in recorded.connections().values():
        sent = _joined(steps, "send")
        if not sent.startswith(_MAGIC):
            continue
        error = read_commands([sent[4:]]).error
        if error is not None:
            frames = [step.data for step in steps if step.what == "recv" and step.data]
            assert error.frame() == frames[-1]
            assert error.fatal
            assert steps[-1].what == "closed"


def test_wrong_magic_is_answered_without_a_trailing_blank() -> None:
    replies = [step.data for step in conversation("bad_magic").steps if step.what == "recv" and step.data]
    assert set(replies) == {RequestError("E_BAD_PROTOCOL", None).frame()}


def _exchanges(steps: list[Step]) -> list[tuple[bytes, tuple[int, bytes]]]:
    """Return the sent bytes with the next received frame, if any."""
    return [
        (sent.data, _frame(answer))
        for sent, answer in pairwise(steps)
        if sent.what == "send" and answer.what == "recv" and answer.data
    ]


@table(
    ("name", "extend"),
    [
        ("pub_plain", False), ("pub_ext", True), ("pub_ext_errors", True), ("pub_ext_on_plain", False),
        ("mpub_ext", True), ("pub_trace", False), ("mpub_trace", False), ("mpub_plain", False),
        ("pub_on_ext_topic", True), ("ext_max_header", True),
    ],
)  # fmt: skip
def test_every_publish_has_the_recorded_outcome(name: str, extend: bool) -> None:
    outcomes = 0
    for steps in conversation(name).connections().values():
        for sent, (kind, answer) in _exchanges(steps):
            if b"PUB" in sent[:5]:
                outcomes += 1
                items = _publish(sent, extend)
                if isinstance(items, RequestError):
                    assert (kind, answer) == (FrameType.ERROR, str(items).encode())
                elif sent.startswith(b"MPUB_TRACE") or items[0].traced:
                    _check_trace(answer, sent, items, extend)
                else:
                    assert (kind, answer) == (FrameType.RESPONSE, b"OK")
    assert outcomes


def _publish(sent: bytes, extend: bool) -> list[PublishItem] | RequestError:
    rules = OpenRules(extend=extend)
    reading = read_commands([sent], rules)
    if reading.error is not None:
        return reading.error
    (command,) = reading.commands
    if command.items is not None:
        return command.items
    assert command.body is not None
    try:
        return parse_publish(
            command.words[0], command.body, rules.limits, CommandTarget(command.words[1].decode(), extend)
        )
    except RequestError as error:
        return error


def _check_trace(answer: bytes, sent: bytes, items: list[PublishItem], extend: bool) -> None:
    reply = decode_trace_reply(answer, 0 if sent.startswith(b"MPUB") else items[0].trace_id)
    assert encode_trace_reply(*reply) == answer
    message_id, _, _, size = reply
    assert size == sum(raw_size(len(item.body), len(item.header), extend, item.version) for item in items)
    assert message_id > 0


# IDENTIFY


def _identifies() -> list[tuple[str, bytes, tuple[int, bytes]]]:
    return [
        (one.name, body, answer)
        for one in conversations()
        for steps in one.connections().values()
        for sent, answer in _exchanges(steps)
        if sent.startswith(b"IDENTIFY\n") and read_commands([sent]).error is None
        for body in (sent[13:],)
    ]


def test_the_server_role_answers_every_identify_as_recorded() -> None:
    seen = set()
    for name, body, (kind, answer) in _identifies():
        limits = ServerLimits(tls=name == "tls", auth=name == "auth")
        if (body, name) in seen:
            continue
        seen.add((body, name))
        settings = ClientSettings.defaults(limits)
        try:
            negotiate(body, limits, settings)
            ours = FrameType.RESPONSE, identify_reply(settings, limits)
        except RequestError as error:
            ours = FrameType.ERROR, str(error).encode()
        if kind == FrameType.RESPONSE and answer != b"OK":
            assert (ours[0], json.loads(ours[1])) == (kind, json.loads(answer)), name
            assert list(json.loads(ours[1])) == list(json.loads(answer))
        else:
            assert ours == (kind, answer), name
    assert len(seen) > 40


def test_the_client_role_reads_every_answer_to_identify() -> None:
    for name, body, (kind, answer) in _identifies():
        if kind != FrameType.RESPONSE:
            continue
        granted = Negotiated.decode(answer)
        asked = json.loads(body)
        assert granted.redesigned == (answer != b"OK")
        assert granted.max_rdy_count == 2500
        assert granted.tls == (name == "tls" and asked.get("tls_v1", False))
        assert granted.snappy == (asked.get("snappy", False) and answer != b"OK")
        assert bool(granted.deflate_level) == (asked.get("deflate", False) and answer != b"OK")
        assert granted.auth_required == (name == "auth")
        if asked.get("msg_timeout") and granted.redesigned:
            assert granted.msg_timeout == asked["msg_timeout"] / 1000


# Messages


def _shape(steps: list[Step], until: Step) -> tuple[bool, bool]:
    """Return whether the subscription receives extend parts, and queue positions."""
    extend = detail = False
    for step in steps[: steps.index(until)]:
        if step.what == "send" and step.data.startswith(b"IDENTIFY"):
            extend = extend or json.loads(step.data[13:]).get("extend_support", False)
        if step.what == "send" and step.data.startswith(b"SUB"):
            detail = not step.data.startswith(b"SUB ")
    return extend, detail


def _text(data: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in data)


def _described(message: RawMessage, extend: bool, detail: bool) -> str:
    text = f"message attempts={message.attempts} id={message.internal_id} trace={message.trace_id}"
    if extend:
        text += f" ext_ver={message.version}" + (f" ext={_text(message.header[:80])}" if message.version else "")
    if detail:
        text += f" offset={message.offset} size={message.size}"
    return f"{text} body={_text(message.body[:60])}"


_WITH_MESSAGES = [
    one
    for one in ALL
    if any(step.note.startswith("message ") for step in one.values[0].steps)  # type: ignore[union-attr]
]


@table("recorded", _WITH_MESSAGES)
def test_every_message_has_its_shape(recorded: Conversation) -> None:
    for steps in recorded.connections().values():
        for step in steps:
            if not step.note.startswith("message "):
                continue
            kind, data = _frame(step)
            extend, detail = _shape(steps, step)
            message = RawMessage()
            decode_into(message, data, extend, detail)
            assert kind == FrameType.MESSAGE
            assert _described(message, extend, detail) == step.note
            assert encode_message(message, extend, detail) == data
            assert 1 <= message.attempts <= 4000
            assert message.timestamp > 1_700_000_000_000_000_000
            if detail and recorded.name != "upgrade_old_records":
                size = raw_size(len(message.body), len(message.header), extend, message.version)
                assert message.size == size


def test_all_shapes_were_recorded() -> None:
    shapes = set()
    for one in conversations():
        for steps in one.connections().values():
            for step in steps:
                if step.note.startswith("message "):
                    extend, detail = _shape(steps, step)
                    message = RawMessage()
                    decode_into(message, _frame(step)[1], extend, detail)
                    shapes.add((extend, detail, message.version))
    assert shapes == {
        (extend, detail, version)
        for extend in (False, True)
        for detail in (False, True)
        for version in (0, 4)
        if extend or not version
    }


# Errors


@table("recorded", ALL)
def test_every_error_has_a_class_and_a_flag_for_the_connection(recorded: Conversation) -> None:
    for steps in recorded.connections().values():
        for step, following in pairwise([*steps, Step(0, "end", b"")]):
            if step.what != "recv" or not step.data:
                continue
            kind, data = _frame(step)
            if kind != FrameType.ERROR:
                continue
            error = server_error(data, node="n:1")
            assert type(error) is not ServerError
            assert type(error) is SERVER_ERRORS[error.code]
            assert str(error).startswith(f"{data.decode().strip()} (node n:1)")
            if not error.closes_connection:
                assert following.what != "closed" or error.code == "E_FAILED_ON_NOT_LEADER"
            elif following.what not in ("silence", "end"):
                assert following.what == "closed"


# The client role


@table("recorded", ALL)
def test_the_client_role_pairs_every_answer_with_its_command(recorded: Conversation) -> None:
    for steps in recorded.connections().values():
        if not steps[0].data.startswith(_MAGIC):
            continue
        client, replies, messages, heartbeats = ClientProtocol("n:1"), list[Reply](), 0, 0
        for step in steps:
            if step.what == "upgraded":
                client.expect(Reply())
            elif step.what == "send":
                for command in read_commands([step.data.removeprefix(_MAGIC)]).commands:
                    if command.words[0] not in _SILENT:
                        replies.append(Reply())
                        client.expect(replies[-1])
            elif step.what == "recv" and step.data:
                heartbeats += step.data.endswith(HEARTBEAT)
                messages += step.data[7] == FrameType.MESSAGE
                messages -= len(client.receive_data(step.data))
        assert messages == 0
        assert client.out == [NOP] * heartbeats
        assert not isinstance(client.error, ProtocolError)
        if client.error is not None:
            assert client.error.closes_connection
            assert all(reply.done for reply in replies)


# Records and layers


def test_disk_records_survive_a_round_trip() -> None:
    for stored in disk_records():
        record, stop = decode_record(stored.data)
        assert stop == len(stored.data)
        assert (record.internal_id, record.trace_id) == (stored.internal_id, stored.trace_id)
        assert record.extend == ("_ext_" in stored.topic or record.version == 4)
        assert raw_size(len(record.body), len(record.header), record.extend, record.version) == len(stored.data)
        assert encode_record(record) == stored.data


def test_disk_records_are_read_in_sequence() -> None:
    data, position, count = b"".join(stored.data for stored in disk_records()), 0, 0
    while position < len(data):
        _, position = decode_record(data, position)
        count += 1
    assert count == len(disk_records())


@pytest.mark.parametrize("name", ["deflate", "snappy"])
@pytest.mark.parametrize("direction", ["recv", "send"])
def test_compressed_bytes_decompress_to_the_original(name: str, direction: str) -> None:
    layer = DeflateLayer(6) if name == "deflate" else SnappyLayer()
    steps = conversation(name).steps
    begin = next(index for index, step in enumerate(steps) if step.what == "upgraded")
    clear = b"".join(step.data for step in steps[begin:] if step.what == direction)
    packed = [step.data for step in steps[begin:] if step.what == f"{direction} raw"]
    assert b"".join(layer.decode(piece) for piece in packed) == clear
