"""How many messages of each partition a micro-batch reads under a limit of messages or bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nsqext.spark.read.planning import Lag, PartitionState, share
from nsqext.waits import gather

if TYPE_CHECKING:
    from nsqext.spark.cluster.admin import Admin
    from nsqext.spark.read.offsets import Key


def _turn(lags: Mapping[Key, Lag]) -> int:
    return sum(lag.begin for lag in lags.values())


def within_rows(lags: Mapping[Key, Lag], limit: int | None) -> dict[Key, int]:
    """Return the number of messages to read from each partition, ``limit`` in total at most."""
    return share({key: lag.count for key, lag in lags.items()}, limit, _turn(lags))


async def within_bytes(
    admin: Admin, lags: Mapping[Key, Lag], found: Mapping[Key, PartitionState], limit: int
) -> dict[Key, int]:
    """Return the number of messages to read from each partition, about ``limit`` bytes of their logs in total.

    A partition that gets a share reads one message at least, so that the total may be larger: by less than one message
    for each partition.
    """
    behind = {key: lag for key, lag in lags.items() if lag.count}

    async def first_of(key: Key) -> int:
        return await admin.bounds.offset_of(*key, behind[key].begin)

    firsts = await gather(behind, first_of)
    sizes = {key: max(found[key].end_offset - first, 1) for key, first in firsts.items()}
    shares = share(sizes, limit, _turn(lags))

    async def count_of(key: Key) -> int:
        lag, stop = behind[key], firsts[key] + shares[key]
        if shares[key] in (0, sizes[key]):
            return lag.count if shares[key] else 0
        last = lag.begin + lag.count - 1
        if lag.count > 1 and stop < await admin.bounds.offset_of(*key, last):
            last = await admin.bounds.count_before(*key, stop)
        # the end of the last message may be unknown: the next batch reads it
        return max(last - lag.begin, 1)

    return await gather(behind, count_of)
