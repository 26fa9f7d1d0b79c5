"""The blocking clients mirror the asynchronous ones: same methods, parameters, defaults and result types."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest

import nsqext
from nsqext import sync
from nsqext.client.consumer.handlers.batches import MessageBatch
from nsqext.client.consumer.message import Message
from tests.support.tables import table

if TYPE_CHECKING:
    from nsqext.broker import Cluster

PAIRS = [
    (nsqext.Producer, sync.Producer),
    (nsqext.Consumer, sync.Consumer),
    (nsqext.Admin, sync.Admin),
    (nsqext.Batcher, sync.Batcher),
    (Message, sync.Message),
    (MessageBatch, sync.MessageBatch),
]
RENAMED = {"aclose": "close"}
ASYNC_ONLY = {
    "Consumer": {"serve", "wait"},  # `run` blocks; a handler in the background ends with `close`
    "Admin": {"aclose"},  # a context manager
    "Batcher": {"end"},  # called by the producer
    # called by the consumer
    "Message": {
        *("all_headers", "finish_now", "mark_answered", "mark_requeued", "mark_returned", "mark_unanswered"),
        *("may_begin", "renew", "replace_body", "requeue_now", "restore", "try_unpack"),
    },
    "MessageBatch": {"finish_now"},
}
SYNC_ONLY = {"of"}
SERVED = {"Consumer.run": "serve"}
"""The blocking one uses the shared event loop, so it has no choice of a backend."""
# a type of the asynchronous client -> that of the blocking one
AT_EXIT = {"drain_at_exit"}
"""The program of an asynchronous client leaves its event loop, and so the block, before it ends."""
TYPES = {r"MessageBatches": "Iterator[MessageBatch]"}


def methods(kind: type) -> set[str]:
    """Return the names of the public methods of a class."""
    return {name for name, value in inspect.getmembers(kind, callable) if not name.startswith("_")}


def mirrored(original: type) -> set[str]:
    """Return the names of the methods that the blocking class has as well."""
    return methods(original) - ASYNC_ONLY.get(original.__name__, set())


@pytest.mark.parametrize(("original", "blocking"), PAIRS, ids=lambda kind: kind.__name__)
def test_methods_are_the_same(original: type, blocking: type) -> None:
    expected = {RENAMED.get(name, name) for name in mirrored(original)}
    assert methods(blocking) - SYNC_ONLY == expected


def described(value: object) -> list[tuple[str, object, object, str]]:
    """Return name, kind, default and annotation of each parameter, and the annotation of the result."""
    assert callable(value)
    signature = inspect.signature(value)
    parameters = [
        (name, parameter.kind, parameter.default, str(parameter.annotation))
        for name, parameter in signature.parameters.items()
        if name not in {"self", *AT_EXIT}
    ]
    return [*parameters, ("return", None, None, blocking_type(str(signature.return_annotation)))]


def blocking_type(annotation: str) -> str:
    """Return the blocking client's annotation for a type."""
    for pattern, replacement in TYPES.items():
        annotation = re.sub(pattern, replacement, annotation)
    return annotation


@table(
    ("original", "blocking", "name"),
    [
        pytest.param(original, blocking, name, id=f"{original.__name__}.{name}")
        for original, blocking in PAIRS
        for name in sorted(mirrored(original) | {"__init__"})
        if not (name == "__init__" and original in (Message, MessageBatch, nsqext.Batcher))  # created by their clients
        if name not in ("count", "index")  # inherited
    ],
)
def test_signatures_are_the_same(original: type, blocking: type, name: str) -> None:
    mirror = getattr(blocking, RENAMED.get(name, name))
    assert described(mirror) == described(getattr(original, SERVED.get(f"{original.__name__}.{name}", name)))


def test_mocks_do_not_take_methods_for_coroutine_functions() -> None:
    declared = [getattr(blocking, name) for _, blocking in PAIRS for name in methods(blocking)]
    functions = [inspect.unwrap(method) for method in declared if inspect.isfunction(method)]
    assert len(functions) > 50
    assert [function for function in functions if inspect.iscoroutinefunction(function)] == []


def test_names_of_annotations_are_found() -> None:
    assert get_type_hints(sync.Producer.ping) == {"return": type(None)}
    assert get_type_hints(sync.Admin.create_channel) == get_type_hints(nsqext.Admin.create_channel)


@pytest.mark.parametrize("blocking", [blocking for _, blocking in PAIRS], ids=lambda kind: kind.__name__)
def test_properties_cannot_be_assigned_to(blocking: type) -> None:
    for name, _ in inspect.getmembers(blocking, inspect.isdatadescriptor):
        if not name.startswith("_"):
            assert isinstance(getattr(blocking, name), property)
            with pytest.raises(AttributeError):
                setattr(object.__new__(blocking), name, 1)
    assert isinstance(sync.Producer.settings, property)


@pytest.mark.parametrize("name", ["what", "portal", "function", "self", "blocking"])
def test_wrong_arguments_name_the_method(name: str, cluster: Cluster) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        wrong: Any = producer.ping
        with pytest.raises(TypeError, match=rf"^Producer\.ping\(\) .*'{name}'"):
            wrong(**{name: 1})
        with pytest.raises(TypeError, match=r"^Producer\.ping\(\) takes 1"):
            wrong(1)


def test_they_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_LOOKUPD", "127.0.0.1:4161")
    monkeypatch.setenv("SHOP_LOOKUP_REQUEST_TIMEOUT", "3")
    for client in (sync.Producer(env="SHOP_"), sync.Consumer("orders", "ch", env="SHOP_"), sync.Admin(env="SHOP_")):
        assert client.settings["lookup_request_timeout"] == 3
