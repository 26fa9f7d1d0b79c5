"""`Cluster.faults`: everything that can be broken on purpose, from synchronous and asynchronous code alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nsqext.broker.fault_injection import Direction, Rule
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState
from nsqext.protocol.server.request_error import Fault

if TYPE_CHECKING:
    from nsqext.broker.lookupd.classic import ClassicLookupd
    from nsqext.broker.lookupd.lookupd import Lookupd
    from nsqext.broker.runtime import Runtime
    from nsqext.broker.runtime_ha import RuntimeHa

__all__ = ("ClusterFaults", "ScriptedClock")

_OPEN_ERRORS = frozenset(
    (
        "E_FAILED_ON_NOT_LEADER",
        "E_FAILED_ON_NOT_WRITABLE",
        "E_PUB_FAILED",
        "E_MPUB_FAILED",
        "E_DPUB_FAILED",
        "E_EXT_NOT_SUPPORT",
        "E_INVALID_JSON_HEADER",
        "INVALID_TRACE_ID",
        "E_FIN_FAILED",
        "E_REQ_FAILED",
        "E_TOUCH_FAILED",
    )
)

_Run = Callable[[Callable[["Runtime"], Any]], Any]


def coordinated(core: Runtime) -> RuntimeHa:
    """Return the inside of a cluster whose partitions have leaders.

    Raises:
        InvalidState: it is of the original generation.
    """
    from nsqext.broker.runtime_ha import RuntimeHa

    if not isinstance(core, RuntimeHa):
        raise InvalidState("the original NSQ has no partition leaders", hint='use generation="ha"')
    return core


class ScriptedClock:
    """The cluster's clock in a test's hands: message timeouts, delays, heartbeats and time stamps follow it."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def advance(self, seconds: float) -> None:
        """Let this many seconds pass at once; what is due by then has happened on return.

        Raises:
            InvalidInput: they are negative: time does not go back.
        """
        if not seconds >= 0:
            raise InvalidInput(f"{seconds!r} seconds cannot pass", hint="time does not go back")
        self._run(lambda core: core.advance(seconds))

    def stop(self) -> None:
        """Hold the clock; time passes only by `advance`."""
        self._run(lambda core: core.clock.stop())

    def run(self) -> None:
        """Let the clock run again."""
        self._run(lambda core: core.clock.run())


class ClusterFaults:
    """What a test may do to a cluster; every method returns when it is done, and blocks until then.

    All raise `InvalidState` while the cluster is not running, `InvalidInput` for a node that there is not, and
    `InvalidSetting` for a direction that there is not.

    Nodes are named n1, n2 and so on, lookup nodes l1, l2 and so on. A direction is ``in`` (what clients send) or
    ``out`` (what the node answers). A peer is the client's end of a connection, ``host:port``; without one all clients
    are meant.

    Attributes:
        clock: the cluster's clock.
    """

    def __init__(self, run: _Run) -> None:
        self._run = run
        self.clock: ScriptedClock = ScriptedClock(run)

    # --- nodes ----------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Kill a node or lookup node; see `Cluster.kill`."""
        self._run(lambda core: core.kill(name))

    def restart(self, name: str) -> None:
        """Start it again; see `Cluster.restart`."""
        self._run(lambda core: core.restart(name))

    def move_leader(self, topic: str, partition: int, name: str) -> None:
        """Make another node the leader; see `Cluster.move_leader`."""
        self._run(lambda core: coordinated(core).move_leader(topic, partition, name))

    def freeze(self, name: str) -> None:
        """Stop a node where it stands, as SIGSTOP does: connections stay, nothing is answered.

        Its lease runs out, as with a kill.
        """
        self._run(lambda core: core.freeze(name))

    def thaw(self, name: str) -> None:
        """Let a frozen node go on."""
        self._run(lambda core: core.thaw(name))

    def refuse(self, name: str, refusing: bool = True) -> None:
        """Close every new connection to a node at once, or take them again."""
        self._run(lambda core: core.node(name).member.node.faults.refuse(refusing))

    # --- bytes ----------------------------------------------------------------------------------------------------

    def _add(self, name: str, rule: Rule) -> None:
        if rule.direction not in ("in", "out"):
            raise InvalidSetting(f"direction={rule.direction!r} is not known", hint='use "in" or "out"')
        self._run(lambda core: core.node(name).member.node.faults.add(rule))

    def drop(self, name: str, direction: Direction, *, size: int | None = None, peer: str | None = None) -> None:
        """Swallow bytes of a node's connections.

        Args:
            name: the node.
            direction: which way.
            size: how many bytes; all until `heal` without it.
            peer: of which client.
        """
        self._add(name, Rule("drop", direction, peer, left=size))

    def delay(self, name: str, direction: Direction, seconds: float, *, peer: str | None = None) -> None:
        """Hold back the bytes of a node's connections, each read or write for so many seconds, until `heal`."""
        self._add(name, Rule("delay", direction, peer, seconds))

    def cut(self, name: str, direction: Direction = "out", *, connections: int = 1, peer: str | None = None) -> None:
        """Let half of the next frame through and close the connection.

        Args:
            name: the node.
            direction: which way.
            connections: how many connections are cut.
            peer: of which client.
        """
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
        """Answer the next commands at a node with an error instead of running them.

        Args:
            name: the node.
            code: ``E_…`` word.
            text: what follows it.
            times: how many commands.
            command: only commands of this name, ``PUB`` for example.
            closes: close the connection behind it; by default as the real server does after this code.
        """
        fatal = code not in _OPEN_ERRORS if closes is None else closes
        fault = Fault(code, text, fatal=fatal)
        self._run(lambda core: core.node(name).member.node.faults.answer(fault, times, command))

    # --- lookup ---------------------------------------------------------------------------------------------------

    def _lookups(self, name: str | None, change: Callable[[Lookupd | ClassicLookupd], None]) -> None:
        def act(core: Runtime) -> None:
            for lookupd in core.lookupds_named(name):
                change(lookupd)

        self._run(act)

    def stale_lookup(self, name: str | None = None) -> None:
        """Have lookup go on telling what is true now; one of several lookup nodes then disagrees with the others.

        Args:
            name: one lookup node; all without it.
        """
        self._lookups(name, lambda lookupd: lookupd.stand_still())

    def empty_lookup(self, name: str | None = None) -> None:
        """Have lookup know of no node and no topic."""
        self._lookups(name, lambda lookupd: lookupd.see_nothing())

    def slow_lookup(self, seconds: float, name: str | None = None) -> None:
        """Have lookup take so many seconds longer for each answer."""
        self._lookups(name, lambda lookupd: lookupd.slow_down(seconds))

    def heal_lookup(self, name: str | None = None) -> None:
        """Have lookup tell the truth again, without delay."""
        self._lookups(name, lambda lookupd: lookupd.see_truth())

    def heal(self) -> None:
        """Take away every fault but kills: thaw, pass all bytes, take all connections, tell the truth."""
        self._run(lambda core: core.heal())
