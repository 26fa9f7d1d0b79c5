"""The page in chromium: reading, live numbers, every action, faults, widths, colours, and a cross-site form.

With ``NSQEXT_TEST_PICTURES=1`` the pictures of the documentation are drawn again.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated

import pytest
from attrs import frozen
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from nsqext import App, sync
from nsqext.app import Header, Key, asyncapi_document
from nsqext.broker import Cluster
from nsqext.types import Address
from nsqext.web import WebOptions, WebPage
from nsqext.web.app import served
from tests.support.browser import Browser, running_browser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver import Chrome

PICTURES = Path(__file__).parents[2] / "docs/pictures"
_LARGEST = 150_000  # bytes of a picture


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with running_browser() as started:
        yield started


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3) as running:
        running.create_topic("orders", partitions=2, replicas=3, extend=True, channels=["billing", "audit"])
        yield running


@pytest.fixture(scope="module")
def original() -> Iterator[Cluster]:
    with Cluster(nodes=2, generation="original") as running:
        running.create_topic("clicks", channels=["archive"])
        yield running


@pytest.fixture(scope="module")
def address(driver: Chrome, cluster: Cluster) -> Iterator[Address]:
    """The address of the page of an embedded cluster."""
    options = WebOptions(write=True, interval=0.5)
    with served(WebPage(cluster.lookupd, options, cluster=cluster), Address("127.0.0.1", 0)) as address:
        yield address
        driver.get("about:blank")


@pytest.fixture
def page(driver: Chrome, address: Address) -> Iterator[Browser]:
    """A browser for the page, which must report no error."""
    browser = Browser(driver, f"http://{address}")
    browser.show_as()
    browser.errors()
    yield browser
    assert browser.errors() == []


def test_pages_are_read_by_following_links(page: Browser, cluster: Cluster) -> None:
    page.open("/")
    page.click('a[href="/topics/orders"]')
    page.wait_text("In-sync replicas")
    assert cluster.nodes[cluster.leader("orders", 0)].tcp in page.row("0")
    page.click('a[href="/topics/orders/channels/billing"]')
    page.wait_text("Timed out")
    page.driver.back()
    page.click('a[href="/topics/orders/messages"]')
    page.wait_text("without consuming messages")
    page.open("/")
    page.click(f'a[href="/nodes/{cluster.nodes["n1"].tcp.replace(":", "%3A")}"]')
    page.wait_text(cluster.nodes["n1"].http)


def test_numbers_change_while_the_page_is_open(page: Browser, cluster: Cluster) -> None:
    cluster.create_topic("counted", channels=["audit"])
    page.open("/")
    page.wait(lambda: page.row("counted"))
    page.open("/topics/counted")
    page.wait(lambda: page.script("!document.getElementById('state').hidden"))
    page.driver.execute_script("window.same = true")
    page.driver.execute_script("document.querySelector('[name=body]').value = 'half written'")
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish_many("counted", [b"one"] * 1500)
    page.wait(lambda: "1\u202f500" in page.row("audit"))
    assert page.script("window.same") is True
    assert page.script("document.querySelector('[name=body]').value") == "half written"
    page.click("#hold")
    page.wait(lambda: page.script("document.getElementById('state').innerText") == "held")


def test_a_new_topic_appears_and_a_deleted_one_vanishes(page: Browser, cluster: Cluster) -> None:
    page.open("/")
    cluster.create_topic("appears", channels=["ch"])
    page.wait(lambda: page.row("appears"))
    cluster.delete_topic("appears")
    page.wait(lambda: not page.row("appears"))
    assert page.row("orders")


def test_a_killed_leader_and_its_successor_are_shown(page: Browser, cluster: Cluster) -> None:
    old = cluster.leader("orders", 0)
    tcp = cluster.nodes[old].tcp
    page.open("/")
    page.press("Kill", action="kill", within=f'tr[data-key="{tcp}"]')
    page.wait(lambda: "down" in page.row(tcp))
    page.open("/topics/orders")
    page.wait(lambda: page.script("!document.getElementById('state').hidden"))
    new = cluster.wait_writable("orders", 0)
    assert new != old
    page.wait(lambda: new in page.row("0").split("\t")[1])
    page.open("/")
    page.press("Restart", action="restart", within=f'tr[data-key="{tcp}"]')
    page.wait(lambda: "up" in page.row(tcp))
    page.press("Freeze", action="freeze", within=f'tr[data-key="{tcp}"]')
    page.wait(lambda: "frozen" in page.row(tcp))
    page.press("Thaw", action="thaw", within=f'tr[data-key="{tcp}"]')
    page.wait(lambda: "up" in page.row(tcp))
    page.open("/topics/orders")
    page.wait(lambda: page.script(f'document.querySelector(\'tr[data-key="0"] [value="{old}"]\') !== null'))
    page.press(old, action="move-leader", within='tr[data-key="0"]')
    page.wait_text("The leader was moved.")
    page.wait(lambda: old in page.row("0").split("\t")[1])


def test_a_button_never_becomes_the_button_of_another_action(page: Browser, cluster: Cluster) -> None:
    """A click that meets an update of the page would do something else."""
    tcp = cluster.nodes["n3"].tcp
    page.open("/")
    page.wait(lambda: "up" in page.row(tcp))
    page.driver.execute_script(
        "window.forms = [...document.querySelectorAll(arguments[0])]", f'tr[data-key="{tcp}"] form'
    )
    shown = "window.forms.map(form => form.getAttribute('action').split('/').pop() + ' ' + form.innerText)"
    before = page.script(shown)
    cluster.faults.freeze("n3")
    try:
        page.wait(lambda: "frozen" in page.row(tcp))
        assert (before, page.script(shown)) == (["kill Kill", "freeze Freeze", "restart Restart"], before)
    finally:
        cluster.faults.thaw("n3")
    page.wait(lambda: "up" in page.row(tcp))


def test_each_kind_of_action_of_topics_and_channels(page: Browser) -> None:
    """Those without a field of their own are submitted in `test_actions.py`."""
    page.open("/")
    page.click("summary")
    page.fill("topic", "made")
    page.fill("channel", "first")
    page.press("Create topic", action="create-topic")
    page.wait_text("The topic was created.")
    page.press("Upgrade to extend", action="upgrade-topic")
    page.wait_text("The topic was upgraded")
    for name, text in {"body": "<b>hello</b>", "headers": "user: 42", "key": "k", "tag": "t", "trace_id": "7"}.items():
        page.fill(name, text)
    page.press("Publish", action="publish")
    page.wait_text("The message was stored.")
    page.open("/topics/made/messages")
    page.wait_text("<b>hello</b>")
    assert all(text in page.text for text in ("user", "42", "Trace id", "Key"))
    page.open("/topics/made")
    page.press("Add partitions", action="expand-topic")
    page.wait_text("The topic gets more partitions.")
    page.wait(lambda: "2 partitions" in page.text)
    page.open("/topics/made")
    page.fill("channel", "second")
    page.press("Create channel", action="create-channel")
    page.wait_text("The channel was created.")
    for label, action, done in (
        ("Pause", "pause-channel", "The channel is paused."),
        ("Move channel", "seek-channel", "The channel was moved."),
        ("Delete channel", "delete-channel", "The channel was deleted."),
        ("Delete topic", "delete-topic", "The topic was deleted."),
    ):
        page.press(label, action=action)
        page.wait_text(done)
    page.wait(lambda: not page.row("made"))


def test_actions_of_the_original_nsq(driver: Chrome, original: Cluster) -> None:
    with served(WebPage(original.lookupd, WebOptions(write=True)), Address("127.0.0.1", 0)) as address:
        browser = Browser(driver, f"http://{address}")
        browser.open("/topics/clicks")
        browser.press("Pause", action="pause-topic")
        browser.wait_text("The topic is paused.")
        browser.press("Unpause", action="unpause-topic")
        browser.wait_text("The topic is no longer paused.")
        browser.press("Tombstone", action="tombstone")
        browser.wait_text("Lookup temporarily hides the node.")
        driver.get("about:blank")


def test_a_form_of_another_site_changes_nothing(page: Browser) -> None:
    page.open("/")
    token = page.script("document.querySelector('[name=token]').value")
    fields = f"<input name=token value={token}><input name=sure value=yes><input name=topic value=orders>"
    page.driver.get(f"data:text/html,<form method=post action={page.url}/actions/delete-topic>{fields}<button>x</form>")
    page.click("button")
    page.wait_text("cross-site request refused")
    page.open("/")
    assert page.row("orders")
    assert any("403" in error for error in page.errors())


def test_many_topics_fit_and_the_nodes_are_a_click_away(driver: Chrome) -> None:
    with Cluster(nodes=3) as many, ExitStack() as stack:
        for number in range(120):
            many.create_topic(f"topic_{number:03}", channels=["ch"])
        address = stack.enter_context(served(WebPage(many.lookupd, WebOptions()), Address("127.0.0.1", 0)))
        browser = Browser(driver, f"http://{address}")
        for width, highest in ((1280, 1800), (390, 7000)):
            browser.show_as(width=width)
            browser.open("/")
            assert browser.script("document.documentElement.scrollHeight") < highest
            assert browser.script("document.querySelector('a[href=\"#nodes\"]').getBoundingClientRect().bottom") < 200
        browser.click('a[href="#nodes"]')
        top = "document.getElementById('nodes').getBoundingClientRect().top"
        browser.wait(lambda: 0 <= browser.script(top) < browser.script("window.innerHeight"))
        browser.fill("search", "topic_11")
        browser.click(".search button")
        browser.wait_text("1 to 10 of 10 found")
        browser.driver.get("about:blank")


def test_live_becomes_stale_while_lookup_is_down(driver: Chrome) -> None:
    with Cluster(nodes=1) as cluster, ExitStack() as stack:
        cluster.create_topic("orders", channels=["ch"])
        options = WebOptions(interval=0.2)
        address = stack.enter_context(served(WebPage(cluster.lookupd, options), Address("127.0.0.1", 0)))
        browser = Browser(driver, f"http://{address}")
        browser.open("/")
        state = "document.getElementById('state').innerText"
        browser.wait(lambda: browser.script(state) == "live")
        cluster.kill("l1")
        for age in ("stale, 3 s", "stale, 5 s"):
            browser.wait(partial(lambda wanted: browser.script(state) == wanted, age))
        cluster.restart("l1")
        browser.wait(lambda: browser.script(state) == "live")
        driver.get("about:blank")


def test_a_stream_that_was_refused_is_opened_again(driver: Chrome, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser repeats a lost connection by itself, and no request that was answered with an error."""
    with Cluster(nodes=1) as cluster, ExitStack() as stack:
        address = stack.enter_context(served(WebPage(cluster.lookupd), Address("127.0.0.1", 0)))
        browser = Browser(driver, f"http://{address}")
        with monkeypatch.context() as full:
            full.setattr("nsqext.web.app._MOST_STREAMS", 0)
            browser.open("/")
            browser.wait(lambda: browser.script("document.getElementById('state').innerText") == "no connection")
        cluster.create_topic("orders", channels=["ch"])
        browser.wait(lambda: browser.row("orders"))
        assert browser.script("document.getElementById('state').innerText") == "live"
        browser.errors()  # of the refused stream
        driver.get("about:blank")


def test_a_page_that_lookup_could_not_fill_is_loaded_again(driver: Chrome) -> None:
    with Cluster(nodes=1) as cluster, ExitStack() as stack:
        cluster.create_topic("orders", channels=["ch"])
        cluster.kill("l1")
        address = stack.enter_context(served(WebPage(cluster.lookupd), Address("127.0.0.1", 0)))
        browser = Browser(driver, f"http://{address}")
        browser.open("/")
        browser.wait_text("This page is loaded again")
        cluster.restart("l1")
        browser.wait(lambda: browser.row("orders"))
        browser.errors()  # of the first response
        driver.get("about:blank")


def test_no_page_is_wider_than_the_window(page: Browser, cluster: Cluster) -> None:
    with (
        sync.Producer(cluster.lookupd) as producer,
        sync.Consumer("orders", "billing", lookupd=cluster.lookupd, tag="canary"),
    ):
        producer.publish("orders", b"x" * 3000, headers={"long": "y" * 300}, key="k" * 100)
        paths = ("/", "/topics/orders", "/topics/orders/messages", f"/nodes/{cluster.nodes['n1'].tcp}")
        for path in (*paths, "/topics/orders/channels/billing"):
            page.open(path)
            for width in (390, 1280):
                page.show_as(width=width)
                assert (path, page.script("document.documentElement.scrollWidth")) == (path, width)


def test_dark_and_light_follow_the_system(page: Browser) -> None:
    page.open("/")
    found = []
    for scheme in ("light", "dark"):
        page.show_as(scheme=scheme)
        found.append(page.script("getComputedStyle(document.body).backgroundColor"))
    assert found == ["rgb(251, 251, 250)", "rgb(18, 22, 21)"]


def test_the_page_is_used_by_keyboard(page: Browser) -> None:
    page.open("/topics/orders")
    body = page.driver.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    assert page.script("document.activeElement.innerText") == "Skip to the content"
    assert page.script("document.activeElement.getBoundingClientRect().top >= 0") is True
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.script("document.activeElement.id") == "main"
    page.driver.switch_to.active_element.send_keys(Keys.TAB)
    assert page.script("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    named = "[...document.querySelectorAll('button, a, input:not([type=hidden]), select, textarea')]"
    unnamed = page.script(
        f"{named}.filter(one => !(one.innerText || one.ariaLabel || one.labels?.length)).map(one => one.outerHTML)"
    )
    assert unnamed == []


def test_the_page_is_read_without_javascript(page: Browser, cluster: Cluster) -> None:
    page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page.open("/topics/orders")
        text = page.driver.find_element(By.TAG_NAME, "body").text
    finally:
        page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "billing" in text and cluster.nodes["n1"].tcp in text
    assert "Hold" not in text


def _publish(producer: sync.Producer, ending: Event) -> None:
    """Publish messages at an uneven pace until the event is set."""
    chance = Random(7)
    for number in count():
        if ending.wait(chance.random() / 50):
            return
        text = b'{"order": %d, "amount": %d}' % (number, number * 7 % 310)
        user = str(number % 50)
        tag = "canary" if number % 9 == 0 else None
        producer.publish("orders", text, headers={"user": user}, key=f"user-{user}", tag=tag, trace_id=number)
        if chance.random() < 0.7:
            producer.publish("clicks", b"click %d" % number)
        if number % 5 == 0:
            producer.publish("payments", b"payment %d" % number, partition=number % 3)


@frozen
class Order:
    number: int
    customer: str
    lines: list[str]


@frozen
class Bill:
    order: int
    cents: int


def _app() -> App:
    app = App("127.0.0.1:1")

    @app.publisher("payments")
    @app.handler("orders", "billing", tag="canary", concurrency=8, max_attempts=5, dead_letter="orders-dead")
    async def bill(order: Order, key: Key, user: Annotated[str, Header()]) -> Bill:
        """Bill an order."""
        return Bill(order.number, 100)

    @app.handler("clicks", "archive")
    async def archive(click: dict[str, str]) -> None:
        """Keep a click."""

    return app


@pytest.mark.skipif(not os.environ.get("NSQEXT_TEST_PICTURES"), reason="NSQEXT_TEST_PICTURES is not set")
def test_draw_the_pictures_of_the_documentation(driver: Chrome) -> None:
    with ExitStack() as stack:
        shown = stack.enter_context(Cluster(nodes=3))
        shown.create_topic("orders", partitions=2, replicas=3, extend=True, channels=["audit", "billing"])
        shown.create_topic("payments", partitions=3, ordered=True, channels=["ledger"])
        shown.create_topic("clicks", partitions=3, channels=["archive"])
        options = WebOptions(write=True, interval=0.2, app_document=asyncapi_document(_app(), title="Shop"))
        page = WebPage(shown.lookupd, options, cluster=shown)
        browser = Browser(driver, f"http://{stack.enter_context(served(page, Address('127.0.0.1', 0)))}")
        producer = stack.enter_context(sync.Producer(shown.lookupd))
        consumers = [
            sync.Consumer("orders", "by-key", lookupd=shown.lookupd, dispatch="key_failover") for _ in range(3)
        ]
        consumers += [sync.Consumer("orders", "billing", lookupd=shown.lookupd, tag=tag) for tag in (None, "canary")]
        consumers.append(sync.Consumer("clicks", "archive", lookupd=shown.lookupd))
        for consumer in consumers:
            consumer.handler(lambda message: None)
            stack.enter_context(consumer)
        publishing = Event()
        thread = Thread(target=_publish, args=(producer, publishing), daemon=True)
        stack.callback(thread.join)
        stack.callback(publishing.set)
        thread.start()
        browser.open("/")
        points = "document.querySelector('.spark polyline')?.getAttribute('points').split(' ').length"
        for drawn in (20, 40, 60):  # each within the time of a wait
            browser.wait(partial(lambda wanted: (browser.script(points) or 0) >= wanted, drawn))
        for name, path, width, height, scheme in (
            ("web-overview", "/", 1280, 760, "light"),
            ("web-topic", "/topics/orders", 1280, 980, "dark"),
            ("web-channel", "/topics/orders/channels/by-key", 1280, 900, "light"),
            ("web-app", "/app", 1280, 1180, "light"),
            ("web-phone", "/topics/orders", 390, 844, "light"),
        ):
            browser.show_as(width=width, height=height, scheme=scheme)
            browser.open(path)
            browser.wait(lambda: browser.script("document.getElementById('state').hidden === false"))
            picture = PICTURES / f"{name}.png"
            assert driver.save_screenshot(str(picture))
            assert picture.stat().st_size < _LARGEST
        driver.get("about:blank")
