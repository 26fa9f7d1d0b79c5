"""The blocking administration client, used by several threads at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from nsqext import sync
from nsqext.errors import InvalidState, TopicNotFound

if TYPE_CHECKING:
    from nsqext.broker import Cluster


def test_one_client_serves_several_threads(cluster: Cluster, topic: str) -> None:
    names = [f"{topic}_{number}" for number in range(8)]
    with sync.Admin(cluster.lookupd) as admin, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: admin.create_topic(name, channels=["ch"]), names))
        list(threads.map(lambda name: admin.pause_channel(name, "ch"), names))
        paused = list(threads.map(lambda name: admin.stats(name).channels["ch"].paused, names))
        list(threads.map(lambda name: admin.unpause_channel(name, "ch"), names[:4]))
        failed = list(threads.map(lambda name: _error(admin, name), ["missing", *names[4:]]))
        assert set(names) <= admin.topics().keys()
        resumed = [name for name in names if not admin.stats(name).channels["ch"].paused]
    assert paused == [True] * 8
    assert resumed == names[:4]
    assert [type(error) for error in failed] == [TopicNotFound, *[type(None)] * 4]
    with pytest.raises(InvalidState):
        admin.topics()


def _error(admin: sync.Admin, name: str) -> Exception | None:
    """Return the error of one thread: the calls of others are not affected."""
    try:
        admin.stats(name)
    except TopicNotFound as error:
        return error
    return None
