"""Commands of the redesigned generation, except publishes."""

from __future__ import annotations

from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from nsqext.broker.engine.options import make_kind
from nsqext.broker.engine.storage.log import Refusal, StartPosition
from nsqext.broker.nsqd import publish_commands as publish
from nsqext.broker.nsqd.session import Dialect, SessionSubscriber
from nsqext.broker.nsqd.validation import CommandValidator, auth, check_auth, read_partition, run_authorized
from nsqext.protocol.extjson import quote
from nsqext.protocol.frames import CLOSE_WAIT, OK
from nsqext.protocol.layers import DeflateLayer, SnappyLayer
from nsqext.protocol.names import MAX_PARTITION, is_valid_channel, is_valid_topic
from nsqext.protocol.server.command_parser import State, check_state
from nsqext.protocol.server.go_format import base10, byte_list, decode, parse_bool, wrap
from nsqext.protocol.server.negotiate import identify_reply, negotiate
from nsqext.protocol.server.request_error import RequestError
from nsqext.protocol.tls_layer import TlsLayer
from nsqext.types import TopicMeta

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.nsqd.node import Hosted
    from nsqext.broker.nsqd.session import Session
    from nsqext.protocol.server.command_parser import Command

_ID = Struct(">q")
_DISABLED = "Consume is disabled currently"


def sub_advanced(session: Session, command: Command) -> Awaitable[None] | None:
    """Parse the start position, then run SUB."""
    words = command.words
    start = None
    if len(words) > 4 and words[4]:
        try:
            start = StartPosition.parse(decode(words[4]))
        except Refusal as refusal:
            raise RequestError("E_INVALID", refusal.text) from None
    return _sub(session, command, Mode(detail=True, start=start))


class Mode(NamedTuple):
    detail: bool  #: messages carry queue offset and size
    ordered: bool = False  #: the channel becomes ordered
    start: StartPosition | None = None


def _sub(session: Session, command: Command, mode: Mode) -> Awaitable[None] | None:
    place = _check_words(session, command.words)
    return run_authorized(session, "SUB", place.topic, place.channel, partial(_subscribe, session, place, mode))


def _subscribe(session: Session, place: _Place, mode: Mode) -> None:
    hosted = _check_hosted(session, place, ordered=mode.ordered)
    sampled = mode.ordered and session.settings.sample_rate > 0
    channel = _channel(session, hosted, place.channel)
    extend = session.sending.extend_support and hosted.partition.extend
    if not hosted.partition.extend:
        session.settings.desired_tag = ""
    subscriber = SessionSubscriber(session, channel, detail=mode.detail, extend=extend)
    try:
        channel.subscribe(subscriber, ordered=mode.ordered and not sampled, start=None if sampled else mode.start)
    except Refusal as refusal:
        if channel.ephemeral and not channel.clients:
            hosted.partition.delete_channel(place.channel)
        if refusal.text == _DISABLED:
            raise RequestError("E_FAILED_ON_NOT_WRITABLE") from None
        raise RequestError("E_INVALID", refusal.text) from None
    if sampled:  # like the real server, which has created the channel
        channel.unsubscribe(subscriber)
        raise RequestError("E_INVALID", "order consume is not allowed while sample rate is not 0")
    session.subscribed(hosted, subscriber)


def _channel(session: Session, hosted: Hosted, name: str) -> Channel:
    """Return the channel, with the dispatch type of IDENTIFY."""
    session.node.channel(hosted, name)
    settings = session.settings
    try:
        return hosted.partition.admit(name, make_kind(settings.dispatch, settings.key_header))
    except Refusal as refusal:
        raise RequestError("E_INVALID", refusal.text) from None


class _Place(NamedTuple):
    topic: str
    channel: str
    partition: int


def check_sub(session: Session, words: list[bytes]) -> tuple[str, str]:
    """Check SUB for both generations; return topic and channel."""
    check_state("SUB", session.state)
    if not session.settings.heartbeat_interval:
        raise RequestError("E_INVALID", "cannot SUB with heartbeats disabled")
    if len(words) < 3:
        raise RequestError("E_INVALID", "SUB insufficient number of parameters")
    topic, channel = decode(words[1]), decode(words[2])
    if not is_valid_topic(topic):
        raise RequestError("E_BAD_TOPIC", f"SUB topic name {quote(topic)} is not valid")
    if not is_valid_channel(channel):
        raise RequestError("E_BAD_CHANNEL", f"SUB channel name {quote(channel)} is not valid")
    return topic, channel


def _check_words(session: Session, words: list[bytes]) -> _Place:
    topic, channel = check_sub(session, words)
    # the partition is parsed only with exactly four words (captured: sub_advanced_offset_partition)
    return _Place(topic, channel, read_partition(words[3]) if len(words) == 4 else -1)


def _check_hosted(session: Session, place: _Place, *, ordered: bool) -> Hosted:
    hosted = session.node.find(place.topic, place.partition)
    if hosted is None:
        raise RequestError("E_TOPIC_NOT_EXIST")
    if hosted.partition.ordered and not ordered:
        raise RequestError("E_SUB_ORDER_IS_MUST", "this topic is configured only allow ordered sub")
    extend = session.settings.extend_support
    if hosted.partition.extend and not extend and not session.node.switches.allow_sub_ext_compatible:
        raise RequestError("E_SUB_EXTEND_NEED", "this topic is extended and should identify as extend support.")
    if extend and not hosted.partition.extend:
        text = "this topic is not extended and should not identify as extend support."
        raise RequestError("E_SUB_EXTEND_FORBIDDON", text)
    if not hosted.leader:
        raise RequestError("E_FAILED_ON_NOT_LEADER")
    if not hosted.writable:
        raise RequestError("E_FAILED_ON_NOT_WRITABLE")
    if not hosted.auto_create_channels and place.channel not in hosted.partition.channels:
        raise RequestError("E_SUB_CHANNEL_NOT_REGISTERED", "channel is not registered under topic.")
    return hosted


def rdy(session: Session, command: Command) -> None:
    """Apply the RDY count; ignored after CLS."""
    check_state("RDY", session.state)
    if session.state is State.CLOSING or session.subscriber is None:
        return
    words = command.words
    count = base10(words[1], f"RDY could not parse count {decode(words[1])}") if len(words) > 1 else 1
    largest = session.node.limits.max_rdy_count
    if not 0 <= count <= largest:
        raise RequestError("E_INVALID", f"RDY count {count} out of range 0-{largest}")
    session.set_ready(count)


def _subscribed(session: Session, verb: str) -> SessionSubscriber:
    if session.subscriber is None:
        check_state(verb, session.state)
        raise RequestError("E_INVALID", "No channel")
    return session.subscriber


def fin(session: Session, command: Command) -> None:
    """Run FIN; success has no answer."""
    subscriber = _subscribed(session, "FIN")
    full_id = command.words[1]
    internal_id: int = _ID.unpack_from(full_id)[0]
    if internal_id <= 0:
        raise RequestError("E_INVALID", "Invalid Message ID")
    hosted = session.hosted
    if hosted is None or not hosted.leader:
        raise RequestError("E_FAILED_ON_NOT_LEADER")
    if not hosted.writable:
        raise RequestError("E_FAILED_ON_NOT_WRITABLE")
    try:
        subscriber.channel.finish(subscriber, internal_id)
    except Refusal as refusal:
        kind = "ErrType:7 ErrCode:0 : " if session.node.options.clustered else ""
        text = f"FIN {byte_list(full_id)} failed {kind}{refusal.text}"
        raise RequestError("E_FIN_FAILED", text, fatal=False) from None


def req(session: Session, command: Command) -> None:
    """Run REQ; success has no answer."""
    subscriber = _subscribed(session, "REQ")
    words = command.words
    if len(words) < 3:
        raise RequestError("E_INVALID", "REQ insufficient number of params")
    full_id = words[1]
    millis = base10(words[2], f"REQ could not parse timeout {decode(full_id)}, {decode(words[2])}")
    # the real server counts nanoseconds in 64 bits: larger delays wrap around
    delay = min(max(wrap(millis * 1_000_000) / 1e9, 0.0), session.node.limits.max_req_timeout)
    try:
        subscriber.channel.requeue(subscriber, _ID.unpack_from(full_id)[0], delay)
    except Refusal as refusal:
        raise RequestError("E_REQ_FAILED", f"REQ {byte_list(full_id)} failed {refusal.text}", fatal=False) from None


def touch(session: Session, command: Command) -> None:
    """Run TOUCH; success has no answer."""
    subscriber = _subscribed(session, "TOUCH")
    full_id = command.words[1]
    if len(full_id) != 16:
        raise RequestError("E_INVALID", "Invalid Message ID")
    try:
        subscriber.channel.touch(subscriber, _ID.unpack_from(full_id)[0])
    except Refusal as refusal:
        raise RequestError("E_TOUCH_FAILED", f"TOUCH {byte_list(full_id)} failed {refusal.text}", fatal=False) from None


def cls(session: Session, _: Command) -> None:
    """End deliveries; FIN, REQ and TOUCH remain allowed."""
    check_state("CLS", session.state)
    _subscribed(session, "CLS")
    session.set_ready(0)
    session.state = State.CLOSING
    session.answer(CLOSE_WAIT)


def identify(session: Session, command: Command) -> None:
    """Run IDENTIFY: the reply is sent in clear, an OK inside each new layer (captured: tls, snappy, deflate)."""
    settings, limits = session.settings, session.node.limits
    negotiate(command.body or b"", limits, settings)
    session.identified()
    session.answer(identify_reply(settings, limits))
    context = session.node.options.tls
    if settings.feature_negotiation and settings.tls and context is not None:
        tls = TlsLayer(context, server_side=True)
        session.push_layer(tls)
        session.handshake = tls
        session.after_handshake = partial(_compress, session, secured=True)
    elif settings.feature_negotiation:
        _compress(session, secured=False)


def _compress(session: Session, *, secured: bool) -> None:
    if secured:
        session.answer(OK)
    if session.settings.snappy:
        session.push_layer(SnappyLayer())
        session.answer(OK)
    if session.settings.deflate:
        session.push_layer(DeflateLayer(session.settings.deflate_level or 6))
        session.answer(OK)


def nop(_: Session, __: Command) -> None:
    """Do nothing; its reception counts as life."""


def _create_topic(session: Session, command: Command) -> None:
    """Create a topic; a cluster's node refuses (captured: standalone_create_topic)."""
    words = command.words
    if len(words) < 3:
        raise RequestError("E_INVALID", "CREATE_TOPIC insufficient number of parameters")
    topic = decode(words[1])
    if not is_valid_topic(topic):
        raise RequestError("E_BAD_TOPIC", f"topic name {quote(topic)} is not valid")
    partition = read_partition(words[2])
    check_auth(session, "CREATE_TOPIC", topic, "")
    if partition < 0:
        raise RequestError("E_BAD_PARTITION", "partition should not less than 0")
    try:
        extend = len(words) > 3 and parse_bool(decode(words[3]))
    except ValueError as error:
        raise RequestError("E_BAD_EXT", f"topic ext is not valid: {error}") from None
    if session.node.options.clustered:
        text = "CREATE_TOPIC is not allowed here while cluster feature enabled."
        raise RequestError("E_CREATE_TOPIC_FAILED", text, fatal=False)
    if partition > MAX_PARTITION:
        raise RequestError("E_CREATE_TOPIC_FAILED", f"CREATE_TOPIC {topic} failed", fatal=False)
    meta = TopicMeta(partition_num=partition + 1, replica=1, extend_support=extend)
    try:
        session.node.create_topic(topic, partition, meta)
    except Refusal as refusal:
        raise RequestError("E_CREATE_TOPIC_FAILED", refusal.text, fatal=False) from None
    session.answer(OK)


REDESIGNED = Dialect(
    {
        b"PUB": publish.publish,
        b"PUB_TRACE": publish.publish,
        b"PUB_EXT": publish.publish,
        b"MPUB": publish.publish_batch,
        b"MPUB_TRACE": publish.publish_batch,
        b"MPUB_EXT": publish.publish_batch,
        b"FIN": fin,
        b"REQ": req,
        b"TOUCH": touch,
        b"RDY": rdy,
        b"NOP": nop,
        b"SUB": partial(_sub, mode=Mode(detail=False)),
        b"SUB_ADVANCED": sub_advanced,
        b"SUB_ORDERED": partial(_sub, mode=Mode(detail=True, ordered=True)),
        b"CLS": cls,
        b"IDENTIFY": identify,
        b"AUTH": auth,
        b"INTERNAL_CREATE_TOPIC": _create_topic,
    },
    CommandValidator,
    missed_heartbeats=3,
)
