"""Commands of the original generation."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.publish import NewMessage
from nsqext.broker.nsqd.auth import check_auth, log_in, rechecked
from nsqext.broker.nsqd.classic.subscriber import ClassicSubscriber
from nsqext.broker.nsqd.classic.validation import parse_delay
from nsqext.broker.nsqd.consume_commands import check_sub, cls, rdy
from nsqext.broker.nsqd.go_format import decode
from nsqext.broker.nsqd.identify import identify
from nsqext.protocol.frames import OK
from nsqext.protocol.server.connection_state import State, check_state
from nsqext.protocol.server.request_error import Fault

if TYPE_CHECKING:
    from nsqext.broker.nsqd.session import Handler, Session
    from nsqext.broker.nsqd.subscriber import Subscription
    from nsqext.protocol.server.command_parser import Command

__all__ = ("COMMANDS",)

_ID_SIZE = 16


def _auth(session: Session, command: Command) -> Awaitable[None] | None:
    if session.authorizations is not None:
        raise Fault("E_INVALID", "AUTH already set")
    if not session.node.limits.auth:
        raise Fault("E_AUTH_DISABLED", "AUTH disabled")
    return log_in(session, command.body or b"")


def _nop(_: Session, __: Command) -> None:
    """NOP: it is enough that it was heard."""


def _publish(session: Session, command: Command) -> Awaitable[None] | None:
    """PUB, DPUB, MPUB; the topic is made when it is not there."""
    rules = session.rules
    verb, topic = command.words[0].decode(), rules.topic
    if verb == "MPUB":
        fresh, rules.stale_auth = not rules.stale_auth, False
        messages = [NewMessage(item.body) for item in command.items or ()]
    else:
        fresh = check_auth(session, verb, topic, "")
        messages = [NewMessage(command.body or b"", delay=rules.delay)]
    if not fresh:
        return rechecked(session, verb, topic, "", partial(_put, session, verb, topic, messages))
    _put(session, verb, topic, messages)
    return None


def _put(session: Session, verb: str, topic: str, messages: list[NewMessage]) -> None:
    hosted = session.node.create_topic(topic)
    try:
        stored = hosted.partition.put(messages)
    except Refusal as refusal:
        raise Fault(f"E_{verb}_FAILED", f"{verb} failed {refusal.text}") from None
    session.count_published(hosted, len(messages))
    session.answer(OK)
    hosted.partition.commit(stored)


def _sub(session: Session, command: Command) -> Awaitable[None] | None:
    """SUB; topic and channel are made when they are not there."""
    topic, channel = check_sub(session, command.words)
    if not check_auth(session, "SUB", topic, channel):
        return rechecked(session, "SUB", topic, channel, partial(_subscribe, session, topic, channel))
    _subscribe(session, topic, channel)
    return None


def _subscribe(session: Session, topic: str, name: str) -> None:
    hosted = session.node.create_topic(topic)
    channel = session.node.channel(hosted, name)
    subscription = ClassicSubscriber(session, channel, hosted.deliveries)
    try:
        channel.subscribe(subscription)
    except Refusal as refusal:
        raise Fault("E_SUB_FAILED", f"SUB failed {refusal.text}") from None
    session.hosted, session.subscription = hosted, subscription
    subscription.client = channel.clients[session.id]
    session.state = State.SUBSCRIBED
    session.answer(OK)


def _acknowledged(session: Session, words: list[bytes], needed: int) -> Subscription:
    """Check the state, the number of words and the size of the id."""
    verb = words[0].decode()
    check_state(verb, session.state)
    if len(words) < needed:
        raise Fault("E_INVALID", f"{verb} insufficient number of params")
    if len(words[1]) != _ID_SIZE:
        raise Fault("E_INVALID", "invalid message ID")
    if session.subscription is None:
        raise Fault("E_INVALID", f"cannot {verb} in current state")
    return session.subscription


def _fin(session: Session, command: Command) -> None:
    """FIN; silent when it succeeds."""
    subscription = _acknowledged(session, command.words, 2)
    try:
        subscription.channel.finish(subscription, session.node.internal_id(command.words[1]))
    except Refusal as refusal:
        raise _failed(command.words, refusal) from None


def _req(session: Session, command: Command) -> None:
    """REQ; silent when it succeeds."""
    words = command.words
    subscription = _acknowledged(session, words, 3)
    delay = parse_delay(words[2], f"REQ could not parse timeout {decode(words[2])}") / 1000
    delay = min(max(delay, 0.0), session.node.limits.max_req_timeout)
    try:
        subscription.channel.requeue(subscription, session.node.internal_id(words[1]), delay)
    except Refusal as refusal:
        raise _failed(words, refusal) from None


def _touch(session: Session, command: Command) -> None:
    """TOUCH; silent when it succeeds."""
    subscription = _acknowledged(session, command.words, 2)
    try:
        subscription.channel.touch(subscription, session.node.internal_id(command.words[1]))
    except Refusal as refusal:
        raise _failed(command.words, refusal) from None


def _failed(words: list[bytes], refusal: Refusal) -> Fault:
    verb = words[0].decode()
    return Fault(f"E_{verb}_FAILED", f"{verb} {decode(words[1])} failed {refusal.text}", fatal=False)


COMMANDS: Mapping[bytes, Handler] = {
    b"PUB": _publish,
    b"MPUB": _publish,
    b"DPUB": _publish,
    b"FIN": _fin,
    b"REQ": _req,
    b"TOUCH": _touch,
    b"RDY": rdy,
    b"NOP": _nop,
    b"SUB": _sub,
    b"CLS": cls,
    b"IDENTIFY": identify,
    b"AUTH": _auth,
}
"""What the original server understands."""
