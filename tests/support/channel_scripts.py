"""Scripts of what the clients of a channel do and receive, for tables of many short scenes.

Steps are separated by ``;``. A step of a consumer begins with its name, a letter; ``! TEXT`` behind a step means that
it is refused with this text::

    a sub 2 tag=x      subscribe with RDY 2 (1 if left out); settings of `Bench.consume`; on=NAME for another channel
    pub m0 m1@x m2+5   publish together: m1 with the tag x, m2 with a delay of 5 s
    keyed A1 C1 A2     with keys: A to D are in the first to the fourth quarter of the hash space
    kind key_failover  make the channel one of this type
    a gets m0 m1/2     it has received these since its last ``gets``, m1 at the second attempt; nothing without words;
                       ``a has m0/1 m1/2`` in any order
    a fin 2 3          also ``a req 2 1.5`` (seconds), ``a touch 2``, ``a rdy 0``, ``a end``, ``a closed``
    wait 1.5           advance the clock
    has depth=1        the channel's statistics; ``acked``, ``cursor``, ``client a`` and ``topic`` likewise
    do empty           a method of the channel, with arguments; ``topic do suspend`` of the partition
    reopen             open the queue on disk again, after a clean end; ``kill``: without one

A script may begin with ``given extend=True delayed_threshold=10.0``: options of the partition and of its channels.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from re import escape
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from attrs import fields_dict

from nsqext.broker.engine.options import ChannelKind, ChannelRules
from nsqext.broker.engine.storage.log import Refusal, StartPosition
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.key_ranges import position_of
from nsqext.protocol.messages import EXT_JSON, KEY_HEADER
from tests.support.engine_partition import Bench, Consumer, tagged

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.channel import Channel

__all__ = ("KEYS", "ChannelScript", "keyed")

_CHECKS = frozenset(("gets", "closed", "has", "acked", "cursor", "channels", "client"))


KEYS: Mapping[str, str] = {
    name: next(key for key in map(str, range(1000)) if position_of(key.encode()) >> 30 == quarter)
    for quarter, name in enumerate("ABCD")
}
"""Keys of the first, second, third and fourth quarter of the hash space."""


def keyed(body: str, key: str, **headers: str) -> NewMessage:
    """Return a message with a key."""
    return NewMessage(body.encode(), header=orjson.dumps({KEY_HEADER: key, **headers}), version=EXT_JSON)


class ChannelScript:
    """A scene with a partition and its consumers."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._bench = Bench(**options)
        self._consumers: dict[str, tuple[Consumer, str]] = {}

    @classmethod
    def checks(cls, script: str, **options: Any) -> int:
        """Run all steps, as `play`; return how many of them check something."""
        cls.play(script, **options)
        steps = [step.split() for step in script.split(";")]
        return sum("!" in words or not _CHECKS.isdisjoint(words[:2]) or _reads_topic(words) for words in steps)

    @classmethod
    def play(cls, script: str, **options: Any) -> Bench:
        """Run all steps, on a partition with these options; return it. A failure names its step."""
        steps = [" ".join(step.split()) for step in script.split(";")]
        given = steps.pop(0).split()[1:] if steps[0].startswith("given ") else []
        if folder := options.get("data_path"):
            options["data_path"] = folder / f"{abs(hash(script))}"
        played = cls({**_options(given), **options})
        for step in steps:
            try:
                played._run(step)
            except (AssertionError, Refusal, pytest.fail.Exception) as error:
                error.add_note(f"step {step}")
                raise
        return played._bench

    def _run(self, step: str) -> None:
        action, _, refusal = (part.strip() for part in step.partition("!"))
        with pytest.raises(Refusal, match=f"^{escape(refusal)}$") if refusal else nullcontext():
            subject, *words = action.split()
            if len(subject) == 1:
                self._act(subject, *words)
            else:
                self._general[subject](self, *words)

    def _channel(self, name: str = "ch") -> Channel:
        return self._bench.channel(name)

    # Consumers

    def _act(self, name: str, verb: str, *words: str) -> None:
        if verb == "sub":
            self._subscribe(name, *words)
            return
        consumer, on = self._consumers[name]
        channel = self._bench.partition.channels.get(on)
        if verb == "gets":
            numbered = any("/" in word for word in words)
            got = [f"{body}/{count}" if numbered else body for body, count in consumer.attempts()]
            assert got == list(words)
        elif verb == "has":  # in any order
            assert sorted(f"{body}/{count}" for body, count in consumer.attempts()) == sorted(words)
        elif verb == "closed":
            assert consumer.has_closed
        else:
            assert channel is not None
            self._answer(channel, consumer, verb, *words)

    def _answer(self, channel: Channel, consumer: Consumer, verb: str, *words: str) -> None:
        if verb == "fin":
            for word in words:
                channel.finish(consumer, int(word))
        elif verb == "req":
            channel.requeue(consumer, int(words[0]), float(words[1]))
        elif verb == "touch":
            channel.touch(consumer, int(words[0]))
        elif verb == "rdy":
            channel.set_ready(consumer, int(words[0]))
        else:
            assert verb == "end"
            channel.unsubscribe(consumer)

    def _subscribe(self, name: str, *words: str) -> None:
        settings: dict[str, Any] = {}
        for word in words:
            key, _, text = word.rpartition("=")
            if key == "start":
                kind, _, number = text.partition(":")
                settings[key] = StartPosition(kind, int(number))
            elif key or not text.isdecimal():
                settings[key or text] = _value(text) if key else True
            else:
                settings["ready"] = int(text)
        channel = settings.pop("on", "ch")
        number = settings.pop("id", ord(name) - ord("a") + 1)
        consumer = self._bench.consume(number, channel=channel, **settings)
        self._consumers[name] = consumer, channel

    # Partition and channel

    def _publish(self, *words: str) -> None:
        self._bench.publish(*map(_message, words))

    def _do(self, method: str, *words: str) -> None:
        getattr(self._channel(), method)(*map(_argument, words))

    def _topic(self, verb: str, *words: str) -> None:
        partition = self._bench.partition
        if verb == "do":
            getattr(partition, words[0])(*map(_argument, words[1:]))
        else:
            _check(partition, (verb, *words))

    def _reopen(self, *, save: bool = True) -> None:
        self._bench.partition.close(save=save)
        now, self._bench = self._bench.now, Bench(**self._options)
        self._bench.now = now

    def _client(self, name: str, *words: str) -> None:
        _check(self._channel().clients[self._consumers[name][0].id], words)

    _general: Mapping[str, Callable[..., None]] = {
        "pub": _publish,
        "keyed": lambda self, *names: self._bench.publish(*(keyed(name, KEYS[name[0]]) for name in names)),
        "kind": lambda self, kind: self._bench.partition.channel("ch", ChannelKind(kind, fixed=True)),
        "wait": lambda self, seconds: self._bench.wait(float(seconds)),
        "has": lambda self, *words: _check(self._channel().stats(), words),
        "acked": lambda self, *words: _check(self._channel().acked, words),
        "cursor": lambda self, *words: _check(self._channel().cursor, words),
        "channel": lambda self, name="ch": self._channel(name),
        "channels": lambda self, *names: _equal(sorted(self._bench.partition.channels), sorted(names)),
        "client": _client,
        "do": _do,
        "reopen": _reopen,
        "kill": lambda self: self._reopen(save=False),
        "topic": _topic,
    }


def _reads_topic(words: list[str]) -> bool:
    return words[0] == "topic" and words[1] != "do"


def _options(words: list[str]) -> dict[str, Any]:
    given = {name: _value(text) for name, _, text in (word.partition("=") for word in words)}
    rules = {name: given.pop(name) for name in fields_dict(ChannelRules) if name in given}
    return given | {"rules": ChannelRules(**rules)}  # type: ignore[arg-type]


def _message(word: str) -> str | NewMessage:
    body, _, tag = word.partition("@")
    if tag:
        return tagged(body, tag)
    body, _, delay = word.partition("+")
    return NewMessage(body.encode(), delay=float(delay)) if delay else body


def _argument(word: str) -> object:
    kind, _, number = word.partition(":")
    return StartPosition(kind, int(number)) if number else _value(word)


def _value(text: str) -> object:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _check(subject: object, words: tuple[str, ...]) -> None:
    wanted = {name: _value(text) for name, _, text in (word.partition("=") for word in words)}
    assert {name: getattr(subject, name) for name in wanted} == wanted


def _equal(found: object, wanted: object) -> None:
    assert found == wanted
