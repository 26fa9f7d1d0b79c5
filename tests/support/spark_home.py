"""A folder of Spark without the libraries that a local session never uses.

Java reads the contents of every library of Spark at its start, and Spark looks for services in those of cluster
managers: two seconds of CPU time.
"""

from __future__ import annotations

from pathlib import Path

import pyspark

__all__ = ("link_spark",)

_UNUSED = (
    *("kubernetes-", "spark-kubernetes", "spark-yarn", "volcano-", "vertx-", "zjsonpatch", "jjwt-"),
    *("curator-", "zookeeper", "netty-tcnative", "netty-transport-native-kqueue"),
    *("hive-", "spark-hive", "datanucleus-", "derby", "HikariCP", "commons-dbcp", "libthrift", "libfb303"),
    *("jdo-", "javax.jdo", "spark-connect", "spark-pipelines", "spark-repl", "scala-compiler"),
    *("spark-mllib_", "spark-graphx", "breeze", "spire", "cats-", "algebra_", "arpack", "lapack", "blas"),
)
"""Beginnings of the names of libraries: cluster managers, other systems, Hive, Spark Connect, machine learning."""


def link_spark(home: Path) -> None:
    """Fill a folder for ``SPARK_HOME`` with links to the package of PySpark."""
    (installed,) = map(Path, pyspark.__path__)
    libraries = home / "jars"
    libraries.mkdir(parents=True)
    for path in installed.iterdir():
        if path.name != libraries.name:
            (home / path.name).symlink_to(path)
    for path in (installed / libraries.name).iterdir():
        if not path.name.startswith(_UNUSED):
            (libraries / path.name).symlink_to(path)
