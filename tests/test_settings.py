"""Settings from keywords, URL, environment and defaults."""

from __future__ import annotations

import gc
import runpy
import ssl
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import attrs
import certifi
import pytest
import trustme

import nsqext
from nsqext import Position, sync
from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.settings import (
    consumer_schema,
    consumer_settings,
    handler_settings,
    producer_schema,
    producer_settings,
)
from nsqext.errors import InvalidSetting, UnknownSetting
from nsqext.settings import Given, Setting, build, parse, settings_of
from nsqext.settings_text import is_url, redact_url, settings_as_text
from tests.support.tables import table

EMPTY: Mapping[str, str] = {}


def collect(
    url: str | None = None,
    keywords: Mapping[str, Any] = EMPTY,
    environ: Mapping[str, str] = EMPTY,
    env: str | None = None,
) -> Given:
    """Return the settings of a producer with this URL; the addresses of the environment without one."""
    rest = {name: value for name, value in keywords.items() if name not in ("lookupd", "nsqd")}
    lookupd = url or keywords.get("lookupd", ())
    return producer_schema().collect(lookupd, keywords.get("nsqd", ()), env, rest, environ)


def produce(
    url: str | None = None, environ: Mapping[str, str] = EMPTY, env: str | None = None, **keywords: Any
) -> ProducerOptions:
    return build(ProducerOptions, producer_settings(), collect(url, keywords, environ, env).values)


def consume(url: str) -> ConsumerOptions:
    given = consumer_schema().collect(url, (), None, {}, EMPTY)
    return build(ConsumerOptions, consumer_settings(), given.values)


def test_without_settings_the_defaults_apply() -> None:
    for of_consumers in ("", "?max_in_flight=3"):  # a URL serves both
        assert produce(f"nsq://h{of_consumers}") == ProducerOptions()
    for of_producers in ("", "?retry_wait=3"):
        assert consume(f"nsq://h{of_producers}") == ConsumerOptions()


def test_precedence() -> None:
    environ = {"NSQEXT_TIMEOUT": "1", "NSQEXT_RETRY_WAIT": "0.1", "NSQEXT_MAX_BATCH_COUNT": "7"}
    url = "nsq://h?timeout=2&retry_wait=0.2"
    options = produce(url, environ, env="NSQEXT_", timeout=3.0)
    assert options == ProducerOptions(timeout=3.0, retry_wait=0.2, max_batch_count=7)


def test_the_environment_is_read_without_an_address_or_where_its_prefix_is_given() -> None:
    environ = {"NSQEXT_URL": "nsq://h:1?timeout=2", "NSQEXT_TIMEOUT": "1", "NSQEXT_RETRY_WAIT": "0.5"}
    alone = produce(None, environ)
    assert (alone.timeout, alone.retry_wait) == (2, 0.5)
    assert produce("nsq://h", environ) == ProducerOptions()
    beside = produce("nsq://h?retry_wait=0.7", environ, env="NSQEXT_")
    assert (beside.timeout, beside.retry_wait) == (2, 0.7)


def test_a_prefix_of_the_environment_separates_clusters() -> None:
    environ = {"ORDERS_URL": "nsq://a:1", "ORDERS_TIMEOUT": "3", "BILLS_NSQD": "b:1", "NSQEXT_TIMEOUT": "9"}
    orders, bills = collect(None, {}, environ, "ORDERS_"), collect(None, {}, environ, "BILLS_")
    assert (orders.lookupd, orders.values) == ("a:1", {"timeout": 3.0})
    assert (bills.nsqd, bills.values) == ("b:1", {})
    with pytest.raises(InvalidSetting, match="STOCK_LOOKUPD, STOCK_NSQD or STOCK_URL"):
        collect(None, {}, environ, "STOCK_")
    with pytest.raises(InvalidSetting, match="is not a prefix of variables"):
        collect(None, {}, environ, "orders!")


def test_addresses_of_keywords_precede_those_of_a_named_environment() -> None:
    given = collect(None, {"lookupd": "a:1"}, {"ORDERS_NSQD": "b:1", "ORDERS_TIMEOUT": "3"}, "ORDERS_")
    assert (given.lookupd, given.nsqd, given.values) == ("a:1", (), {"timeout": 3.0})


def test_an_unreadable_secret_is_not_shown() -> None:
    setting = Setting("lookup_token", "token", "", "int", 0, int, ProducerOptions)
    with pytest.raises(InvalidSetting, match=r"^URL: lookup_token=\*\*\* cannot be parsed") as caught:
        parse("hush", setting, "URL: ")
    assert caught.value.__cause__ is None


def test_without_an_address_the_error_names_all_ways() -> None:
    with pytest.raises(InvalidSetting, match="no address of lookup or nsqd") as caught:
        nsqext.Producer(env="NOWHERE_")
    for way in ("Producer(lookupd='host:4161')", "Producer('nsq://host:4161')", "NOWHERE_URL"):
        assert way in str(caught.value)


def test_variables_of_kubernetes_are_no_settings() -> None:
    environ = {
        "NSQEXT_PORT": "tcp://10.0.0.1:4161",
        "NSQEXT_SERVICE_HOST": "10.0.0.1",
        "NSQEXT_SERVICE_PORT": "4161",
        "NSQEXT_SERVICE_PORT_HTTP": "4161",
        "NSQEXT_PORT_4161_TCP": "tcp://10.0.0.1:4161",
        "NSQEXT_PORT_4161_TCP_ADDR": "10.0.0.1",
        "NSQEXT_LOOKUPD": "h:1",
    }
    given = collect(None, {}, environ)
    assert (given.lookupd, given.values) == ("h:1", {})


@pytest.mark.parametrize(
    ("url", "keywords", "environ", "lookupd", "nsqd"),
    [
        ("nsq://a:1,b,[::1]:2,[::2]", {}, {}, "a:1,b:4161,[::1]:2,[::2]:4161", ()),
        ("nsqd://a,b:5", {}, {"NSQEXT_LOOKUPD": "c:1"}, (), "a:4150,b:5"),
        ("nsq://?timeout=1", {}, {"NSQEXT_LOOKUPD": "c:1"}, "c:1", ()),
        ("nsq://?lookupd=x:1,y:2", {}, {}, "x:1,y:2", ()),
        (None, {}, {"NSQEXT_NSQD": "n:1"}, (), "n:1"),
        (None, {"lookupd": ["l:1"]}, {"NSQEXT_NSQD": "n:1"}, ["l:1"], ()),
    ],
)
def test_addresses(url: str | None, keywords: dict[str, Any], environ: dict[str, str], lookupd: Any, nsqd: Any) -> None:
    given = collect(url, keywords, environ)
    assert (given.lookupd, given.nsqd) == (lookupd, nsqd)


def test_values_of_every_kind() -> None:
    url = (
        "nsq://h?ordered=true&queue_position=no&partitions=0,2&start=offset:77&msg_timeout=none&sample_rate=0"
        "&backoff=off&max_attempts=5&dead_letter=dead&lookup_poll_interval=9"
        "&deflate_level=3&tag=canary&max_in_flight=9&key=none"
    )
    options = consume(url)
    assert (options.ordered, options.queue_position, options.partitions) == (True, False, (0, 2))
    assert (options.start, options.msg_timeout, options.backoff.mode) == (Position.offset(77), None, "off")
    assert (options.failure.max_attempts, options.failure.dead_letter) == (5, "dead")
    assert (options.lookup.poll_interval, options.connection.deflate_level) == (9, 3)
    assert (options.tag, options.max_in_flight) == ("canary", 9)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("earliest", Position.earliest()),
        ("latest", Position.latest()),
        ("timestamp:1000", Position.at(1000)),
        ("message:3", Position.message(3)),
    ],
)
def test_positions(text: str, position: Position) -> None:
    assert consume(f"nsq://h?start={text}").start == position
    assert nsqext.Consumer("orders", "ch", "h", start=text).settings["start"] == position


def test_tls(tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    assert produce("nsq://h?tls=true").connection.tls is True
    assert produce("nsq://h?tls=false").connection.tls is False
    context = produce(f"nsq://h?tls={tmp_path}/ca.pem").connection.tls
    assert isinstance(context, ssl.SSLContext)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize(
    ("url", "keywords", "environ", "reason"),
    [
        ("nsq://h?colour=red", {}, {}, "unknown setting 'colour'"),
        (None, {"lookupd": "h", "colour": "red"}, {}, "unknown setting 'colour'"),
        (None, {}, {"NSQEXT_COLOUR": "red"}, "unknown setting 'colour'"),
        (None, {"lookupd": "h", "start_timeout": 1.0}, {}, "unknown setting 'start_timeout'"),
        ("nsq://h?timeout=soon", {}, {}, "timeout='soon' cannot be parsed"),
        ("nsq://h?close_timeout=soon", {}, {}, "close_timeout='soon' cannot be parsed"),
        ("nsq://h?snappy=maybe", {}, {}, "write true or false"),
        ("nsq://h?tls=/no/such/file", {}, {}, "a file of certificates"),
        ("nsq://h?start=somewhere", {}, {}, "write earliest"),
        ("nsq://h?ext_filter=x", {}, {}, "cannot be written as text"),
        ("nsq://h?timeout=1&timeout=2", {}, {}, "timeout is given twice"),
        ("nsq://h?lookupd=a:1", {}, {}, "lookupd is given twice"),
        ("nsq://h?nsqd=a:1", {}, {}, "nsqd is given twice"),
        (None, {"lookupd": "a:1", "nsqd": "b:1"}, {}, "both lookupd and nsqd"),
        (None, {}, {"NSQEXT_LOOKUPD": "a:1", "NSQEXT_NSQD": "b:1"}, "both lookupd and nsqd"),
        ("nsq://h?snappy=1&deflate_level=3", {}, {}, "cannot be used together"),
        ("nsq://h?timeout=-1", {}, {}, "not a positive time"),
        ("nsq://h/topic", {}, {}, "neither path nor fragment"),
        ("nsq://h#topic", {}, {}, "neither path nor fragment"),
        ("nsq://[::1", {}, {}, "cannot be read"),
        ("nsq://me:hush@h", {}, {}, "no user names"),
        ("nsq://:hush@h?auth_secret=x", {}, {}, "given twice"),
    ],
)
def test_mistakes(url: str | None, keywords: dict[str, Any], environ: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason) as caught:
        build(ProducerOptions, producer_settings(), collect(url, keywords, environ).values)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "nsq://h:4161?auth_secert=hush",
        "nsq://h:4161?auth_secrt=hush",
        "nsq://h:4161?auth=hush&timeout=x",
        "nsq://h:4161?password=hush",
        "nsq://:hu#sh@h:4161",
        "nsq://:hu/sh@h:4161",
        "nsq://:hu?sh@h:4161",
        "nsq://user:hu/sh@h:4161",
        "nsq://user:hu?sh@h:4161",
        "nsq://:hush",
    ],
)
def test_misspelt_secrets_are_not_shown(url: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        nsqext.Producer(url)
    assert "hu" not in str(caught.value)
    assert "sh@" not in str(caught.value)


def test_a_secret_may_have_an_at_sign() -> None:
    given = collect("nsq://:a@b@h:1?")
    assert (given.lookupd, given.values) == ("h:1", {"auth_secret": "a@b"})


def test_the_settings_of_a_client_show_no_secret_and_cannot_be_changed() -> None:
    shown = nsqext.Producer("nsq://:hush@h").settings
    assert (shown["auth_secret"], shown["lookup_auth_secret"]) == ("***", None)


def test_settings_for_another_process_are_those_of_url_and_environment_without_addresses() -> None:
    environ = {"NSQEXT_LOOKUPD": "h:1", "NSQEXT_TIMEOUT": "1", "NSQEXT_RETRY_WAIT": "0.1", "NSQEXT_TEST_X": "y"}
    assert settings_as_text("nsq://h:2?timeout=2", environ) == {"timeout": "2", "retry_wait": "0.1"}
    assert settings_as_text(None, {"NSQEXT_URL": "nsqd://:hush@h?snappy=1"}) == {"auth_secret": "hush", "snappy": "1"}


def test_secrets_are_read_and_never_shown() -> None:
    options = produce("nsq://:hu%2Fsh@h")
    assert options.connection.auth_secret == "hu/sh"
    assert "hu/sh" not in repr(options)
    url = "nsq://:hush@h:1?timeout=1&auth_secret=hush"
    assert redact_url(url, producer_settings()) == "nsq://***@h:1?timeout=1&auth_secret=***"
    assert redact_url(url, ()) == "nsq://***@h:1?timeout=***&auth_secret=***"
    assert redact_url(url) == "nsq://***@h:1?timeout=1&auth_secret=***"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("h:4161", "h:4161"),
        ("https://h/nsq?a=1", "https://h/nsq?a=1"),
        ("https://user:hush@h/nsq", "https://***@h/nsq"),
        ("nsq://user:hu/s@h@h:4161", "nsq://***@h:4161"),
        ("nsq://:hush", "nsq://***"),
        ("https://h/?password=hu@sh", "https://h/?password=***"),
        ("https://h/?auth_%73ecret=hush&b=2", "https://h/?auth_%73ecret=***&b=2"),
        ("https://h/?b=2;authtoken=hush", "https://h/?b=2;authtoken=***"),
        ("user:hush@h:4161", "***@h:4161"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, shown: str) -> None:
    assert redact_url(url) == shown
    assert "hu" not in redact_url(url, ())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("time_out", "timeout"),
        ("tlss", "tls"),
        ("max-retry-wait", "max_retry_wait"),
        ("lookup", "lookupd"),
        ("auth_secrt", "auth_secret"),
    ],
)
def test_a_misspelt_setting_suggests_the_right_one(name: str, meant: str) -> None:
    places: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        (f"nsq://h?{name}=hush", {}, {}),
        ("nsq://h", {name: "hush"}, {}),
        ("nsq://h", {}, {f"NSQEXT_{name.upper()}": "hush"}),
    ]
    for url, keywords, environ in places:
        with pytest.raises(InvalidSetting, match=f"did you mean {meant}") as caught:
            collect(url, keywords, environ, "NSQEXT_")
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "unknown", "meant"),
    [
        (nsqext.Producer, "bogus", "Producer: unknown setting 'bogus'"),
        (nsqext.Producer, "lokupd", "did you mean lookupd?"),
        (nsqext.Producer, "timout", "did you mean timeout?"),
        (nsqext.Producer, "max_in_flight", "Producer: unknown setting 'max_in_flight'"),
        (nsqext.Consumer, "max_inflight", "Consumer: unknown setting .*did you mean max_in_flight?"),
        (sync.Producer, "timout", "did you mean timeout?"),
        (sync.Consumer, "msg_timeot", "did you mean msg_timeout?"),
        (nsqext.App, "lokupd", "App: .*did you mean lookupd?"),
        (nsqext.App, "msg_timeot", "did you mean msg_timeout?"),
        (nsqext.Router().handler, "max_inflight", "handler.*did you mean max_in_flight?"),
        (nsqext.Router().handler, "bogus", "handler.*unknown setting 'bogus'"),
        (nsqext.Router().batch_handler, "maxcount", "handler.*did you mean max_count?"),
        (nsqext.Router().handler, "autofinish", "handler.*did you mean auto_finish?"),
        (nsqext.Producer, "middlewares", "did you mean middleware?"),
        (nsqext.Lookup, "lookup_poll_intervall", "Lookup: .*did you mean lookup_poll_interval?"),
        (nsqext.Admin, "time_out", "Admin: .*did you mean timeout?"),
        (sync.Admin, "lookup_auth_secert", "did you mean lookup_auth_secret?"),
    ],
)
def test_an_unknown_keyword_suggests_the_right_one(call: Callable[..., object], unknown: str, meant: str) -> None:
    given = ("t", "ch") if "andler" in call.__name__ or "Consumer" in call.__name__ else ("h",)
    with warnings.catch_warnings(record=True) as caught:
        with pytest.raises(UnknownSetting, match=meant.replace("?", r"\?")) as error:
            call(*given, **{unknown: 1})
        gc.collect()
    assert isinstance(error.value, TypeError)
    assert caught == []


@pytest.mark.parametrize("address", [4161, b"127.0.0.1:4161"])
def test_addresses_that_are_not_text_are_refused(address: Any) -> None:
    for arguments in ({"lookupd": address}, {"nsqd": address}):
        with pytest.raises(InvalidSetting, match=r"is not an address: write text such as"):
            nsqext.Producer(**arguments)


def test_names_are_unambiguous_and_complete() -> None:
    for options, settings in ((ProducerOptions, producer_settings()), (ConsumerOptions, consumer_settings())):
        members = 0
        for outer in attrs.fields(options):
            factory = getattr(outer.default, "factory", None)
            members += len(attrs.fields(factory)) if factory is not None and attrs.has(factory) else 1
        assert len(settings) == members
    shared = producer_settings().keys() & consumer_settings().keys()
    shared -= {"close_timeout", "lookup_timeout", "key_tags"}  # of both, with a default for each
    assert all(producer_settings()[name].owner is consumer_settings()[name].owner for name in shared)
    text_only_by_keyword = {name for name, setting in consumer_settings().items() if setting.read is None}
    assert text_only_by_keyword == {"ext_filter", "node_filter"}


@pytest.mark.parametrize(
    ("typed", "settings"),
    [
        (nsqext.ProducerSettings, producer_settings()),
        (nsqext.ConsumerSettings, consumer_settings()),
        (nsqext.HandlerSettings, handler_settings()),
        (nsqext.AppSettings, {**producer_settings(), **consumer_settings()}),
    ],
)
def test_the_typed_dictionaries_have_the_settings(typed: Any, settings: Mapping[str, Setting]) -> None:
    assert typed.__optional_keys__ == settings.keys()
    assert not typed.__required_keys__


def test_variables_of_tests_are_ignored() -> None:
    environ = {"NSQEXT_TEST_LOOKUPD": "a", "NSQEXT_BENCH_NSQD": "b", "OTHER": "c", "NSQEXT_LOOKUPD": "h"}
    assert produce(None, environ) == ProducerOptions()


def test_variables_of_other_parts_are_settings_with_another_prefix() -> None:
    environ = {"NSQEXT_WEB_LOOKUPD": "h", "NSQEXT_WEB_TIMEOUT": "3"}
    assert produce(None, environ, "NSQEXT_WEB_").timeout == 3


@table(
    ("text", "expected"), [("nsq://h", True), (" nsqd://h\n", True), ("http://h", False), ("h:1", False), (1, False)]
)
def test_urls_are_told_from_addresses(text: object, expected: bool) -> None:
    assert is_url(text) is expected


@pytest.mark.parametrize("text", ["TRUE", "True", "yes", "ON", "1"])
def test_truth_has_several_spellings(text: str) -> None:
    assert produce(f"nsq://h?snappy={text}").connection.snappy is True


def test_an_empty_parameter_is_a_value() -> None:
    with pytest.raises(InvalidSetting, match="timeout='' cannot be parsed"):
        produce("nsq://h?timeout=")


def test_two_settings_of_a_name_are_an_error_of_the_option_class() -> None:
    @attrs.frozen
    class Backoff:
        base: float = 1.0

    @attrs.frozen
    class Options:
        backoff_base: float = 2.0
        backoff: Backoff = attrs.Factory(Backoff)

    with pytest.raises(TypeError, match="two settings of Options have the name backoff_base"):
        settings_of(Options)


def test_an_error_of_a_group_has_the_name_of_the_setting() -> None:
    with pytest.raises(InvalidSetting, match=r"^lookup_poll_interval=-1"):
        produce("nsq://h?lookup_poll_interval=-1")


def test_clients_from_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDERS_MAX_IN_FLIGHT", "9")
    assert nsqext.Producer("nsq://h", timeout=2.0).settings["timeout"] == 2
    compression = nsqext.Producer("nsq://h", compression={"orders": "gzip"}).settings["compression"]
    assert isinstance(compression, MappingProxyType)
    assert compression == {"orders": "gzip"}
    consumer = nsqext.Consumer("orders", "ch", "nsq://h", partitions=[1])  # type: ignore[arg-type]
    assert consumer.settings["partitions"] == (1,)
    assert nsqext.Consumer("orders", "ch", "nsqd://h", tag="blue", env="ORDERS_").settings["max_in_flight"] == 9
    assert sync.Producer("nsq://h?timeout=2").settings["timeout"] == 2
    assert sync.Consumer("orders", "ch", "nsq://h", close_timeout=1.0).settings["close_timeout"] == 1
    with pytest.raises(InvalidSetting, match="both a URL and nsqd"):
        nsqext.Producer("nsq://h", nsqd="n:1")


def test_a_value_that_is_given_wins_over_one_that_is_not() -> None:
    """A handler's value counts also where it equals the default."""
    app = nsqext.App("h", max_attempts=2, dead_letter="dead", backoff="off", concurrency=4)
    app.handler("orders", "ch", max_attempts=0, dead_letter=None, backoff="consumer", concurrency=1)(_unused)
    app.handler("bills", "ch")(_unused)
    own, shared = (consumer.settings for consumer in app.consumers)
    names = ("max_attempts", "dead_letter", "backoff", "concurrency")
    assert [own[name] for name in names] == [0, None, "consumer", 1]
    assert [shared[name] for name in names] == [2, "dead", "off", 4]


async def _unused(message: nsqext.Message) -> None:
    """Never called."""


def test_the_table_of_the_documentation_is_complete() -> None:
    """To write it again: python docs/settings_table.py."""
    found = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "settings_table.py"))
    assert found["PAGE"].read_text(encoding="utf-8") == found["page"]()


_SAMPLES = {
    "key_hash": "java_string",
    "delay_via": "relay",
    "compression": "gzip",
    "start": "earliest",
    "dispatch": "key_failover",
    "tls": "false",
    "deflate_level": "3",
    "heartbeat_interval": "7",
    "lookup_poll_jitter": "0.7",
    "requeue_jitter": "0.7",
    "sample_rate": "7",
    "output_buffer_timeout": "0.7",
    "partitions": "7",
    "max_retry_wait": "7",
    "on_lost": "ignore",
    "balance": "least_pending",
    "on_unknown": "raise",
    "transport": "http",
    "backoff": "off",
    "backoff_base": "7",
    "lookup_ca": certifi.where(),
    "address_map": "nsqd-0=10.0.0.7",
}


_NEEDED = {
    "start_existing": "start=earliest",
    "tls_hostname": "tls=true",
    "lookup_auth_secret": "lookup_auth_over_http=true",
    "dead_letter": "max_attempts=3",
    "reject_ordered": "max_attempts=3",
    "key_tags": "dispatch=key_failover",
    "settle_timeout": "on_unknown=settle",
    "compression_min": "compression=gzip",
    "redelivery_wait": "key=user",
    "gap_wait": "key=user",
    "settle_wait": "key=user",
}
"""Settings without which another one is not valid."""


def _sample(setting: Setting) -> str:
    """Return the text of a valid value that is not the default."""
    if setting.name in _SAMPLES:
        return _SAMPLES[setting.name]
    if setting.kind.startswith("bool"):
        return str(not setting.default)
    return "700" if setting.kind.startswith(("int", "float")) else "text"


def _value(client: Any, setting: Setting) -> object:
    """Return the value that a client runs with."""
    inner = getattr(client, "_producer", None) or getattr(client, "_consumer", None) or client
    inner = getattr(inner, "_original", inner)  # of a blocking client
    options = getattr(inner._options, setting.group) if setting.group else inner._options
    return getattr(options, setting.member)


def _app_consumer(*url: str, **keywords: Any) -> nsqext.Consumer:
    """Return the consumer of a handler of an app."""
    app = nsqext.App(*url, **keywords)
    router = nsqext.Router()

    @router.handler("orders", "ch")
    async def handle(message: nsqext.Message) -> None:
        """Never called."""

    app.include_router(router)
    return app.consumers[0]


_ENTRIES: dict[str, tuple[Callable[..., Any], Mapping[str, Setting]]] = {
    "Producer": (nsqext.Producer, producer_settings()),
    "sync.Producer": (sync.Producer, producer_settings()),
    "Consumer": (partial(nsqext.Consumer, "orders", "ch"), consumer_settings()),
    "sync.Consumer": (partial(sync.Consumer, "orders", "ch"), consumer_settings()),
    "App.producer": (lambda *url, **keywords: nsqext.App(*url, **keywords).producer, producer_settings()),
    "App.handler": (_app_consumer, consumer_settings()),
}


_PLACES = ("keyword", "url", "environment")


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("entry", _ENTRIES)
def test_every_setting_reaches_every_client(entry: str, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers and consumers take each setting at each place; what forwards to them takes it at one place."""
    make, settings = _ENTRIES[entry]
    read = [setting for setting in settings.values() if setting.read is not None]
    forwards = entry not in ("Producer", "Consumer")
    reached = set[str]()
    for number, setting in enumerate(read[turn::3] if forwards else read):
        assert setting.read is not None
        text = _sample(setting)
        value = setting.read(text)
        assert value != setting.default, setting.name
        needed = _NEEDED.get(setting.name, "")
        place = _PLACES[(turn + number) % 3]
        with monkeypatch.context() as patch:
            if place == "keyword":
                client = make(f"nsq://h?{needed}", **{setting.name: value})
            elif place == "url":
                client = make(f"nsq://h?{setting.name}={quote(text)}&{needed}")
            else:
                patch.setenv(f"ORDERS_{setting.name.upper()}", text)
                client = make(f"nsq://h?{needed}", env="ORDERS_")
        assert _value(client, setting) == value, setting.name
        reached.add(setting.name)
    assert len(reached) >= len(read) // 3 > 0


@pytest.mark.parametrize("entry", ["Producer", "Consumer"])
def test_a_value_of_another_kind_is_refused(entry: str) -> None:
    make, settings = _ENTRIES[entry]
    wrong = {"bool": "no", "bool | None": "no", "str | None": 5}
    refused = [name for name, setting in settings.items() if setting.kind in wrong]
    for name in refused:
        with pytest.raises(InvalidSetting, match=rf"^{name}(='no' is not True or False| is a int)"):
            make("nsq://h", **{name: wrong[settings[name].kind]})
    assert len(refused) > 5


@pytest.mark.parametrize(("name", "value"), [("timeout", "5"), ("close_timeout", "5")])
def test_a_time_given_as_text_is_named_as_text(name: str, value: str) -> None:
    keywords: Any = {name: value}
    with pytest.raises(InvalidSetting, match=f"{name}='5' is text: give a number of seconds"):
        nsqext.Producer("h:1", **keywords)
