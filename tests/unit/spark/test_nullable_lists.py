"""Nullable lists reach Python as they are, without the NULLs that Spark is slow to send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from cdc_replay.spark.nullable_lists import map_in_arrow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

DDL = "id int, texts array<string>, numbers array<int>"
ROWS = [(1, ["a", None], None), (2, None, [1]), (3, [], []), (4, None, None), (5, [None], [2, None, 3])]


def test_null_lists_empty_lists_and_null_elements_stay_distinct(spark: SparkSession) -> None:
    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            assert batch.schema.names == ["id", "texts", "numbers"]
            yield batch

    frame = spark.createDataFrame(ROWS, DDL).coalesce(1)

    assert [tuple(row) for row in map_in_arrow(frame, same, DDL).orderBy("id").collect()] == ROWS


def test_run_of_null_lists_arrives_as_nulls(spark: SparkSession) -> None:
    def counts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            numbers = [batch.num_rows, batch["old"].null_count, len(batch["old"].values)]
            yield pa.RecordBatch.from_pydict(
                {"rows": numbers[:1], "nulls": numbers[1:2], "values": numbers[2:]}
            )

    frame = spark.range(100_000).selectExpr("id", "if(id = 7, array('x'), null) as old")
    counted = map_in_arrow(frame, counts, "rows bigint, nulls bigint, values bigint")

    assert counted.groupBy().sum().collect() == [(100_000, 99_999, 1)]
