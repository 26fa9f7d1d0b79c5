"""States of a connection, and which commands a server accepts in each.

The states are those of the original server's notes (init, subscribed, closing).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from nsqext.protocol.server.request_error import RequestError


class State(Enum):
    """State of a connection, the same for both roles."""

    INIT = auto()
    SUBSCRIBED = auto()
    CLOSING = auto()


_SUBS = ("SUB", "SUB_ADVANCED", "SUB_ORDERED")
_ACKS = ("FIN", "REQ", "TOUCH")

ACCEPTED_IN: Mapping[str, frozenset[State]] = {
    "IDENTIFY": frozenset({State.INIT}),
    "AUTH": frozenset({State.INIT}),
    **dict.fromkeys(_SUBS, frozenset({State.INIT})),
    **dict.fromkeys(_ACKS, frozenset({State.SUBSCRIBED, State.CLOSING})),
    "RDY": frozenset({State.SUBSCRIBED, State.CLOSING}),
    "CLS": frozenset({State.SUBSCRIBED}),
}
"""States in which a command is accepted; a command that is not listed is accepted in every state."""


def check_state(verb: str, state: State) -> None:
    """Raise the error of a command that is not accepted in this state (captured: wrong_state)."""
    accepted = ACCEPTED_IN.get(verb)
    if accepted is not None and state not in accepted:
        name = "SUB" if verb in _SUBS else verb
        raise RequestError("E_INVALID", f"cannot {name} in current state")
