"""`Cluster.faults`: fault injection into an embedded cluster."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

from nsqext.arguments import check_flags, check_number, check_time, is_number
from nsqext.broker.fault_injection import Direction, Rule
from nsqext.broker.nsqd.server import dialect_of
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState, TopicNotFound
from nsqext.errors.server import SERVER_ERRORS
from nsqext.protocol.server.request_error import RequestError

if TYPE_CHECKING:
    from nsqext.broker.lookupd.lookupd import LookupServer
    from nsqext.broker.runtime import Runtime
    from nsqext.broker.runtimes import RuntimeRedesigned

_CODE = re.compile("E_[A-Z_]+")
_PEER = re.compile(r".+:[0-9]+")
_Run = Callable[[Callable[["Runtime"], Any]], Any]


def coordinated(runtime: Runtime) -> RuntimeRedesigned:
    """Return the runtime of a redesigned cluster; raises `InvalidState` for the original generation."""
    from nsqext.broker.runtimes import RuntimeRedesigned

    if not isinstance(runtime, RuntimeRedesigned):
        raise InvalidState("the original NSQ has no partition leaders", hint='use generation="redesigned"')
    return runtime


class ScriptedClock:
    """The cluster's clock, which message timeouts, delays, heartbeats and time stamps follow."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def advance(self, seconds: float) -> None:
        """Advance the clock; on return, all timers that became due have fired.

        Raises:
            InvalidInput: the seconds are negative, infinite or no number.
        """
        if not is_number(seconds) or seconds == inf:
            raise InvalidInput(f"cannot advance the clock by {seconds!r} seconds", hint="give a positive number")
        self._run(lambda runtime: runtime.advance(seconds))

    def stop(self) -> None:
        """Stop the clock; only `advance` moves it."""
        self._run(lambda runtime: runtime.clock.stop())

    def run(self) -> None:
        """Start the clock again."""
        self._run(lambda runtime: runtime.clock.run())


class ClusterFaults:
    """Faults of a cluster; methods block until they are done.

    They raise `InvalidState` while the cluster is not running, `InvalidInput` for an unknown node, and `InvalidSetting`
    for an unknown direction, a count below 1, a time that is no number of seconds, a peer that is no address, or
    another fault without effect.

    Nodes are named n1, n2 and so on, lookup nodes l1, l2 and so on. A direction is ``in`` (from clients) or ``out`` (to
    clients). A peer, a client's ``host:port``, limits a fault to this client.

    A fault replaces the previous fault of its kind, node, direction and peer, or command: counts do not add up.

    Attributes:
        clock: the cluster's clock.
    """

    def __init__(self, run: _Run) -> None:
        self._run = run
        self.clock: ScriptedClock = ScriptedClock(run)

    # Nodes

    def truncate(self, topic: str, partition: int, count: int) -> None:
        """Remove all messages behind the first ``count`` of a partition, acknowledged or not.

        A killed leader of the redesigned NSQ returns like this if no other node has what it lost. Later messages get
        the counts and byte offsets of removed messages.

        Raises:
            TopicNotFound: no running node has the partition.
            InvalidSetting: ``count`` is negative.
        """
        check_number("count", count)

        def act(runtime: Runtime) -> None:
            copies = [
                hosted.partition
                for run in coordinated(runtime).nodes.values()
                if (hosted := run.member.node.hosted.get((topic, partition))) is not None
            ]
            if not copies:
                raise TopicNotFound("no running node has the partition", topic=topic, partition=partition)
            for copy in copies:
                copy.truncate(copy.log.find_count(count))

        self._run(act)

    def freeze(self, name: str) -> None:
        """Freeze a node as SIGSTOP does: connections stay open without answers; its lease expires.

        Raises:
            InvalidState: the node is down.
        """

        def act(runtime: Runtime) -> None:
            if runtime.node(name).server is None:
                raise InvalidState(f"{name!r} is down, and cannot be frozen", hint="restart it first")
            runtime.freeze(name)

        self._run(act)

    def thaw(self, name: str) -> None:
        """Thaw a frozen node."""
        self._run(lambda runtime: runtime.thaw(name))

    def refuse(self, name: str, refusing: bool = True) -> None:
        """Close every new connection of a client (TCP, not HTTP) to a node at once, or accept them again."""
        check_flags(refusing=refusing)
        self._run(lambda runtime: runtime.node(name).member.node.faults.refuse(refusing))

    def hold_flush(self, name: str, holding: bool = True) -> None:
        """Acknowledge new messages of a node, and deliver none of them until the hold ends.

        A busy node of the redesigned NSQ does so for seconds: its topics count the messages, its channels do not, and
        report no depth for them (seen on loaded servers). A leader change and a restart deliver them, too.

        Raises:
            InvalidState: the cluster is of the original generation, which delivers at once.
        """
        check_flags(holding=holding)
        self._run(lambda runtime: coordinated(runtime).node(name).member.node.faults.hold_flush(holding))

    # Bytes

    def _add(self, name: str, rule: Rule) -> None:
        if rule.direction not in ("in", "out"):
            raise InvalidSetting(f"direction={rule.direction!r} is unknown", hint='use "in" or "out"')
        if rule.peer is not None and _PEER.fullmatch(str(rule.peer)) is None:
            raise InvalidSetting(f"peer={rule.peer!r} is not the address of a client", hint="give host:port")
        self._run(lambda runtime: runtime.node(name).member.node.faults.replace(rule))

    def drop(self, name: str, direction: Direction, *, size: int | None = None, peer: str | None = None) -> None:
        """Discard bytes of a node's connections.

        Args:
            size: number of bytes; None for all bytes until `heal`.
        """
        if size is not None:
            check_number("size", size, 1)
        self._add(name, Rule("drop", direction, peer, left=size))

    def delay(self, name: str, direction: Direction, seconds: float, *, peer: str | None = None) -> None:
        """Delay every read or write of a node's connections, until `heal`."""
        check_time("seconds", seconds, zero=False)
        self._add(name, Rule("delay", direction, peer, seconds))

    def cut(self, name: str, direction: Direction = "out", *, connections: int = 1, peer: str | None = None) -> None:
        """Pass half of the next frame and close the connection.

        Args:
            connections: number of connections to cut.
        """
        check_number("connections", connections, 1)
        self._add(name, Rule("cut", direction, peer, left=connections))

    def answer(
        self,
        name: str,
        code: str,
        text: str = "",
        *,
        times: int = 1,
        command: str | None = None,
        closes: bool | None = None,
    ) -> None:
        """Answer the next commands at a node with an error, without executing them.

        Args:
            code: ``E_…`` word.
            text: follows the code.
            command: limits the fault to commands of this name, for example ``PUB``.
            closes: close the connection then; None to do as the real server after this code.
        """
        check_number("times", times, 1)
        if closes is not None:
            check_flags(closes=closes)
        if _CODE.fullmatch(code) is None:
            raise InvalidSetting(f"code={code!r} is not a code of an error", hint="E_ and capitals, as E_PUB_FAILED")
        known = SERVER_ERRORS.get(code)
        fatal = (known is None or known.closes_connection) if closes is None else closes
        fault = RequestError(code, text, fatal=fatal)

        def act(runtime: Runtime) -> None:
            node = runtime.node(name).member.node
            commands = [name.decode() for name in dialect_of(node).commands]
            if command not in (None, *commands):
                raise InvalidSetting(
                    f"command={command!r} is not a command of this generation", hint=f"it has {', '.join(commands)}"
                )
            node.faults.answer(fault, times, command)

        self._run(act)

    # Lookup

    def _lookups(self, name: str | None, change: Callable[[LookupServer], None]) -> None:
        def act(runtime: Runtime) -> None:
            for lookupd in runtime.lookupds_named(name):
                change(lookupd)

        self._run(act)

    def stale_lookup(self, name: str | None = None) -> None:
        """Make lookup nodes repeat the present state; a single stale node then disagrees with the others.

        Args:
            name: a lookup node; None for all.
        """
        self._lookups(name, lambda lookupd: lookupd.show_snapshot())

    def empty_lookup(self, name: str | None = None) -> None:
        """Make lookup nodes show neither nodes nor topics."""
        self._lookups(name, lambda lookupd: lookupd.show_nothing())

    def slow_lookup(self, seconds: float, name: str | None = None) -> None:
        """Delay each response of lookup nodes."""
        check_time("seconds", seconds)

        def slow_down(lookupd: LookupServer) -> None:
            lookupd.delay = seconds

        self._lookups(name, slow_down)

    def heal_lookup(self, name: str | None = None) -> None:
        """Remove the faults of lookup nodes."""
        self._lookups(name, lambda lookupd: lookupd.show_current())

    def pending(self) -> dict[str, list[str]]:
        """Return the faults in effect by node: ``{"n1": ["frozen"], "l1": ["down"], "clock": ["stopped"]}``."""
        pending: dict[str, list[str]] = self._run(lambda runtime: runtime.pending())
        return pending

    def heal(self) -> None:
        """Remove every fault except kills and a stopped clock."""
        self._run(lambda runtime: runtime.heal())
