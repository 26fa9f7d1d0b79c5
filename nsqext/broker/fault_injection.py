"""Injected faults of a node, which its server applies to received and sent bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import anyio
from attrs import define, field

from nsqext.waits import Waiters

if TYPE_CHECKING:
    from nsqext.protocol.server.request_error import RequestError

Direction = Literal["in", "out"]
"""``in`` for bytes from clients, ``out`` for bytes to clients."""


@define(eq=False)
class Rule:
    """A fault of the bytes of a node's connections."""

    #: ``drop`` discards bytes, ``delay`` delays them, ``cut`` forwards half a frame and closes
    kind: Literal["drop", "delay", "cut"]
    direction: Direction
    peer: str | None = None  #: ``host:port`` of the client; None for every client
    seconds: float = 0.0  #: of a delay
    #: bytes to discard or connections to cut; None without limit
    left: int | None = None

    @property
    def place(self) -> tuple[str, str, str | None]:
        """Rules with an equal place replace each other."""
        return self.kind, self.direction, self.peer

    def __str__(self) -> str:
        if self.kind == "delay":
            extent = f"{self.seconds:g} s"
        else:
            extent = f"{'all' if self.left is None else self.left} {'bytes' if self.kind == 'drop' else 'connections'}"
        return f"{self.kind} {self.direction}{f' of {self.peer}' if self.peer else ''}: {extent}"


@define(eq=False)
class _Answer:
    fault: RequestError
    command: str | None
    left: int

    def __str__(self) -> str:
        return f"answer {self.command or 'any command'} with {self.fault.code}: {self.left} commands"


def _half(data: bytes, direction: Direction) -> bytes:
    """Return half of the first outgoing frame, or of incoming bytes."""
    size = len(data)
    if direction == "out" and size > 8:
        size = min(size, 4 + int.from_bytes(data[:4], "big"))
    return data[: size // 2]


@define(eq=False)
class NodeFaults:
    """Faults of a node; changed only in the cluster's event loop."""

    active: bool = False  #: any fault is set; while False, a read or write costs an attribute access more
    refusing: bool = False  #: new connections are closed at once
    flush_held: bool = False  #: committed messages are not readable for channels
    on_flush: Callable[[], None] = lambda: None  #: called when ``flush_held`` ends
    frozen: bool = False  #: does not read, write or run timers, as a stopped process
    rules: list[Rule] = field(factory=list)
    _answers: list[_Answer] = field(factory=list, alias="answers")
    _thawed: anyio.Event | None = field(default=None, alias="thawed")
    _changes: Waiters = field(factory=Waiters, init=False)

    def _update(self) -> None:
        self.active = self.frozen or self.refusing or bool(self.rules or self._answers)
        self._changes.wake()

    def freeze(self) -> None:
        if not self.frozen:
            self.frozen, self._thawed = True, anyio.Event()
            self._update()

    def thaw(self) -> None:
        if self._thawed is not None:
            self.frozen = False
            self._thawed.set()
            self._thawed = None
            self._update()

    def refuse(self, refusing: bool = True) -> None:
        self.refusing = refusing
        self._update()

    def hold_flush(self, holding: bool = True) -> None:
        held, self.flush_held = self.flush_held, holding
        if held and not holding:
            self.on_flush()

    def add(self, rule: Rule) -> None:
        """Add a rule, until `heal` or until it is used up."""
        self.rules.append(rule)
        self._update()

    def replace(self, rule: Rule) -> None:
        """Add a rule in the place of an earlier rule."""
        self.remove([old for old in self.rules if old.place == rule.place])
        self.add(rule)

    def remove(self, rules: Sequence[Rule]) -> None:
        self.rules[:] = [rule for rule in self.rules if not any(rule is gone for gone in rules)]
        self._update()

    def answer(self, fault: RequestError, times: int = 1, command: str | None = None) -> None:
        """Answer the next commands, or commands of a name (``PUB``), with an error instead of running them.

        Replaces the last answer to commands of this name.
        """
        self._answers[:] = [answer for answer in self._answers if answer.command != command]
        self._answers.append(_Answer(fault, command, times))
        self._update()

    def pending(self) -> list[str]:
        states = {"frozen": self.frozen, "refuse connections": self.refusing, "flush held": self.flush_held}
        return [*(name for name, set_ in states.items() if set_), *map(str, (*self.rules, *self._answers))]

    def heal(self) -> None:
        self.rules.clear()
        self._answers.clear()
        self.refusing = False
        self.hold_flush(False)
        self.thaw()
        self._update()

    async def gate(self) -> None:
        while self._thawed is not None:
            await self._thawed.wait()

    def command(self, name: str) -> RequestError | None:
        """Return and count the error that answers the next command; None to run the command."""
        for answer in self._answers:
            if answer.command in (None, name):
                answer.left -= 1
                if answer.left <= 0:
                    self._answers.remove(answer)
                    self._update()
                return answer.fault
        return None

    async def carry(self, direction: Direction, peer: str, data: bytes) -> tuple[bytes, bool]:
        """Apply the faults to bytes; return the bytes to forward, and whether to close the connection then."""
        await self.gate()
        for rule in list(self.rules):
            if rule.direction != direction or rule.peer not in (None, peer) or rule not in self.rules:
                continue  # another connection may have used it up during a delay, or `heal` ended it
            if rule.kind == "delay":
                with anyio.move_on_after(rule.seconds):
                    while rule in self.rules:
                        await self._changes.wait()
            elif rule.kind == "cut":
                self._use(rule, 1)
                return _half(data, direction), True
            else:
                swallowed = len(data) if rule.left is None else min(rule.left, len(data))
                self._use(rule, swallowed)
                data = data[swallowed:]
        await self.gate()
        return data, False

    def _use(self, rule: Rule, amount: int) -> None:
        if rule.left is not None:
            rule.left -= amount
            if rule.left <= 0 and rule in self.rules:
                self.rules.remove(rule)
                self._update()
