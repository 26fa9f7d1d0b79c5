"""How many messages of each partition a batch reads, where it is bounded by their number or by their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nsqext.spark.cluster.gather import together
from nsqext.spark.read.planning import Key, Lag, Standing, share

if TYPE_CHECKING:
    from nsqext.spark.cluster.admin import Admin

__all__ = ("within_bytes", "within_rows")


def _turn(lags: Mapping[Key, Lag]) -> int:
    return sum(lag.begin for lag in lags.values())


def within_rows(lags: Mapping[Key, Lag], limit: int | None) -> dict[Key, int]:
    """Return how many messages are read of each partition, all together no more than a number.

    Args:
        lags: what there is to read.
        limit: the number; None for all.
    """
    return share({key: lag.count for key, lag in lags.items()}, limit, _turn(lags))


async def within_bytes(
    admin: Admin, lags: Mapping[Key, Lag], found: Mapping[Key, Standing], limit: int
) -> dict[Key, int]:
    """Return how many messages are read of each partition, all together no more than so many bytes of their logs.

    A partition whose turn it is gives one message at least, so that there may be more bytes: less than one message for
    each such partition.

    Args:
        admin: tells where messages begin.
        lags: what there is to read.
        found: what is known of the partitions.
        limit: the bytes.

    Raises:
        NsqError: the servers cannot be asked.
    """
    behind = {key: lag for key, lag in lags.items() if lag.count}

    async def first_of(key: Key) -> int:
        return await admin.offset_of(*key, behind[key].begin)

    firsts = await together(behind, first_of)
    sizes = {key: max(found[key].end_offset - first, 1) for key, first in firsts.items()}
    shares = share(sizes, limit, _turn(lags))

    async def count_of(key: Key) -> int:
        lag, stop = behind[key], firsts[key] + shares[key]
        if shares[key] in (0, sizes[key]):
            return lag.count if shares[key] else 0
        last = lag.begin + lag.count - 1
        if lag.count > 1 and stop < await admin.offset_of(*key, last):
            last = await admin.count_before(*key, stop)
        # where its end is not known the last message is left for the next batch
        return max(last - lag.begin, 1)

    return await together(behind, count_of)
