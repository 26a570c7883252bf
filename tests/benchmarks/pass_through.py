"""The slot's bytes through the steps of a change log, with nothing done to them.

    python -m benchmarks.pass_through PLAN [--warm]

Pieces of the slot are decoded and read two at a time, each is written to a file, and workers of Spark read
the files. Nothing is parsed, filtered, netted out or applied. The plan is a file of JSON with the keys of
`Plan`; what is printed is `{"seconds": …, "rows": …}`. Spark starts while the slot is read; with `--warm` it
runs before the seconds begin.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg import sql

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA: Final = pa.schema([("row", pa.binary())])
BATCH_ROWS: Final = 10_000
ROW_GROUP_BYTES: Final = 32 << 20
AT_ONCE: Final = 2
TRAILER_BYTES: Final = 2
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}

_PEEK: Final = """
    copy (
        select lsn, xid, data from pg_logical_slot_peek_binary_changes(
            {}, {}, null, 'proto_version', '1', 'publication_names', {}
        )
    ) to stdout (format binary)
"""


@dataclass(frozen=True)
class Plan:
    """The publisher, its publications, and pieces: a slot at the beginning of each, and the end's LSN."""

    dsn: str
    publications: str
    folder: str
    pieces: tuple[tuple[str, str], ...]


def main() -> None:
    """Carry out the plan."""
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    warm_spark = warm_up(start_spark()) if "--warm" in sys.argv else None
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as readers:
        files = [readers.submit(read, plan, *piece) for piece in plan.pieces]
        spark = warm_spark or start_spark()
        rows = sum(pass_through(spark, file.result()) for file in files)
    sys.stdout.write(f"{json.dumps({'seconds': time.monotonic() - began, 'rows': rows})}\n")


def start_spark() -> SparkSession:
    """Start Spark, with what makes its start and small plans fast."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[*]")
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def warm_up(spark: SparkSession) -> SparkSession:
    """Run a job with workers."""
    numbers = spark.range(0, AT_ONCE, numPartitions=AT_ONCE)
    numbers.mapInArrow(unchanged, numbers.schema).collect()
    return spark


def unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a worker."""
    yield from batches


def read(plan: Plan, slot: str, end: str) -> str:
    """Write what a slot has up to `end` to a file; its path."""
    file = f"{plan.folder}/{slot}.parquet"
    statement = sql.SQL(_PEEK).format(slot, end, plan.publications)
    with psycopg.connect(plan.dsn, autocommit=True) as connection, connection.cursor() as cursor:
        connection.execute("set logical_decoding_work_mem = '1GB'")
        with (
            cursor.copy(statement) as copy,
            pq.ParquetWriter(file, SCHEMA, compression="zstd", use_dictionary=False) as writer,
        ):
            for group in row_groups(batches(copy)):
                writer.write_batch(group, row_group_size=len(group))
    with Path(file).open("rb") as written:
        os.fsync(written.fileno())
    return file


def batches(copy: psycopg.Copy) -> Iterator[pa.RecordBatch]:
    """The rows of a COPY, taken from libpq: psycopg's own loop takes longer."""
    take = copy.connection.pgconn.get_copy_data
    row: bytes | bytearray | memoryview = copy.read()
    while len(row) > TRAILER_BYTES:
        content, sizes = io.BytesIO(), [0]
        while len(row) > TRAILER_BYTES and len(sizes) <= BATCH_ROWS:
            content.write(row)
            sizes.append(len(row))
            size, row = take(1)
            if size == 0:  # nothing has arrived
                row = copy.read()
        offsets = np.cumsum(np.array(sizes, dtype=np.int32), dtype=np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content.getvalue())]
        rows = pa.BinaryArray.from_buffers(pa.binary(), len(sizes) - 1, buffers)
        yield pa.RecordBatch.from_arrays([rows], schema=SCHEMA)
    copy.read()


def row_groups(of: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in larger batches."""
    group: list[pa.RecordBatch] = []
    for batch in of:
        group.append(batch)
        if sum(each.nbytes for each in group) >= ROW_GROUP_BYTES:
            yield pa.concat_batches(group)
            group = []
    if group:
        yield pa.concat_batches(group)


def pass_through(spark: SparkSession, file: str) -> int:
    """Have workers read a file; how many rows it has."""
    groups = pq.ParquetFile(file).metadata.num_row_groups
    numbers = spark.range(0, groups, numPartitions=min(groups, AT_ONCE))
    counts = numbers.mapInArrow(partial(count_rows, file=file), numbers.schema).collect()
    return sum(each.id for each in counts)


def count_rows(numbers: Iterator[pa.RecordBatch], *, file: str) -> Iterator[pa.RecordBatch]:
    """Read the row groups of these numbers; their rows, as `id`. In a worker."""
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            rows = pq.ParquetFile(file).read_row_group(number, use_threads=False).num_rows
            yield pa.RecordBatch.from_pydict({"id": [rows]})


if __name__ == "__main__":
    main()
