"""Every page of the web interface, on embedded clusters of both generations."""

from __future__ import annotations

import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, cast

import anyio
import pytest

from nsqext import Admin, App, Consumer, Producer
from nsqext.admin import TopicInfo
from nsqext.app import Header, asyncapi_document
from nsqext.broker import Cluster
from nsqext.delays import DelayStore
from nsqext.errors import InvalidSetting
from nsqext.protocol.delay_record import DelayedMessage
from nsqext.types import Address
from nsqext.web import WebOptions, WebPage
from nsqext.web.document import AppDocument, type_text
from nsqext.web.monitor import Snapshot
from nsqext.web.pages import Pages, age, seconds_since, size
from tests.support import plain_http
from tests.support.consumers import eventually
from tests.support.tables import table
from tests.support.web_pages import browsing, page_with

if TYPE_CHECKING:
    from nsqext.web.monitor import Monitor

pytestmark = pytest.mark.anyio


@pytest.fixture
def topic(redesigned: Cluster) -> str:
    name = f"web_{token_hex(4)}"
    redesigned.create_topic(name, partitions=2, replicas=2, extend=True, channels=["billing"])
    return name


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_the_overview_shows_topics_and_nodes(redesigned: Cluster, topic: str) -> None:
    async with Producer(redesigned.lookupd) as producer, browsing(redesigned) as browser:
        await producer.publish_many(topic, [b"1"] * 1234)
        answer = await browser.get("/")
    assert answer.status_code == 200
    assert f'<a href="/topics/{topic}">{topic}</a>' in answer.text
    assert '<td class="num " data-label="Messages">1\u202f234</td>' in answer.text
    for node in redesigned.nodes.values():
        assert node.tcp in answer.text and node.http in answer.text
    assert "3 of 3" in answer.text


async def test_a_topic_shows_partitions_with_leader_replicas_and_channels(redesigned: Cluster, topic: str) -> None:
    async with browsing(redesigned) as browser:
        answer = await browser.get(f"/topics/{topic}")
    assert answer.status_code == 200
    for partition in range(2):
        row = answer.text.partition(f'<th scope="row">{partition}</th>')[2].partition("</tr>")[0]
        for name in redesigned.in_sync(topic, partition):
            assert redesigned.nodes[name].tcp in row
    assert f"/topics/{topic}/channels/billing" in answer.text
    assert "2 replicas" in answer.text and "extend" in answer.text


async def test_names_that_are_folders_in_a_path_have_pages(redesigned: Cluster) -> None:
    redesigned.create_topic("..", channels=["."])
    try:
        async with browsing(redesigned) as browser:
            topic = await browser.get("/topics/~..")
            channel = await browser.get("/topics/~../channels/~.")
            messages = await browser.get("/topics/~../messages")
    finally:
        redesigned.delete_topic("..")
    assert [page.status_code for page in (topic, channel, messages)] == [200] * 3
    assert '<a href="/topics/~../channels/~.">.</a>' in topic.text


async def test_a_channel_shows_consumers_with_tag_and_version(redesigned: Cluster, topic: str) -> None:
    async with (
        Producer(redesigned.lookupd) as producer,
        Consumer(topic, "billing", lookupd=redesigned.lookupd, tag="canary", max_in_flight=10) as consumer,
        browsing(redesigned) as browser,
    ):
        await producer.publish(topic, b"x", tag="canary")
        with anyio.fail_after(25):
            message = await anext(consumer)
        answer = await browser.get(f"/topics/{topic}/channels/billing")
        await message.finish()
    assert answer.status_code == 200
    assert '<span class="flag accent">canary</span>' in answer.text
    assert "nsqext/" in answer.text
    assert "<dt>In flight</dt><dd>1</dd>" in answer.text


async def test_what_the_numbers_lack_is_shown() -> None:
    with Cluster(nodes=2, generation="original") as cluster:
        cluster.create_topic("orders", channels=["billing"])
        answering, silent = cluster.nodes.values()
        paused = plain_http.post(f"http://{answering.http}/channel/pause?topic=orders&channel=billing")
        assert paused.status_code == 200
        async with browsing(cluster, write=True) as browser:
            channel = await browser.get("/topics/orders/channels/billing")
            assert "paused in 1 of 2 places" in channel.text
            assert ">Unpause</button>" in channel.text and ">Pause</button>" in channel.text
            await anyio.to_thread.run_sync(cluster.faults.freeze, silent.name)
            text = await page_with(browser, "/topics/orders/channels/billing", lambda text: "No response" in text)
            overview = await browser.get("/")
            await anyio.to_thread.run_sync(cluster.faults.freeze, answering.name)
            await page_with(browser, "/topics/orders/channels/billing", lambda text: "No node reports the chan" in text)
    assert f"No response from {silent.tcp}: the numbers do not include it" in text
    assert '<span class="flag warn">incomplete</span>' in overview.text


async def test_a_channel_that_skips_on_one_partition_can_deliver_again(redesigned: Cluster, topic: str) -> None:
    leader = redesigned.nodes[redesigned.leader(topic, 1)]
    skips = plain_http.post(f"http://{leader.http}/channel/skip?topic={topic}&channel=billing&partition=1")
    assert skips.status_code == 200
    async with browsing(redesigned, write=True) as browser:
        pages = [await browser.get(f"/topics/{topic}{path}") for path in ("", "/channels/billing")]
    assert ["skips every message in 1 of 2 places" in page.text for page in pages] == [True, True]
    assert ">Stop skipping</button>" in pages[1].text


async def test_a_partition_without_a_leader_does_not_hide_the_replicas_of_others() -> None:
    with Cluster(nodes=4) as cluster:
        cluster.create_topic("orders", partitions=2, replicas=2, channels=["ch"])
        kept = {cluster.nodes[name].tcp for name in cluster.in_sync("orders", 0)}
        for name in cluster.in_sync("orders", 1):
            await anyio.to_thread.run_sync(cluster.kill, name)
        async with browsing(cluster) as browser:
            text = await page_with(browser, "/topics/orders", lambda text: "no leader" in text)
    rows = [text.partition(f'<th scope="row">{number}</th>')[2].partition("</tr>")[0] for number in (0, 1)]
    assert [address for address in kept if address not in rows[0]] == [] and len(kept) == 2
    assert "no leader" in rows[1] and "no response" not in rows[1]


async def test_key_ranges_are_drawn(redesigned: Cluster, topic: str) -> None:
    async with (
        Consumer(topic, "keys", lookupd=redesigned.lookupd, dispatch="key_failover"),
        Consumer(topic, "keys", lookupd=redesigned.lookupd, dispatch="key_failover"),
        browsing(redesigned, interval=0.1) as browser,
    ):
        path = f"/topics/{topic}/channels/keys"
        text = await page_with(browser, path, lambda text: text.count("<title>0.") == 4)
    assert text.count('<svg class="ranges"') == 2
    assert "key_failover" in text


async def test_messages_are_shown_decoded_and_escaped(redesigned: Cluster, topic: str) -> None:
    hostile = '<script>alert("1")</script>'
    async with Producer(redesigned.lookupd) as producer, browsing(redesigned) as browser:
        await producer.publish(
            topic, hostile.encode(), headers={"user": "<i>42</i>"}, key="'><b>", tag="canary", trace_id=77
        )
        answer = await browser.get(f"/topics/{topic}/messages", params={"count": "5"})
    assert answer.status_code == 200
    assert hostile not in answer.text and "<i>42" not in answer.text and "'><b>" not in answer.text
    assert "&lt;script&gt;" in answer.text and "&lt;i&gt;42&lt;/i&gt;" in answer.text
    assert '<span class="flag accent">canary</span>' in answer.text and ">77<" in answer.text


async def test_a_page_of_messages_is_no_stream(redesigned: Cluster, topic: str) -> None:
    async with browsing(redesigned) as browser:
        with anyio.fail_after(25):
            answer = await browser.get(f"/topics/{topic}/messages", headers={"accept": "text/event-stream"})
    assert answer.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ({"count": "99999999999", "partition": " 0 "}, 200, ""),
        ({"count": "", "partition": ""}, 200, ""),
        ({"count": "few"}, 400, "is not a whole number"),
        ({"partition": "-1"}, 400, "is not a whole number"),
        ({"partition": "99"}, 400, "has no partition 99"),
    ],
)
async def test_numbers_of_a_query_are_those_of_forms(
    redesigned: Cluster, topic: str, query: dict[str, str], status: int, text: str
) -> None:
    async with browsing(redesigned) as browser:
        answer = await browser.get(f"/topics/{topic}/messages", params=query)
    assert (answer.status_code, text in answer.text) == (status, True)


async def test_a_node_shows_the_partitions_that_it_leads(redesigned: Cluster, topic: str) -> None:
    leader = redesigned.nodes[redesigned.leader(topic, 0)]
    leaders = {redesigned.leader(topic, partition) for partition in range(2)}
    link = f"/topics/{topic}/channels/billing"
    async with (
        Consumer(topic, "billing", lookupd=redesigned.lookupd),
        browsing(redesigned, interval=0.1) as browser,
    ):
        text = await page_with(browser, f"/nodes/{leader.tcp}", lambda text: link in text)
        for name in redesigned.nodes.keys() - leaders:
            assert link not in (await browser.get(f"/nodes/{redesigned.nodes[name].tcp}")).text
        unknown = await browser.get("/nodes/127.0.0.1:1")
    assert leader.http in text and topic in text
    assert unknown.status_code == 503 and "lookup does not know the node" in unknown.text


async def test_a_node_that_lookup_does_not_list_shows_the_topics_that_it_leads() -> None:
    node = Address("127.0.0.1", 1)
    embedded = SimpleNamespace(
        nodes={"n1": SimpleNamespace(tcp=str(node), name="n1")}, state=lambda name: "down", lookupd=["127.0.0.1:1"]
    )
    topics = {"orders": TopicInfo("orders", "redesigned", None, {0: node}, (), ())}
    pages = Pages(cast("Monitor", None), cast("Admin", None), WebOptions(), cast("Cluster", embedded))
    page = await pages.node(Snapshot(1.0, topics, {}, (), {}, {}), {"node": str(node)}, {})
    assert (page.title, page.values["topics"]) == ("n1", ["orders"])


async def test_the_original_nsq_is_shown_by_node(original: Cluster) -> None:
    topic = f"web_{token_hex(4)}"
    async with Admin(original.lookupd) as admin, browsing(original) as browser:
        await admin.create_topic(topic, channels=["ch#ephemeral"])
        pages = {
            path: await browser.get(path, params={"done": ""})
            for path in ("/", f"/topics/{topic}", f"/topics/{topic}/channels/ch%23ephemeral")
        }
        messages = await browser.get(f"/topics/{topic}/messages")
    assert {path: page.status_code for path, page in pages.items()} == dict.fromkeys(pages, 200)
    for node in original.nodes.values():
        assert node.tcp in pages[f"/topics/{topic}"].text
    assert f"/topics/{topic}/channels/ch%23ephemeral" in pages[f"/topics/{topic}"].text
    assert messages.status_code == 200
    assert "keeps no log" in messages.text and "nsqext tail" in messages.text and "<form" not in messages.text


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/topics/missing", 404, "lookup does not know the topic"),
        ("/topics/bad%20name", 400, "bad name"),
        ("/nowhere", 404, "the page does not exist"),
        ("/static/../app.py", 404, "the page does not exist"),
    ],
)
async def test_errors_are_pages(redesigned: Cluster, path: str, status: int, text: str) -> None:
    async with browsing(redesigned) as browser:
        answer = await browser.get(path)
    assert (answer.status_code, text in answer.text) == (status, True)
    assert "What happened" in answer.text


async def test_an_unknown_channel_is_an_error_page_with_a_link_back(redesigned: Cluster, topic: str) -> None:
    async with browsing(redesigned) as browser:
        answer = await browser.get(f"/topics/{topic}/channels/missing")
    assert answer.status_code == 400
    assert f'href="/topics/{topic}"' in answer.text and "it may have been deleted" in answer.text


def names_in(text: str) -> list[str]:
    """Return the topics of an overview in their order."""
    return re.findall(r'<tr data-key="(t\d\d)"', text)


async def test_many_topics_are_searched_sorted_and_divided_into_pages() -> None:
    names = [f"t{number:02}" for number in range(60)]
    with Cluster(nodes=1) as cluster:
        for number, name in enumerate(names):
            cluster.create_topic(name, partitions=1 + (number % 7 == 3), channels=["ch"])
        async with browsing(cluster) as browser:

            async def shown(query: str) -> str:
                answer = await browser.get(f"/{query}")
                assert answer.status_code == 200
                return answer.text

            first = await shown("")
            assert names_in(first) == names[:25]
            assert "1 to 25 of 60" in first and 'rel="next" href="/?page=2"' in first
            assert names_in(await shown("?page=3")) == names_in(await shown("?page=99")) == names[50:]
            falling = await shown("?order=falling")
            assert names_in(falling) == names[:-26:-1] and 'aria-sort="descending"' in falling
            large = await shown("?sort=partitions")
            assert names_in(large)[:9] == names[3::7] and 'href="/?sort=partitions&amp;order=rising"' in large
            found = await shown("?search=T1&sort=name")
            assert names_in(found) == names[10:20] and "60 topics in all" in found
            assert "No topic" in await shown("?search=%3Cb%3E") and "<b>" not in await shown("?search=%3Cb%3E")
            for query in ("?sort=colour", "?order=up", "?page=x"):
                refused = await browser.get(f"/{query}")
                assert (refused.status_code, "http-equiv" in refused.text) == (400, False)


async def test_lookup_that_does_not_answer_is_an_error_page(closed_address: Address) -> None:
    async with browsing([str(closed_address)]) as browser:
        answer = await browser.get("/")
    assert answer.status_code == 503
    assert "What to do" in answer.text and str(closed_address) in answer.text
    assert '<meta http-equiv="refresh" content="3">' in answer.text


async def test_a_lookup_that_ends_leaves_the_last_numbers_with_a_warning() -> None:
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("orders", channels=["ch"])
        async with browsing(cluster, interval=0.1) as browser:
            assert "numbers are" not in (await browser.get("/")).text
            cluster.kill("l1")
            text = await page_with(browser, "/", lambda text: "The numbers are" in text)
    assert 'href="/topics/orders"' in text


async def test_styles_and_script_are_served(redesigned: Cluster) -> None:
    async with browsing(redesigned) as browser:
        for name, kind in (("page.css", "text/css"), ("page.js", "text/javascript"), ("icon.svg", "image/svg+xml")):
            answer = await browser.get(f"/static/{name}")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)


async def test_a_topic_without_any_leader_is_still_shown() -> None:
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("orders", partitions=1, channels=["ch"])
        async with browsing(cluster, embedded=True, interval=0.1) as browser:
            await page_with(browser, "/topics/orders", lambda text: cluster.nodes["n1"].tcp in text)
            cluster.kill("n1")
            text = await page_with(browser, "/topics/orders", lambda text: "no leader" in text)
            assert "What happened" not in text
            overview = await page_with(browser, "/", lambda text: "0 of 1 led" in text)
    assert "0 of 1" in overview and "state down" in overview


async def test_a_channel_names_the_partitions_that_its_numbers_lack() -> None:
    with Cluster(nodes=2) as cluster:
        cluster.create_topic("orders", partitions=2, channels=["ch"])
        async with browsing(cluster, interval=0.1) as browser:
            page = "/topics/orders/channels/ch"
            text = await page_with(browser, page, lambda text: "In flight" in text)
            assert "is not reported" not in text
            cluster.kill(cluster.leader("orders", 1))
            await page_with(browser, page, lambda text: "partition 1 is not reported" in text)


async def test_messages_of_the_other_partitions_are_shown_while_one_has_no_leader() -> None:
    with Cluster(nodes=2) as cluster:
        cluster.create_topic("orders", partitions=3, channels=["ch"])
        async with Producer(cluster.lookupd) as producer, browsing(cluster, interval=0.1) as browser:
            for number in (0, 1, 2):
                await producer.publish("orders", b"from partition %d" % number, partition=number)
            cluster.kill(cluster.leader("orders", 1))
            page = "/topics/orders/messages"
            text = await page_with(browser, page, lambda text: "Without the messages of partition 1" in text)
            one = await browser.get(page, params={"partition": "1"})
            newest = (await browser.get(page, params={"count": "1"})).text
    assert "from partition 0" in text and "from partition 2" in text and "from partition 1" not in text
    assert "from partition 2" in newest and "from partition 0" not in newest
    assert (one.status_code, "leader" in one.text) == (503, True)


async def test_the_messages_of_a_relay_are_shown_if_it_has_a_store(redesigned: Cluster, tmp_path: Path) -> None:
    async with browsing(redesigned) as browser:
        assert (await browser.get("/delayed")).status_code == 404
        assert "Delayed messages" not in (await browser.get("/")).text
    with DelayStore(tmp_path / "store") as store:
        async with browsing(redesigned, delay_store=store) as browser:
            assert "No message waits" in (await browser.get("/delayed")).text
            for number in range(201):
                store.add([(DelayedMessage(identity=f"<id-{number}>", topic="orders", due=2**41 + number), b"x")])
            store.failed("<id-0>", "no leader", 1e9, 15.0, alone=True)
            text = (await browser.get("/delayed")).text
            assert '<a href="/delayed">Delayed messages</a>' in (await browser.get("/")).text
            with closing(sqlite3.connect(tmp_path / "store")) as other:
                other.execute("DROP TABLE delayed")
            failed = await browser.get("/delayed")
    assert (failed.status_code, "cannot be read: no such table" in failed.text) == (503, True)
    assert "&lt;id-0&gt;" in text
    assert "2039-09-07 15:47:35.552" in text
    assert "no leader" in text
    assert "1 more are due later" in text


def _described(topic: str) -> dict[str, Any]:
    app = App("127.0.0.1:1")

    @app.handler(topic, "billing", tag="new", max_attempts=3, dead_letter="dead")
    async def bill(order: dict[str, int], user: Annotated[str, Header()]) -> None:
        """Bill <an> order."""

    app.publishes("other", str, key=True)
    return asyncapi_document(app, title="The shop")


async def test_an_app_shows_what_it_receives_and_sends_with_the_lag(redesigned: Cluster, topic: str) -> None:
    document = _described(topic)
    async with Producer(redesigned.lookupd) as producer, browsing(redesigned, app_document=document) as browser:
        await producer.publish_many(topic, [b"1"] * 1234)
        text = await page_with(browser, "/app", lambda text: '<td class="num" data-label="Lag">1\u202f234</td>' in text)
        assert (await browser.get("/app/asyncapi.json")).json() == document
        assert '<a href="/app">App</a>' in (await browser.get("/")).text
    assert f'<a href="/topics/{topic}/channels/billing">billing</a>' in text
    assert "Bill &lt;an&gt; order." in text and "The shop" in text
    assert "deadLetter: dead" in text and "object of integer" in text and "dead-letter-error" in text
    assert 'dead <span class="flag warn">missing</span>' in text


async def test_without_an_app_its_page_does_not_exist(redesigned: Cluster) -> None:
    async with browsing(redesigned) as browser:
        assert (await browser.get("/app")).status_code == 404
        assert (await browser.get("/app/asyncapi.json")).status_code == 404


@table(
    "schema, text",
    [
        ({}, "any"),
        (True, "any"),
        ({"type": "string", "format": "date-time"}, "string (date-time)"),
        ({"type": ["string", "null"]}, "string or null"),
        ({"anyOf": [{"$ref": "#/components/schemas/Item"}, {"type": "null"}]}, "Item or null"),
        ({"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}, "array of integer, string"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "object of number"),
        ({"allOf": [{"$ref": "#/components/schemas/Item"}, {"type": "object"}]}, "Item and object"),
        ({"enum": list(range(6))}, "0 or 1 or 2 or 3 or 4 or 5"),
        ({"enum": list(range(8))}, "0 or 1 or 2 or 3 or 4 or 5 or …"),
        ({"const": "a"}, "'a'"),
    ],
)
def test_a_schema_is_a_few_words(schema: Any, text: str) -> None:
    assert type_text(schema) == text


def test_sizes_are_in_binary_units() -> None:
    assert [size(value) for value in (None, 1023, 1024, 1536 * 1024)] == ["–", "1023 B", "1.0 KiB", "1.5 MiB"]


def test_a_time_in_the_future_is_now() -> None:
    """The clocks of nodes may be ahead."""
    later = time.time() + 3600
    assert (age(later), seconds_since(later)) == ("0 s", 0)


def test_the_messages_of_an_operation_are_named_by_their_components() -> None:
    channel = {"address": "orders", "messages": {"received": {"$ref": "#/components/messages/Order"}}}
    operation = {
        "action": "receive",
        "channel": {"$ref": "#/channels/orders"},
        "messages": [{"$ref": "#/channels/orders/messages/received"}],
    }
    document = {
        "info": {"title": "x", "version": "1"},
        "channels": {"orders": channel},
        "operations": {"bill": operation},
        "components": {"messages": {"Order": {"name": "order"}}},
    }
    found = AppDocument.read(document)
    assert [one.messages for one in found.operations] == [("Order",)]
    assert [(one.identity, one.name) for one in found.messages] == [("Order", "order")]


def test_a_document_without_its_parts_is_refused() -> None:
    broken = {"asyncapi": "3.0.0", "info": {"title": "x", "version": "1"}, "operations": {"a": {"channel": {}}}}
    with pytest.raises(InvalidSetting, match="cannot be read"):
        AppDocument.read(broken)


async def test_the_stream_of_a_page_lasts_until_the_cluster_responds(closed_address: Address) -> None:
    """A browser that reconnects to a page that was started again, before lookup is: each stream was a traceback."""
    page, sent = WebPage([str(closed_address)], WebOptions(interval=0.1)), list[bytes]()

    async def receive() -> dict[str, object]:
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"accept", b"text/event-stream")]
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": headers}
    async with anyio.create_task_group() as tasks:
        await tasks.start(page.run)
        tasks.start_soon(page, scope, receive, send)
        await eventually(lambda: sum(one.startswith(b"event: gone") for one in sent) >= 2)
        tasks.cancel_scope.cancel()
    assert sent.count(b"retry: 2000\n\n") == 1


async def test_a_page_that_is_gone_for_a_while_is_updated_again(redesigned: Cluster) -> None:
    """A deleted topic may be created again; the browser keeps its stream."""
    topic = f"web_{token_hex(4)}"
    page = WebPage(redesigned.lookupd, WebOptions(interval=0.1))
    sent: list[bytes] = []

    async def receive() -> dict[str, object]:
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"accept", b"text/event-stream")]
    scope = {"type": "http", "method": "GET", "path": f"/topics/{topic}", "query_string": b"", "headers": headers}
    async with anyio.create_task_group() as tasks:
        await tasks.start(page.run)
        tasks.start_soon(page, scope, receive, send)
        with anyio.fail_after(25):
            while not any(one.startswith(b"event: gone") for one in sent):  # noqa: ASYNC110
                await anyio.sleep(0.02)
            await anyio.to_thread.run_sync(lambda: redesigned.create_topic(topic, channels=["billing"]))
            while not any(one.startswith(b"data: ") and b"billing" in one for one in sent):  # noqa: ASYNC110
                await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()
    assert sent.count(b"retry: 2000\n\n") == 1
