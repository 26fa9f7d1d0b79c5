"""Settings from keywords, URL, environment and defaults."""

from __future__ import annotations

import gc
import runpy
import ssl
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import attrs
import certifi
import pytest
import trustme

import nsqext
from nsqext import ConnectionOptions, ConsumerOptions, LookupOptions, Position, ProducerOptions, sync
from nsqext.client.from_url import consumer_settings, load_consumer, load_producer, producer_settings
from nsqext.errors import InvalidSetting
from nsqext.errors.redaction import redact_url

if TYPE_CHECKING:
    from nsqext.settings import Setting

EMPTY: Mapping[str, str] = {}


def produce(url: str | None = None, environ: Mapping[str, str] = EMPTY, **keywords: Any) -> ProducerOptions:
    return load_producer(url, keywords, environ).options


def test_without_settings_the_defaults_apply() -> None:
    assert produce() == ProducerOptions()
    assert load_consumer(None, {}, EMPTY).options == ConsumerOptions()


def test_precedence() -> None:
    environ = {"NSQEXT_TIMEOUT": "1", "NSQEXT_RETRY_WAIT": "0.1", "NSQEXT_MAX_BATCH_COUNT": "7"}
    url = "nsq://h?timeout=2&retry_wait=0.2"
    options = produce(url, environ, timeout=3.0)
    assert options == ProducerOptions(timeout=3.0, retry_wait=0.2, max_batch_count=7)


def test_the_url_of_the_environment() -> None:
    environ = {"NSQEXT_URL": "nsq://h:1?timeout=2", "NSQEXT_TIMEOUT": "1"}
    assert produce(None, environ).timeout == 2
    assert produce("nsq://h", environ).timeout == 1


@pytest.mark.parametrize(
    ("url", "keywords", "environ", "lookupd", "nsqd"),
    [
        ("nsq://a:1,b,[::1]:2,[::2]", {}, {}, "a:1,b:4161,[::1]:2,[::2]:4161", ()),
        ("nsqd://a,b:5", {}, {"NSQEXT_LOOKUPD": "c:1"}, (), "a:4150,b:5"),
        ("nsq://a:1", {"nsqd": ["n:1"]}, {}, (), ["n:1"]),
        ("nsq://?timeout=1", {}, {"NSQEXT_LOOKUPD": "c:1"}, "c:1", ()),
        ("nsq://?lookupd=x:1,y:2", {}, {}, "x:1,y:2", ()),
        (None, {}, {"NSQEXT_NSQD": "n:1"}, (), "n:1"),
        (None, {}, {}, (), ()),
    ],
)
def test_addresses(url: str | None, keywords: dict[str, Any], environ: dict[str, str], lookupd: Any, nsqd: Any) -> None:
    loaded = load_producer(url, keywords, environ)
    assert (loaded.lookupd, loaded.nsqd) == (lookupd, nsqd)


def test_values_of_every_kind() -> None:
    url = (
        "nsq://h?ordered=true&queue_position=no&partitions=0,2&start=offset:77&msg_timeout=none&sample_rate=0"
        "&backoff_mode=off&failure_max_attempts=5&failure_dead_letter=dead&lookup_poll_interval=9"
        "&connection_deflate_level=3&tag=canary&max_in_flight=9&key=none"
    )
    loaded = load_consumer(url, {}, EMPTY)
    options = loaded.options
    assert (options.ordered, options.queue_position, options.partitions) == (True, False, (0, 2))
    assert (options.start, options.msg_timeout, options.backoff.mode) == (Position.offset(77), None, "off")
    assert (options.failure.max_attempts, options.failure.dead_letter) == (5, "dead")
    assert (options.lookup, options.connection) == (
        LookupOptions(poll_interval=9),
        ConnectionOptions(deflate_level=3),
    )
    assert loaded.others == {"tag": "canary", "max_in_flight": 9}


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
    assert load_consumer(f"nsq://h?start={text}", {}, EMPTY).options.start == position


def test_tls(tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    assert produce("nsq://h?connection_tls=true").connection.tls is True
    assert produce("nsq://h?connection_tls=false").connection.tls is False
    context = produce(f"nsq://h?connection_tls={tmp_path}/ca.pem").connection.tls
    assert isinstance(context, ssl.SSLContext)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize(
    ("url", "keywords", "environ", "reason"),
    [
        ("nsq://h?colour=red", {}, {}, "unknown setting 'colour'"),
        (None, {"colour": "red"}, {}, "unknown setting 'colour'"),
        (None, {}, {"NSQEXT_COLOUR": "red"}, "unknown setting 'colour'"),
        (None, {"start_timeout": 1.0}, {}, "unknown setting 'start_timeout'"),
        ("nsq://h?timeout=soon", {}, {}, "timeout='soon' cannot be parsed"),
        ("nsq://h?close_timeout=soon", {}, {}, "close_timeout='soon' cannot be parsed"),
        ("nsq://h?connection_snappy=maybe", {}, {}, "write true or false"),
        ("nsq://h?connection_tls=/no/such/file", {}, {}, "a file of certificates"),
        ("nsq://h?start=somewhere", {}, {}, "write earliest"),
        ("nsq://h?ext_filter=x", {}, {}, "cannot be written as text"),
        ("nsq://h?timeout=1&timeout=2", {}, {}, "timeout is given twice"),
        ("nsq://h?lookupd=a:1", {}, {}, "lookupd is given twice"),
        ("nsq://h?nsqd=a:1", {}, {}, "nsqd is given twice"),
        (None, {"lookupd": "a:1", "nsqd": "b:1"}, {}, "both lookupd and nsqd"),
        (None, {}, {"NSQEXT_LOOKUPD": "a:1", "NSQEXT_NSQD": "b:1"}, "both lookupd and nsqd"),
        ("nsq://h?connection_snappy=1&connection_deflate_level=3", {}, {}, "cannot be used together"),
        ("nsq://h?timeout=-1", {}, {}, "not positive"),
        ("http://h", {}, {}, "scheme 'http'"),
        ("nsq://h/topic", {}, {}, "neither path nor fragment"),
        ("nsq://[::1", {}, {}, "cannot be read"),
        ("nsq://me:hush@h", {}, {}, "no user names"),
        ("nsq://:hush@h?connection_auth_secret=x", {}, {}, "given twice"),
    ],
)
def test_mistakes(url: str | None, keywords: dict[str, Any], environ: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason) as caught:
        load_producer(url, keywords, environ)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "nsq://h:4161?auth_secret=hush",
        "nsq://h:4161?connection_auth_secrt=hush",
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
        nsqext.Producer.from_url(url)
    assert "hu" not in str(caught.value)
    assert "sh@" not in str(caught.value)


def test_secrets_are_read_and_never_shown() -> None:
    options = produce("nsq://:hu%2Fsh@h")
    assert options.connection.auth_secret == "hu/sh"
    assert "hu/sh" not in repr(options)
    url = "nsq://:hush@h:1?timeout=1&connection_auth_secret=hush"
    assert redact_url(url, producer_settings()) == "nsq://***@h:1?timeout=1&connection_auth_secret=***"
    assert redact_url(url, ()) == "nsq://***@h:1?timeout=***&connection_auth_secret=***"
    assert redact_url(url) == "nsq://***@h:1?timeout=1&connection_auth_secret=***"


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
        ("tls", "connection_tls"),
        ("max-retry-wait", "max_retry_wait"),
        ("lookup", "lookupd"),
        ("connection_auth_secrt", "connection_auth_secret"),
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
            load_producer(url, keywords, environ)
        assert "hush" not in str(caught.value)


def test_an_unknown_argument_suggests_the_right_one() -> None:
    for arguments, meant in (
        ({"bogus": 1}, r"no argument 'bogus': it has lookupd, nsqd, connect, options"),
        ({"lokupd": "h"}, "did you mean lookupd="),
        ({"timeout": 1}, r"did you mean options=ProducerOptions\(timeout=...\)"),
        ({"timout": 1}, r"did you mean options=ProducerOptions\(timeout=...\)"),
    ):
        with pytest.raises(TypeError, match=meant), warnings.catch_warnings(record=True) as caught:
            nsqext.Producer("h", **arguments)
        gc.collect()
        assert caught == []


@pytest.mark.parametrize("kind", [nsqext.Consumer, sync.Consumer])
def test_an_unknown_argument_of_a_consumer_suggests_the_right_one(kind: Callable[..., object]) -> None:
    for arguments, meant in (
        ({"bogus": 1}, r"no argument 'bogus': it has lookupd, nsqd, tag, max_in_flight"),
        ({"max_inflight": 3}, "did you mean max_in_flight="),
        ({"msg_timeout": 3}, r"did you mean options=ConsumerOptions\(msg_timeout=...\)"),
    ):
        with pytest.raises(TypeError, match=meant):
            kind("t", "ch", lookupd="h", **arguments)


@pytest.mark.parametrize(
    ("call", "unknown", "meant"),
    [
        (nsqext.App, "lokupd", "App.*did you mean lookupd="),
        (nsqext.App, "timeout", r"did you mean producer_options=ProducerOptions\(timeout=...\)"),
        (nsqext.App, "msg_timeout", r"did you mean consumer_options=ConsumerOptions\(msg_timeout=...\)"),
        (nsqext.Router().handler, "max_inflight", "handler.*did you mean max_in_flight="),
        (nsqext.Router().handler, "bogus", "it has tag, max_in_flight, .*options=ConsumerOptions"),
        (nsqext.Router().batch_handler, "maxcount", "batch_handler.*did you mean max_count="),
        (nsqext.Lookup, "option", "Lookup.*did you mean options="),
        (nsqext.Lookup, "poll_intervall", r"did you mean options=LookupOptions\(poll_interval=...\)"),
        (nsqext.Admin, "time_out", "Admin.*did you mean timeout="),
        (sync.Admin, "auth_secret", r"did you mean options=LookupOptions\(auth_secret=...\)"),
    ],
)
def test_a_misspelt_argument_suggests_the_right_one(call: Callable[..., object], unknown: str, meant: str) -> None:
    given = ("t", "ch") if "handler" in call.__name__ else ("h",)
    with pytest.raises(TypeError, match=meant):
        call(*given, **{unknown: 1})


@pytest.mark.parametrize("options", [{}, {"timeout": 3}, nsqext.BackoffOptions()])
def test_options_of_another_class_are_refused(options: Any) -> None:
    for make in (
        lambda: nsqext.Producer("h", options=options),
        lambda: nsqext.Consumer("t", "ch", lookupd="h", options=options),
        lambda: nsqext.App("h", producer_options=options),
        lambda: nsqext.App("h", consumer_options=options),
        lambda: nsqext.Admin("h", options=options),
        lambda: nsqext.Lookup("h", options=options),
        lambda: nsqext.App("h").handler("t", "ch", options=options)(_unused),
    ):
        with pytest.raises(InvalidSetting, match=rf"options is a {type(options).__name__}.*Options\(...\)"):
            make()


async def _unused(message: nsqext.Message) -> None:
    """Never called."""


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
        assert len([setting for setting in settings.values() if setting.owner is not None]) == members
    shared = producer_settings().keys() & consumer_settings().keys()
    shared.remove("close_timeout")  # how long closing waits, of both, with a default for each
    assert all(producer_settings()[name].owner is consumer_settings()[name].owner for name in shared)
    text_only_by_keyword = {name for name, setting in consumer_settings().items() if setting.read is None}
    assert text_only_by_keyword == {"ext_filter"}


def test_variables_of_tests_are_ignored() -> None:
    assert produce(None, {"NSQEXT_TEST_LOOKUPD": "a", "NSQEXT_BENCH_NSQD": "b", "OTHER": "c"}) == ProducerOptions()


def test_clients_from_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSQEXT_MAX_IN_FLIGHT", "9")
    assert nsqext.Producer.from_url("nsq://h", timeout=2.0).options.timeout == 2
    assert nsqext.Consumer.from_url("orders", "ch", "nsqd://h", tag="blue").tag == "blue"
    assert sync.Producer.from_url("nsq://h?timeout=2").options.timeout == 2
    assert sync.Consumer.from_url("orders", "ch", "nsq://h", close_timeout=1.0).options.close_timeout == 1
    with pytest.raises(InvalidSetting, match="neither lookupd nor nsqd"):
        nsqext.Producer.from_url()


def test_the_table_of_the_documentation_is_complete() -> None:
    """To write it again: python docs/settings_table.py."""
    found = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "settings_table.py"))
    assert found["PAGE"].read_text(encoding="utf-8") == found["page"]()


_SAMPLES = {
    "key_hash": "java_string",
    "compression": "gzip",
    "start": "earliest",
    "dispatch": "key_failover",
    "connection_tls": "false",
    "connection_deflate_level": "3",
    "connection_heartbeat_interval": "7",
    "lookup_poll_jitter": "0.7",
    "failure_jitter": "0.7",
    "sample_rate": "7",
    "output_buffer_timeout": "0.7",
    "partitions": "7",
    "max_retry_wait": "7",
    "delivery_on_lost": "ignore",
    "balance": "least_pending",
    "on_unknown": "raise",
    "backoff_mode": "off",
    "backoff_base": "7",
    "lookup_ca": certifi.where(),
}


_NEEDED = {
    "start_existing": "start=earliest",
    "connection_tls_hostname": "connection_tls=true",
    "lookup_auth_secret": "lookup_auth_over_http=true",
    "failure_dead_letter": "failure_max_attempts=3",
    "failure_reject_ordered": "failure_max_attempts=3",
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
    if setting.owner is None:
        return getattr(inner, setting.name, None) or getattr(inner, f"_{setting.name}")
    options = getattr(inner.options, setting.group) if setting.group else inner.options
    return getattr(options, setting.member)


def _app_consumer(*url: str, **keywords: Any) -> nsqext.Consumer:
    """Return the consumer of a handler of an app."""
    app = nsqext.App.from_url(*url, **keywords)
    router = nsqext.Router()

    @router.handler("orders", "ch")
    async def handle(message: nsqext.Message) -> None:
        """Never called."""

    app.include_router(router)
    return app.consumers[0]


_ENTRIES: dict[str, tuple[Callable[..., Any], dict[str, Setting]]] = {
    "Producer": (nsqext.Producer.from_url, producer_settings()),
    "sync.Producer": (sync.Producer.from_url, producer_settings()),
    "Consumer": (partial(nsqext.Consumer.from_url, "orders", "ch"), consumer_settings()),
    "sync.Consumer": (partial(sync.Consumer.from_url, "orders", "ch"), consumer_settings()),
    "App.producer": (lambda *url, **keywords: nsqext.App.from_url(*url, **keywords).producer, producer_settings()),
    "App.handler": (_app_consumer, consumer_settings()),
}


@pytest.mark.parametrize("place", ["keyword", "url", "environment"])
@pytest.mark.parametrize("entry", _ENTRIES)
def test_every_setting_reaches_every_client(entry: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, settings = _ENTRIES[entry]
    reached = 0
    for setting in settings.values():
        if setting.read is None:
            continue
        text = _sample(setting)
        value = setting.read(text)
        assert value != setting.default, setting.name
        needed = _NEEDED.get(setting.name, "")
        with monkeypatch.context() as patch:
            if place == "keyword":
                client = make(f"nsq://h?{needed}", **{setting.name: value})
            elif place == "url":
                client = make(f"nsq://h?{setting.name}={quote(text)}&{needed}")
            else:
                patch.setenv(f"NSQEXT_{setting.name.upper()}", text)
                client = make(f"nsq://h?{needed}")
        assert _value(client, setting) == value, setting.name
        reached += 1
    assert reached == len([setting for setting in settings.values() if setting.read is not None])
