"""IDENTIFY: settings, the reply, and the layers that were negotiated."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from nsqext.protocol.frames import OK
from nsqext.protocol.layers import DeflateLayer, SnappyLayer, TlsLayer
from nsqext.protocol.server.negotiate import identify_reply, negotiate

if TYPE_CHECKING:
    from nsqext.broker.nsqd.session import Session
    from nsqext.protocol.server.command_parser import Command

__all__ = ("identify",)


def identify(session: Session, command: Command) -> None:
    """IDENTIFY: the reply goes in clear, an OK inside each new layer (captured: tls, snappy, deflate)."""
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
