"""Constructors, whose calls are read by names, and what their objects show and refuse."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from importlib import import_module
from pkgutil import walk_packages

import pytest

from nsqext import Admin, App, Consumer, Lookup, Producer, client, sync
from nsqext.broker import Cluster
from nsqext.errors import InvalidSetting

_MOST = 5


def _positional(kind: type) -> int:
    parameters = inspect.signature(kind).parameters.values()
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


def test_no_constructor_takes_more_than_five_positional_arguments() -> None:
    modules = [import_module(found.name) for found in walk_packages(client.__path__, "nsqext.client.")]
    kinds = {
        kind
        for module in modules
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and not name.startswith("_")
        if not issubclass(kind, (dict, Exception))
    }
    assert len(kinds) > 60
    assert sorted(kind.__qualname__ for kind in kinds if _positional(kind) > _MOST) == []


def _app() -> App:
    app = App("l:4161")

    @app.handler("orders", "billing")
    async def bill(body: bytes) -> None:
        """Handle nothing."""

    return app


_SHOWN: dict[str, Callable[[], object]] = {
    "Producer(lookupd='l:4161,m:4161', not open)": lambda: Producer("l:4161,m:4161", auth_secret="s3cret"),
    "Producer(nsqd='n:4150', not open)": lambda: Producer(nsqd="n:4150"),
    "Consumer('orders,b.*', 'billing', lookupd='l:4161', not open)": lambda: Consumer(
        ["orders", "b.*"], "billing", "l:4161"
    ),
    "App(Lookup('l:4161'), orders/billing, not running)": _app,
    "App(nsqd='n:4150', no handlers, not running)": lambda: App(nsqd="n:4150"),
    "sync.Producer(nsqd='n:4150', not open)": lambda: sync.Producer(nsqd="n:4150"),
    "sync.Consumer('t', 'ch', nsqd='n:4150', not open)": lambda: sync.Consumer("t", "ch", nsqd="n:4150"),
}


@pytest.mark.parametrize("shown", _SHOWN)
def test_a_client_shows_its_addresses_topics_channel_and_state(shown: str) -> None:
    assert repr(_SHOWN[shown]()) == shown


def test_a_cluster_shows_its_addresses_and_state() -> None:
    cluster = Cluster(1)
    assert repr(cluster) == "Cluster(1 nodes, generation 'redesigned', not running)"
    with cluster:
        assert repr(cluster) == f"Cluster(1 nodes, generation 'redesigned', running, lookupd='{cluster.lookupd[0]}')"


_BOUND: dict[str, Callable[[], object]] = {
    **_SHOWN,
    "Admin('l:4161')": lambda: Admin("l:4161"),
    "Lookup('l:4161')": lambda: Lookup("l:4161"),
    "sync.Admin('l:4161')": lambda: sync.Admin("l:4161"),
    "Cluster(1 nodes, generation 'redesigned', not running)": lambda: Cluster(1),
}


@pytest.mark.parametrize("shown", _BOUND)
def test_a_client_that_is_pickled_or_copied_is_named_in_the_error(shown: str) -> None:
    client_of_this_process = _BOUND[shown]()
    for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=re.escape(f"{shown} cannot be pickled or copied")):
            duplicate(client_of_this_process)


async def _coroutine(*_: object) -> str:
    return ""


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Consumer("t", "ch", "l:4161", address_map=_coroutine), "address_map"),  # type: ignore[arg-type]
        (lambda: Producer("l:4161", address_map=_coroutine), "address_map"),  # type: ignore[arg-type]
        (lambda: Producer("l:4161", key_hash=_coroutine), "key_hash"),  # type: ignore[arg-type]
    ],
)
def test_coroutine_functions_that_nothing_would_await_are_refused(make: Callable[[], object], name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name}=.*is a coroutine function, which would not be awaited"):
        make()
