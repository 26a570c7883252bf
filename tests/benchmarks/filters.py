"""Rows per second of a row filter in Arrow and on the server.

    make env && PYTHONPATH=tools:tests .venv/bin/python -m benchmarks.filters [--rows N]

The same filters are evaluated both ways over the same inserted rows, on an embedded server and two cores. Of
each way the fastest of three runs counts. What reading the frame takes, and what its way through Python takes
that the server's way needs, is said first.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F

from cdc_replay.filters.arrow_eval import evaluate_filter
from cdc_replay.filters.compile import ArrowFilter, ServerFilter, compile_filter
from cdc_replay.filters.server_eval import ServerCheck
from cdc_replay.spark.session import spark_session
from embedded.java import spark_environment
from embedded.postgres import Cluster
from fixtures.postgres import Database, create_database
from fixtures.server_filters import evaluate_on_server
from fixtures.stored_filters import FilteredTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NAMES: Final = ("id", "status", "amount", "note", "at")
TABLE: Final = (
    "create table t (id bigint primary key, status text, amount numeric(12, 2), note text, at timestamptz)"
)
FILTERS: Final = {
    "few values": "status in ('new', 'paid') and status <> 'x'",
    "integer": "id % 10 = 3",
    "text": "amount > 250.50 and note like '%7%'",
    "time": "at >= '2026-01-01' and at < '2026-07-01'",
}


def frame_of(rows: int) -> DataFrame:
    """Inserted rows, cached: `route`, `kind`, `old` and `new`."""
    number = F.col("id")
    words = F.array(*map(F.lit, ("new", "paid", "sent", "lost")))
    cents = (number * 7919) % 100_000
    amount = F.concat_ws(".", cents.cast("string"), F.lpad((number % 100).cast("string"), 2, "0"))
    note = F.concat(F.lit("order no. "), F.md5(number.cast("string")))
    moment = F.timestamp_seconds(F.lit(1_750_000_000) + number * 31)
    at = F.concat(F.date_format(moment, "yyyy-MM-dd HH:mm:ss"), F.lit("+00"))
    values = F.array(number.cast("string"), words[(number % 4).cast("int")], amount, note, at)
    none = F.lit(None).cast("array<string>")
    frame = spark_session("benchmark").range(0, rows, numPartitions=4)
    frame = frame.select(
        F.lit(0).alias("route"), F.lit("I").alias("kind"), none.alias("old"), values.alias("new")
    )
    frame.persist().count()
    return frame


def seconds(run: Callable[[], object]) -> float:
    """The time of the fastest of three runs."""
    found = []
    for _ in range(3):
        began = time.monotonic()
        run()
        found.append(time.monotonic() - began)
    return min(found)


def in_arrow(frame: DataFrame, compiled: ArrowFilter) -> int:
    def passing(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            texts = {
                column.attnum: pc.list_element(batch["new"], NAMES.index(column.name))
                for column in compiled.columns
            }
            passes = evaluate_filter(compiled.expression, texts, batch.num_rows)
            yield pa.RecordBatch.from_pydict({"passes": passes})

    return int(frame.mapInArrow(passing, "passes boolean").select(F.count_if("passes")).collect()[0][0])


def on_server(frame: DataFrame, compiled: ServerFilter, dsn: str) -> int:
    check = ServerCheck.from_filter(compiled, NAMES, check_id=0, routes=[0])
    answered = evaluate_on_server(frame, [check], dsn, rows={"old": "old_verdicts", "new": "new_verdicts"})
    return int(answered.select(F.count_if(F.col("new_verdicts")[0])).collect()[0][0])


def through_python(frame: DataFrame) -> int:
    """What the way through Python costs by itself."""
    filled = frame.withColumn("old", F.array().cast("array<string>"))
    through = filled.mapInArrow(lambda batches: batches, filled.schema)
    return int(through.select(F.count("new")).collect()[0][0])


def measure(rows: int, database: Database) -> None:
    """Say how fast each filter is."""
    database.run(TABLE)
    filtered = FilteredTable(database)
    table = filtered.table()
    frame = frame_of(rows)
    read = seconds(lambda: frame.select(F.count("new")).collect())
    python = seconds(lambda: through_python(frame))
    say(f"{rows} rows; reading the frame {read:.2f} s, through Python and back {python:.2f} s")
    for (name, text), stored in zip(FILTERS.items(), filtered.store(list(FILTERS.values())), strict=True):
        compiled = compile_filter(stored, table)
        assert isinstance(compiled, ArrowFilter)
        server = ServerFilter((stored,), compiled.columns, "measured", table.name)
        here, there = partial(in_arrow, frame, compiled), partial(on_server, frame, server, database.dsn)
        assert here() == there()
        speeds = f"Arrow {rows / seconds(here):10,.0f} rows/s, server {rows / seconds(there):10,.0f} rows/s"
        say(f"{name:10} {speeds}   {text}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    os.environ.update(spark_environment())
    spark_session("benchmark", conf={"spark.master": "local[2]"})
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), "publisher") as cluster:
        measure(rows, create_database(cluster, "benchmark"))


if __name__ == "__main__":
    main()
