"""Every action of the page, on embedded clusters of both generations."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import count
from secrets import token_hex
from typing import Any

import anyio
import pytest

from nsqext import Admin, Consumer, Producer
from nsqext.broker import Cluster
from nsqext.web.actions import ACTIONS, ActionForm, _position
from tests.support.web_pages import browsing, page_with, press, submit, token_of

pytestmark = pytest.mark.anyio


def fresh() -> str:
    """Return an unused topic name."""
    return f"web_{token_hex(4)}"


async def test_a_topic_is_created_and_deleted(redesigned: Cluster, original: Cluster) -> None:
    for cluster in (redesigned, original):
        topic = fresh()
        async with browsing(cluster, write=True) as browser, Admin(cluster.lookupd) as admin:
            chosen = {"partitions": "2", "replicas": "2", "extend": "yes"}
            if cluster is original:  # it answered that the topic was created, without these
                ignored = await press(browser, "create-topic", topic=topic, channel="ch", **chosen)
                assert ignored.status_code == 400
                assert "the original NSQ has no partitions, replicas, extend of topics" in ignored.text
                assert topic not in await admin.topics()
                chosen = {"partitions": "1", "replicas": "1"}
            created = await press(browser, "create-topic", topic=topic, channel="ch", **chosen)
            assert (created.status_code, created.url.path) == (200, f"/topics/{topic}")
            assert "The topic was created." in created.text
            info = await admin.topic(topic)
            assert info.channels == ("ch",)
            if info.meta is not None:
                assert (info.meta.partition_num, info.meta.replica, info.meta.extend_support) == (2, 2, True)
            again = await press(browser, "create-topic", topic=topic)
            assert again.status_code == 400 and "the topic exists" in again.text
            deleted = await press(browser, "delete-topic", topic=topic)
            assert (deleted.status_code, deleted.url.path) == (200, "/")
            assert topic not in deleted.text
            assert topic not in await admin.topics()


async def test_irreversible_actions_ask_first(redesigned: Cluster) -> None:
    topic = fresh()
    redesigned.create_topic(topic, channels=["ch"])
    asking = [name for name, action in ACTIONS.items() if action.question]
    assert {"delete-topic", "empty-topic", "delete-channel", "empty-channel", "seek-channel"} <= set(asking)
    async with (
        browsing(redesigned, write=True) as browser,
        Admin(redesigned.lookupd) as admin,
        Producer(redesigned.lookupd) as producer,
    ):
        await producer.publish(topic, b"kept")
        token = await token_of(browser)
        for name in asking:
            form = {"token": token, "topic": topic, "channel": "ch", "position": "latest", "node": "<b>"}
            answer = await browser.post(f"/actions/{name}", data=form)
            assert (answer.status_code, ACTIONS[name].question in answer.text) == (200, True)
            assert 'name="sure" value="yes"' in answer.text
            assert f'name="topic" value="{topic}"' in answer.text
            assert "<b>" not in answer.text.partition("facts")[2].partition("</dl>")[0]
        assert (await admin.stats(topic)).channels["ch"].lag == 1


async def test_a_channel_is_created_paused_emptied_and_deleted(redesigned: Cluster, original: Cluster) -> None:
    for cluster in (redesigned, original):
        topic = fresh()
        async with (
            browsing(cluster, write=True) as browser,
            Admin(cluster.lookupd) as admin,
            Producer(cluster.lookupd) as producer,
        ):
            await admin.create_topic(topic, channels=["keep"])
            place = {"topic": topic, "channel": "ch"}
            created = await press(browser, "create-channel", **place)
            assert created.url.path == f"/topics/{topic}/channels/ch"
            paused = await press(browser, "pause-channel", **place)
            assert '<span class="flag warn">paused</span>' in paused.text and "Unpause" in paused.text
            unpaused = await press(browser, "unpause-channel", **place)
            assert '<span class="flag warn">paused</span>' not in unpaused.text
            await producer.publish(topic, b"1")
            await press(browser, "empty-channel", **place)
            assert {name: one.lag for name, one in (await admin.stats(topic)).channels.items()} == {"ch": 0, "keep": 1}
            await press(browser, "empty-topic", topic=topic)
            assert (await admin.stats(topic)).channels["keep"].lag == 0
            deleted = await press(browser, "delete-channel", **place)
            assert deleted.url.path == f"/topics/{topic}"
            assert await admin.channels(topic) == ("keep",)


async def test_a_channel_is_skipped_and_moved(redesigned: Cluster) -> None:
    topic = fresh()
    redesigned.create_topic(topic, channels=["ch"])
    place = {"topic": topic, "channel": "ch"}
    async with (
        browsing(redesigned, write=True) as browser,
        Admin(redesigned.lookupd) as admin,
        Producer(redesigned.lookupd) as producer,
    ):
        assert "skips every message" in (await press(browser, "skip-channel", **place)).text
        await press(browser, "unskip-channel", **place)
        assert not (await admin.stats(topic)).channels["ch"].skipped
        await producer.publish_many(topic, [b"1", b"2"])
        for position, at, lag in (("latest", "", 0), ("earliest", "", 2), ("time", "2020-01-01T00:00", 2)):
            moved = await press(browser, "seek-channel", position=position, time=at, **place)
            assert (position, moved.status_code) == (position, 200)
            assert (position, (await admin.stats(topic)).channels["ch"].lag) == (position, lag)
        await press(browser, "seek-channel", position="latest", time="", **place)
        wrong = (("time", "yesterday"), ("time", ""), ("nowhere", ""), ("", ""), ("earliest", "2020-01-01T00:00"))
        for position, at in wrong:
            refused = await press(browser, "seek-channel", position=position, time=at, **place)
            assert (position, refused.status_code) == (position, 400)
        assert (await admin.stats(topic)).channels["ch"].lag == 0, "the time was ignored, and all was delivered again"


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the system does not change its time zone")
async def test_a_position_is_a_time_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    zoned = ActionForm({"position": "time", "time": "2020-01-01T02:00+02:00"})
    assert str(_position(zoned)) == "timestamp:1577836800"
    form = ActionForm({"position": "time", "time": "2020-01-01T00:00"})
    try:
        monkeypatch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        assert str(_position(form)) == "timestamp:1577836800"
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_the_forms_of_pages_have_what_their_actions_take(redesigned: Cluster) -> None:
    topic = fresh()
    redesigned.create_topic(topic, channels=["ch"])
    async with browsing(redesigned, write=True) as browser:
        for label, action in (
            ("Pause", "pause-channel"),
            ("Unpause", "unpause-channel"),
            ("Skip messages", "skip-channel"),
            ("Stop skipping", "unskip-channel"),
            ("Move channel", "seek-channel"),
            ("Empty channel", "empty-channel"),
            ("Delete channel", "delete-channel"),
            ("Empty topic", "empty-topic"),
            ("Delete topic", "delete-topic"),
        ):
            path = f"/topics/{topic}" + ("/channels/ch" if action.endswith("channel") else "")
            done = await submit(browser, path, label, action)
            assert (action, done.status_code, ACTIONS[action].done in done.text) == (action, 200, True)


async def test_settings_of_topics_and_channels_are_changed(redesigned: Cluster) -> None:
    topic = fresh()
    redesigned.create_topic(topic, channels=["ch"])
    place = {"topic": topic, "channel": "ch"}
    async with browsing(redesigned, write=True) as browser, Admin(redesigned.lookupd) as admin:
        changed = await press(browser, "set-topic", topic=topic, replicas="2", retention_days="7", sync_every="")
        assert (changed.status_code, "settings of the topic were changed" in changed.text) == (200, True)
        meta = (await admin.topic(topic)).meta
        assert meta is not None
        assert meta.replica == 2
        for name, fields in (
            ("set-channel", {"rate_limit_kib": "100"}),
            ("redeliver-channel", {}),
            ("deliver-delayed", {"within_hours": "1"}),
            ("empty-delayed", {}),
        ):
            done = await press(browser, name, **place, **fields)
            assert (name, done.status_code, ACTIONS[name].done in done.text) == (name, 200, True)
        for name, fields in (("set-topic", {"retention_days": "61"}), ("set-channel", {"rate_limit_kib": ""})):
            refused = await press(browser, name, **place, **fields)
            assert (name, refused.status_code) == (name, 400)


async def test_a_hidden_node_is_shown_again(redesigned: Cluster) -> None:
    topic = fresh()
    redesigned.create_topic(topic, channels=["ch"])
    async with browsing(redesigned, write=True) as browser, Admin(redesigned.lookupd) as admin:
        leader = (await admin.topic(topic)).leaders[0]
        node = next(one for one in await admin.nodes() if one.tcp == leader)
        await admin.tombstone(topic, str(node.http))
        page = await page_with(browser, f"/nodes/{leader}", lambda text: "Show again" in text)
        assert "show-node" in page
        shown = await press(browser, "show-node", topic=topic, node=str(node.http))
        assert "Lookup shows the node again." in shown.text
        assert next(one for one in await admin.nodes() if one.tcp == leader).tombstoned == ()


async def test_a_message_is_published_with_all_properties(redesigned: Cluster) -> None:
    topic = fresh()
    redesigned.create_topic(topic, extend=True, channels=["ch"])
    async with browsing(redesigned, write=True) as browser, Admin(redesigned.lookupd) as admin:
        fields = {"headers": "user: 42\r\nsource: page", "key": "k1", "tag": "canary", "trace_id": "77"}
        answer = await press(browser, "publish", topic=topic, body="two\r\nlines \u00e9", **fields)
        assert answer.status_code == 200 and "The message was stored." in answer.text
        (message,) = await admin.peek(topic)
        assert message.body == "two\nlines \u00e9"
        assert message.headers == {"user": "42", "source": "page"}
        assert (message.key, message.tag, message.trace_id) == ("k1", "canary", 77)
        twice = {"body": "x", "headers": "user: 1\nuser: 2"}
        for bad in ({"body": ""}, {"body": "x", "headers": "no colon"}, {"body": "x", "trace_id": "seven"}, twice):
            refused = await press(browser, "publish", topic=topic, **bad)
            assert (bad, refused.status_code) == (bad, 400)
        assert len(await admin.peek(topic)) == 1


@pytest.mark.parametrize("name", ["topic", "channel", "headers", "key", "tag", "partition", "node", "%ff"])
async def test_a_field_that_is_no_text_is_refused(redesigned: Cluster, name: str) -> None:
    """The answer was 500, because no page could show the field."""
    topic = fresh()
    redesigned.create_topic(topic, extend=True, channels=["ch"])
    async with browsing(redesigned, write=True) as browser:
        token = await token_of(browser)
        fields = {"topic": topic, "channel": "ch", "body": "x", "node": "n", "token": token} | {name: "%ff"}
        for action in ("delete-topic", "publish", "tombstone", "pause-channel"):
            content = "&".join(f"{field}={value}" for field, value in fields.items())
            answer = await browser.post(f"/actions/{action}", content=content)
            assert (action, answer.status_code) == (action, 400)
            assert "is no text" in answer.text
        fields |= {name: topic if name == "topic" else "", "body": "%ff"}
        del fields["node"]
        content = "&".join(f"{field}={value}" for field, value in fields.items() if value)
        assert (await browser.post("/actions/publish", content=content)).status_code == 303
    async with Admin(redesigned.lookupd) as admin:
        assert (await admin.stats(topic)).messages == 1


async def test_a_topic_is_upgraded(redesigned: Cluster) -> None:
    topic = fresh()
    redesigned.create_topic(topic, channels=["ch"])
    async with browsing(redesigned, write=True) as browser, Admin(redesigned.lookupd) as admin:
        assert "upgrade-topic" in (await browser.get(f"/topics/{topic}")).text
        answer = await press(browser, "upgrade-topic", topic=topic)
        assert "upgrade-topic" not in answer.text.partition("<main")[2]
        info = await admin.topic(topic)
    assert info.meta is not None and info.meta.extend_support


async def test_the_next_messages_of_the_original_nsq_are_shown(
    original: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.web.app._MOST_WATCHES", 1)
    topic = fresh()
    original.create_topic(topic, channels=["keep"])
    path = f"/topics/{topic}/messages"
    async with (
        browsing(original, write=True) as browser,
        Producer(original.lookupd) as producer,
        anyio.create_task_group() as tasks,
    ):
        form = {"token": await token_of(browser)}
        refused = await browser.post(path, data={"token": "0"})

        async def publish() -> None:
            for number in count(1):
                await producer.publish(topic, b"<b>next</b> %05d" % number)
                await anyio.sleep(0.05)

        tasks.start_soon(publish)
        for _ in range(2):  # the first one gives its place back
            shown = await browser.post(path, data=form)
        tasks.cancel_scope.cancel()
    assert refused.status_code == 403
    assert (shown.status_code, shown.text.count("&lt;b&gt;next&lt;/b&gt;")) == (200, 20)
    numbers = re.findall(r"&lt;b&gt;next&lt;/b&gt; ([0-9]{5})", shown.text)
    assert len(numbers) == 20
    assert numbers == sorted(numbers, reverse=True), "the newest comes first"
    async with Admin(original.lookupd) as admin:
        kept = (await admin.stats(topic)).channels["keep"]
        assert kept.messages == kept.lag >= 20
        with anyio.fail_after(25):
            while set((await admin.stats(topic)).channels) != {"keep"}:  # noqa: ASYNC110 - the broker has no event
                await anyio.sleep(0.02)


async def test_a_node_that_does_not_respond_has_no_messages_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no temporary channel either, which would consume its waiting messages if it has no other one."""
    monkeypatch.setattr("nsqext.web.app._ADMIN_TIMEOUT", 0.5)
    monkeypatch.setattr("nsqext.web.pages._WATCHED", 0.1)
    filters: list[Callable[[str], bool]] = []

    def noting(*args: Any, **settings: Any) -> Consumer:
        filters.append(settings["node_filter"])
        return Consumer(*args, **settings)

    monkeypatch.setattr("nsqext.web.pages.Consumer", noting)
    with Cluster(nodes=2, generation="original") as cluster:
        cluster.create_topic("orders", channels=["keep"])
        silent = cluster.nodes["n2"]
        async with browsing(cluster, write=True) as browser:
            form = {"token": await token_of(browser)}
            both = await browser.post("/topics/orders/messages", data=form)
            await anyio.to_thread.run_sync(cluster.faults.freeze, silent.name)
            one = await browser.post("/topics/orders/messages", data=form)
    assert (both.status_code, "Without the messages of" in both.text) == (200, False)
    assert one.status_code == 200
    assert f"Without the messages of {silent.tcp}: no response." in one.text
    assert [connects(silent.tcp) for connects in filters] == [True, False]


async def test_a_topic_without_channels_is_not_watched(original: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.web.app._MOST_WATCHES", 1)
    topic = fresh()
    original.create_topic(topic)
    async with browsing(original, write=True) as browser, Admin(original.lookupd) as admin:
        form = {"token": await token_of(browser)}
        for _ in range(2):  # the first one gives its place back
            refused = await browser.post(f"/topics/{topic}/messages", data=form)
        assert await admin.channels(topic) == ()
    assert (refused.status_code, "would consume the waiting messages" in refused.text) == (503, True)


async def test_partitions_are_added(redesigned: Cluster) -> None:
    topic = fresh()
    redesigned.create_topic(topic, channels=["ch"])
    async with browsing(redesigned, write=True) as browser, Admin(redesigned.lookupd) as admin:
        answer = await press(browser, "expand-topic", topic=topic, partitions="3")
        assert (answer.status_code, "The topic gets more partitions." in answer.text) == (200, True)
        with anyio.fail_after(25):
            while len((await admin.topic(topic)).leaders) != 3:  # noqa: ASYNC110 - the broker has no event
                await anyio.sleep(0.02)
        fewer = await press(browser, "expand-topic", topic=topic, partitions="1")
    assert fewer.status_code in (400, 503)


async def test_a_topic_of_the_original_nsq_is_paused_and_a_node_hidden(original: Cluster) -> None:
    topic = fresh()
    node = original.nodes["n1"]
    async with browsing(original, write=True) as browser, Admin(original.lookupd) as admin:
        await admin.create_topic(topic, channels=["ch"])
        paused = await press(browser, "pause-topic", topic=topic)
        assert '<span class="flag warn">paused</span>' in paused.text
        unpaused = await press(browser, "unpause-topic", topic=topic)
        assert '<span class="flag warn">paused</span>' not in unpaused.text
        hidden = await press(browser, "tombstone", topic=topic, node=node.http)
        assert hidden.status_code == 200
        assert [str(one.tcp) for one in await admin.nodes() if topic in one.tombstoned] == [node.tcp]
        refused = await press(browser, "skip-channel", topic=topic, channel="ch")
    assert refused.status_code == 400 and "the original NSQ cannot do this" in refused.text


async def test_nodes_of_an_embedded_cluster_are_killed_frozen_and_restarted() -> None:
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("orders", replicas=3, channels=["ch"])
        async with browsing(cluster, embedded=True, write=True, interval=0.1) as browser:
            assert "/actions/kill" in (await browser.get("/")).text
            old = cluster.leader("orders")
            killed = await press(browser, "kill", name=old)
            assert '<span class="state down">down</span>' in killed.text
            await page_with(browser, "/", lambda text: "2 of 3" in text)
            new = cluster.wait_writable("orders")
            assert new != old
            text = await page_with(browser, "/topics/orders", lambda text: f"<b>{new}</b>" in text)
            assert "/actions/move-leader" in text and f'name="name" value="{old}"' not in text
            restarted = await press(browser, "restart", name=old)
            assert "state down" not in restarted.text
            frozen = await press(browser, "freeze", name=old)
            assert '<span class="state frozen">frozen</span>' in frozen.text and "Thaw" in frozen.text
            thawed = await press(browser, "thaw", name=old)
            assert "state frozen" not in thawed.text
            moved = await press(browser, "move-leader", topic="orders", partition="0", name=old)
            assert moved.status_code == 200
            assert cluster.leader("orders") == old
            assert (await press(browser, "kill", name="n9")).status_code == 400


async def test_faults_are_for_embedded_clusters_only(redesigned: Cluster) -> None:
    async with browsing(redesigned, write=True) as browser:
        answer = await press(browser, "kill", name="n1")
        text = (await browser.get("/")).text
    assert answer.status_code == 503 and "nsqext broker --web" in answer.text
    assert redesigned.state("n1") == "up"
    assert "/actions/kill" not in text
