"""Commands of the redesigned generation that neither publish nor consume, and the table of all its commands."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from nsqext.broker.nsqd import consume_commands as consume
from nsqext.broker.nsqd import publish_commands as publish
from nsqext.broker.nsqd.auth import auth, check_auth
from nsqext.broker.nsqd.session import Dialect
from nsqext.broker.nsqd.validation import CommandValidator
from nsqext.protocol.extjson import quote
from nsqext.protocol.frames import OK
from nsqext.protocol.layers import DeflateLayer, SnappyLayer
from nsqext.protocol.names import MAX_PARTITION, is_valid_topic
from nsqext.protocol.server.go_format import decode, parse_bool, parse_int
from nsqext.protocol.server.negotiate import identify_reply, negotiate
from nsqext.protocol.server.request_error import RequestError
from nsqext.protocol.tls_layer import TlsLayer
from nsqext.types import TopicMeta

if TYPE_CHECKING:
    from nsqext.broker.nsqd.session import Session
    from nsqext.protocol.server.command_parser import Command


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
    """Run NOP: receiving it is enough to keep the connection alive."""


def _create_topic(session: Session, command: Command) -> None:
    """Run INTERNAL_CREATE_TOPIC, which a node of a cluster refuses (captured: standalone_create_topic)."""
    words = command.words
    if len(words) < 3:
        raise RequestError("E_INVALID", "CREATE_TOPIC insufficient number of parameters")
    topic = decode(words[1])
    if not is_valid_topic(topic):
        raise RequestError("E_BAD_TOPIC", f"topic name {quote(topic)} is not valid")
    try:
        partition = parse_int(decode(words[2]))
    except ValueError as error:
        raise RequestError("E_BAD_PARTITION", f"topic partition is not valid: {error}") from None
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
    session.node.host(topic, partition, TopicMeta(partition_num=partition + 1, replica=1, extend_support=extend))
    session.node.on_topic_created(topic)
    session.answer(OK)


REDESIGNED = Dialect(
    {
        b"PUB": publish.publish,
        b"PUB_TRACE": publish.publish,
        b"PUB_EXT": publish.publish,
        b"MPUB": publish.publish_batch,
        b"MPUB_TRACE": publish.publish_batch,
        b"MPUB_EXT": publish.publish_batch,
        b"FIN": consume.fin,
        b"REQ": consume.req,
        b"TOUCH": consume.touch,
        b"RDY": consume.rdy,
        b"NOP": nop,
        b"SUB": consume.sub,
        b"SUB_ADVANCED": consume.sub_advanced,
        b"SUB_ORDERED": consume.sub_ordered,
        b"CLS": consume.cls,
        b"IDENTIFY": identify,
        b"AUTH": auth,
        b"INTERNAL_CREATE_TOPIC": _create_topic,
    },
    CommandValidator,
    missed_heartbeats=3,
)
"""The redesigned generation."""
