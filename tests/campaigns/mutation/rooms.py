"""The rooms of the package that hold promises, and the tests that have to find a bug in them."""

from __future__ import annotations

from attrs import frozen

__all__ = ("NAMED", "ROOMS", "Named")

ROOMS = {
    "client/producer": (
        "tests/client/producer",
        "tests/contract/test_settling.py",
        "tests/delays/test_relay.py",
        "tests/observability/test_observers.py",
        "tests/test_settings.py",
    ),
    "client/consumer": (
        "tests/client/consumer",
        "tests/client/test_tasks.py",
        "tests/client/test_trace_log.py",
        "tests/app/test_typed.py",
        "tests/contract/test_key_tags.py",
        "tests/contract/test_order_after_reconnect.py",
        "tests/observability/test_observers.py",
        "tests/property/test_bodies.py",
        "tests/test_settings.py",
    ),
    "lookup": ("tests/lookup", "tests/test_settings.py"),
    "key_ranges": ("tests/key_ranges",),
    "transactions": ("tests/transactions",),
    "delays": ("tests/delays",),
    "integrations": ("tests/integrations",),
    "broker/engine": ("tests/broker/engine",),
    "broker/coordinator": ("tests/broker/coordinator", "tests/broker/cluster/test_disk.py"),
    "spark/read": ("tests/spark/read",),
}
"""Folder below the package -> its tests."""


@frozen
class Named:
    """A bug of independent origin that no test found once.

    Attributes:
        name: what goes wrong.
        module: path of the module below the package.
        before: the right code.
        after: the wrong code.
        tests: the files that have to find it.
    """

    name: str
    module: str
    before: str
    after: str
    tests: tuple[str, ...]


NAMED = (
    Named(
        "a dead letter with an unknown outcome counts as stored",
        "client/consumer/handlers/failure_policy.py",
        "        except Exception:\n            logger.exception(",
        "        except DeliveryUnknown:\n            pass\n        except Exception:\n            logger.exception(",
        ("tests/client/consumer/handlers/test_dead_letter.py",),
    ),
    Named(
        "on_unknown=raise holds for the first attempt only",
        "client/producer/sender.py",
        'self._options.on_unknown != "retry" and',
        'self._options.on_unknown != "retry" and self.count == 1 and',
        ("tests/client/producer/test_retry.py",),
    ),
    Named(
        "a leader of an equal epoch replaces the known one",
        "lookup/partition_map.py",
        "best.epoch > last.epoch",
        "best.epoch >= last.epoch",
        ("tests/lookup/test_partition_map.py",),
    ),
    Named(
        "with fsync=interval, full files are not synced",
        "broker/engine/storage/segments.py",
        'if self._out is not None and self._options.fsync != "never":',
        'if self._out is not None and self._options.fsync == "always":',
        ("tests/broker/engine/storage/test_partition_disk.py",),
    ),
)
