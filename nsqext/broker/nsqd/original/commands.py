"""Commands of the original generation, with checks in the server's order while a body is read."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage, Stored
from nsqext.broker.nsqd.commands import check_sub, cls, identify, nop, rdy
from nsqext.broker.nsqd.publish_commands import put
from nsqext.broker.nsqd.session import MESSAGE_HEAD, Dialect, Session, SessionSubscriber
from nsqext.broker.nsqd.validation import CommandValidator, auth, check_auth, recheck_auth, run_authorized
from nsqext.protocol.extjson import quote
from nsqext.protocol.frames import FrameType
from nsqext.protocol.names import is_valid_topic
from nsqext.protocol.server.command_parser import BATCH_VERBS, BatchReader, Command, CommandTarget, check_state
from nsqext.protocol.server.go_format import MASK_64, base10, decode, wrap
from nsqext.protocol.server.request_error import RequestError

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.nsqd.node import Hosted, Node
    from nsqext.protocol.messages import RawMessage

_ID_SIZE = 16
_VERBS = frozenset((b"PUB", b"MPUB", b"DPUB"))
_SINGLE = frozenset((b"PUB", b"DPUB"))
_MS = 1_000_000
_EPOCH = 1288834974288  # 2012-10-28 in units of 2**20 ns, the start of the real server's ids
_ID_SHIFT = 22


class OriginalSubscriber(SessionSubscriber):
    """A session as the client of a channel."""

    def __init__(self, session: Session, channel: Channel, hosted: Hosted) -> None:
        super().__init__(session, channel, detail=False, extend=False)
        # added to internal ids: a topic that is created again has other ids than the deleted one
        self._id_base = ((hosted.partition.created >> 20) - _EPOCH) << _ID_SHIFT
        self._name = channel.name
        self._deliveries = hosted.deliveries
        self._deliveries.setdefault(channel.name, 0)

    def internal_id(self, wire_id: bytes) -> int:
        """Return the number of an id of 16 hexadecimal digits with small letters; 0 for other bytes."""
        try:
            return int(wire_id, 16) - self._id_base if wire_id == wire_id.lower() else 0
        except ValueError:
            return 0

    def deliver(self, message: RawMessage) -> None:
        body = message.body
        wire_id = b"%016x" % (self._id_base + message.internal_id)
        head = MESSAGE_HEAD.pack(30 + len(body), FrameType.MESSAGE, message.timestamp, message.attempts, wire_id)
        self._deliveries[self._name] += 1
        self.session.hold(head + body, full=self.in_flight >= self.window)


def _publish(session: Session, command: Command) -> Awaitable[None] | None:
    rules = session.rules
    verb, topic = command.words[0].decode(), rules.topic
    if verb == "MPUB":
        fresh, rules.stale_auth = not rules.stale_auth, False
        messages = [NewMessage(item.body) for item in command.items or ()]
    else:
        fresh = check_auth(session, verb, topic, "")
        messages = [NewMessage(command.body or b"", delay=rules.delay)]
    if not fresh:
        return recheck_auth(session, verb, topic, "", partial(_put, session, verb, topic, messages))
    return _put(session, verb, topic, messages)


def _put(session: Session, verb: str, topic: str, messages: list[NewMessage]) -> Awaitable[None] | None:
    return put(session, _created(session.node, verb, topic), messages, f"E_{verb}_FAILED", None, _store)


def _created(node: Node, verb: str, topic: str) -> Hosted:
    try:
        return node.create_topic(topic)
    except Refusal as refusal:
        raise RequestError(f"E_{verb}_FAILED", f"{verb} failed {refusal.text}") from None


def _store(node: Node, hosted: Hosted, messages: Sequence[NewMessage], code: str) -> Stored:
    try:
        return node.put(hosted, messages)
    except Refusal as refusal:
        verb = code.split("_")[1]
        raise RequestError(code, f"{verb} failed {refusal.text}") from None


def _sub(session: Session, command: Command) -> Awaitable[None] | None:
    topic, channel = check_sub(session, command.words)
    return run_authorized(session, "SUB", topic, channel, partial(_subscribe, session, topic, channel))


def _subscribe(session: Session, topic: str, name: str) -> None:
    hosted = _created(session.node, "SUB", topic)
    channel = session.node.channel(hosted, name)
    subscriber = OriginalSubscriber(session, channel, hosted)
    try:
        channel.subscribe(subscriber)
    except Refusal as refusal:
        raise RequestError("E_SUB_FAILED", f"SUB failed {refusal.text}") from None
    session.subscribed(hosted, subscriber)


def _acknowledge(session: Session, command: Command) -> None:
    words, subscriber = command.words, session.subscriber
    verb = words[0].decode()
    check_state(verb, session.state)
    if len(words) < (3 if verb == "REQ" else 2):
        raise RequestError("E_INVALID", f"{verb} insufficient number of params")
    if len(words[1]) != _ID_SIZE:
        raise RequestError("E_INVALID", "invalid message ID")
    if not isinstance(subscriber, OriginalSubscriber):
        raise RequestError("E_INVALID", f"cannot {verb} in current state")
    channel, internal_id = subscriber.channel, subscriber.internal_id(words[1])
    try:
        if verb == "FIN":
            channel.finish(subscriber, internal_id)
        elif verb == "TOUCH":
            channel.touch(subscriber, internal_id)
        else:
            delay = parse_delay(words[2], f"REQ could not parse timeout {decode(words[2])}") / 1000
            channel.requeue(subscriber, internal_id, min(max(delay, 0.0), session.node.limits.max_req_timeout))
    except Refusal as refusal:
        text = f"{verb} {decode(words[1])} failed {refusal.text}"
        raise RequestError(f"E_{verb}_FAILED", text, fatal=False) from None


def parse_delay(word: bytes, text: str) -> int:
    """Return the milliseconds of REQ and DPUB; enormous delays overflow 64 bits of nanoseconds."""
    return wrap(base10(word, text) * _MS) // _MS


class OriginalValidator(CommandValidator):
    """The original server's checks for a session."""

    def refuse_unknown(self, words: list[bytes]) -> NoReturn:
        raise RequestError("E_INVALID", f"invalid command {decode(words[0])}")

    def _check_publish(self, words: list[bytes]) -> None:
        verb = words[0]
        if verb not in _VERBS:
            raise RequestError("E_INVALID", f"invalid command {decode(verb)}")
        name = verb.decode()
        if len(words) < (3 if verb == b"DPUB" else 2):
            raise RequestError("E_INVALID", f"{name} insufficient number of parameters")
        self.topic: str = decode(words[1])
        if not is_valid_topic(self.topic):
            again = "E_BAD_TOPIC " if verb == b"MPUB" else ""  # the real server says it twice
            raise RequestError("E_BAD_TOPIC", f"{again}{name} topic name {quote(self.topic)} is not valid")
        self.delay: float = self._delay(words[2]) if verb == b"DPUB" else 0.0
        if verb == b"MPUB":
            self.stale_auth: bool = not check_auth(self._client, name, self.topic, "")
            if not self.stale_auth:
                _created(self._client.node, name, self.topic)  # also for a body that is refused, or never comes

    def _delay(self, word: bytes) -> float:
        millis = parse_delay(word, f"DPUB could not parse timeout {decode(word)}")
        largest = round(self._limits.max_req_timeout * 1000)
        if not 0 <= millis <= largest:
            raise RequestError("E_INVALID", f"DPUB timeout {base10(word, '') & MASK_64} out of range 0-{largest}")
        return millis / 1000

    def check_end(self, words: list[bytes], batch: BatchReader | None, *, sized: bool) -> None:
        """Refuse a truncated body; publishes name their command."""
        if batch is not None:
            batch.check_end()
        name = words[0].decode()
        single = words[0] in _SINGLE
        code, what = ("E_BAD_MESSAGE", "message body") if single else ("E_BAD_BODY", "body")
        raise RequestError(code, f"{name} failed to read {what}{'' if sized else ' size'}")

    def _reader(self, words: list[bytes], size: int) -> BatchReader | None:
        return BatchReader(words[0], self._limits, CommandTarget(self.topic)) if words[0] in BATCH_VERBS else None


ORIGINAL = Dialect(
    {
        b"PUB": _publish,
        b"MPUB": _publish,
        b"DPUB": _publish,
        b"FIN": _acknowledge,
        b"REQ": _acknowledge,
        b"TOUCH": _acknowledge,
        b"RDY": rdy,
        b"NOP": nop,
        b"SUB": _sub,
        b"CLS": cls,
        b"IDENTIFY": identify,
        b"AUTH": auth,
    },
    OriginalValidator,
    missed_heartbeats=2,
)
