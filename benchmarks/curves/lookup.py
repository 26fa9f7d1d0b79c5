"""Cost of lookup for an idle client: CPU and bytes by topics and lookup nodes, and a long list of lookup nodes.

The lookup nodes are small HTTP servers in the process of the benchmark, which count requests and bytes. The client, in
a separate process, polls more often than by default; figures are converted to the default of one poll per minute.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.curves.child import child
from benchmarks.curves.curve import Curve, Points

__all__ = ("CURVES", "lookup_nodes")

_TOPICS = (1, 10, 100, 500)
_NODES = (1, 2, 3)
_LISTED = (1, 10, 100, 500, 1000)
_PARTITIONS = 4
_SECONDS = 6.0
_INTERVAL = 3.0

_measured: dict[tuple[int, int, int], float] = {}


class LookupServer(ThreadingHTTPServer):
    """A lookup node that finds every topic.

    Attributes:
        nodes: addresses that it lists.
        requests: requests for a topic.
        sent: bytes of requests and responses, headers included.
    """

    daemon_threads = True
    request_queue_size = 512

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.nodes: list[str] = []
        self.requests = 0
        self.sent = 0
        self.lock = threading.Lock()
        leaders = {
            str(number): {
                "broadcast_address": "127.0.0.1",
                "hostname": "n",
                "tcp_port": 4150 + number,
                "http_port": 4151,
                "version": "0.3.7-HA",
            }
            for number in range(_PARTITIONS)
        }
        meta = {"partition_num": _PARTITIONS, "replica": 2, "extend_support": True, "ordered": False}
        self.topic = json.dumps(
            {"channels": ["ch"], "meta": meta, "partitions": leaders, "producers": list(leaders.values())}
        ).encode()

    def handle_error(self, *_: object) -> None:
        """Log nothing: clients close connections when they end."""

    def listed(self) -> bytes:
        """Return the list of lookup nodes."""
        nodes = [
            {"ID": node, "NodeIP": node.partition(":")[0], "TcpPort": "1", "HttpPort": node.partition(":")[2],
             "RpcPort": "1", "Epoch": 1}
            for node in self.nodes
        ]  # fmt: skip
        return json.dumps({"lookupdleader": nodes[0], "lookupdnodes": nodes}).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    server: LookupServer

    def do_GET(self) -> None:
        listing = self.path.startswith("/listlookup")
        body = self.server.listed() if listing else self.server.topic
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        head = len(self.requestline) + 2 + len(bytes(self.headers))
        with self.server.lock:
            self.server.requests += not listing
            self.server.sent += 0 if listing else head + len(body) + 110

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def lookup_nodes(count: int) -> Iterator[list[LookupServer]]:
    """Run a number of lookup nodes, which list each other."""
    servers = [LookupServer() for _ in range(count)]
    addresses = [f"127.0.0.1:{server.server_port}" for server in servers]
    for server in servers:
        server.nodes = addresses
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield servers
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def idle_minute(topics: int, nodes: int) -> tuple[float, float]:
    """Return milliseconds of CPU and KiB of traffic of an idle minute."""
    with lookup_nodes(nodes) as servers:
        address = servers[0].nodes[0]
        used = float(child("idle_producer", address, topics, _SECONDS, _INTERVAL))
        requests, sent = sum(server.requests for server in servers), sum(server.sent for server in servers)
    first = topics * nodes  # before the clock starts
    polled = max(1, requests - first)
    return used / polled * first, sent / requests * first / 1024


def listed_nodes(count: int) -> float:
    """Return the milliseconds of CPU of the first lookup of a topic with a long list of lookup nodes."""
    with lookup_nodes(1) as (server,):
        server.nodes = server.nodes + [f"127.0.0.1:{port}" for port in range(1, count)]  # no node is up
        return float(child("first_lookup", server.nodes[0], count))


@contextmanager
def _polls(which: int) -> Iterator[Points]:
    yield {
        (f"{nodes} lookup node{'s' if nodes > 1 else ''}", float(topics)): partial(_figure, which, topics, nodes)
        for nodes in _NODES
        for topics in _TOPICS
    }


def _figure(which: int, topics: int, nodes: int) -> float:
    """Return one of the two figures of `idle_minute`, which are measured together."""
    found = _measured.pop((topics, nodes, which), None)
    if found is None:
        cpu, traffic = idle_minute(topics, nodes)
        found = (cpu, traffic)[which]
        _measured[topics, nodes, 1 - which] = (cpu, traffic)[1 - which]
    return found


@contextmanager
def _listed() -> Iterator[Points]:
    yield {("all listed nodes asked", float(count)): partial(listed_nodes, count) for count in _LISTED}


CURVES = (
    Curve(
        "polling_cpu",
        "Idle: CPU of lookup polls",
        "topics consumed",
        "ms of CPU per idle minute",
        "One HTTP request for each topic and lookup node: the lookup service has no request for several topics. A "
        "response that did not change is recognized by a digest and not parsed; a producer's topic is polled less and "
        "less often, down to once in five minutes.",
        partial(_polls, 0),
        digits=1,
        note="Default interval of 60 s; one poller and one pool of HTTP connections for all topics.",
    ),
    Curve(
        "polling_bytes",
        "Idle: traffic of lookup polls",
        "topics consumed",
        "KiB per idle minute",
        "The response of a lookup node, which names node and ports of each partition (four here), and its headers.",
        partial(_polls, 1),
        digits=1,
        note="Default interval of 60 s.",
    ),
    Curve(
        "listed_nodes",
        "Lookup: a list of dead lookup nodes",
        "lookup nodes that the service lists; all but one are down",
        "ms of CPU for the first lookup of a topic",
        "A connection attempt to each listed node, 32 at the same time, until a second after the first response. By "
        "default at most 64 nodes are used (`max_lookup_nodes`); the measurement raises that. The first figure is the "
        "import of the HTTP client.",
        _listed,
        digits=0,
    ),
)
