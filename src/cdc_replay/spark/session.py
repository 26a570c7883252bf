"""The one place that builds a Spark session.

Under `spark-submit` the master and the resources come from the connection; elsewhere the session is local.
Jobs move Arrow batches between the JVM and Python and hold no cached tables, so the defaults are small.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final

from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from cdc_replay.spark.java import JVM_OPTIONS, local_environment

logger = logging.getLogger(__name__)

DEFAULTS: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
    # A part's pieces in one batch are memory that the JVM maps and clears anew for each task, while Python
    # waits; a batch of a few pieces is filled again and again.
    "spark.sql.execution.arrow.maxBytesPerBatch": "2m",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    # Windows tell their size before they are planned, and a plan that turns out to be empty on the way would
    # lose what is observed in it.
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": JVM_OPTIONS,
    # What is shuffled in volume is compressed already (`replay.compact.shuffle`).
    "spark.shuffle.compress": "false",
    "spark.python.daemon.module": "cdc_replay.spark.worker_daemon",
    # Workers make and drop arrays of megabytes all the time. Memory that goes back to the system each time is
    # mapped and cleared anew, which takes a fifth of their time; idle workers are ended after a minute.
    "spark.executorEnv.MIMALLOC_PURGE_DELAY": "-1",
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}
"""What a session gets unless `spark-submit` or the caller says otherwise."""

LOGGERS_OF_FAILURES: Final = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.api.python.PythonRunner",
)
"""What logs the exception of a task, which also reaches the driver's program, on the driver."""

SMALL_WINDOW_ROWS: Final = 50_000
ROWS_PER_PARTITION: Final = 500_000


def spark_session(name: str, *, conf: dict[str, str] | None = None) -> SparkSession:
    """The process's session, made if there is none; `conf` overrides the defaults.

    Settings that come from `spark-submit` win over the defaults, never over `conf`.
    """
    if (active := SparkSession.getActiveSession()) is not None:
        return active
    builder = SparkSession.builder.appName(name)
    submitted = _submitted_settings()
    if "spark.master" not in submitted:
        prepare_environment()
        builder = builder.master("local[*]")
    for key, value in DEFAULTS.items():
        if key not in submitted:
            builder = builder.config(key, value)
    for key, value in (conf or {}).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    if not logger.isEnabledFor(logging.DEBUG):
        _leave_failures_to_us(session)
    return session


def _leave_failures_to_us(session: SparkSession) -> None:
    """Let the JVM log no task that fails: whoever runs the job says why, without two stack traces."""
    jvm: Any = session.sparkContext._jvm  # noqa: SLF001 - there is no other way to its loggers
    configurator = jvm.org.apache.logging.log4j.core.config.Configurator
    for name in LOGGERS_OF_FAILURES:
        configurator.setLevel(name, "OFF")
    # Nor py4j each call to a JVM that is gone.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)


def tune_for(session: SparkSession, rows: int) -> None:
    """Set what depends on the size of the window that is planned next.

    Compiling a plan costs more than it gains on a small window: a cold session needs about 3 s of CPU for it.
    """
    is_small = rows < SMALL_WINDOW_ROWS
    session.conf.set("spark.sql.codegen.wholeStage", str(not is_small).lower())
    session.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN" if is_small else "FALLBACK")
    cores = session.sparkContext.defaultParallelism
    partitions = 1 if is_small else max(2 * cores, rows // ROWS_PER_PARTITION)
    session.conf.set("spark.sql.shuffle.partitions", str(partitions))


def prepare_environment() -> None:
    """Set what a local Spark needs in this process's environment and the user has not set."""
    for key, value in local_environment().items():
        os.environ.setdefault(key, value)


def _submitted_settings() -> set[str]:
    # `spark-submit` starts the JVM first and tells the Python program its port. What was submitted is known
    # to that JVM only: a SparkConf that is made before the first context does not ask it by itself.
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return set()
    connected: Callable[[], Any] = launch_gateway
    return {key for key, _ in SparkConf(_jvm=connected().jvm).getAll()}
