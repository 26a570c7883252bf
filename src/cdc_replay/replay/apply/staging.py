"""Executors: COPY net changes into staging tables on the subscriber.

The first task that has changes of a target creates its unlogged table in schema `cdc_replay`, with the
target's own types, so that the target's input functions read the publisher's text (R8.1); domains are
replaced by their base types, so that a value that was not sent can be NULL.

Each COPY commits, and every row carries the task attempt that wrote it. A task that fails or runs twice
leaves rows that are ignored: the driver merges the attempts whose `StagedPart` arrived. The tables of a
killed run are found by the subscription's prefix in their names, and dropped by the next run.

Net changes of contingent lineages (`replay.compact.fold_reference`) are staged under a second number of the
attempt, so that they can be replaced, and the changes that they come from in another table
(`replay.apply.contingent`).
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark import TaskContext

from cdc_replay.arrow.arrays import Int64s
from cdc_replay.errors import TargetMismatch, UnchangedToastLost
from cdc_replay.failpoints import failpoint
from cdc_replay.model.frames import NetKind
from cdc_replay.postgres.connection import Connection
from cdc_replay.replay.apply.conflicts import SerializedError, failure_of
from cdc_replay.replay.apply.encoding import CsvEncoder, CsvRows, StagedPart
from cdc_replay.replay.apply.refused_rows import CopiedLines
from cdc_replay.replay.apply.stage_table import StageTable, copy_statement
from cdc_replay.replay.apply.transient_keys import TransientKeys, tracks_integer_keys
from cdc_replay.spark.nullable_lists import map_in_arrow
from cdc_replay.subscriber.apply_connection import connect_to_write
from cdc_replay.subscriber.staged_columns import check_types

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

_PART_COLUMNS: Final = (
    ("target", "int", pa.int32()),
    ("attempt", "bigint", pa.int64()),
    ("counts", "map<string,bigint>", pa.map_(pa.string(), pa.int64())),
    ("unsent", "array<int>", pa.list_(pa.int32())),
    ("omitted", "array<string>", pa.list_(pa.string())),
    ("conflicts", "map<string,bigint>", pa.map_(pa.string(), pa.int64())),
    ("transient_count", "bigint", pa.int64()),
    ("transient_steps", "binary", pa.binary()),
    ("failure", "array<string>", pa.list_(pa.string())),
)
PARTS_DDL: Final = ", ".join(f"{name} {spark_type}" for name, spark_type, _ in _PART_COLUMNS)
PARTS: Final = pa.schema([(name, arrow_type) for name, _, arrow_type in _PART_COLUMNS])


@dataclass(frozen=True, slots=True)
class StagedTable:
    """All staged parts of one target."""

    table: StageTable
    parts: tuple[StagedPart, ...]

    def count(self, kind: NetKind | str) -> int:
        """Rows of that kind."""
        name = kind.value if isinstance(kind, NetKind) else kind
        return sum(part.counts.get(name, 0) for part in self.parts)

    @property
    def attempts(self) -> list[int]:
        """The task attempts whose rows count."""
        return sorted(part.attempt for part in self.parts)

    @property
    def unsent(self) -> frozenset[int]:
        """Positions of values that some UPDATE did not send."""
        return frozenset().union(*(part.unsent for part in self.parts))

    @property
    def omitted(self) -> list[str]:
        """Distinct patterns of columns that INSERTs leave to their defaults."""
        return sorted(frozenset().union(*(part.omitted for part in self.parts)))

    @property
    def conflicts(self) -> collections.Counter[str]:
        """Conflicts among the window's own changes, by `ConflictKind` value."""
        total: collections.Counter[str] = collections.Counter()
        for part in self.parts:
            total.update(part.conflicts)
        return total

    @property
    def transient_keys(self) -> Int64s:
        """The keys of transient rows that are not staged, in any order."""
        return np.concatenate([part.transient_keys.keys for part in self.parts])


def stage_frame(net: DataFrame, tables: Iterable[StageTable], dsn: str) -> dict[int, StagedTable]:
    """Write `net` (NET) into staging tables, from the executors; returns what was staged, by target.

    Raises:
        CdcReplayError: if a value does not fit its target column, or the subscriber cannot be written.
    """
    stager = Stager.of(tables, dsn)

    def stage_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from stage_with([stager], batches)

    return collect_staged(map_in_arrow(net, stage_partition, PARTS_DDL).collect(), stager.tables)


def collect_staged(rows: Iterable[Row], tables: Mapping[int, StageTable]) -> dict[int, StagedTable]:
    """What the tasks have staged (rows of PARTS), by target.

    Raises:
        CdcReplayError: the error of a failed task.
    """
    parts: dict[int, list[StagedPart]] = {}
    for row in rows:
        if row["failure"] is not None:
            raise SerializedError(*row["failure"]).error()
        part = StagedPart(
            row["target"],
            row["attempt"],
            row["counts"],
            frozenset(row["unsent"]),
            frozenset(row["omitted"]),
            row["conflicts"],
            TransientKeys(row["transient_count"], row["transient_steps"]),
        )
        parts.setdefault(part.target, []).append(part)
    return {target: StagedTable(tables[target], tuple(parts[target])) for target in sorted(parts)}


@dataclass(frozen=True, slots=True)
class Stager:
    """Writes net changes from an executor; picklable."""

    tables: Mapping[int, StageTable]
    dsn: str

    @classmethod
    def of(cls, tables: Iterable[StageTable], dsn: str) -> Self:
        """A stager for those tables of the database `dsn`."""
        return cls({table.index: table for table in tables}, dsn)


def stage_with(stagers: Sequence[Stager], batches: Iterator[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Stage batches (NET) of a task by each of `stagers`; returns what each has staged (PARTS).

    Their tables differ in names and types only, so that all are sent the same text.
    """
    context = TaskContext.get()
    tracked = frozenset(
        target
        for target in stagers[0].tables
        if all(tracks_integer_keys(stager.tables[target]) for stager in stagers)
    )
    encoder = CsvEncoder(stagers[0].tables, tracked, 0 if context is None else context.taskAttemptId())
    try:
        texts: Iterable[CsvRows] = encoder.encode(batches)
        if len(stagers) > 1:
            texts = list(texts)
        rows = [_copy_texts(stager, texts, encoder) for stager in stagers]
    except (UnchangedToastLost, TargetMismatch) as error:
        rows = [[encoder.failure(SerializedError.from_error(error))]] * len(stagers)
    return [pa.RecordBatch.from_pylist(part_rows, schema=PARTS) for part_rows in rows]


def _copy_texts(stager: Stager, texts: Iterable[CsvRows], encoder: CsvEncoder) -> list[dict[str, Any]]:
    target: int | None = None
    copied: tuple[int, bool] | None = None
    copy: psycopg.Copy | None = None
    lines = CopiedLines()
    try:
        with contextlib.ExitStack() as connected, contextlib.ExitStack() as copying:
            connection: Connection | None = None
            for text_target, is_changes, text in texts:
                if connection is None:
                    connection = connected.enter_context(
                        connect_to_write(stager.dsn, purpose="apply staging")
                    )
                if copy is None or copied != (text_target, is_changes):
                    copying.close()  # its errors are those of the previous target
                    target, copied, lines = text_target, (text_target, is_changes), CopiedLines()
                    copy = copying.enter_context(_start_copy(connection, stager.tables[target], is_changes))
                lines.add(text)
                copy.write(text)
                failpoint("replay.mid_staging")
    except psycopg.Error as error:
        if target is None:
            return [encoder.failure(failure_of(error, None))]
        table = stager.tables[target]
        return [encoder.failure(failure_of(error, table.target, lines.refused_key(error, table)))]
    return encoder.parts()


def _start_copy(
    connection: Connection, table: StageTable, is_changes: bool
) -> contextlib.AbstractContextManager[psycopg.Copy]:
    # `if not exists` alone fails if another task creates the same table concurrently. Statements that are
    # sent together are one transaction.
    locked = sql.SQL("select pg_advisory_xact_lock(hashtextextended({}, 0)); {}")
    create = table.create_changes_statement if is_changes else table.create_statement
    connection.execute(locked.format(sql.Literal(table.name), create), prepare=False)
    into = table.changes_identifier if is_changes else table.identifier
    if table.owner_is_untrusted and not is_changes:
        check_types(connection, table.identifier, table.target)
    return connection.cursor().copy(copy_statement(into))
