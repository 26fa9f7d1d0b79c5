"""The server role of a connection without I/O.

The owner of the connection calls `Session.receive` with received bytes, `Session.step` to run their commands, and
`Session.take` for bytes to send.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from math import inf
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from attrs import evolve

from nsqext.broker.engine.channel.in_flight import SubscribedClient
from nsqext.broker.nsqd.output_buffer import OutputBuffer
from nsqext.protocol.frames import HEARTBEAT, MAGIC_V2, OK, FrameType, encode_frame
from nsqext.protocol.server.command_parser import Command, CommandParser, State
from nsqext.protocol.server.negotiate import ClientSettings
from nsqext.protocol.server.request_error import RequestError
from nsqext.protocol.tls_layer import TlsLayer

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.nsqd.auth_server import Authorizations
    from nsqext.broker.nsqd.node import Hosted, Node, NodePublisher
    from nsqext.broker.nsqd.validation import CommandValidator
    from nsqext.protocol.layers import Layer
    from nsqext.protocol.messages import RawMessage

logger: logging.Logger = logging.getLogger("nsqext.broker.nsqd")

Handler = Callable[["Session", Command], Awaitable[None] | None]
"""Runs a command; returns what the next command waits for. Raises `RequestError`."""

_CONSUMER_BUFFER = 4096
_TURN = 256  # commands of a connection before other connections run
_TOO_MANY = encode_frame(FrameType.ERROR, b"too much client connections")
MESSAGE_HEAD: Struct = Struct(">IIqH16s")
"""Size and type of the frame, time stamp, attempts, id."""
_EXT = Struct(">BH")
_DETAIL = Struct(">QI")


class Dialect(NamedTuple):
    """What differs between the sessions of the generations."""

    commands: Mapping[bytes, Handler]
    validator: type[CommandValidator]
    missed_heartbeats: int  #: intervals without a command after which a client is disconnected


class Session:
    """A client of a node."""

    def __init__(self, node: Node, peer: str, dialect: Dialect) -> None:
        options = node.options
        self.node: Node = node
        self.peer: str = peer  #: ``host:port`` of the client
        self.clock: Callable[[], float] = options.clock
        self.settings: ClientSettings = ClientSettings.defaults(node.limits)  #: negotiated by IDENTIFY
        # before IDENTIFY, the original server names a client by its host
        self.settings.client_id = self.settings.hostname = peer.rpartition(":")[0] if options.original else peer
        #: for deliveries and heartbeats, from the first IDENTIFY
        self.sending: ClientSettings = self.settings
        self.state: State = State.INIT
        self.subscriber: SessionSubscriber | None = None
        self.hosted: Hosted | None = None  #: the consumed partition
        self.authorizations: Authorizations | None = None
        self.closing: bool = False  #: close after the output is sent
        self.closed: bool = False  #: close now
        self.pending: bool = False  #: received commands wait for `step`
        self.connected: int = options.wall()  #: nanoseconds since 1970
        self.published: dict[str, NodePublisher] = {}  #: by topic
        self.ready: int = 0  #: last RDY count
        self.output: OutputBuffer = OutputBuffer(self.settings, options.machine_clock, ticking=options.original)
        #: TLS in negotiation; nothing else is received or sent
        self.handshake: TlsLayer | None = None
        self.after_handshake: Callable[[], None] | None = None
        self.rules: CommandValidator = dialect.validator(self)
        self._dialect = dialect
        self._parser = CommandParser(self.rules, raw_ids=not options.original)
        self._max_unsent = options.max_unsent
        self._magic: bytes | None = b""
        self._marked = self._waiting = self._choked = False
        self.heard: float = self.clock()  #: clock time of the last command
        self._heartbeat_due = self.heard + self.settings.heartbeat_interval
        self.id: int = node.add(self)  #: unique in the node

    # Bytes in

    def receive(self, data: bytes) -> None:
        """Parse bytes of the client; raises `NsqError` if a layer cannot decode them."""
        layers = list(self.output.layers)
        for layer in layers:
            data = layer.decode(data)
        if self.handshake is not None:
            self._continue_handshake(self.handshake)
            for layer in self.output.layers[len(layers) :]:  # a client may compress without waiting for OK
                data = layer.decode(data)
        if self._magic is not None:
            data = self._take_magic(self._magic + data)
        self._parser.receive(data)

    def _continue_handshake(self, tls: TlsLayer) -> None:
        if tls.ready:
            self.handshake = None
            self.rules.tls_missing = False
            if self.after_handshake is not None:
                self.after_handshake()
        self.output.urgent = True
        self.mark()

    def _take_magic(self, data: bytes) -> bytes:
        if len(data) < len(MAGIC_V2):
            self._magic = data
            return b""
        self._magic = None
        logger.info("CLIENT(%s): desired protocol magic %r", self.peer, data[: len(MAGIC_V2)].decode("latin-1"))
        if not data.startswith(MAGIC_V2):
            self.refuse(RequestError("E_BAD_PROTOCOL", None))
        elif 0 < self.node.switches.max_connections < len(self.node.sessions):
            self.write(_TOO_MANY)
            self.closing = True
        self.heard = self.clock()
        return data[len(MAGIC_V2) :]

    def step(self) -> Awaitable[None] | None:
        """Run a turn of complete commands, then deliver.

        Returns what must be awaited before the next step: replicas or an auth server. None when more bytes are needed,
        when the session is closing, or at the end of the turn: then ``pending`` is true.
        """
        self.pending = False
        if self._magic is not None or self.handshake is not None:
            return None
        turn = self.node.turn
        turn.begin()
        try:
            return self._run_commands()
        finally:
            turn.end()

    def _run_commands(self) -> Awaitable[None] | None:
        handlers, parser, faulty = self._dialect.commands, self._parser, self.node.faults.active
        waiting: Awaitable[None] | None = None
        rules, output, most = self.rules, self.output, self._max_unsent
        left = _TURN
        while waiting is None and not self.closing:
            if not left or output.size > most:
                self.pending = True
                break
            left -= 1
            try:
                command = parser.next_command()
                if command is None:
                    break
                words = command.words
                if faulty and (fault := self.node.faults.command(words[0].decode("latin-1"))):
                    raise fault
                if rules.tls_missing and command.body is None:
                    rules.check_tls(words)
                handler = handlers.get(words[0])
                if handler is None:
                    rules.refuse_unknown(words)
                waiting = handler(self, command)
            except RequestError as error:
                self.refuse(error)
            self.heard = self.clock()
        self._waiting = waiting is not None
        return waiting

    def eof_received(self) -> None:
        """Refuse a command that the end of the stream truncates."""
        if self._waiting or self.closing or self._magic is not None or self.handshake is not None:
            return
        try:
            self._parser.check_end()
        except RequestError as error:
            self.refuse(error)

    def command_done(self) -> None:
        self._waiting = False
        self.heard = self.clock()

    def push_layer(self, layer: Layer) -> None:
        """Put a layer between this session and the client; frames written before bypass it.

        The first layer discards bytes behind the command: the real servers lose them with the buffer that they replace.
        """
        self.output.encode()
        self.output.urgent = True
        self.mark()
        rest = self._parser.take_rest()
        if rest and self.output.layers:
            self._parser.receive(layer.decode(rest))
        self.output.layers.append(layer)

    def has_layer(self, kind: type[Layer]) -> bool:
        """Return whether the connection has this layer; a later IDENTIFY does not end it."""
        return any(isinstance(layer, kind) for layer in self.output.layers)

    @property
    def tls_version(self) -> str:
        versions = [layer.version for layer in self.output.layers if isinstance(layer, TlsLayer)]
        return (versions[0] or "").replace("TLSv", "TLS") if versions else ""

    @property
    def common_name(self) -> str:
        return "".join(layer.peer_common_name for layer in self.output.layers if isinstance(layer, TlsLayer))

    # Bytes out

    @property
    def has_room(self) -> bool:
        """Whether unsent output is within ``NodeOptions.max_unsent``; else commands wait."""
        return self.output.size <= self._max_unsent

    def answer(self, data: bytes) -> None:
        self.write(encode_frame(FrameType.RESPONSE, data))

    def refuse(self, error: RequestError) -> None:
        """Send an error; a fatal error closes the connection, without a code silently."""
        if error.code:
            self.write(error.frame())
        if error.fatal:
            self.closing = True
            self.mark()
            if self.node.options.original:  # the redesigned server still sends a message, in 12 of 15 cases
                self._apply_ready(0)

    def write(self, frame: bytes) -> None:
        self.output.write(frame)
        if not self._marked:
            self.mark()

    def hold(self, frame: bytes, *, full: bool) -> None:
        output = self.output
        if output.hold(frame, full=full):
            self.node.flush_later(self, output.due)
        if output.size > self._max_unsent:
            self.choke()
            output.urgent = True
        if output.urgent and not self._marked:
            self.mark()

    def mark(self) -> None:
        if not self._marked and (self.output.urgent or self.closing or self.closed):
            self._marked = True
            dirty = self.node.dirty
            dirty.append(self)
            if len(dirty) == 1:
                self.node.wake()

    def unmark(self) -> None:
        self._marked = False

    def take(self) -> bytes:
        """Return the bytes of the next write."""
        if self.handshake is not None:
            return self.output.take_handshake(self.handshake.pending())
        return self.output.take()

    def expire_output(self, now: float) -> float:
        """Send due held messages; return when the others are due, or 0.0."""
        self.output.expire(now)
        self.mark()
        return self.output.due

    def count_published(self, hosted: Hosted, count: int) -> None:
        topic = hosted.partition.topic
        publisher = self.published.get(topic)
        if publisher is None:
            publisher = hosted.traffic.publisher(self.peer, self.settings.user_agent)
            self.published[topic] = publisher
        publisher.published += count
        publisher.last = self.node.options.wall()
        hosted.traffic.durations[0] += count

    def subscribed(self, hosted: Hosted, subscriber: SessionSubscriber) -> None:
        """Become a consumer; the redesigned server then enlarges a buffer that was not negotiated."""
        channel = subscriber.channel
        self.hosted, self.subscriber = hosted, subscriber
        self.state = State.SUBSCRIBED
        settings = self.settings
        default = self.node.limits.output_buffer_size
        # by this or an earlier IDENTIFY
        asked = settings.output_buffer_size != default or settings.raw.get("output_buffer_size", 0)
        if not (asked or self.node.options.original or self.output.layers or channel.ephemeral):
            self.settings.output_buffer_size = _CONSUMER_BUFFER
        self.answer(OK)

    # Time and end

    def identified(self) -> None:
        """Let deliveries and heartbeats follow the first IDENTIFY (captured: identify_heartbeat_later)."""
        self.output.restart_ticks()
        if self.sending is self.settings:
            self.sending = evolve(self.settings)
            self._heartbeat_due = self.clock() + self.sending.heartbeat_interval

    def tick(self, now: float) -> float:
        """Send due heartbeats and held messages, or disconnect a silent client; return the next due time."""
        due, end = self._heartbeat_time(), self._disconnect_time()
        if due <= now and due < end and not self.closing:
            self._heartbeat_due = max(due + self.sending.heartbeat_interval, now)
            if self.subscriber is None or not self.subscriber.stalled:
                self.write(encode_frame(FrameType.RESPONSE, HEARTBEAT))
        elif now >= end:
            self.closed = True
        self.expire_output(self.node.options.machine_clock())
        if self.closing or self.closed:
            return inf
        return min(self._heartbeat_time(), self._disconnect_time())

    def _heartbeat_time(self) -> float:
        return self._heartbeat_due if self.sending.heartbeat_interval and self._magic is None else inf

    def _disconnect_time(self) -> float:
        if self._magic is not None:
            return self.heard + (inf if self.node.options.original else self.node.options.client_timeout)
        patience = self.settings.heartbeat_interval
        return self.heard + patience * self._dialect.missed_heartbeats if patience and not self._waiting else inf

    def set_ready(self, count: int) -> None:
        """Apply RDY; of a choked session, only 0."""
        self.ready = count
        if not self._choked or not count:
            self._apply_ready(count)

    def choke(self) -> None:
        """Deliver nothing until `relieve`, because the client does not read."""
        if self.subscriber is not None and not self._choked:
            self._choked = True
            self._apply_ready(0)

    def relieve(self) -> None:
        if self._choked:
            self._choked = False
            self._apply_ready(self.ready)

    def _apply_ready(self, count: int) -> None:
        if self.subscriber is not None:
            self.subscriber.channel.set_ready(self.subscriber, count)

    def fail(self) -> None:
        """Send a failed layer's output, such as a TLS alert, and close the connection."""
        self.closing = self.output.urgent = True
        self.mark()

    def close(self) -> None:
        self.closed = True
        self.mark()

    def end(self) -> None:
        """Clean up after the connection closed; messages in flight are requeued."""
        self.closed = True
        self.node.remove(self)
        for topic in self.published:
            for hosted in self.node.partitions(topic):
                hosted.traffic.publishers.pop(self.peer, None)
        subscriber, self.subscriber = self.subscriber, None
        if subscriber is not None:
            subscriber.channel.unsubscribe(subscriber)
        logger.info("PROTOCOL(V2): [%s] exiting ioloop", self.peer)


class SessionSubscriber(SubscribedClient):
    """A session as the client of a channel."""

    def __init__(self, session: Session, channel: Channel, *, detail: bool, extend: bool) -> None:
        settings, sending = session.settings, session.sending
        super().__init__(
            session.id,
            session.peer,
            settings.desired_tag,
            extend,
            sending.sample_rate,
            sending.ext_filter,
            sending.msg_timeout,
            settings.msg_timeout,
        )
        self.session: Session = session
        self.channel: Channel = channel
        self.detail: bool = detail

    def deliver(self, message: RawMessage) -> None:
        body = message.body
        size = 30 + len(body)
        middle = b""
        if self.extend:
            header = message.header
            middle = _EXT.pack(message.version, len(header)) + header if message.version else b"\0"
        if self.detail:
            middle += _DETAIL.pack(message.offset, message.size)
        if middle:
            size += len(middle)
            body = middle + body
        frame = MESSAGE_HEAD.pack(size, FrameType.MESSAGE, message.timestamp, message.attempts, message.id) + body
        # the real server does not buffer messages of an ordered channel
        self.session.hold(frame, full=self.in_flight >= self.window or self.channel.ordered)

    def closed(self) -> None:
        self.session.close()
