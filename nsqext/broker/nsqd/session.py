"""The server role of one connection: bytes in, bytes out.

A session reads and writes no socket. `Session.receive` takes bytes, `Session.step` runs the commands in them,
`Session.take` gives the bytes to send. Only what needs somebody else (replicas, an auth server) is awaited: then `step`
returns what the owner of the connection has to await before it steps on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from math import inf
from typing import TYPE_CHECKING

from attrs import evolve

from nsqext.broker.nsqd.classic.validation import ClassicValidator
from nsqext.broker.nsqd.validation import CommandValidator
from nsqext.protocol.frames import HEARTBEAT, MAGIC_V2, FrameType, encode_frame
from nsqext.protocol.layers import TlsLayer
from nsqext.protocol.names import is_ephemeral
from nsqext.protocol.server.command_parser import Command, CommandParser
from nsqext.protocol.server.connection_state import State
from nsqext.protocol.server.negotiate import ClientSettings
from nsqext.protocol.server.request_error import Fault

if TYPE_CHECKING:
    from nsqext.broker.nsqd.auth import Authorizations
    from nsqext.broker.nsqd.node import Hosted, Node
    from nsqext.broker.nsqd.publish_stats import Publisher
    from nsqext.broker.nsqd.subscriber import Subscription
    from nsqext.protocol.layers import Layer

__all__ = ("Handler", "Session")

Handler = Callable[["Session", Command], Awaitable[None] | None]
"""Runs a command; returns what has to be awaited before the next one, and raises `Fault`."""

_CONSUMER_BUFFER = 4096
_HIGH_WATER = 4 * 1024 * 1024
_TOO_MANY = encode_frame(FrameType.ERROR, b"too much client connections")


class Session:
    """One client of a node.

    Args:
        node: the node.
        peer: ``host:port`` of the client.
        commands: what it understands, by name.

    Attributes:
        id: its number on the node.
        settings: what IDENTIFY made of it.
        sending: the settings that deliveries and heartbeats follow: those of the first IDENTIFY.
        state: whether it has subscribed, and whether it is closing.
        subscription: its place in a channel.
        hosted: the partition it consumes.
        authorizations: what AUTH brought; None before.
        closing: it is to be closed when its output is written.
        closed: it is to be closed now.
        connected: when it came, in nanoseconds since 1970.
        published: what it published, by topic.
        wanted: its last RDY.
        handshake: TLS that is being set up; nothing else is read or written meanwhile.
        after_handshake: called when TLS is up.
    """

    def __init__(self, node: Node, peer: str, commands: Mapping[bytes, Handler]) -> None:
        self.node: Node = node
        self.peer: str = peer
        self.clock: Callable[[], float] = node.options.clock
        self.settings: ClientSettings = ClientSettings.defaults(node.limits)
        # the original server knows a client that does not identify by its host alone
        self.settings.client_id = self.settings.hostname = peer.rpartition(":")[0] if node.options.original else peer
        self.sending: ClientSettings = self.settings
        self.state: State = State.INIT
        self.subscription: Subscription | None = None
        self.hosted: Hosted | None = None
        self.authorizations: Authorizations | None = None
        self.layers: list[Layer] = []
        self.closing: bool = False
        self.closed: bool = False
        self.connected: int = node.options.wall()
        self.published: dict[str, Publisher] = {}
        self.wanted: int = 0
        self.handshake: TlsLayer | None = None
        self.after_handshake: Callable[[], None] | None = None
        self.rules: CommandValidator = ClassicValidator(self) if node.options.original else CommandValidator(self)
        self._commands = commands
        self._parser = CommandParser(self.rules, raw_ids=not node.options.original)
        self._magic: bytes | None = b""
        self._wire: list[bytes] = []
        self._out: list[bytes] = []
        self.buffered: int = 0
        self.urgent: bool = False
        self._marked = self._waiting = self._choked = False
        self.heard: float = self.clock()
        self._due = self.heard + self.settings.heartbeat_interval
        self._held = 0.0
        self.id: int = node.add(self)

    # --- bytes in -------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Take bytes from the client.

        Raises:
            NsqError: a layer cannot read them; the connection is of no use any more.
        """
        for layer in list(self.layers):
            data = layer.decode(data)
        if self.handshake is not None:
            self._continue_handshake(self.handshake)
        if self._magic is not None:
            data = self._take_magic(self._magic + data)
        self._parser.receive(data)

    def _continue_handshake(self, tls: TlsLayer) -> None:
        if tls.ready:
            self.handshake = None
            self.rules.guarded = False
            if self.after_handshake is not None:
                self.after_handshake()
        self.urgent = True
        self.mark()

    def _take_magic(self, data: bytes) -> bytes:
        if len(data) < len(MAGIC_V2):
            self._magic = data
            return b""
        self._magic = None
        if not data.startswith(MAGIC_V2):
            self.refuse(Fault("E_BAD_PROTOCOL", None))
        elif 0 < self.node.switches.max_connections < len(self.node.sessions):
            self.write(_TOO_MANY)
            self.closing = True
        self.heard = self.clock()
        return data[len(MAGIC_V2) :]

    def step(self) -> Awaitable[None] | None:
        """Run the commands that are complete.

        Returns:
            None when more bytes are needed (or the session is closing), or what has to be awaited before the next step.
        """
        if self._magic is not None or self.handshake is not None:
            return None
        commands, parser, faulty = self._commands, self._parser, self.node.faults.active
        waiting: Awaitable[None] | None = None
        while waiting is None and not self.closing:
            try:
                command = parser.next_command()
                if command is None:
                    break
                if faulty and (fault := self.node.faults.command(command.words[0].decode("latin-1"))):
                    raise fault
                if self.rules.guarded and command.body is None:
                    self.rules.check_tls(command.words)
                waiting = commands.get(command.words[0], self.rules.unknown)(self, command)
            except Fault as fault:
                self.refuse(fault)
            self.heard = self.clock()
        self._waiting = waiting is not None
        return waiting

    def no_more(self) -> None:
        """Hear that the client sends no more: refuse a command whose body is cut off."""
        if self._waiting or self.closing or self._magic is not None or self.handshake is not None:
            return
        try:
            self._parser.check_end()
        except Fault as fault:
            self.refuse(fault)

    def waited(self) -> None:
        """Say that what `step` returned has been awaited."""
        self._waiting = False
        self.heard = self.clock()

    def push_layer(self, layer: Layer) -> None:
        """Put a layer between this session and the client: what is to be sent until now goes without it."""
        self._encode()
        self.urgent = True
        self.mark()
        self.layers.append(layer)
        rest = self._parser.take_rest()
        if rest:
            self._parser.receive(layer.decode(rest))

    @property
    def tls_version(self) -> str:
        """Version of TLS on this connection, empty without."""
        versions = [layer.version for layer in self.layers if isinstance(layer, TlsLayer)]
        return (versions[0] or "").replace("TLSv", "TLS") if versions else ""

    # --- bytes out ------------------------------------------------------------------------------------------------

    def answer(self, data: bytes) -> None:
        """Send a response."""
        self.write(encode_frame(FrameType.RESPONSE, data))

    def refuse(self, fault: Fault) -> None:
        """Send an error, and close behind it when it is fatal; a fault without a code closes silently."""
        if fault.code:
            self.write(fault.frame())
        if fault.fatal:
            self.closing = True
            self.mark()

    def write(self, frame: bytes) -> None:
        """Send a whole frame now; what was held back goes with it."""
        self._out.append(frame)
        self.buffered += len(frame)
        self.urgent = True
        self.mark()

    def hold(self, frame: bytes, *, full: bool) -> None:
        """Send a message; it may wait in the output buffer until that is full or its time is over.

        Args:
            frame: the frame.
            full: the client takes no more messages, so that waiting for more would be in vain.
        """
        self._out.append(frame)
        self.buffered += len(frame)
        if self.buffered > _HIGH_WATER:
            self.choke()
            full = True
        settings = self.settings
        if full or self.buffered >= settings.output_buffer_size:
            self.urgent = True
        elif not self._held:
            self._held = self.node.options.machine_clock() + settings.output_buffer_timeout
        self.mark()

    def mark(self) -> None:
        """Tell the node that this session has something to do."""
        if not self._marked and (self.urgent or self.closing or self.closed):
            self._marked = True
            dirty = self.node.dirty
            dirty.append(self)
            if len(dirty) == 1:
                self.node.wake()

    def unmark(self) -> None:
        """Say that the node has seen it."""
        self._marked = False

    def take(self) -> bytes:
        """Hand over the bytes to send, through the layers."""
        if self.handshake is not None:
            self._wire.append(self.handshake.pending())
            self.urgent = False
        else:
            self._encode()
        data = self._wire[0] if len(self._wire) == 1 else b"".join(self._wire)
        self._wire.clear()
        return data

    def _encode(self) -> None:
        out = self._out
        if out:
            data = b"".join(out)
            out.clear()
            for layer in reversed(self.layers):
                data = layer.encode(data)
            self._wire.append(data)
        self.buffered = 0
        self.urgent = False
        self._held = 0.0

    def count_published(self, hosted: Hosted, count: int) -> None:
        """Count messages that were taken for a partition."""
        topic = hosted.partition.topic
        publisher = self.published.get(topic)
        if publisher is None:
            publisher = hosted.traffic.publisher(self.peer, self.settings.user_agent)
            self.published[topic] = publisher
        publisher.published += count
        publisher.last = self.node.options.wall()

    def switch_to_consumer(self, channel: str) -> None:
        """Give a consumer that did not negotiate a buffer the redesigned server's buffer for consumers."""
        asked = self.settings.raw.get("output_buffer_size", 0)
        if not (asked or self.node.options.original or self.layers or is_ephemeral(channel)):
            self.settings.output_buffer_size = _CONSUMER_BUFFER

    # --- time and end ---------------------------------------------------------------------------------------------

    def identified(self) -> None:
        """Let deliveries and heartbeats follow what was negotiated, once (captured: identify_heartbeat_later)."""
        if self.sending is self.settings:
            self.sending = evolve(self.settings)
            self._due = self.clock() + self.sending.heartbeat_interval

    def tick(self, now: float) -> None:
        """Let time pass: heartbeats, held output, and the end of a client that says nothing."""
        interval, patient = self.sending.heartbeat_interval, self.settings.heartbeat_interval
        if self._magic is not None:
            patience = inf if self.node.options.original else self.node.options.client_timeout
            self.closed = self.closed or now - self.heard >= patience
        elif patient and not self._waiting:
            # the redesigned server gives a client three intervals, the original one two
            self.closed = self.closed or now - self.heard >= patient * (2 if self.node.options.original else 3)
        if interval and now >= self._due and self._magic is None and not self.closing:
            self._due = max(self._due + interval, now)
            subscription = self.subscription
            if subscription is None or not subscription.channel.is_stalled(subscription):
                self.write(encode_frame(FrameType.RESPONSE, HEARTBEAT))
        if self._held and self.settings.output_buffer_timeout and self._held <= self.node.options.machine_clock():
            self.urgent = True
        self.mark()

    def set_ready(self, count: int) -> None:
        """Take a RDY; it counts from when the client has taken what was sent."""
        self.wanted = count
        subscription = self.subscription
        if subscription is not None and (not self._choked or not count):
            subscription.channel.set_ready(subscription, count)

    def choke(self) -> None:
        """The client takes no more bytes: deliver nothing until `relieve`."""
        subscription = self.subscription
        if subscription is not None and not self._choked:
            self._choked = True
            subscription.channel.set_ready(subscription, 0)

    def relieve(self) -> None:
        """The client has taken everything: deliver again."""
        subscription = self.subscription
        if self._choked and subscription is not None:
            self._choked = False
            subscription.channel.set_ready(subscription, self.wanted)

    def fail(self) -> None:
        """A layer cannot be read: send what it wants to say about that, and close."""
        self.closing = self.urgent = True
        self.mark()

    def close(self) -> None:
        """Close the connection now, as when its channel is gone."""
        self.closed = True
        self.mark()

    def end(self) -> None:
        """The connection is gone: give its messages back."""
        self.closed = True
        self.node.remove(self)
        for topic in self.published:
            for hosted in self.node.partitions(topic):
                hosted.traffic.publishers.pop(self.peer, None)
        subscription, self.subscription = self.subscription, None
        if subscription is not None:
            subscription.channel.unsubscribe(subscription)
