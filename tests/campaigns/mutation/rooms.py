"""The rooms of the package that hold promises, and the tests that have to find a bug in them."""

from __future__ import annotations

__all__ = ("OTHER_TESTS", "PROGRAMS", "ROOMS")

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
        "tests/app/test_asyncapi.py",
        "tests/app/test_typed.py",
        "tests/contract/test_key_tags.py",
        "tests/contract/test_order_after_reconnect.py",
        "tests/observability/test_observers.py",
        "tests/property/test_bodies.py",
        "tests/test_settings.py",
    ),
    "client": (
        "tests/client/test_cancel_anywhere.py",
        "tests/client/test_constructors.py",
        "tests/client/test_events.py",
        "tests/client/test_pulse.py",
        "tests/client/test_schedules.py",
        "tests/client/test_signals.py",
        "tests/client/test_tasks.py",
        "tests/client/test_trace_log.py",
        "tests/middleware",
        "tests/test_settings.py",
    ),
    "lookup": ("tests/lookup", "tests/test_settings.py"),
    "key_ranges": ("tests/key_ranges",),
    "transactions": ("tests/transactions",),
    "delays": ("tests/delays",),
    "integrations": ("tests/integrations",),
    "app": ("tests/app",),
    "admin": (
        "tests/admin",
        "tests/contract/test_admin.py",
        "tests/contract/test_channel_changes.py",
        "tests/contract/test_node_changes.py",
        "tests/contract/test_topic_changes.py",
    ),
    "cli": ("tests/cli",),
    "web": ("tests/web",),
    "observability": ("tests/observability",),
    "arrow": ("tests/arrow",),
    "sync": ("tests/sync",),
    "testing": ("tests/testing", "tests/campaigns/simulation"),
    "middleware": ("tests/middleware", "tests/app", "tests/observability"),
    "http": (
        "tests/http",
        "tests/golang",
        "tests/broker/nsqd",
        "tests/broker/lookupd",
        "tests/broker/test_listeners.py",
    ),
    "golang": (
        "tests/golang",
        "tests/cli/servers/test_config_file.py",
        "tests/http",
        "tests/broker/nsqd",
        "tests/broker/lookupd",
    ),
    "partitions": ("tests/partitions", "tests/spark/cluster", "tests/spark/read"),
    "settings": ("tests/test_settings.py", "tests/test_setting_names.py"),
    "settings_text": ("tests/test_settings.py",),
    "arguments": ("tests/test_settings.py", "tests/test_arguments.py"),
    "waits": ("tests/test_waits.py", "tests/transport/test_waiter.py"),
    "errors": ("tests/test_errors.py",),
    "protocol": ("tests/protocol", "tests/captures", "tests/property", "tests/client/producer"),
    "transport": ("tests/transport", "tests/sync/test_direct.py"),
    "broker": (
        "tests/broker/cluster",
        "tests/broker/coordinator/test_stats.py",
        "tests/broker/test_listeners.py",
        "tests/broker/test_standalone.py",
        "tests/cli/servers/test_programs.py",
        "tests/contract/test_topics.py",
        "tests/contract/test_original.py",
    ),
    "broker/nsqd": ("tests/broker/nsqd", "tests/captures"),
    "broker/lookupd": ("tests/broker/lookupd", "tests/broker/cluster"),
    "spark/cluster": ("tests/spark/cluster", "tests/spark/test_options.py", "tests/spark/read"),
    "broker/engine": ("tests/broker/engine",),
    "broker/coordinator": (
        "tests/broker/coordinator",
        "tests/broker/cluster/test_cluster.py",
        "tests/broker/cluster/test_disk.py",
        "tests/broker/lookupd",
    ),
    "spark/read": ("tests/spark/read",),
    "spark/write": ("tests/spark/write",),
}
"""Folder or module below the package, without the folders that are rooms -> its tests."""

PROGRAMS = ("cli",)
"""Rooms whose tests run them in other processes."""

OTHER_TESTS = {
    "cli/admin/spark.py": ("tests/cli/messages/test_client_commands.py",),
    "cli/admin/stats.py": ("tests/cli/admin/test_topic_and_channel.py", "tests/cli/admin/test_doctor_and_top.py"),
    "cli/connection.py": (
        "tests/cli/messages/test_relay_and_trace.py",
        "tests/cli/messages/test_pub_and_tail.py",
        "tests/transactions/test_refusals.py",
    ),
    "cli/files/import_file.py": ("tests/cli/files/test_export_and_import.py",),
    "cli/message_files.py": ("tests/cli/files/test_record_and_replay.py", "tests/cli/files/test_export_and_import.py"),
    "cli/messages/outbox.py": ("tests/transactions/test_cancel.py", "tests/transactions/test_refusals.py"),
    "cli/messages/relay.py": ("tests/cli/messages/test_mirror.py", "tests/cli/files/test_record_and_replay.py"),
    "cli/messages/relay_run.py": ("tests/cli/messages/test_mirror.py", "tests/cli/messages/test_relay_and_trace.py"),
    "cli/messages/tail.py": ("tests/cli/messages/test_relay_and_trace.py",),
    "cli/servers/broker.py": (
        "tests/cli/servers/test_server_settings.py",
        "tests/cli/servers/test_web.py",
        "tests/cli/servers/test_programs.py",
    ),
    "cli/servers/nsqd.py": (
        "tests/cli/servers/test_server_settings.py",
        "tests/cli/servers/test_config_file.py",
        "tests/cli/servers/test_programs.py",
    ),
    "cli/servers/nsqlookupd.py": ("tests/cli/servers/test_server_settings.py", "tests/cli/servers/test_programs.py"),
    "cli/servers/program.py": ("tests/cli/servers/test_config_file.py",),
    "cli/workers/run.py": ("tests/cli/workers/test_status.py",),
    "cli/workers/worker.py": ("tests/cli/workers/test_run.py", "tests/cli/workers/test_status.py"),
}
"""Module of those rooms -> tests that run it, besides those that are named for it."""
