"""`Cluster`: a whole NSQ in this process, for tests, demos and first steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from attrs import frozen

from nsqext.broker.cluster_fault_injection import ClusterFaults, coordinated
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.options import ClusterOptions, ClusterShape
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState
from nsqext.protocol.names import MAX_PARTITIONS, check_channel, check_topic

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from nsqext.broker.runtime import Runtime

__all__ = ("Cluster", "ClusterNode")

T = TypeVar("T")


@frozen
class ClusterNode:
    """Where a node of a cluster is reached.

    Attributes:
        name: ``n1``, ``n2`` and so on.
        tcp: ``host:port`` for clients.
        http: ``host:port`` of its HTTP API.
    """

    name: str
    tcp: str
    http: str


class Cluster:
    """nsqd and nsqlookupd in a thread of their own.

    Start it with ``with``; inside, it can be used from synchronous, asyncio and trio code and from every thread. Each
    method returns when what it does is done, and blocks until then: nothing cancels it. All raise `InvalidState` while
    the cluster is not running, and `InvalidInput` for a node that there is not.

    Args:
        nodes: how many nsqd; they are called n1, n2 and so on.
        lookupds: how many nsqlookupd; they are called l1, l2 and so on, and one of them is the leader.
        generation: ``ha`` for the redesigned NSQ, ``nsq`` for the original.
        data_path: folder for everything that is to outlive the cluster; without it everything is in memory.
        options: further settings.

    Attributes:
        faults: what can be broken on purpose.

    Raises:
        InvalidSetting: a setting makes no sense.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        lookupds: int = 1,
        generation: str = "ha",
        data_path: str | Path | None = None,
        options: ClusterOptions | None = None,
    ) -> None:
        self._shape = ClusterShape(nodes, lookupds, generation, Path(data_path) if data_path is not None else None)
        self._options = options or ClusterOptions()
        self._core: Runtime | None = None
        self._portal: BlockingPortal | None = None
        self._thread: AbstractContextManager[BlockingPortal] | None = None
        self._ended: Any = None
        self.faults: ClusterFaults = ClusterFaults(self._run)

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the cluster; returns when everything listens.

        Raises:
            InvalidState: it runs already.
            InvalidSetting: an address that was asked for cannot be had.
        """
        if self._portal is not None:
            raise InvalidState("the cluster runs already")
        from anyio.from_thread import start_blocking_portal

        self._thread = start_blocking_portal("asyncio")
        self._portal = self._thread.__enter__()
        try:
            self._core = self._portal.call(self._make)
            self._ended, _ = self._portal.start_task(self._core.run)
        except BaseException:
            self._leave()
            raise
        return self

    async def _make(self) -> Runtime:
        try:
            if self._shape.generation == "nsq":
                from nsqext.broker.runtime_classic import RuntimeClassic

                return RuntimeClassic(self._shape, self._options)
            from nsqext.broker.runtime_ha import RuntimeHa

            return RuntimeHa(self._shape, self._options)
        except ModuleNotFoundError as error:
            if error.name not in ("starlette", "uvicorn"):
                raise
            raise InvalidState(
                f"the cluster needs {error.name}, which is not installed", hint="pip install 'nsqext[broker]'"
            ) from error

    def stop(self) -> None:
        """Stop the cluster; no thread, task or socket is left. Stopping twice is fine."""
        if self._portal is None or self._core is None:
            return
        try:
            self._portal.call(self._core.stop)
            self._ended.result()
        finally:
            self._leave()

    def _leave(self) -> None:
        thread, self._thread, self._portal, self._core = self._thread, None, None, None
        if thread is not None:
            thread.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, function: Callable[[Runtime], Any]) -> Any:
        if self._portal is None or self._core is None:
            raise InvalidState("the cluster is not running", hint="use it inside `with Cluster() as cluster:`")
        return self._portal.call(function, self._core)

    # --- where things are -----------------------------------------------------------------------------------------

    @property
    def lookupd(self) -> list[str]:
        """``host:port`` of the lookup nodes' HTTP, which is what a client is given."""
        return [str(running.lookupd.http) for running in self._known.lookupds.values()]

    @property
    def nodes(self) -> Mapping[str, ClusterNode]:
        """The nsqd by name."""
        return {
            name: ClusterNode(name, str(running.member.tcp), str(running.member.http))
            for name, running in self._known.nodes.items()
        }

    @property
    def _known(self) -> Runtime:
        if self._core is None:
            raise InvalidState("the cluster is not running", hint="use it inside `with Cluster() as cluster:`")
        return self._core

    # --- topics ---------------------------------------------------------------------------------------------------

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
        """Create a topic; returns when every partition takes writes.

        Partitions share nodes (``multi_part``) where there are more copies than nodes.

        Args:
            name: its name.
            partitions: how many partitions.
            replicas: copies of each.
            extend: messages may carry headers and tags.
            ordered: consumers get the messages of a partition strictly one after the other.
            channels: channels to make; messages that are published before a channel is made never reach it.
            register_channels: consumers get these channels and no others.
            dispatch: how these channels choose a consumer, ``key_failover`` for example; empty for as usual.

        Raises:
            InvalidSetting: there is no such dispatch.
            InvalidInput: a bad name or number, too few nodes, a dispatch that an ordered topic or a consumer of the
                channel rules out, or the topic exists with another shape.
        """
        if isinstance(channels, str):
            raise InvalidSetting(f"channels={channels!r} is a text", hint="give a list of names")
        for what, number, most in (
            ("partitions", partitions, MAX_PARTITIONS),
            ("replicas", replicas, MAX_PARTITIONS),
        ):
            if not (isinstance(number, int) and 1 <= number <= most):
                raise InvalidInput(f"{what}={number!r} is not a number from 1 to {most}", topic=name)
        names = tuple(check_channel(channel) for channel in channels)
        spec = TopicSpec(
            partition_num=partitions,
            replica=replicas,
            ordered=ordered,
            multi_part=not ordered and partitions * replicas > self._shape.nodes,
            extend=extend,
            disable_channel_auto_create=register_channels,
        )
        check_topic(name)
        self._run(lambda core: core.create_topic(name, spec, names, dispatch))

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its messages; its consumers are closed.

        Raises:
            TopicNotFound: there is none.
        """
        self._run(lambda core: core.delete_topic(name))

    def upgrade_topic(self, name: str) -> None:
        """Turn a topic into an extend topic; there is no way back.

        Raises:
            TopicNotFound: there is none.
        """
        self._run(lambda core: coordinated(core).upgrade_topic(name))

    def leader(self, topic: str, partition: int = 0) -> str:
        """Return the name of the node that leads a partition (or led it last, while there is no leader).

        Raises:
            TopicNotFound: there is no such partition.
        """
        return str(self._run(lambda core: coordinated(core).replicas(topic, partition).state.leader))

    def in_sync(self, topic: str, partition: int = 0) -> list[str]:
        """Return the names of the nodes that have every acknowledged message of a partition, the leader first.

        Raises:
            TopicNotFound: there is no such partition.
        """
        return list(self._run(lambda core: coordinated(core).replicas(topic, partition).state.in_sync))

    def epoch(self, topic: str, partition: int = 0) -> int:
        """Return the number of the partition's last election.

        Raises:
            TopicNotFound: there is no such partition.
        """
        return int(self._run(lambda core: coordinated(core).replicas(topic, partition).state.epoch))

    def wait_writable(self, topic: str, partition: int = 0, *, timeout: float = 10.0) -> str:
        """Return the leader's name as soon as the partition takes writes.

        Args:
            topic: the topic.
            partition: which partition.
            timeout: seconds to wait at most.

        Raises:
            PartitionUnavailable: it did not in time.
        """
        return str(self._run(lambda core: coordinated(core).wait_writable(topic, partition, timeout)))

    # --- nodes ----------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Kill a node, as ``kill -9`` does: connections break, ports refuse, and nobody is told."""
        self._run(lambda core: core.kill(name))

    def terminate(self, name: str) -> None:
        """End a node as SIGTERM does: its partitions pass to others at once."""
        self._run(lambda core: core.terminate(name))

    def restart(self, name: str) -> None:
        """Start a node again, at the same addresses and with the messages that it had.

        Returns when it takes connections; it catches up with its leaders after that.
        """
        self._run(lambda core: core.restart(name))

    def move_leader(self, topic: str, partition: int, name: str) -> None:
        """Make another node the leader of a partition; a node without a copy takes over the old leader's.

        Raises:
            NsqError: the node is not there.
        """
        self._run(lambda core: coordinated(core).move_leader(topic, partition, name))
