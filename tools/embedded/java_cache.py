"""Make the ahead-of-time cache of the packaged Java: `python -m embedded.java_cache`.

Spark runs once, with jobs like ours; the classes that its JVM loads and links, and its profile, go into the
cache. That takes half a minute and 200 MB, once per environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import IntegerType

from cdc_replay.spark.java import JVM_OPTIONS, TRAINING, cache_file, local_environment
from cdc_replay.spark.session import SMALL_WINDOW_ROWS, spark_session, tune_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE_SECONDS: Final = 600
_PIECES: Final = pa.schema([("part", pa.int32()), ("piece", pa.binary())])
_SCHEMA: Final = "id bigint, name string, at timestamp"


def exercise() -> None:
    """Spark jobs like those of a window: rows from and to Python, a shuffle, filters of several types."""
    session = spark_session("training")
    _exchange_pieces(session)
    for rows in (SMALL_WINDOW_ROWS - 1, SMALL_WINDOW_ROWS):
        tune_for(session, rows, is_packed=False)
        rows_in = session.range(rows).selectExpr("id", "cast(id as string) name", "timestamp_micros(id) at")
        filtered = rows_in.mapInArrow(_same, _SCHEMA).where(
            "id % 3 = 0 and name rlike '[0-9]+' or at < timestamp'2020-01-01' and length(name) > 2"
        )
        filtered.repartition(2, "id").mapInArrow(_same, _SCHEMA).limit(10).collect()
    session.stop()


def _exchange_pieces(session: SparkSession) -> None:
    """Send bytes from Python to Python by partition id, as windows do."""
    schema = from_arrow_schema(_PIECES)
    pieces = session.range(0, 6, numPartitions=6).mapInArrow(_pieces, schema)
    task = F.floor(F.col("part") * 1.0 / 3).cast(IntegerType())
    pieces.repartitionById(2, task).mapInArrow(_same, schema).collect()


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        columns = {"part": batch["id"].cast("int32"), "piece": batch["id"].cast("string").cast("binary")}
        yield batch.from_pydict(columns)


def _same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def make_cache() -> None:
    """Make the cache, replacing an older one; nothing is made if Java is not the packaged one.

    Raises:
        CalledProcessError, TimeoutExpired: if Spark does not run.
    """
    environment = os.environ | local_environment()
    home = environment.get("JAVA_HOME")
    if "JAVA_HOME" in os.environ or home is None:
        return
    cache = cache_file(Path(home))
    fresh = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        subprocess.run(
            [
                str(Path(sys.executable).with_name("spark-submit")),
                *("--conf", f"spark.driver.extraJavaOptions={JVM_OPTIONS}"),
                __file__,
            ],
            env=environment | {TRAINING: str(fresh)},
            check=True,
            capture_output=True,
            timeout=PATIENCE_SECONDS,
        )
        fresh.replace(cache)
    finally:
        fresh.unlink(missing_ok=True)


if __name__ == "__main__":
    if TRAINING in os.environ:
        exercise()
    else:
        make_cache()
