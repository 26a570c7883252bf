"""The one place that gives out a Spark session.

Under `spark-submit` the master and the resources come from the connection; inside of `connect.connected_to`
the session is one of a running server; elsewhere it is local.
Jobs stream Arrow batches between the JVM and Python and cache no tables, so the defaults are small.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from cdc_replay.spark.errors import SparkEnded
from cdc_replay.spark.java import JVM_OPTIONS, local_environment
from cdc_replay.spark.preloaded_daemon import DAEMON_MODULE, preload_daemon
from cdc_replay.spark.server_session import current_server_session
from cdc_replay.termination import finish_on_interrupt_again

logger = logging.getLogger(__name__)

DEFAULTS: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
    # A batch with a whole shuffle partition is memory that the JVM maps and clears for each task while Python
    # waits; a small batch is reused.
    "spark.sql.execution.arrow.maxBytesPerBatch": "2m",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    # The size of a window is known before it is planned, and a plan that adaptive execution finds empty would
    # lose its observed metrics.
    "spark.sql.adaptive.enabled": "false",
    # Unless `tune_for` says otherwise.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": JVM_OPTIONS,
    # Shuffled volume is already compressed (`replay.compact.shuffle`).
    "spark.shuffle.compress": "false",
    "spark.python.daemon.module": DAEMON_MODULE,
    # Workers allocate and free arrays of megabytes. Returning that memory to the system each time costs a
    # fifth of their time for mapping and clearing; Spark ends idle workers after a minute.
    "spark.executorEnv.MIMALLOC_PURGE_DELAY": "-1",
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}
"""Defaults of a session; `spark-submit` and the caller override them."""

SESSION_DEFAULTS: Final = {key: value for key, value in DEFAULTS.items() if key.startswith("spark.sql.")}
"""Those of them that a session of a server can have."""

LOGGERS_OF_FAILURES: Final = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.api.python.PythonRunner",
)
"""They log exceptions of tasks on the driver, which its program gets anyway."""

CHATTER: Final = b"WARNING: Using incubator modules: jdk.incubator.vector"
"""Java says so wherever Spark's launcher runs one that has the module, which only MLlib uses."""

_first_session: Final = threading.Lock()
"""Held from the first session of the process on: one daemon is preloaded, also if other threads, which do not
see the active session, ask for one."""

SMALL_WINDOW_ROWS: Final = 50_000
ROWS_PER_PARTITION: Final = 500_000


def spark_session(name: str, *, conf: dict[str, str] | None = None) -> SparkSession:
    """The process's session, made if there is none; `conf` overrides the defaults.

    Settings that come from `spark-submit` win over the defaults, never over `conf`. A server's session has
    its settings already.
    """
    if (server := current_server_session()) is not None:
        return cast("SparkSession", server.session)
    if (active := SparkSession.getActiveSession()) is not None:
        return active
    submitted = _submitted_settings()
    settings = {key: value for key, value in DEFAULTS.items() if key not in submitted} | (conf or {})
    if "spark.master" not in submitted:
        prepare_environment()
        settings = {"spark.master": "local[*]"} | settings
        _start_jvm(settings)
    if _forks_our_daemon_here(submitted | settings) and _first_session.acquire(blocking=False):
        # Not before: the JVM's start is what everything waits for.
        settings |= preload_daemon(submitted | settings)
    builder = SparkSession.builder.appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    finish_on_interrupt_again()
    session.sparkContext.setLogLevel("ERROR")
    if not logger.isEnabledFor(logging.DEBUG):
        _leave_failures_to_us(session)
    return session


def _start_jvm(settings: Mapping[str, str]) -> None:
    """Start the JVM of a local Spark, unless it runs, without what it says of itself on standard error.

    Spark's builder would start it with our standard error as its own.
    """
    if SparkContext._gateway is not None:  # noqa: SLF001 - Spark has no other way to say where it writes
        return
    launch: Callable[..., Any] = launch_gateway
    reader, writer = os.pipe()
    threading.Thread(target=pass_on, args=(reader,), daemon=True).start()
    try:
        gateway = launch(SparkConf().setAll(list(settings.items())), {"stderr": writer})
    finally:
        os.close(writer)
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001


def pass_on(reader: int) -> None:
    """Write the JVM's lines from this pipe to our standard error, but for its chatter, until it ends."""
    with open(reader, "rb") as lines:
        for line in lines:
            if not line.startswith(CHATTER):
                # A JVM whose pipe is full would wait for ever, so a line that is lost ends nothing.
                with contextlib.suppress(OSError):
                    os.write(2, line)


def has_session() -> bool:
    """Whether `spark_session` would start nothing."""
    return current_server_session() is not None or SparkSession.getActiveSession() is not None


def _leave_failures_to_us(session: SparkSession) -> None:
    """Switch off the JVM's log of failed tasks: the caller reports the cause without two stack traces."""
    jvm: Any = session.sparkContext._jvm  # noqa: SLF001 - there is no other way to its loggers
    configurator = jvm.org.apache.logging.log4j.core.config.Configurator
    for name in LOGGERS_OF_FAILURES:
        configurator.setLevel(name, "OFF")
    # py4j logs each call to a dead JVM, some of them to the root.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(is_not_of_py4j)


def is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Whether a record is to be kept: a filter for the root logger."""
    return "py4j" not in Path(record.pathname).parts


def running_application() -> str | None:
    """Spark's id of this process's application; None without a session, or if its JVM has ended."""
    with contextlib.suppress(Exception):  # of a dead JVM; the id only serves a link
        session = SparkSession.getActiveSession()
        return None if session is None else session.conf.get("spark.app.id", None)
    return None


def check_jvm_runs(action: str) -> None:
    """Check that the JVM which this process has started, if any, still runs.

    Raises:
        SparkEnded: if it does not; `action` is what needs it.
    """
    process: subprocess.Popen[bytes] | None = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001
    if process is not None and process.poll() is not None:
        raise SparkEnded(action)


def count_cores(session: SparkSession) -> int:
    """The number of tasks that run at once."""
    if (server := current_server_session()) is not None:
        return server.cores
    return session.sparkContext.defaultParallelism


def tune_for(session: SparkSession, rows: int, *, is_packed: bool) -> None:
    """Set the options that depend on the next window: how many rows, and whether they pass the JVM packed.

    To compile a plan takes a new JVM 0.2 s. For a frame of many rows that is repaid: without, to find 150,000
    values that were not sent takes 47 s instead of 37.
    """
    is_small = rows < SMALL_WINDOW_ROWS
    is_compiled = not is_packed and not is_small
    session.conf.set("spark.sql.codegen.wholeStage", str(is_compiled).lower())
    session.conf.set("spark.sql.codegen.factoryMode", "FALLBACK" if is_compiled else "NO_CODEGEN")
    cores = count_cores(session)
    partitions = 1 if is_small else max(2 * cores, rows // ROWS_PER_PARTITION)
    session.conf.set("spark.sql.shuffle.partitions", str(partitions))


def prepare_environment() -> None:
    """Set the environment variables of a local Spark that the user has not set."""
    for key, value in local_environment().items():
        os.environ.setdefault(key, value)


def _forks_our_daemon_here(settings: Mapping[str, str]) -> bool:
    is_ours = settings.get("spark.python.daemon.module") == DAEMON_MODULE
    return is_ours and settings["spark.master"].startswith("local")


def _submitted_settings() -> dict[str, str]:
    # `spark-submit` starts the JVM first and passes its port to Python. Only that JVM knows the submitted
    # settings; a SparkConf created before the first context does not ask it.
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    connected: Callable[[], Any] = launch_gateway
    return dict(SparkConf(_jvm=connected().jvm).getAll())
