"""Commands that are accepted in each state."""

from __future__ import annotations

import pytest

from nsqext.protocol.server.command_parser import State, check_state
from nsqext.protocol.server.request_error import RequestError
from tests.support.tables import table


@table(
    ("verb", "taken"),
    [
        ("IDENTIFY", {State.INIT}),
        ("AUTH", {State.INIT}),
        ("SUB", {State.INIT}),
        ("SUB_ADVANCED", {State.INIT}),
        ("SUB_ORDERED", {State.INIT}),
        ("RDY", {State.SUBSCRIBED, State.CLOSING}),
        ("FIN", {State.SUBSCRIBED, State.CLOSING}),
        ("REQ", {State.SUBSCRIBED, State.CLOSING}),
        ("TOUCH", {State.SUBSCRIBED, State.CLOSING}),
        ("CLS", {State.SUBSCRIBED}),
        ("PUB", set(State)),
        ("NOP", set(State)),
    ],
)
def test_commands_and_states(verb: str, taken: set[State]) -> None:
    for state in State:
        if state in taken:
            check_state(verb, state)
        else:
            with pytest.raises(RequestError) as caught:
                check_state(verb, state)
            name = "SUB" if verb.startswith("SUB") else verb
            assert str(caught.value) == f"E_INVALID cannot {name} in current state"
            assert caught.value.fatal
