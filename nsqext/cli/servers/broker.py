"""``nsqext broker``: run a cluster until SIGTERM or Ctrl+C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

from attrs import frozen

from nsqext.cli.command import command, examples
from nsqext.cli.parameters import Option
from nsqext.cli.servers.web import WEB_PORT, web_options
from nsqext.cli.waiting import waits
from nsqext.errors import InvalidSetting
from nsqext.protocol.names import DEFAULT_CHANNEL
from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.broker import Cluster, ClusterOptions
    from nsqext.web import WebOptions

_LEASE = 0.3  # seconds
_FLAGS = ("extend", "ordered")
_NUMBERS = ("partitions", "replicas")
_GENERATIONS = {"redesigned": "redesigned NSQ", "original": "original NSQ"}


def parse_topic(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``NAME[:OPTION[,OPTION…]]`` to a name and arguments of `nsqext.broker.Cluster.create_topic`."""
    name, _, options = text.partition(":")
    arguments: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if key in _FLAGS and not equals:
            arguments[key] = True
        elif key in _NUMBERS and value.isdecimal():
            arguments[key] = int(value)
        elif key == "channel" and value:
            arguments.setdefault("channels", []).append(value)
        else:
            raise InvalidSetting(
                f"unknown topic option {option!r}",
                topic=name,
                hint="use partitions=N, replicas=N, extend, ordered, channel=NAME",
            )
    return name, arguments


@frozen
class Addresses:
    """Listening addresses of the servers."""

    lookupd_http_address: Annotated[
        list[str] | None, Option(help="HOST:PORT of a lookup node's HTTP side; repeat for each.")
    ] = None
    lookupd_tcp_address: Annotated[
        list[str] | None, Option(help="HOST:PORT of a lookup node's TCP side; repeat for each.")
    ] = None
    tcp_address: Annotated[list[str] | None, Option(help="HOST:PORT of an nsqd's TCP side; repeat for each.")] = None
    http_address: Annotated[list[str] | None, Option(help="HOST:PORT of an nsqd's HTTP side; repeat for each.")] = None
    host: Annotated[str, Option(help="Host of addresses that are not given.")] = "127.0.0.1"
    broadcast_address: Annotated[str, Option(help="Host in the addresses that clients receive.")] = ""


@frozen
class Protection:
    """Access to the servers."""

    tls_cert: Annotated[Path | None, Option(help="Certificate, for clients that use TLS.")] = None
    tls_key: Annotated[Path | None, Option(help="Its key.")] = None
    http_guard: Annotated[bool, Option(help="Refuse HTTP requests of other web sites, by Host and Origin.")] = True
    http_host: Annotated[
        list[str] | None, Option(help="A further host name that HTTP clients use; repeat for each.")
    ] = None

    def files(self) -> tuple[Path, Path] | None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidSetting("--tls-cert and --tls-key need each other", hint="give both, or neither of them")
        return (self.tls_cert, self.tls_key) if self.tls_cert and self.tls_key else None


@frozen
class PageOptions:
    """The web page."""

    web: Annotated[
        bool,
        Option("--web", help="Serve the web page, with changes, and with buttons that kill, freeze and restart nodes."),
    ] = False
    web_port: Annotated[int, Option(min=0, max=65535, help="Port of the web page on 127.0.0.1; 0 for a free port.")] = (
        WEB_PORT
    )


@examples(
    "nsqext broker --topic orders:partitions=2,extend,channel=billing",
    "nsqext broker --web --nodes 1 --data-path data",
    "nsqext broker --generation original",
)
@command
def run(
    nodes: Annotated[int, Option(help="Number of nsqd.")] = 3,
    lookupds: Annotated[int, Option(help="Number of nsqlookupd.")] = 1,
    generation: Annotated[str, Option(help="redesigned or original.")] = "redesigned",
    topic: Annotated[
        list[str] | None,
        Option(help="A topic to create: NAME, or NAME: and partitions=N, replicas=N, extend, ordered, channel=NAME."),
    ] = None,
    data_path: Annotated[
        Path | None, Option(help="Folder for messages and topics. (default: keep them in memory)")
    ] = None,
    page: PageOptions = PageOptions(),
    addresses: Addresses = Addresses(),
    protection: Protection = Protection(),
    lease: Annotated[float, Option(help="Seconds before the partitions of a silent node move to others.")] = _LEASE,
) -> None:
    """Run an NSQ cluster in one process: nsqd and nsqlookupd of either generation.

    ^C or SIGTERM closes the servers gracefully; a second signal, after a second, exits immediately.
    """
    from nsqext.broker import Cluster
    from nsqext.client.signals import stopping_on_signals

    topics: dict[str, dict[str, Any]] = {}
    for name, arguments in map(parse_topic, topic or ()):
        if name in topics:
            raise InvalidSetting("--topic is given twice for one topic", topic=name, hint="give its options together")
        topics[name] = arguments
    for arguments in topics.values():
        if generation == "redesigned":  # the redesigned NSQ refuses publishes to a topic without channels
            arguments.setdefault("channels", [DEFAULT_CHANNEL])
    if generation == "original" and lease != _LEASE:
        raise InvalidSetting("--lease with the original NSQ would be ignored", hint="leave it out")
    options = _cluster_options(addresses, protection, lease)
    if page.web_port != WEB_PORT and not page.web:
        raise InvalidSetting("--web-port without --web would be ignored", hint="give --web")
    page_options = web_options("127.0.0.1", write=True) if page.web else None
    ending: SimpleQueue[None] = SimpleQueue()  # not an Event: a signal may arrive while `wait` holds the lock of `set`
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # for a second ^C
    with stopping_on_signals(partial(ending.put, None)), ExitStack() as stack:
        with waits.waiting("the nodes to start"):
            cluster = stack.enter_context(
                Cluster(nodes, lookupds=lookupds, generation=generation, data_path=data_path, options=options)
            )
            for name, arguments in topics.items():
                cluster.create_topic(name, **arguments)
        kept = f"messages in {data_path}" if data_path else "messages in memory"
        with _served_page(cluster, page_options, page.web_port) as url:
            print(banner_of(cluster, f"{_GENERATIONS[generation]}, {kept}", list(topics), url), flush=True)
            ending.get()
            print("ending", flush=True)


def _cluster_options(addresses: Addresses, protection: Protection, lease: float) -> ClusterOptions:
    from nsqext.broker import ClusterOptions
    from nsqext.broker.standalone import TlsFiles

    tls = protection.files()
    return ClusterOptions(
        host=addresses.host,
        broadcast_address=addresses.broadcast_address,
        lookupd_http=tuple(addresses.lookupd_http_address or ()),
        lookupd_tcp=tuple(addresses.lookupd_tcp_address or ()),
        nsqd_tcp=tuple(addresses.tcp_address or ()),
        nsqd_http=tuple(addresses.http_address or ()),
        lease=lease,
        http_guard=protection.http_guard,
        http_hosts=tuple(protection.http_host or ()),
        tls=TlsFiles(*tls).context() if tls else None,
    )


@contextmanager
def _served_page(cluster: Cluster, options: WebOptions | None, port: int) -> Iterator[str]:
    """Serve the cluster's web page and yield its URL; nothing without options."""
    if options is None:
        yield ""
        return
    from nsqext.web import WebPage
    from nsqext.web.app import served

    with served(WebPage(cluster.lookupd, options, cluster=cluster), Address("127.0.0.1", port)) as address:
        yield f"http://{address}/"


def banner_of(cluster: Cluster, about: str, wanted: list[str], page: str) -> str:
    """Return the addresses, commands to copy with the first wanted topic, and ``ready`` as the last line.

    ``about`` has generation and place of messages; ``page`` is the web page's URL, or empty.
    """
    from nsqext._version import __version__

    topics = cluster.topics  # with topics of the data path
    lines = [f"nsqext {__version__} broker: {about}"]
    lines += [f"page: {page}"] if page else []
    lines += [f"nsqlookupd l{number}: HTTP {address}" for number, address in enumerate(cluster.lookupd, 1)]
    lines += [f"nsqd {node.name}: TCP {node.tcp}, HTTP {node.http}" for node in cluster.nodes.values()]
    lines += [f"topic {name}: channels {', '.join(channels)}" for name, channels in topics.items()]
    name = next(iter([*wanted, *topics]), "orders")
    lines += ["", "In another terminal:", f"  export NSQEXT_LOOKUPD={','.join(cluster.lookupd)}"]
    lines += [] if topics else [f"  nsqext topic create {name}"]
    # a temporary channel; on the original NSQ it receives later messages
    commands = [f"  nsqext pub {name} hello", f"  nsqext tail {name} --start earliest"]
    if cluster.generation == "original":
        commands = [f"  nsqext tail {name} &", f"  nsqext pub {name} hello"]
    lines += [*commands, ""]
    return "\n".join([*lines, "ready"])
