"""Rows changed since the oldest staged chunk, read from the publisher at the fence: (2) of `resume.py`.

Executors get the touched keys. A task stages its keys and their rows in one transaction, in two staging
tables of its own, so that a repeated attempt replaces the tables of an earlier one. Rows are found by the
index of the key, or by one pass over the table if the server estimates that to be cheaper.
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
from cdc_replay.postgres.identifiers import commas
from cdc_replay.postgres.planned_tables import PlannedTable, check_unchanged, lock_planned_tables, same_key
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
"""Keys per statement."""

MATCH: Final = "exists (select from unnest({arrays}) as requested ({names}) where {same})"


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """The input of all tasks; picklable."""

    settings: CopySettings
    table: TableCopy
    leaves: tuple[Table, ...]
    passes: sql.Composed | None
    key: tuple[KeyColumn, ...]

    @classmethod
    def from_plan(cls, settings: CopySettings, planned: TablePlan, key: tuple[KeyColumn, ...]) -> ChangedRows:
        """For a planned table and the columns of its key."""
        return cls(settings, planned.table, planned.synced.leaves, planned.passes, key)

    def queries(self, keys: Sequence[Sequence[str]]) -> Iterator[sql.Composed]:
        """The queries for rows of all leaves with one of the keys that pass the filters."""
        for leaf in self.leaves:
            condition = match(leaf, self.key, keys)
            yield select(PageSlice(leaf), self.table.columns, self.passes, also=(condition,))


@dataclass(frozen=True, slots=True)
class ChangedRowsPart:
    """The staging tables of one task, for rows and for keys. `bytes` of COPY text."""

    rows_table: str
    keys_table: str
    rows: int
    keys: int
    bytes: int
    seconds: float


ChangedRowsResult: TypeAlias = ChangedRowsPart | CdcReplayError


def match(leaf: Table, key: Sequence[KeyColumn], keys: Sequence[Sequence[str]]) -> sql.Composed:
    """The condition that a row of `leaf` has one of these keys, by the operators of the key's index."""
    names = key_names(len(key))
    same = (
        same_key(
            sql.Identifier(leaf.name.schema, leaf.name.name, column.name),
            column.type_sql,
            (column.equality.schema, column.equality.name),
            sql.Identifier("requested", name),
        )
        for name, column in zip(names, key, strict=True)
    )
    texts = (sql.SQL("{}::text[]").format(list(column)) for column in zip(*keys, strict=True))
    return sql.SQL(MATCH).format(
        arrays=commas(texts),
        names=commas(map(sql.Identifier, names)),
        same=sql.SQL(" and ").join(same),
    )


def stage_changed_rows(changed: ChangedRows, keys: DataFrame) -> tuple[ChangedRowsResult, ...]:
    """Stage the touched `keys` and the publisher's rows for them; one result for each task with keys."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        task_id = 0 if context is None else context.partitionId()
        for result in _attempt(changed, batches, task_id):
            yield pa.RecordBatch.from_pydict({"result": [pickle.dumps(result)]})

    rows = map_in_arrow(keys, stage, "result binary").collect()
    # Pickled by our own tasks, like all results of Spark jobs.
    return tuple(pickle.loads(bytes(row["result"])) for row in rows)  # noqa: S301 - from this job's tasks


def _attempt(
    changed: ChangedRows, batches: Iterable[pa.RecordBatch], task_id: int
) -> Iterator[ChangedRowsResult]:
    key_arrays = [batch.column("key") for batch in batches if batch.num_rows]
    if not key_arrays:
        return
    try:
        with (
            closing(import_snapshot(changed.settings.snapshot, purpose=changed.settings.purpose)) as source,
            closing(subscriber_connection(changed.settings)) as destination,
        ):
            yield _stage(changed, key_arrays, task_id, source, destination)
    except CdcReplayError as error:
        yield error


def _stage(
    changed: ChangedRows,
    key_arrays: Sequence[pa.ListArray],
    task_id: int,
    source: Connection,
    destination: Connection,
) -> ChangedRowsPart:
    started = time.monotonic()
    table, settings = changed.table, changed.settings
    leaves = tuple(map(PlannedTable.from_catalog, changed.leaves))
    lock_planned_tables(source, leaves)
    point = settings.snapshot.consistent_point
    rows_table, keys_table = (
        staging_name(settings.subscription, table.name, point, f"{kind}{task_id}") for kind in "rk"
    )
    with subscriber_write_errors(table.name), destination.transaction():
        create_staging(destination, rows_table, table.target, table.columns)
        create_keys(destination, keys_table, len(changed.key))
        count = _copy_keys(destination, keys_table, key_arrays)
        queries = itertools.chain.from_iterable(map(changed.queries, _batches_of_keys(key_arrays)))
        target = CopyTarget(staging_table(rows_table), table.name, table.columns, is_new=True)
        copied = copy_across(source, queries, destination, target, settings.pace())
        check_unchanged(source, leaves)
        _add_keys_of_rows(destination, changed.key, rows_table, keys_table)
    seconds = time.monotonic() - started
    return ChangedRowsPart(rows_table, keys_table, copied.rows, count, copied.bytes, seconds)


def _batches_of_keys(key_arrays: Iterable[pa.ListArray]) -> Iterator[list[list[str]]]:
    for keys in key_arrays:
        for start in range(0, len(keys), KEYS_PER_QUERY):
            yield keys.slice(start, KEYS_PER_QUERY).to_pylist()


def _copy_keys(destination: Connection, name: str, key_arrays: Iterable[pa.ListArray]) -> int:
    statement = sql.SQL("copy {} from stdin").format(staging_table(name))
    with destination.cursor() as cursor:
        with cursor.copy(statement) as into:
            for keys in _batches_of_keys(key_arrays):
                for key in keys:
                    into.write_row(key)
        return cursor.rowcount


def _add_keys_of_rows(
    destination: Connection, key: Sequence[KeyColumn], rows_table: str, keys_table: str
) -> None:
    """Add the rows' own keys: other texts if the publisher's equality is coarser than that of texts."""
    texts = commas(key_text("changed", column.name) for column in key)
    destination.execute(
        sql.SQL("insert into {} select {} from {} as changed").format(
            staging_table(keys_table), texts, staging_table(rows_table)
        )
    )
