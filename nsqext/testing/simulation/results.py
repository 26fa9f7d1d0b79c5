"""What a simulation found: the run of a seed, its failure, and the call that repeats it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

if TYPE_CHECKING:
    from nsqext.testing.simulation.faults import Fault


@frozen
class Run:
    """Result of a seed.

    Attributes:
        trace: digest of every event; equal for equal runs.
        seconds: virtual duration.
        error: what the scenario raised; None when it returned.
        lines: the last events as text, if kept.
        injected: whether the scenario has called `World.inject_faults`.
        effective: kinds of its faults that had an effect.
        handler_errors: what handlers raised, as text, and how often; their messages are delivered again. An
            `AssertionError` is the error of the run instead.
    """

    seed: int
    faults: tuple[Fault, ...]
    trace: str
    seconds: float
    turns: int
    error: BaseException | None = None
    lines: tuple[str, ...] = ()
    injected: bool = False
    effective: frozenset[str] = frozenset()
    handler_errors: Mapping[str, int] = field(factory=dict)


class SimulationFailed(AssertionError):
    """A scenario raised. The text has the seed, the necessary faults, the error, and what handlers raised.

    Attributes:
        run: the run with the fewest faults that still fails.
    """

    def __init__(self, run: Run, call: str) -> None:
        self.run: Run = run
        faults = "".join(f"\n  {fault}" for fault in run.faults) or "\n  (none)"
        handlers = "".join(f"\n  {text} ({count} times)" for text, count in run.handler_errors.items())
        raised = f"handlers raised:{handlers}\n" if handlers else ""
        super().__init__(
            f"seed {run.seed}: {error_text(run.error)}\nfaults, as few as fail:{faults}\n{raised}repeat it with: {call}"
        )


def error_text(error: BaseException | None) -> str:
    """Return class and text of an error, of the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def failed_assertion(error: BaseException) -> AssertionError | None:
    """Return a failed assertion, also one of a task group; None for other errors."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for one in error.exceptions if (found := failed_assertion(one))), None)
    return error if isinstance(error, AssertionError) else None


def repeating_call(scenario: object, seed: int, settings: Mapping[str, tuple[object, object]]) -> str:
    """Return the call of `simulate` that repeats a seed.

    Args:
        settings: the other arguments by name, each with its default.
    """
    given = [f"{name}={_written(value)}" for name, (value, default) in settings.items() if value != default]
    name = getattr(scenario, "__name__", "scenario")
    return f"simulate({', '.join([name, f'seeds=[{seed}]', *given])})"


def _written(value: Any) -> str:
    """Return a value as in Python; of options only the members that are not the default."""
    if not attrs.has(type(value)):
        return repr(value)
    default = type(value)()
    members = [member.name for member in attrs.fields(type(value))]
    given = [(name, getattr(value, name)) for name in members if getattr(value, name) != getattr(default, name)]
    return f"{type(value).__name__}({', '.join(f'{name}={own!r}' for name, own in given)})"
