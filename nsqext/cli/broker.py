"""``nsqext broker``: a cluster on the command line, until SIGTERM or Ctrl+C."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from nsqext.errors import InvalidSetting

__all__ = ("parse_topic", "run")

_FLAGS = ("extend", "ordered")
_NUMBERS = ("partitions", "replicas")


def parse_topic(text: str) -> tuple[str, dict[str, Any]]:
    """Read a topic: ``NAME[:OPTION[,OPTION…]]``.

    The options are ``partitions=N``, ``replicas=N``, ``extend``, ``ordered`` and ``channel=NAME``.

    Returns:
        Its name and the arguments of `nsqext.broker.Cluster.create_topic`.

    Raises:
        InvalidSetting: an option that there is not.
    """
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
                f"topic option {option!r} is not known",
                topic=name,
                hint="use partitions=N, replicas=N, extend, ordered, channel=NAME",
            )
    return name, arguments


def run(
    nodes: Annotated[int, typer.Option(help="How many nsqd.")] = 3,
    lookupds: Annotated[int, typer.Option(help="How many nsqlookupd.")] = 1,
    generation: Annotated[str, typer.Option(help="ha (redesigned) or nsq (original).")] = "ha",
    lookupd_http_address: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of a lookup node's HTTP; once for each.")
    ] = None,
    lookupd_tcp_address: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of a lookup node's TCP; once for each.")
    ] = None,
    tcp_address: Annotated[list[str] | None, typer.Option(help="HOST:PORT of an nsqd; once for each.")] = None,
    http_address: Annotated[list[str] | None, typer.Option(help="HOST:PORT of an nsqd's HTTP; once for each.")] = None,
    host: Annotated[str, typer.Option(help="Where everything else listens.")] = "127.0.0.1",
    broadcast_address: Annotated[str, typer.Option(help="Host that clients are told to connect to.")] = "",
    data_path: Annotated[Path | None, typer.Option(help="Folder for messages; in memory without it.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate, for clients that ask for TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    topic: Annotated[
        list[str] | None, typer.Option(help="A topic to create: NAME:partitions=2,replicas=2,extend,channel=billing.")
    ] = None,
    lease: Annotated[float, typer.Option(help="Seconds before the partitions of a silent node pass to others.")] = 0.3,
) -> None:
    """Run a whole NSQ in one process: nsqd and nsqlookupd of either generation."""
    from nsqext.broker import Cluster, ClusterOptions
    from nsqext.broker.standalone import TlsFiles

    if (tls_cert is None) != (tls_key is None):
        raise InvalidSetting(
            "a certificate needs its key, and a key its certificate", hint="give --tls-cert and --tls-key"
        )
    topics = [parse_topic(text) for text in topic or ()]
    options = ClusterOptions(
        host=host,
        broadcast_address=broadcast_address,
        lookupd_http=tuple(lookupd_http_address or ()),
        lookupd_tcp=tuple(lookupd_tcp_address or ()),
        nsqd_tcp=tuple(tcp_address or ()),
        nsqd_http=tuple(http_address or ()),
        lease=lease,
        tls=TlsFiles(tls_cert, tls_key).context() if tls_cert and tls_key else None,
    )
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    with Cluster(nodes, lookupds=lookupds, generation=generation, data_path=data_path, options=options) as cluster:
        for name, arguments in topics:
            cluster.create_topic(name, **arguments)
        for place, address in enumerate(cluster.lookupd, 1):
            print(f"nsqlookupd l{place}: HTTP {address}")
        for node in cluster.nodes.values():
            print(f"nsqd {node.name}: TCP {node.tcp}, HTTP {node.http}")
        print("ready", flush=True)
        ending.wait()
