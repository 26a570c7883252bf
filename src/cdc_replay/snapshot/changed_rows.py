"""The rows that the log has touched, read from the publisher at the fence: part (2) of `resume.py`.

Executors get the touched keys. A task stages its keys, and the rows that they find: one transaction, two
staging tables of its own, so that a repeated attempt replaces what an earlier one left. The rows are found by
the index of the key, or by one pass over the table where the server thinks that less.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import pyarrow as pa
from psycopg import sql
from pyspark import TaskContext

from cdc_replay.errors import CdcReplayError
from cdc_replay.model.publication import Table
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.copy import CopyTarget, copy_across, subscriber_write_errors
from cdc_replay.postgres.exported_snapshot import import_snapshot
from cdc_replay.postgres.planned_tables import PlannedTable, lock_planned_tables, same_key
from cdc_replay.snapshot.copy_chunk import CopySettings, TableCopy, subscriber_connection
from cdc_replay.snapshot.fingerprint import KeyColumn
from cdc_replay.snapshot.plan import PageSlice, select
from cdc_replay.snapshot.planning import TablePlan
from cdc_replay.snapshot.staging import (
    create_keys,
    create_staging,
    key_names,
    key_text,
    staging_name,
    staging_table,
)
from cdc_replay.spark.nullable_lists import map_in_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEYS_PER_QUERY: Final = 5_000
"""Keys that one statement asks for."""

MATCH: Final = "exists (select from unnest({arrays}) as wanted ({names}) where {same})"


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """What the tasks have in common; picklable."""

    setting: CopySettings
    table: TableCopy
    leaves: tuple[Table, ...]
    passes: sql.Composed | None
    key: tuple[KeyColumn, ...]

    @classmethod
    def of(cls, setting: CopySettings, planned: TablePlan, key: tuple[KeyColumn, ...]) -> ChangedRows:
        """The rows of a published table that have touched keys."""
        return cls(setting, planned.table, planned.synced.leaves, planned.passes, key)

    def queries(self, keys: Sequence[Sequence[str]]) -> Iterator[sql.Composed]:
        """The rows of all leaves that have one of the keys and pass the filters."""
        for leaf in self.leaves:
            condition = match(leaf, self.key, keys)
            yield select(PageSlice(leaf), self.table.columns, self.passes, also=(condition,))


@dataclass(frozen=True, slots=True)
class ChangedRowsPart:
    """What one task has staged: the tables for rows and for keys. `bytes` of COPY text."""

    rows_table: str
    keys_table: str
    rows: int
    keys: int
    bytes: int
    seconds: float


LateResult: TypeAlias = ChangedRowsPart | CdcReplayError


def match(leaf: Table, key: Sequence[KeyColumn], keys: Sequence[Sequence[str]]) -> sql.Composed:
    """The condition that a row of `leaf` has one of these keys, as the key's index compares."""
    names = key_names(len(key))
    same = (
        same_key(
            sql.Identifier(leaf.name.schema, leaf.name.name, column.name),
            column.type_sql,
            (column.equality.schema, column.equality.name),
            sql.Identifier("wanted", name),
        )
        for name, column in zip(names, key, strict=True)
    )
    texts = (sql.SQL("{}::text[]").format(list(column)) for column in zip(*keys, strict=True))
    return sql.SQL(MATCH).format(
        arrays=sql.SQL(", ").join(texts),
        names=sql.SQL(", ").join(map(sql.Identifier, names)),
        same=sql.SQL(" and ").join(same),
    )


def stage_late_rows(late: ChangedRows, keys: DataFrame) -> tuple[LateResult, ...]:
    """Stage the touched `keys` and the publisher's rows for them; one result for each task that had any."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        number = 0 if context is None else context.partitionId()
        for result in _attempt(late, batches, number):
            yield pa.RecordBatch.from_pydict({"result": [pickle.dumps(result)]})

    rows = map_in_arrow(keys, stage, "result binary").collect()
    # What our own task has made; Spark brings results of other jobs in the same way.
    return tuple(pickle.loads(bytes(row["result"])) for row in rows)  # noqa: S301 - by this job's tasks


def _attempt(late: ChangedRows, batches: Iterable[pa.RecordBatch], number: int) -> Iterator[LateResult]:
    held = [batch.column("key") for batch in batches if batch.num_rows]
    if not held:
        return
    try:
        with (
            closing(import_snapshot(late.setting.snapshot, purpose=late.setting.purpose)) as source,
            closing(subscriber_connection(late.setting)) as destination,
        ):
            yield _stage(late, held, number, source, destination)
    except CdcReplayError as error:
        yield error


def _stage(
    late: ChangedRows, held: Sequence[pa.ListArray], number: int, source: Connection, destination: Connection
) -> ChangedRowsPart:
    began = time.monotonic()
    lock_planned_tables(source, map(PlannedTable.from_catalog, late.leaves))
    point = late.setting.snapshot.consistent_point
    names = [
        staging_name(late.setting.subscription, late.table.name, point, f"{kind}{number}") for kind in "rk"
    ]
    rows_table, keys_table = names
    with subscriber_write_errors(late.table.name), destination.transaction():
        create_staging(destination, rows_table, late.table.target, late.table.columns)
        create_keys(destination, keys_table, len(late.key))
        count = _copy_keys(destination, keys_table, held)
        queries = itertools.chain.from_iterable(map(late.queries, _several(held)))
        target = CopyTarget(staging_table(rows_table), late.table.name, late.table.columns, is_new=True)
        copied = copy_across(source, queries, destination, target, late.setting.pace())
        _add_keys_of_rows(destination, late.key, rows_table, keys_table)
    return ChangedRowsPart(rows_table, keys_table, copied.rows, count, copied.bytes, time.monotonic() - began)


def _several(held: Iterable[pa.ListArray]) -> Iterator[list[list[str]]]:
    for keys in held:
        for start in range(0, len(keys), KEYS_PER_QUERY):
            yield keys.slice(start, KEYS_PER_QUERY).to_pylist()


def _copy_keys(destination: Connection, name: str, held: Iterable[pa.ListArray]) -> int:
    statement = sql.SQL("copy {} from stdin").format(staging_table(name))
    with destination.cursor() as cursor:
        with cursor.copy(statement) as into:
            for keys in _several(held):
                for key in keys:
                    into.write_row(key)
        return cursor.rowcount


def _add_keys_of_rows(
    destination: Connection, key: Sequence[KeyColumn], rows_table: str, keys_table: str
) -> None:
    """The rows' own keys, which are other texts where the publisher's equality is coarser."""
    texts = sql.SQL(", ").join(key_text("late", column.name) for column in key)
    destination.execute(
        sql.SQL("insert into {} select {} from {} as late").format(
            staging_table(keys_table), texts, staging_table(rows_table)
        )
    )
