"""`Cluster`: an embedded NSQ cluster for tests, demos and first steps."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from attrs import frozen

from nsqext.arguments import check_flags, check_number, check_time
from nsqext.broker.cluster_fault_injection import ClusterFaults, coordinated
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.options import ClusterOptions, ClusterShape
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState
from nsqext.protocol.names import MAX_PARTITIONS, check_channel, check_topic
from nsqext.types import ProcessBound

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from nsqext.broker.runtime import Runtime

T = TypeVar("T")


@frozen
class ClusterNode:
    """Addresses of an nsqd.

    Attributes:
        name: ``n1``, ``n2`` and so on.
        tcp: ``host:port`` for clients.
        http: ``host:port`` of its HTTP API.
    """

    name: str
    tcp: str
    http: str


class Cluster(ProcessBound):
    """An NSQ cluster in its own thread.

    Start it with ``with``. Synchronous, asyncio and trio code can use it, from every thread. Methods block until they
    are done and cannot be cancelled. They raise `InvalidState` if the cluster is not running or stops, and in a forked
    process, which has its addresses only, and `InvalidInput` for an unknown node. Methods of partitions and
    `upgrade_topic` raise `InvalidState` for the original generation. It stops at the end of the program.

    Args:
        nodes: number of nsqd, named n1, n2 and so on.
        lookupds: number of nsqlookupd, named l1, l2 and so on.
        generation: ``redesigned`` or ``original`` NSQ.
        data_path: folder of messages and topics; None for memory.
        options: further settings.

    Attributes:
        faults: fault injection.

    Raises:
        InvalidSetting: a setting is invalid.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        lookupds: int = 1,
        generation: str = "redesigned",
        data_path: str | Path | None = None,
        options: ClusterOptions | None = None,
    ) -> None:
        self._shape = ClusterShape(nodes, lookupds, generation, Path(data_path) if data_path is not None else None)
        if options is not None and not isinstance(options, ClusterOptions):
            raise InvalidSetting(f"options={options!r} is not a ClusterOptions")
        self._options = options or ClusterOptions()
        self._shape.check_addresses(self._options)
        self._runtime: Runtime | None = None
        self._portal: BlockingPortal | None = None
        self._thread: AbstractContextManager[BlockingPortal] | None = None
        self._ended: Any = None
        self._process = 0  # that has its thread
        self.faults: ClusterFaults = ClusterFaults(self._run)

    def __repr__(self) -> str:
        shape = f"{self._shape.nodes} nodes, generation {self.generation!r}"
        state = "not running" if self._runtime is None else f"running, lookupd={','.join(self.lookupd)!r}"
        return f"{type(self).__name__}({shape}, {state})"

    # Start and stop

    def start(self) -> Self:
        """Start; return when every server listens.

        Raises:
            InvalidState: it is running.
            InvalidSetting: an address or the data path is in use, or its files are damaged.
        """
        if self._portal is not None:
            raise InvalidState("the cluster is already running")
        from anyio.from_thread import start_blocking_portal

        self._thread = start_blocking_portal("asyncio")
        self._portal = self._thread.__enter__()
        self._process = os.getpid()
        _open_clusters.add(self)
        try:
            self._runtime = self._portal.call(self._create_runtime)
            self._ended, _ = self._portal.start_task(self._runtime.run)
        except BaseException:
            self._close_portal()
            raise
        return self

    async def _create_runtime(self) -> Runtime:
        try:
            from nsqext.broker.runtimes import RuntimeOriginal, RuntimeRedesigned

            kind = RuntimeOriginal if self._shape.generation == "original" else RuntimeRedesigned
            return kind(self._shape, self._options)
        except ModuleNotFoundError as error:
            if error.name not in ("starlette", "uvicorn", "re2"):
                raise
            raise InvalidState(
                f"the cluster needs {error.name}, which is not installed", hint="pip install 'nsqext[broker]'"
            ) from error

    def stop(self) -> None:
        """Stop thread, tasks and sockets; without effect while the cluster is not running, and in a forked process."""
        if self._portal is None or self._runtime is None:
            return
        if self._process != os.getpid():
            vars(self._portal)["start_task_soon"] = _refuse  # the end of this process would wait for it forever
            self._close_portal()
            return
        try:
            self._portal.call(self._runtime.stop)
            self._ended.result()
        finally:
            with suppress(RuntimeError):
                self._portal.call(self._portal.stop, True)  # calls of other threads may wait for ever
            self._close_portal()

    def _close_portal(self) -> None:
        _open_clusters.discard(self)
        thread, self._thread, self._portal, self._runtime = self._thread, None, None, None
        if thread is not None:
            thread.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self, function: Callable[[Runtime], Any]) -> Any:
        if self._portal is None or self._runtime is None:
            raise _not_running()
        if self._process != os.getpid():
            raise InvalidState("the cluster runs in the process that forked this one", hint="call it there")
        try:
            return self._portal.call(function, self._runtime)
        except CancelledError:
            raise _not_running() from None

    # Addresses

    @property
    def generation(self) -> str:
        """``redesigned`` or ``original`` NSQ."""
        return self._shape.generation

    @property
    def lookupd(self) -> list[str]:
        """``host:port`` of the lookup nodes' HTTP APIs, for clients."""
        return [str(running.lookupd.http) for running in self._running.lookupds.values()]

    @property
    def nodes(self) -> Mapping[str, ClusterNode]:
        """The nsqd by name."""
        return {
            name: ClusterNode(name, str(running.member.tcp), str(running.member.http))
            for name, running in self._running.nodes.items()
        }

    @property
    def _running(self) -> Runtime:
        if self._runtime is None:
            raise _not_running()
        return self._runtime

    # Topics

    @property
    def topics(self) -> dict[str, list[str]]:
        """The channels of each topic, sorted by name; includes topics of the data path."""
        return dict(self._run(lambda runtime: runtime.topics()))

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        replicas: int = 1,
        extend: bool = False,
        ordered: bool = False,
        channels: Iterable[str] = (),
        register_channels: bool = False,
        dispatch: str = "",
    ) -> None:
        """Create a topic; return when every partition accepts writes.

        If all partitions together have more replicas than there are nodes, they share nodes (``multi_part``).

        Args:
            extend: messages may carry headers and tags.
            ordered: each partition delivers one message at a time, in order.
            channels: names of channels to create; they get no earlier messages.
            register_channels: consumers may use only these channels.
            dispatch: dispatch type of these channels, for example ``key_failover``; empty for the default.

        Raises:
            InvalidSetting: unknown dispatch type, or one without channels; a flag that is not True or False.
            InvalidInput: invalid name or number, too few nodes, a dispatch type that an ordered topic or a channel's
                consumer excludes, or the topic exists with other settings.
            TopicNotFound: it was deleted meanwhile.
        """
        names = channel_names(channels, dispatch)
        spec = new_topic(
            *(name, partitions, replicas, self._shape.nodes),
            extend=extend,
            ordered=ordered,
            register_channels=register_channels,
        )
        self._run(lambda runtime: runtime.create_topic(name, spec, names, dispatch))

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its messages; its consumers are closed.

        Raises:
            TopicNotFound: unknown topic.
        """
        self._run(lambda runtime: runtime.delete_topic(name))

    def upgrade_topic(self, name: str) -> None:
        """Make a topic an extend topic, which cannot be undone.

        Raises:
            TopicNotFound: unknown topic.
        """
        self._run(lambda runtime: coordinated(runtime).upgrade_topic(name))

    def leader(self, topic: str, partition: int = 0) -> str:
        """Return the name of a partition's leader; while it has none, of its last leader.

        Raises:
            TopicNotFound: unknown partition.
        """
        return str(self._run(lambda runtime: coordinated(runtime).replicas(topic, partition).state.leader))

    def in_sync(self, topic: str, partition: int = 0) -> list[str]:
        """Return the names of a partition's in-sync replicas, the leader first.

        Raises:
            TopicNotFound: unknown partition.
        """
        return list(self._run(lambda runtime: coordinated(runtime).replicas(topic, partition).state.in_sync))

    def epoch(self, topic: str, partition: int = 0) -> int:
        """Return the number of the partition's last election.

        Raises:
            TopicNotFound: unknown partition.
        """
        return int(self._run(lambda runtime: coordinated(runtime).replicas(topic, partition).state.epoch))

    def wait_writable(self, topic: str, partition: int = 0, *, timeout: float = 10.0) -> str:
        """Wait until a partition accepts writes; return the leader's name.

        Args:
            timeout: in seconds.

        Raises:
            PartitionUnavailable: the timeout expired.
            TopicNotFound: unknown partition.
            InvalidSetting: the timeout is no time.
        """
        check_time("timeout", timeout)
        return str(self._run(lambda runtime: coordinated(runtime).wait_writable(topic, partition, timeout)))

    # Nodes

    def state(self, name: str) -> Literal["up", "frozen", "down"]:
        """Return the state of an nsqd, without waiting for the cluster.

        Raises:
            InvalidInput: unknown node.
        """
        running = self._running.node(name)
        if running.server is None:
            return "down"
        return "frozen" if running.member.node.faults.frozen else "up"

    def kill(self, name: str) -> None:
        """Kill a node as ``kill -9``: connections break, ports refuse, no node is notified."""
        self._run(lambda runtime: runtime.kill(name))

    def terminate(self, name: str) -> None:
        """End a node as SIGTERM does: its partitions move to other nodes at once."""
        self._run(lambda runtime: runtime.terminate(name))

    def restart(self, name: str) -> None:
        """Start a node again with its addresses and messages; kill it first if it runs.

        Returns when it accepts connections; its catch-up with the leaders follows.
        """
        self._run(lambda runtime: runtime.restart(name))

    def move_leader(self, topic: str, partition: int, name: str) -> None:
        """Make another node the leader of a partition; without a replica it gets the old leader's.

        Raises:
            TopicNotFound: unknown partition.
            NsqError: the node is down, or the cluster refuses the move.
        """
        self._run(lambda runtime: coordinated(runtime).move_leader(topic, partition, name))


def channel_names(channels: Iterable[str], dispatch: str = "") -> tuple[str, ...]:
    """Return the names of a new topic's channels; see `Cluster.create_topic`."""
    if isinstance(channels, str):
        raise InvalidSetting(f"channels={channels!r} is a text", hint="give a list of names")
    names = tuple(check_channel(channel) for channel in channels)
    if dispatch and not names:
        raise InvalidSetting(f"dispatch={dispatch!r} has no effect without channels", hint="give channels=[...]")
    return names


def new_topic(
    name: str,
    partitions: int,
    replicas: int,
    nodes: int,
    *,
    extend: bool,
    ordered: bool,
    register_channels: bool = False,
) -> TopicSpec:
    """Return the specification of a new topic of a cluster with ``nodes``; see `Cluster.create_topic`."""
    check_number("partitions", partitions, 1, MAX_PARTITIONS, InvalidInput)
    check_number("replicas", replicas, 1, MAX_PARTITIONS, InvalidInput)
    check_flags(extend=extend, ordered=ordered, register_channels=register_channels)
    check_topic(name)
    return TopicSpec(
        partition_num=partitions,
        replica=replicas,
        ordered=ordered,
        multi_part=not ordered and partitions * replicas > nodes,
        extend=extend,
        disable_channel_auto_create=register_channels,
    )


# kept, and stopped at the end of the program, which would wait forever for the thread of a deleted cluster
_open_clusters: set[Cluster] = set()


@atexit.register
def _stop_running() -> None:
    for cluster in tuple(_open_clusters):
        cluster.stop()


def _refuse(*_: object, **__: object) -> None:
    raise RuntimeError("the event loop stayed in the parent when this process was forked")


def _not_running() -> InvalidState:
    return InvalidState("the cluster is not running", hint="use it inside `with Cluster() as cluster:`")
