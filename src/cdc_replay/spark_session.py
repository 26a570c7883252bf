"""The one place that builds a Spark session.

Under `spark-submit` the master and the resources come from the connection; elsewhere the session is local. Jobs move
Arrow batches between the JVM and Python and hold no cached tables, so the defaults are small.
"""

from __future__ import annotations

import os
from typing import Final

from pyspark import SparkConf
from pyspark.sql import SparkSession

DEFAULTS: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.adaptive.enabled": "true",
    "spark.driver.memory": "1g",
}
"""What a session gets unless `spark-submit` or the caller says otherwise."""


def spark_session(name: str, *, conf: dict[str, str] | None = None) -> SparkSession:
    """The process's session, made if there is none; `conf` overrides the defaults.

    Settings that come from `spark-submit` win over the defaults, never over `conf`.
    """
    if (active := SparkSession.getActiveSession()) is not None:
        return active
    builder = SparkSession.builder.appName(name)
    submitted = _submitted_settings()
    if "spark.master" not in submitted:
        builder = builder.master("local[*]")
    for key, value in DEFAULTS.items():
        if key not in submitted:
            builder = builder.config(key, value)
    for key, value in (conf or {}).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _submitted_settings() -> set[str]:
    # `spark-submit` starts the JVM first and tells the Python program its port.
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return set()
    return {key for key, _ in SparkConf().getAll()}
