"""Addresses, contexts and settings that commands share."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from nsqext.broker import Cluster
from nsqext.cli import connection
from nsqext.cli.connection import Contexts, ServerAccess, is_redesigned, save_contexts
from nsqext.errors import InvalidSetting, LookupUnreachable
from tests.support.command_line import run

if TYPE_CHECKING:
    from nsqext import Admin


@pytest.mark.parametrize("name", ["lookupd", "nsqd", "NSQEXT_URL", "NSQEXT_LOOKUPD", "NSQEXT_NSQD"])
def test_an_address_replaces_the_current_context_with_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("NSQEXT_CONTEXTS_FILE", str(tmp_path / "contexts.toml"))
    save_contexts(Contexts({"prod": "nsq://h:1?tls=true"}, "prod"))
    assert ServerAccess().chosen_url() == "nsq://h:1?tls=true"
    given: dict[str, Any] = {}
    if name.isupper():
        monkeypatch.setenv(name, "nsq://h:2")
    else:
        given[name] = "h:2"
    assert ServerAccess(**given).chosen_url() is None


def test_a_context_has_an_address_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "contexts.toml"
    words = ("config", "set", "prod", "nsq://?timeout=7")
    done = run(*words, NSQEXT_CONTEXTS_FILE=str(file), NSQEXT_LOOKUPD="h:1")
    assert (done.returncode, b"the URL has no address" in done.stderr) == (2, True), done.stderr
    assert not file.exists()


def test_a_cluster_is_the_same_in_any_order_of_its_addresses() -> None:
    for name, text in (("lookupd", "i:1, h:1"), ("lookupd", "h:1,i:1"), ("nsqd", "i:1,h:1")):
        given: dict[str, Any] = {name: text}
        assert ServerAccess(**given).cluster() == "h:1, i:1"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("generation", ["redesigned", "original"])
async def test_a_topic_that_does_not_exist_yet_has_positions_on_the_redesigned_nsq(generation: str) -> None:
    """Otherwise a command lost what was published between the creation of the topic and its subscription."""
    with Cluster(nodes=1, generation=generation) as cluster:
        assert await ServerAccess(cluster.lookupd[0]).has_positions("later") is (generation == "redesigned")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_positions_are_known_once_lookup_lists_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a recorder that starts before the nodes began a new channel behind the stored messages."""
    with Cluster(nodes=1) as cluster:
        access, found = ServerAccess(cluster.lookupd[0]), list[bool]()
        cluster.terminate("n1")

        async def ask() -> None:
            found.append(await access.has_positions("later"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(0.7)
            assert found == []
            await anyio.to_thread.run_sync(cluster.restart, "n1")
        assert found == [True]
        cluster.terminate("n1")
        monkeypatch.setattr(connection, "_STARTUP", 0.7)
        with pytest.raises(LookupUnreachable, match="lookup knows no node yet"):
            await access.has_positions("later")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("generations", "redesigned"), [(["original"], False), (["original", "redesigned"], True), ([], None)]
)
async def test_the_generation_of_a_cluster_is_that_of_its_nodes(
    generations: list[str], redesigned: bool | None
) -> None:
    async def nodes() -> list[SimpleNamespace]:
        return [SimpleNamespace(generation=one) for one in generations]

    admin = cast("Admin", SimpleNamespace(nodes=nodes))
    if redesigned is None:
        with pytest.raises(LookupUnreachable, match="knows no node yet"):
            await is_redesigned(admin)
    else:
        assert await is_redesigned(admin) is redesigned


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ("max_attempts=3", True),
        ("max_attempts=3&dead_letter=dead", False),
        ("max_attempts=3&dead_letter=dead&tag=eu", True),
        ("max_attempts=0", False),
    ],
)
def test_what_would_be_dropped_is_refused_unless_it_becomes_a_dead_letter(settings: str, refused: bool) -> None:
    with pytest.raises(InvalidSetting, match="messages would be left out") if refused else nullcontext():
        ServerAccess(url=f"nsqd://h:1?{settings}").refuse_loss()


@pytest.mark.parametrize(
    ("settings", "asked", "expected"),
    [
        ("", None, 15.0),
        ("?lookup_request_timeout=0.2", None, 15.0),
        ("?lookup_request_timeout=40", None, 40.0),
        ("?lookup_request_timeout=40", 0.5, 0.5),
    ],
)
def test_a_request_waits_for_a_lookup_service_that_starts(
    monkeypatch: pytest.MonkeyPatch, settings: str, asked: float | None, expected: float
) -> None:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr("nsqext.Admin", lambda lookupd, **given: found.append(given))
    ServerAccess(url=f"nsq://h:1{settings}").new_admin(asked)
    assert [given["lookup_request_timeout"] for given in found] == [expected]


def test_settings_of_lookup_are_left_out_of_commands_that_use_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be meant for services that have the same environment."""
    monkeypatch.setenv("NSQEXT_LOOKUPD", "h:4161")
    monkeypatch.setenv("NSQEXT_LOOKUP_REQUEST_TIMEOUT", "7")
    monkeypatch.setenv("NSQEXT_REQUEST_TIMEOUT", "8")
    for access, lookup in ((ServerAccess(), 7.0), (ServerAccess(nsqd="h:4150"), 2.0)):
        for client in (access.producer(), access.consumer("t", "ch")):
            assert (client.settings["lookup_request_timeout"], client.settings["request_timeout"]) == (lookup, 8.0)
