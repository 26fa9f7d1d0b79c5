"""Shared by `nsqext nsqd` and `nsqext nsqlookupd`: log lines in the original's format, signals, exit statuses."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import pairwise
from typing import Any

from nsqext.cli.servers.redesigned_flags import check_alone, given_without_effect, with_new_names, without_old_names
from nsqext.golang.flags import FlagError, read_flags, with_config_file

_LEVELS = {"debug": 10, "info": 20, "warn": 30, "error": 40, "fatal": 50}
_NAMES = {logging.WARNING: "WARN", logging.CRITICAL: "FATAL"}
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
logger: logging.Logger = logging.getLogger("nsqext.broker")


class _Format(logging.Formatter):
    """Formats log lines as the original programs: prefix, time with microseconds, level, text."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        from datetime import datetime

        moment = datetime.fromtimestamp(record.created).strftime("%Y/%m/%d %H:%M:%S.%f")
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return f"{self._prefix}{moment} {_NAMES.get(record.levelno, record.levelname)}: {text}"


def _start_log(name: str, flags: Mapping[str, Any]) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Format(flags.get("log-prefix", f"[{name}] ")))
    logger.addHandler(handler)
    logger.setLevel(_LEVELS.get(str(flags.get("log-level", "info")).lower(), logging.INFO))
    logger.propagate = False


def _chooses_redesigned(arguments: Sequence[str]) -> bool:
    """Return whether the arguments have ``-generation redesigned``, which decides how the others are read."""
    words = [word.removeprefix("-").removeprefix("-") for word in arguments]
    return "generation=redesigned" in words or ("generation", "redesigned") in pairwise(words)


def check_nsqlookupd(flags: dict[str, Any]) -> None:
    """Check the command line of nsqlookupd."""
    check_alone(flags)
    level = flags.get("log-level")
    if flags.get("generation", "original") == "original" and level is not None and level.lower() not in _LEVELS:
        known = ", ".join(_LEVELS)
        raise FlagError(f"invalid value \"{level}\" for flag -log-level: invalid log level '{level}' ({known})")


def read_program(
    name: str,
    arguments: Sequence[str],
    kinds: Mapping[str, str],
    check: Callable[[dict[str, Any]], None],
    defaults: Mapping[str, Any],
    redesigned: Mapping[str, str],
) -> dict[str, Any]:
    """Read a program's command line and configuration file; exit if they are invalid."""
    both = {**kinds, **redesigned}
    flags = with_new_names(read_flags(name, arguments, both if _chooses_redesigned(arguments) else kinds, check))
    if flags.get("version"):
        from nsqext.broker.standalone import version_of

        print(f"{name} v{version_of(flags.get('generation', 'original'))}")
        raise SystemExit(0)
    if not flags.get("config"):
        return {**defaults, **flags}
    from nsqext.errors import InvalidSetting

    try:
        read = with_config_file(flags, kinds)
        flags = with_config_file(flags, without_old_names(both)) if read.get("generation") == "redesigned" else read
        check(flags)
    except (FlagError, InvalidSetting) as error:
        _start_log(name, {})
        logger.critical("%s", error)
        raise SystemExit(1) from None
    return {**defaults, **flags}


def run_program(name: str, flags: Mapping[str, Any], serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a program until SIGTERM or SIGINT; exit with status 1 if it cannot start."""
    import anyio

    from nsqext.broker.standalone import version_of
    from nsqext.client.tasks import first_error
    from nsqext.errors import NsqError

    _start_log(name, flags)
    logger.info("%s v%s", name, version_of(flags.get("generation", "original")))
    for ignored in given_without_effect(flags):
        logger.warning("-%s has no effect in this server", ignored)

    async def until_signal() -> None:
        with anyio.open_signal_receiver(*_SIGNALS) as signals:  # also while the servers close
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                await anext(signals)
                tasks.cancel_scope.cancel()

    try:
        anyio.run(until_signal)
    except (NsqError, OSError, ModuleNotFoundError, BaseExceptionGroup) as group:
        error = first_error(group) if isinstance(group, BaseExceptionGroup) else group
        if not isinstance(error, (NsqError, OSError, ModuleNotFoundError)):
            raise
        hint = ": pip install 'nsqext[broker]'" if isinstance(error, ModuleNotFoundError) else ""
        logger.critical("failed to instantiate %s - %s%s", name, error, hint)
        sys.exit(1)
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # a second signal does not change the exit status
