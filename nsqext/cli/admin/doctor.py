"""``nsqext doctor``: diagnose a cluster, report problems and solutions. ``nsqext check``: a health probe."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import aclosing, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import anyio
from anyio import to_thread
from attrs import asdict, frozen

from nsqext.cli.admin.findings import Finding, examine_delays, examine_outbox
from nsqext.cli.admin.service_metrics import examine_service
from nsqext.cli.command import check_http_url, command, examples
from nsqext.cli.connection import ServerAccess, counted
from nsqext.cli.parameters import Argument, Option
from nsqext.cli.waiting import waits
from nsqext.errors import InvalidSetting, NsqError, escaped
from nsqext.http.client import HttpClient, HttpRequestFailed
from nsqext.lookup.client import LookupClient
from nsqext.lookup.options import LookupUrl, is_loopback, parse_lookup_addresses, url_of
from nsqext.protocol.names import is_ephemeral
from nsqext.settings_text import redact_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from nsqext.admin import Admin, NodeStatus, TopicInfo, TopicStats
    from nsqext.types import Address

T = TypeVar("T")

_TIMEOUT = 5.0
_SIGN_IN = (401, 403)  # of a gateway that demands the secret, which the examined client sends
_CLOCK = 5.0  # largest difference of clocks, in seconds
_MARKS = {"ok": "✓", "warning": "!", "error": "✗"}


@frozen
class Services:
    """What is examined besides the cluster."""

    database: Annotated[
        str | None,
        Option(envvar="NSQEXT_OUTBOX", help="Examine the outbox in this database too; see nsqext outbox."),
    ] = None
    delay_store: Annotated[
        Path | None, Option(help="Examine the delayed messages in this file too; see nsqext delay.")
    ] = None
    metrics: Annotated[
        str | None, Option(help="Examine a service by this URL of its metrics too: http://billing:8080/metrics.")
    ] = None
    metrics_namespace: Annotated[str, Option(help="--metrics: namespace of the series.")] = "nsqext"

    def __attrs_post_init__(self) -> None:
        if self.metrics is not None:
            check_http_url("--metrics", self.metrics, "http://billing:8080/metrics")
        elif self.metrics_namespace != "nsqext":
            raise InvalidSetting("--metrics-namespace without --metrics would be ignored", hint="give --metrics URL")


@examples(
    "nsqext doctor --lookupd 127.0.0.1:4161",
    "nsqext doctor --metrics http://billing:8080/metrics",
    "nsqext doctor --json | jq 'select(.status != \"ok\")'",
)
@command
async def run(connection: ServerAccess, services: Services = Services()) -> None:
    """Examine addresses, names, ports, leaders, channels, versions, clocks and TLS; report problems with solutions.

    With --metrics, also a service: dropped messages, dead letters, redeliveries since its start, connections that have
    used up their RDY counts, and its relays. Exits with 1 if an error is found.
    """
    findings = await examine(connection)
    if services.database is not None:
        findings.append(await to_thread.run_sync(examine_outbox, services.database))
    if services.delay_store is not None:
        findings.append(await to_thread.run_sync(examine_delays, services.delay_store))
    if services.metrics is not None:
        with waits.waiting(f"a response of {redact_url(services.metrics)}"):
            findings += await examine_service(services.metrics, services.metrics_namespace)
    for finding in findings:
        hint = f"\n    {escaped(finding.hint)}" if finding.hint else ""
        found = escaped(f"{finding.subject}: {finding.text}")
        connection.show(asdict(finding), f"{_MARKS[finding.status]} {found}{hint}")
    if any(finding.status == "error" for finding in findings):
        raise SystemExit(1)


async def examine(connection: ServerAccess) -> list[Finding]:
    """Return the findings about the cluster of a connection."""
    findings: list[Finding] = []
    for address in parse_lookup_addresses(connection.lookup()):
        with waits.waiting(f"a response of lookup at {address}"):
            findings += await _examine_address("lookup", address)
    if all(finding.status == "error" for finding in findings):
        return findings
    async with LookupClient(connection.lookup(), connection.options().lookup) as client, connection.admin() as admin:
        await _collect(findings, "lookup", lambda: examine_lookup(client))
        nodes = await _collect(findings, "nodes", admin.nodes)
        findings += _examine_versions(nodes or ())
        for node in nodes or ():
            findings += await _examine_node(node)
        await _collect(findings, "topics", lambda: _examine_topics(findings, admin))
    with waits.waiting("a node to connect to"):
        findings += await _examine_client(connection)
    return findings


async def _collect(findings: list[Finding], subject: str, ask: Callable[[], Awaitable[T]]) -> T | None:
    try:
        found = await ask()
    except NsqError as error:
        findings.append(Finding("error", subject, str(error)))
        return None
    if isinstance(found, Finding):
        findings.append(found)
    return found


def _unverified() -> ssl.SSLContext:
    """Return a context that accepts any certificate, because /ping contains no secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _examine_address(kind: str, address: Address) -> list[Finding]:
    subject = f"{kind} {address}"
    try:
        await anyio.getaddrinfo(address.host, address.port)
    except (OSError, UnicodeError) as error:
        return [
            Finding("error", subject, f"the name {address.host} is unknown: {error}", "correct it, or add it to DNS")
        ]
    try:
        async with aclosing(HttpClient(_TIMEOUT, tls=_unverified)) as web:
            began = time.time()
            answer = await web.request("GET", f"{url_of(address)}/ping")
    except HttpRequestFailed as error:
        if error.reason == "unreachable":
            return [Finding("error", subject, f"is not reached: {error.text}", "is it running, and is the port open?")]
        hint = "is it the HTTP port (4161 of nsqlookupd, 4151 of nsqd) and not the TCP port?"
        return [Finding("error", subject, f"does not speak HTTP: {error.text}", hint)]
    if answer.status not in (200, *_SIGN_IN):
        return [Finding("error", subject, f"/ping returned {answer.status}", "is it an NSQ server?")]
    findings = [Finding("ok", subject, f"responds in {(time.time() - began) * 1000:.0f} ms")]
    with suppress(ValueError):  # without a date, or with the text of a proxy
        behind = (began + time.time()) / 2 - parsedate_to_datetime(answer.headers.get("date", "")).timestamp()
        if abs(behind) > _CLOCK:
            text = f"its clock differs by {abs(behind):.0f} s from this machine's"
            findings.append(Finding("warning", subject, text, "synchronize clocks (NTP): message timestamps are wrong"))
    return findings


async def examine_lookup(client: LookupClient) -> Finding:
    """Return whether the lookup nodes respond, and whether they have one leader."""
    nodes = await client.lookup_nodes()
    leaders = [str(node.address) for node in nodes if node.leader]
    if leaders:
        return Finding("ok", "lookup", f"{counted(len(nodes), 'node')}, {leaders[0]} leads")
    if any(isinstance(node.address, LookupUrl) and node.address.path for node in nodes):
        return Finding("ok", "lookup", "behind a gateway, which hides the leader of the lookup nodes")
    known = await client.lists.nodes()
    if any(node.redesigned for node in known):
        return Finding(
            "error", "lookup", "no lookup node is the leader", "are etcd and a majority of the lookup nodes up?"
        )
    return Finding("ok", "lookup", f"{counted(len(nodes), 'node')} of the original NSQ, which have no leader")


def _examine_versions(nodes: Sequence[NodeStatus]) -> list[Finding]:
    if not nodes:
        return [Finding("error", "nodes", "lookup lists no nsqd", "start nsqd with the TCP addresses of nsqlookupd")]
    versions = sorted({node.version for node in nodes})
    if len(versions) > 1:
        return [Finding("warning", "nodes", f"versions differ: {', '.join(versions)}", "finish the upgrade")]
    return [Finding("ok", "nodes", f"{len(nodes)}, version {versions[0]}")]


async def _examine_node(node: NodeStatus) -> list[Finding]:
    subject = f"nsqd {node.tcp}"
    findings: list[Finding] = []
    if node.http is None:
        findings.append(Finding("error", subject, "lookup does not report its HTTP address", "is its HTTP side off?"))
    else:
        findings += await _examine_address("nsqd HTTP", node.http)
    try:
        with anyio.fail_after(_TIMEOUT):
            async with await anyio.connect_tcp(node.tcp.host, node.tcp.port):
                findings.append(Finding("ok", subject, "accepts connections"))
    except (OSError, TimeoutError) as error:
        hint = "is the port open from this machine? Set -broadcast-address to a name that clients can resolve"
        if is_loopback(node.tcp.host):
            hint = "it broadcasts a loopback address, which other machines cannot use: set -broadcast-address"
        findings.append(Finding("error", subject, f"does not accept connections: {error!r}", hint))
    if node.tombstoned:
        text = f"tombstoned for {', '.join(node.tombstoned)}"
        findings.append(Finding("warning", subject, text, "lookup temporarily hides the node for these topics"))
    return findings


async def _examine_topics(findings: list[Finding], admin: Admin) -> None:
    topics = await admin.topics()
    stats = await admin.all_stats(topics)
    before = len(findings)
    for name, info in topics.items():
        for number in info.leaderless:
            hint = "start the nodes that hold its replicas"
            findings.append(Finding("error", f"topic {name}", f"partition {number} has no leader", hint))
        if info.generation == "original" and not info.nodes:
            hint = f"start the nodes that hold its messages, or nsqext topic delete {name}"
            findings.append(Finding("warning", f"topic {name}", "lookup lists no node with it", hint))
        if info.generation == "redesigned" and not (info.channels or info.leaderless):
            hint = f"publishes are refused: nsqext channel create {name} default"
            findings.append(Finding("warning", f"topic {name}", "it has no channel", hint))
        if name in stats:
            hint = "repeat it: the leader may have moved just now; otherwise read the log of the node"
            findings += [Finding("error", f"topic {name}", text, hint) for text in _unreported(info, stats[name])]
            findings += _examine_channels(stats[name])
    if len(findings) == before:
        findings.append(Finding("ok", "topics", f"{len(topics)}, every partition has a leader"))


def _unreported(info: TopicInfo, stats: TopicStats) -> list[str]:
    """Return what to say of the partitions that their leaders do not report although they respond."""
    return [
        f"partition {number} is not reported by {info.leaders[number]}, its leader"
        for number in stats.missing or ()
        if number in info.leaders and info.leaders[number] not in stats.unreachable
    ]


def _examine_channels(topic: TopicStats) -> list[Finding]:
    findings = []
    if any(part.paused for part in topic.partitions):
        hint = f"nsqext topic unpause {topic.name}"
        findings.append(Finding("warning", f"topic {topic.name}", "is paused: its channels receive no messages", hint))
    for channel in topic.channels.values():
        subject = f"channel {topic.name}/{channel.name}"
        change = f"{topic.name} {channel.name}"
        parts = [part.channels[channel.name] for part in topic.partitions if channel.name in part.channels]
        if any(part.skipped for part in parts):
            hint = f"nsqext channel unskip {change}"
            findings.append(Finding("warning", subject, "finishes messages without delivering them", hint))
        if paused := sum(part.paused for part in parts):
            hint = f"nsqext channel unpause {change}"
            where = "" if paused == len(parts) else f" in {paused} of {len(parts)} places"
            findings.append(Finding("warning", subject, f"is paused{where} with {channel.lag} waiting messages", hint))
        elif not channel.clients and channel.lag:
            hint = f"start a consumer, or nsqext channel delete {change}"
            findings.append(Finding("warning", subject, f"has no consumer and {channel.lag} waiting messages", hint))
        else:
            findings += _without_consumer(topic, channel.name)
        hint = f"nsqext channel create {change}"
        findings += [Finding("warning", subject, text, hint) for text in _absences(topic, channel.name)]
    return findings


def _absences(topic: TopicStats, channel: str) -> list[str]:
    """Return what to say of the partitions on which a channel of others does not exist."""
    text = "does not exist on partition {}, and gets no message that is published there"
    lacks = [] if is_ephemeral(channel) else [part for part in topic.partitions if channel not in part.channels]
    return [text.format(part.partition) for part in lacks if part.partition is not None]


def _without_consumer(topic: TopicStats, channel: str) -> Iterator[Finding]:
    """Yield where messages wait although consumers are connected elsewhere."""
    for part in topic.partitions:
        found = part.channels.get(channel)
        if found is not None and found.lag and not found.clients:
            place = f"node {part.node}" if part.partition is None else f"partition {part.partition}"
            text = f"has no consumer on {place}, and {found.lag} waiting messages there"
            hint = "do the consumers reach its node? Read their logs"
            yield Finding("warning", f"channel {topic.name}/{channel}", text, hint)


async def _examine_client(connection: ServerAccess) -> list[Finding]:
    """Connect like a producer, with TLS, authentication and compression as configured."""
    options = connection.options().connection
    words = ["TLS"] if options.tls else []
    words += ["authentication"] if options.auth_secret else []
    subject = f"client with {' and '.join(words)}" if words else "client without TLS"
    try:
        async with connection.producer() as producer:
            await producer.ping()
    except NsqError as error:
        hint = "does nsqd have a certificate, and does the setting tls name its CA?" if options.tls else ""
        return [Finding("error", subject, str(error), hint or "does nsqd require TLS or a secret?")]
    return [Finding("ok", subject, f"connects from {socket.gethostname()}")]


@examples("nsqext check", "nsqext check orders billing --max-lag 1000 --min-consumers 2 --timeout 3")
@command
async def check(
    connection: ServerAccess,
    topic: Annotated[str | None, Argument(help="The topic; every partition needs a leader that responds.")] = None,
    channel: Annotated[str | None, Argument(help="The channel.")] = None,
    max_lag: Annotated[int | None, Option(min=0, help="Largest number of unfinished messages in the channel.")] = None,
    min_consumers: Annotated[int, Option(min=0, help="Smallest number of consumers of the channel.")] = 0,
    timeout: Annotated[
        float,
        Option(min=0.1, help="Seconds after which the check fails; a request has half, or lookup_request_timeout."),
    ] = 5.0,
) -> None:
    """Probe a cluster, topic or channel; exit with 0 if it is healthy, otherwise with 1.

    Without a topic, lookup and every node must respond, and lookup nodes of the redesigned NSQ have a leader; a
    partition without a leader is found for its topic, and by `nsqext doctor`. A topic or channel that is paused, or a
    channel that skips messages or does not exist on a partition, is not healthy.
    """
    if channel is None and (max_lag is not None or min_consumers):
        raise InvalidSetting("--max-lag and --min-consumers need a channel")
    problems: list[str] = []
    # a node that does not respond is named before the time is over
    request_timeout = connection.load().values.get("lookup_request_timeout", timeout / 2)
    with anyio.move_on_after(timeout) as scope:
        try:
            async with connection.admin(request_timeout) as admin:
                if topic is None:
                    problems.extend(await _check_nodes(connection, admin))
                else:
                    problems.extend(await _check_topic(admin, topic))
                if topic is not None and channel is not None:
                    problems.extend(await _check_channel(admin, topic, channel, max_lag, min_consumers))
        except InvalidSetting:
            raise
        except NsqError as error:
            problems.append(str(error))
    if scope.cancelled_caught:
        problems.append(f"no response within {timeout:g} s")
    connection.show({"healthy": not problems, "problems": problems}, "; ".join(problems) or "healthy")
    if problems:
        raise SystemExit(1)


async def _check_nodes(connection: ServerAccess, admin: Admin) -> list[str]:
    nodes = await admin.nodes()
    if not nodes:
        return ["lookup lists no node"]
    async with LookupClient(connection.lookup(), connection.options().lookup) as client:
        found = await examine_lookup(client)
    problems = [found.text] if found.status == "error" else []
    return problems + [f"node {node.tcp} does not respond" for node in nodes if not node.reachable]


async def _check_topic(admin: Admin, topic: str) -> list[str]:
    info, stats = await admin.topic(topic), await admin.stats(topic)
    problems = [f"partition {number} has no leader" for number in info.leaderless]
    problems += _unreported(info, stats)
    if info.generation == "original" and not info.nodes:
        problems.append("lookup lists no node with the topic")
    if any(part.paused for part in stats.partitions):
        problems.append("the topic is paused")
    return problems + [f"node {node} does not respond" for node in stats.unreachable]


async def _check_channel(admin: Admin, topic: str, channel: str, max_lag: int | None, min_consumers: int) -> list[str]:
    found = await admin.stats(topic, channel)
    stats = found.channels.get(channel)
    if stats is None:
        return [f"the topic has no channel {channel}" if found.complete else f"no node reports the channel {channel}"]
    parts = [part.channels[channel] for part in found.partitions if channel in part.channels]
    problems = ["the channel is paused"] if any(part.paused for part in parts) else []
    if any(part.skipped for part in parts):
        problems.append("the channel finishes messages without delivering them")
    problems += [f"the channel {text}" for text in _absences(found, channel)]
    if max_lag is not None and stats.lag > max_lag:
        problems.append(f"{stats.lag} messages are unfinished; at most {max_lag} may be")
    if stats.consumers < min_consumers:
        problems.append(f"{stats.consumers} consumers; at least {min_consumers} are required")
    return problems
