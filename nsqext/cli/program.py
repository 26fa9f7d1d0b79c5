"""What the stand-ins for the original programs share: log lines, signals, and the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Any

from nsqext.cli.flags import FlagError, read_flags

__all__ = ("VERSION", "Log", "read_program", "run_program")

VERSION = "1.3.0 (built w/nsqext)"

Log = Callable[[str, str], None]
"""Writes a line, given its level and its text."""

_LEVELS = ("DEBUG", "INFO", "WARN", "ERROR", "FATAL")


def _logger(prefix: str, level: str) -> Log:
    least = _LEVELS.index(level) if level in _LEVELS else 1

    def log(of: str, text: str) -> None:
        if _LEVELS.index(of) >= least:
            now = datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")
            sys.stderr.write(f"{prefix}{now} {of}: {text}\n")
            sys.stderr.flush()

    return log


def read_program(
    name: str,
    arguments: Sequence[str],
    kinds: Mapping[str, str],
    check: Callable[[dict[str, Any]], None],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """Read the command line of a program and its configuration file; ends the program where it cannot.

    Args:
        name: of the program.
        arguments: the words behind it.
        kinds: see `nsqext.cli.flags.parse_flags`.
        check: see `nsqext.cli.flags.read_flags`.
        defaults: flags that were not given.
    """
    flags = read_flags(name, arguments, kinds, f"{name} v{VERSION}", check)
    if not flags.get("config"):
        return {**defaults, **flags}
    from nsqext.cli.config_file import with_config_file
    from nsqext.errors import InvalidSetting

    try:
        flags = with_config_file(flags, kinds)
        check(flags)
    except (FlagError, InvalidSetting) as error:
        _logger(f"[{name}] ", "INFO")("FATAL", str(error))
        raise SystemExit(1) from None
    return {**defaults, **flags}


def run_program(name: str, flags: Mapping[str, Any], serve: Callable[[Log], Coroutine[Any, Any, None]]) -> None:
    """Run a program until SIGTERM or SIGINT; it ends with status 1 when it cannot start.

    Args:
        name: of the program.
        flags: its command line.
        serve: runs until it is cancelled.
    """
    import signal

    import anyio

    from nsqext.client.tasks import first_error
    from nsqext.errors import NsqError

    log = _logger(flags.get("log-prefix", f"[{name}] "), str(flags.get("log-level", "info")).upper())
    log("INFO", f"{name} v{VERSION}")

    async def until_told() -> None:
        async with anyio.create_task_group() as tasks:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                tasks.start_soon(serve, log)
                async for _ in signals:
                    tasks.cancel_scope.cancel()
                    return

    try:
        anyio.run(until_told)
    except* (NsqError, OSError) as group:
        log("FATAL", f"failed to instantiate {name} - {first_error(group)}")
        raise SystemExit(1) from None
    except* ModuleNotFoundError as group:
        log("FATAL", f"failed to instantiate {name} - {first_error(group)}: pip install 'nsqext[broker]'")
        raise SystemExit(1) from None
