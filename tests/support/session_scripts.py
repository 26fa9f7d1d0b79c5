"""Scripts of conversations with a node without sockets, for tables of many short scenes.

Steps are separated by ``;``. A client is a letter, and connects with its first step::

    host t extend      make the node lead partition 0 of a topic; ``ordered``, and a number for another partition
    a: SUB t ch -> OK  send a command; its only answer, errors with ``!`` before it; without ``->`` none is looked at
    a: PUB t | body    a command with a body; ``[x, y]`` is that of MPUB
    a: FIN $m0 & CLS   two commands at once; ``$m0`` is the id of the last message with this body, ``#5`` the id 5
    a gets m0 m1/2     messages received since the last such step, m1 at the second attempt
    a hears OK m0      all frames; ``a open`` and ``a closed``: whether the connection stays; ``a ends``: it is lost
    wait 1.5           advance the clock, and tick; ``flush 0.05``: let only held output expire
    node exiting=True  attributes of the node; ``switch log_level=3`` of its switches, ``topic leader=False`` of the
                       topic ``t``; ``node has publish_failed=1`` compares
    do unhost t 0      a method of the node; ``topic do delete_channel ch`` of the partition
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Mapping
from struct import pack
from typing import TYPE_CHECKING, Any

import pytest

from nsqext.protocol.frames import FrameType
from tests.support.commands import multi_body
from tests.support.nsqd_sessions import Client, Clock, host, make_node, make_original, sized

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node

__all__ = ("SessionScript",)

_CHECKS = frozenset(("gets", "hears", "open", "closed", "has"))


class SessionScript:
    """A node and its clients."""

    def __init__(self, node: Node, clock: Clock) -> None:
        self._node, self._clock = node, clock
        self._clients: dict[str, Client] = {}
        self._ids: dict[str, bytes] = {}

    @classmethod
    def checks(cls, script: str, *, original: bool = False, **options: Any) -> int:
        """Run all steps, on a node with these options; return how many of them check something."""
        cls.play(script, original=original, **options)
        steps = [step.split() for step in script.split(";")]
        return sum("->" in words or not _CHECKS.isdisjoint(words[1:2]) for words in steps)

    @classmethod
    def play(cls, script: str, *, original: bool = False, **options: Any) -> Node:
        """Run all steps, on a node with these options; return it. A failure names its step."""
        clock = Clock()
        node = make_original(clock, **options) if original else make_node(clock, **options)
        played = cls(node, clock)
        for step in (" ".join(step.split()) for step in script.split(";")):
            try:
                played._run(step)
            except (AssertionError, ValueError, pytest.fail.Exception) as error:
                error.add_note(f"step {step}")
                raise
        return node

    def _run(self, step: str) -> None:
        if step[1:3] == ": ":
            self._send(step[0], step[3:])
        elif step[1:2] == " ":
            name, verb, *words = step.split()
            self._look(name, verb, *words)
        else:
            verb, *words = step.split()
            self._general[verb](self, *words)

    def _client(self, name: str) -> Client:
        if name not in self._clients:
            self._clients[name] = Client(self._node, f"127.0.0.1:{3000 + ord(name) - ord('a')}")
        return self._clients[name]

    def _send(self, name: str, text: str) -> None:
        commands, _, answer = text.partition(" -> ")
        client = self._client(name)
        data = b"".join(map(self._encode, commands.split(" & ")))
        if answer:
            assert client.ask(data).rstrip() == answer
        else:
            client.send(data)

    def _encode(self, command: str) -> bytes:
        line, with_body, body = command.partition(" | ")
        data = b" ".join(map(self._word, line.split()))
        if not with_body:
            return data + b"\n"
        items = re.fullmatch(r"\[(.*)\]", body)
        content = multi_body([item.strip().encode() for item in items[1].split(",")]) if items else body.encode()
        return data + sized("", content)

    def _word(self, word: str) -> bytes:
        if word.startswith("$"):
            return self._ids[word[1:]]
        return pack(">QQ", int(word[1:]), 0) if word.startswith("#") else word.encode()

    def _look(self, name: str, verb: str, *words: str) -> None:
        client = self._client(name)
        if verb in ("gets", "hears"):
            client.session.output.urgent = True
            found = [self._shown(kind, data, numbered="/" in "".join(words)) for kind, data in client.receive()]
            shown = [text for kind, text in found if verb == "hears" or kind == FrameType.MESSAGE]
            assert shown == list(words)
        elif verb == "ends":
            client.session.end()
        else:
            assert client.open is (verb == "open")

    def _shown(self, kind: int, data: bytes, *, numbered: bool) -> tuple[int, str]:
        if kind != FrameType.MESSAGE:
            return kind, data.decode().strip().split(" ")[0]
        body = data[26:].decode()
        self._ids[body] = data[10:26]
        return kind, f"{body}/{int.from_bytes(data[8:10], 'big')}" if numbered else body

    # Node

    def _host(self, topic: str, *words: str) -> None:
        numbers = [int(word) for word in words if word.isdecimal()]
        host(self._node, topic, *numbers, extend="extend" in words, ordered="ordered" in words)

    def _wait(self, seconds: str) -> None:
        self._clock.seconds += float(seconds)
        self._node.tick()

    def _flush(self, seconds: str) -> None:
        self._clock.seconds += float(seconds)
        self._node.expire_output()

    def _topic(self, *words: str) -> None:
        hosted = self._node.hosted["t", 0]
        if words[0] == "do":
            getattr(hosted.partition, words[1])(*map(_value, words[2:]))
        else:
            _set(hosted, words)

    _general: Mapping[str, Callable[..., None]] = {
        "host": _host,
        "wait": _wait,
        "flush": _flush,
        "topic": _topic,
        "node": lambda self, *words: _set(self._node, words),
        "switch": lambda self, *words: _set(self._node.switches, words),
        "do": lambda self, method, *words: getattr(self._node, method)(*map(_value, words)),
    }


def _set(subject: object, words: tuple[str, ...]) -> None:
    for name, _, text in (word.partition("=") for word in words if word != "has"):
        if words[0] == "has":
            assert getattr(subject, name) == _value(text)
        else:
            assert hasattr(subject, name)
            setattr(subject, name, _value(text))


def _value(text: str) -> object:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text
