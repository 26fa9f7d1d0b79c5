"""Makes files of ``--py-files`` and ``addArtifacts`` importable in the process that plans a stream.

Spark gives that process another folder than all others, ``streaming_job`` beside or below the folder of the files, and
never fills it (observed in Spark 4.0 to 4.3): without a link, unpickling the source raises ModuleNotFoundError.
"""

from __future__ import annotations

import logging
from pathlib import Path

logger: logging.Logger = logging.getLogger("nsqext.spark")

_FOLDER = "streaming_job"
_ROOT = "userFiles"
"""First part of the name of the folder in which the driver keeps files; a session of Connect has a folder below it."""


def share_with_streams() -> None:
    """Link the file that contains this package, if Spark delivered it to this process."""
    try:
        from pyspark.core.files import SparkFiles
    except ImportError:  # a client of Spark Connect
        return
    if SparkFiles._is_running_on_worker and SparkFiles._root_directory is not None:
        link_for_streams(Path(SparkFiles._root_directory), Path(__file__))


def link_for_streams(root: Path, module: Path) -> None:
    """Link a delivered file to where the process that plans a stream searches for it.

    Args:
        root: folder of the files of this process.
        module: path of a module; nothing happens if it is not in a file of the folder.
    """
    if not module.is_relative_to(root):
        return
    name = module.relative_to(root).parts[0]
    if (root / name).is_dir():  # of spark.archives, or unpacked by `nsqext.spark.shipped_source`
        return
    link = (root if root.name.startswith(_ROOT) else root.parent) / _FOLDER / name
    try:
        if link.exists() and link.samefile(root / name):
            return
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)  # of a session that has ended, or of another version
        link.symlink_to(root / name)
    except OSError as error:
        logger.warning("streams will not find %s: %s cannot be created: %s", name, link, error)
