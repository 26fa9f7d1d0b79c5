"""Conversations of clients with a node of each generation, and of a redesigned node without a cluster."""

from __future__ import annotations

from tests.support.session_scripts import SessionScript
from tests.support.tables import table

REDESIGNED = {
    "RDY is a window": """
        host t; a: SUB t ch 0 -> OK; a: RDY 1; p: PUB t 0 | m0 -> OK; p: PUB t 0 | m1 -> OK; a gets m0; a: FIN $m0;
        a gets m1""",
    "RDY without a count is one message": """
        host t; a: SUB t ch 0 -> OK; a: RDY; p: PUB t 0 | m0 -> OK; p: PUB t 0 | m1 -> OK; a gets m0""",
    "an id is never zero": """
        host t; a: SUB t ch 0 -> OK; a: FIN #0 -> !E_INVALID Invalid Message ID; a closed""",
    "a cluster creates no topics on command": """
        a: INTERNAL_CREATE_TOPIC new 0 -> !E_CREATE_TOPIC_FAILED CREATE_TOPIC is not allowed here while cluster feature
        enabled.; a open""",
    "each type of frame": """
        host t; a: SUB t ch 0 -> OK; a: RDY 1; p: PUB t 0 | m0 -> OK; a: NONSENSE; a hears m0 E_INVALID; a closed""",
    "messages of a client that is lost are delivered to the next": """
        host t; a: SUB t ch 0 -> OK; a: RDY 1; p: PUB t 0 | m0 -> OK; a gets m0; a ends; b: SUB t ch 0 -> OK;
        b: RDY 1; b gets m0/1""",
    "a deleted channel closes its clients without an error frame": """
        host t; a: SUB t ch 0 -> OK; a: RDY 1; topic do delete_channel ch; a hears; a closed""",
    "a removed partition closes its clients": """
        host t; a: SUB t ch 0 -> OK; a: RDY 1; do unhost t 0; a closed; p: PUB t 0 | m0 -> !E_TOPIC_NOT_EXIST""",
    "deliveries follow the first IDENTIFY": """
        host t; a: IDENTIFY | {"msg_timeout":60000} -> OK; a: IDENTIFY | {"msg_timeout":1000} -> OK;
        a: SUB t ch 0 -> OK; a: RDY 1; p: PUB t 0 | m0 -> OK; a gets m0; wait 30; a gets; a: TOUCH $m0; wait 1.1;
        a gets m0/2""",
    "revoked sampling does not forbid order": """
        host t; a: IDENTIFY | {"sample_rate":1} -> OK; a: IDENTIFY | {"sample_rate":0} -> OK;
        a: SUB_ORDERED t ch 0 -> OK""",
    "a client that adds extend support later receives no messages and no heartbeats": """
        host t extend; a: IDENTIFY | {"heartbeat_interval":1000} -> OK;
        a: IDENTIFY | {"heartbeat_interval":1000,"extend_support":true} -> OK; a: SUB t ch 0 -> OK; a: RDY 1;
        p: PUB t 0 | m0 -> OK; wait 1; a open; wait 1; a open; wait 1; a hears; a closed""",
    "a delay counts in 64 bits": """
        host t; a: SUB t ch 0 -> OK; a: RDY 1; p: PUB t 0 | m0 -> OK; a gets m0; a: REQ $m0 18446744073710;
        wait 0.01; a gets m0/2""",
    "no follower takes answers": """
        host t; a: SUB t ch 0 -> OK; a: RDY 1; p: PUB t 0 | m0 -> OK; a gets m0; topic leader=False;
        a: FIN $m0 -> !E_FAILED_ON_NOT_LEADER""",
    "a message that FIN makes room for is not delivered to a client that stops at once": """
        host t; p: PUB t 0 | old -> OK; a: SUB t ch 0 -> OK; a: RDY 1; p: PUB t 0 | m0 -> OK; p: PUB t 0 | m1 -> OK;
        a gets m0; a: FIN $m0 & CLS -> CLOSE_WAIT; a hears""",
    "a follower refuses publishes, and stays open": """
        host t; topic leader=False; a: PUB t 0 | m0 -> !E_FAILED_ON_NOT_LEADER; topic has failed=1;
        node has publish_failed=1; a open; a: SUB t ch 0 -> !E_FAILED_ON_NOT_LEADER; a closed""",
    "what a topic requires is checked before its leader": """
        host t extend; topic leader=False;
        a: SUB t ch 0 -> !E_SUB_EXTEND_NEED this topic is extended and should identify as extend support.""",
    "a leader without majority refuses publishes and consumers": """
        host t; topic writable=False; a: MPUB t 0 | [m0] -> !E_FAILED_ON_NOT_WRITABLE;
        a: SUB t ch 0 -> !E_FAILED_ON_NOT_WRITABLE; a closed""",
    "writes that are switched off are answered as by a follower": """
        host t; host o ordered; switch write_disabled=ordered; a: PUB o 0 | m0 -> !E_FAILED_ON_NOT_LEADER;
        a: PUB t 0 | m0 -> OK; switch write_disabled=all; a: PUB t 0 | m0 -> !E_FAILED_ON_NOT_LEADER""",
    "a node that drains refuses publishes": """
        host t; node exiting=True; a: PUB t 0 | m0 -> !E_PUB_FAILED exiting;
        a: MPUB t 0 | [m0] -> !E_MPUB_FAILED exiting; a open""",
    "heartbeats can be switched off for publishers": """
        a: IDENTIFY | {"heartbeat_interval":-1} -> OK; wait 500; a open; a hears;
        a: SUB t ch -> !E_INVALID cannot SUB with heartbeats disabled""",
}

ALONE = {
    "FIN lacks the coordinator's text": """
        host t; a: SUB t ch 0 -> OK; a: RDY 1;
        a: FIN #5 -> !E_FIN_FAILED FIN [0 0 0 0 0 0 0 5 0 0 0 0 0 0 0 0] failed Message ID not in flight""",
    "the first channel begins at the last flush": """
        host t; p: PUB t 0 | flushed -> OK; wait 0; p: PUB t 0 | fresh -> OK; a: SUB t ch 0 -> OK; a: RDY 1;
        a gets fresh; b: SUB t second 0 -> OK; b: RDY 1; b gets""",
    "topics are created on command": """
        a: INTERNAL_CREATE_TOPIC new 1 true -> OK; a: INTERNAL_CREATE_TOPIC new 1023 -> OK;
        a: INTERNAL_CREATE_TOPIC new 1024 -> !E_CREATE_TOPIC_FAILED CREATE_TOPIC new failed;
        a: INTERNAL_CREATE_TOPIC new -1 -> !E_BAD_PARTITION partition should not less than 0""",
}

ORIGINAL = {
    "an id that is no number names no message": """
        a: SUB t ch -> OK; a: RDY 1; p: PUB t | m0 -> OK; a gets m0;
        a: FIN zzzzzzzzzzzzzzzz -> !E_FIN_FAILED FIN zzzzzzzzzzzzzzzz failed ID not in flight; a: FIN $m0; a hears""",
    "the first channel gets the stored messages": """
        p: MPUB t | [m0, m1] -> OK; a: SUB t ch -> OK; a: RDY 2; a gets m0 m1""",
    "answers name messages by 16 hexadecimal digits": """
        a: SUB t ch -> OK; a: RDY 1; p: PUB t | m0 -> OK; a gets m0; a: TOUCH $m0; a: REQ $m0 200; a gets; wait 0.3;
        a gets m0/2; a: FIN $m0; a: FIN $m0; a hears E_FIN_FAILED; a open""",
    "a client that is disconnected for an error gets no more messages": """
        p: PUB t | m0 -> OK; a: SUB t ch & RDY 1 & RDY 9999; a hears OK E_INVALID; a closed; b: SUB t ch -> OK;
        b: RDY 1; b gets m0""",
    "a requeued message precedes what is published after it, also behind a deferred message": """
        a: SUB t ch -> OK; a: RDY 2; p: MPUB t | [m0, m1] -> OK; a gets m0 m1; a: RDY 0; a: REQ $m0 0;
        p: DPUB t 60000 | later -> OK; a: REQ $m1 0; p: PUB t | m2 -> OK; a: RDY 3; a gets m0 m1 m2""",
    "DPUB waits at the channel": """
        a: SUB t ch -> OK; a: RDY 1; p: DPUB t 500 | later -> OK; wait 0.4; a gets; wait 0.2; a gets later""",
}


@table(("scene", "script"), REDESIGNED.items())
def test_a_node_of_a_cluster(scene: str, script: str) -> None:
    assert SessionScript.checks(script), scene


@table(("scene", "script"), ALONE.items())
def test_a_node_without_a_cluster(scene: str, script: str) -> None:
    assert SessionScript.checks(script, clustered=False, flush_interval=1.0), scene


@table(("scene", "script"), ORIGINAL.items())
def test_a_node_of_the_original_generation(scene: str, script: str) -> None:
    assert SessionScript.checks(script, original=True), scene
