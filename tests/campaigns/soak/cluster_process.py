"""The embedded cluster in a process of its own: obeys calls that it reads from standard input as JSON lines."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

import orjson

from nsqext import NsqError
from nsqext.broker import Cluster, ClusterOptions


def _reply(**values: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(values) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Run the cluster until standard input ends."""
    seed, memory = map(int, sys.argv[1:])
    with Cluster(nodes=3, lookupds=2, options=ClusterOptions(seed=seed, node_memory_bound=memory)) as cluster:
        _reply(lookupd=cluster.lookupd)
        for line in sys.stdin.buffer:
            name, arguments, options = orjson.loads(line)
            try:
                result = attrgetter(name)(cluster)(*arguments, **options)
            except NsqError as error:
                _reply(refused=str(error))
            else:
                _reply(result=result)


if __name__ == "__main__":
    main()
