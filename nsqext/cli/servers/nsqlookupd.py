"""``nsqext nsqlookupd``: replaces nsqlookupd, original or redesigned without a cluster, with its flags."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from nsqext.broker.listeners import listen_early
from nsqext.cli.servers import redesigned_flags
from nsqext.cli.servers.program import check_nsqlookupd, read_program, run_program

FLAGS = {
    "version": "bool",
    "config": "str",
    "log-level": "str",
    "log-prefix": "str",
    "generation": "str",
    "http-guard": "bool",
    "http-host": "list",
    "verbose": "bool",
    "tcp-address": "str",
    "http-address": "str",
    "broadcast-address": "str",
    "inactive-producer-timeout": "duration",
    "tombstone-lifetime": "duration",
}


def main(arguments: Sequence[str]) -> None:
    """Run until SIGTERM or SIGINT."""
    defaults = {"tcp-address": "0.0.0.0:4160", "http-address": "0.0.0.0:4161"}
    flags = read_program("nsqlookupd", arguments, FLAGS, check_nsqlookupd, defaults, redesigned_flags.NSQLOOKUPD)
    listen_early((flags["tcp-address"], flags["http-address"]))
    from nsqext.broker.standalone import LookupdSettings, run_lookupd

    inactive = 60.0 if flags.get("generation") == "redesigned" else 300.0  # the real programs' defaults
    settings = LookupdSettings(
        generation=flags.get("generation", "original"),
        tcp=flags["tcp-address"],
        http=flags["http-address"],
        broadcast_address=flags.get("broadcast-address") or socket.gethostname(),
        inactive_producer_timeout=flags.get("inactive-producer-timeout", inactive),
        tombstone_lifetime=flags.get("tombstone-lifetime", 45.0),
        http_guard=flags.get("http-guard", False),
        http_hosts=tuple(flags.get("http-host", ())),
    )
    run_program("nsqlookupd", flags, lambda: run_lookupd(settings))
