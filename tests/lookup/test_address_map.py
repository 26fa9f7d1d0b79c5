"""Addresses that lookup lists and that this host reaches elsewhere: containers and tunnels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import anyio
import pytest

from nsqext import Admin, Consumer, Producer
from nsqext.broker import Cluster
from nsqext.broker.options import ClusterOptions
from nsqext.errors import InvalidSetting, PublishFailed
from nsqext.lookup.client import LookupClient
from nsqext.lookup.options import LookupOptions
from nsqext.types import Address
from tests.support.fake_lookupd import LookupNodes, lookup_json
from tests.support.machine_pauses import repeated_if_paused

pytestmark = pytest.mark.anyio

HIDDEN = "nsqd-0.nsqext.invalid"


@pytest.fixture(scope="module")
def lookupd() -> Iterator[str]:
    """Lookup of a cluster whose nodes register with a name that this host does not resolve."""
    with Cluster(nodes=1, generation="original", options=ClusterOptions(broadcast_address=HIDDEN)) as cluster:
        yield f"127.0.0.1:{cluster.lookupd[0].rpartition(':')[2]}"


@pytest.mark.parametrize(
    ("given", "reached"),
    [
        (None, ("nsqd-0", 4150)),
        ("nsqd-0:4150=127.0.0.1:14150", ("127.0.0.1", 14150)),
        ("nsqd-0=10.0.0.7, nsqd-1=10.0.0.8", ("10.0.0.7", 4150)),
        ({"nsqd-0": "10.0.0.7", "nsqd-0:4150": "127.0.0.1:1"}, ("127.0.0.1", 1)),  # the whole address wins
        ({"nsqd-1": "10.0.0.7"}, ("nsqd-0", 4150)),
        ({"nsqd-0": "::1"}, None),
        (lambda address: address.replace("4150", "14150"), ("nsqd-0", 14150)),
        (lambda address: "nowhere", None),
        (lambda address: address[99], None),
    ],
)
def test_listed_addresses_are_mapped(given: Any, reached: tuple[str, int] | None) -> None:
    listed = Address("nsqd-0", 4150, listed_by="127.0.0.1:4161")
    if reached is None:
        with pytest.raises(InvalidSetting, match="address_map"):
            LookupOptions(address_map=given).reached_at(listed)
    else:
        found = LookupOptions(address_map=given).reached_at(listed)
        assert (found.host, found.port) == reached


async def test_a_map_that_changes_is_asked_again_although_the_answer_is_the_same() -> None:
    nodes = LookupNodes()
    nodes.lists("a:4161")
    nodes.finds("a:4161", lookup_json({0: "n1:4150"}, num=1))
    tunnels = {"n1": "t1", "a": "a"}
    client = LookupClient("a:4161", LookupOptions(address_map=tunnels), nodes.transport)
    found = []
    for tunnels["n1"] in ("t1", "t1", "t2"):
        (answer,) = await client.lookup("orders")
        found.append(answer.partitions[0].tcp.host)
    assert found == ["t1", "t1", "t2"]


@pytest.mark.parametrize("given", ["a=b:1", "a", "=", {"a": 1}, {"a:x": "b:1"}, 5])
def test_maps_that_name_no_address_are_refused(given: Any) -> None:
    with pytest.raises(InvalidSetting, match="address_map"):
        Producer("127.0.0.1:4161", address_map=given)


@pytest.mark.parametrize("form", ["mapping", "text", "function"])
async def test_all_clients_reach_mapped_nodes(lookupd: str, form: str) -> None:
    mapped: Any = {HIDDEN: "127.0.0.1"}
    forms: Mapping[str, Any] = {
        "mapping": mapped,
        "text": f"{HIDDEN}=127.0.0.1",
        "function": lambda address: address.replace(HIDDEN, "127.0.0.1"),
    }
    given = forms[form]
    topic = f"mapped_{form}"
    with anyio.fail_after(25):
        async with Admin(lookupd, address_map=given) as admin:
            await admin.create_topic(topic, channels=["ch"], exist_ok=True)  # over HTTP
            async with Producer(lookupd, address_map=given) as producer:
                await producer.publish(topic, b"through")
            assert (await admin.stats(topic)).partitions[0].messages >= 1
        async with Consumer(topic, "ch", lookupd, address_map=given) as consumer:
            async for message in consumer:
                assert message.body == b"through"
                await message.finish()
                break


@repeated_if_paused(0.1)
async def test_the_error_names_the_lookup_node_that_lists_an_unknown_host(lookupd: str) -> None:
    async with Producer(lookupd, timeout=0.5) as producer:
        with pytest.raises(PublishFailed) as caught:
            await producer.publish("orders", b"x")
    assert f"lookup {lookupd} lists the node {HIDDEN}:" in str(caught.value)
    assert "whose name is unknown here" in str(caught.value)
    assert "set address_map" in str(caught.value)


@repeated_if_paused(0.1)
async def test_an_address_of_the_user_that_is_unknown_has_the_old_hint() -> None:
    async with Producer(nsqd=f"{HIDDEN}:4150", timeout=0.5) as producer:
        with pytest.raises(PublishFailed, match="check the host name"):
            await producer.publish("orders", b"x")
