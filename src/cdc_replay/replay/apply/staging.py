"""Executors: net changes into staging tables on the subscriber, by COPY.

Each target that has net changes gets one unlogged table in schema `cdc_replay`, made by the first task that
needs it. Its columns have the target's own types, so that the target's input functions read the publisher's
text (R8.1), below all domains, so that a value that was not sent can be NULL.

Each COPY commits by itself, and every row carries the number of the task attempt that wrote it. A task that
failed or was run twice leaves rows behind that nobody reads: the driver merges only the attempts whose
`StagedPart` came back. Whatever a killed run leaves is found by its name, which begins with the
subscription's number, and dropped by the next run.

The net changes of contingent lineages (`replay.compact.fold_reference`) are staged under an attempt's second
number, so that others can take their place, and the changes that they come from in a table beside
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
from cdc_replay.replay.apply.encoding import CsvRows, Encoding, StagedPart
from cdc_replay.replay.apply.stage_table import StageTable, copy_statement
from cdc_replay.replay.apply.transient_keys import TransientKeys, are_counted
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
    ("gone", "bigint", pa.int64()),
    ("gone_steps", "binary", pa.binary()),
    ("failure", "array<string>", pa.list_(pa.string())),
)
PARTS_DDL: Final = ", ".join(f"{name} {spark_type}" for name, spark_type, _ in _PART_COLUMNS)
PARTS: Final = pa.schema([(name, arrow_type) for name, _, arrow_type in _PART_COLUMNS])


@dataclass(frozen=True, slots=True)
class StagedTable:
    """All parts of one target."""

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
        """Conflicts that the window has in itself, by `ConflictKind` value."""
        total: collections.Counter[str] = collections.Counter()
        for part in self.parts:
            total.update(part.conflicts)
        return total

    @property
    def gone(self) -> Int64s:
        """The keys of rows that came and went and are not staged, in no order."""
        return np.concatenate([part.gone.keys for part in self.parts])


def stage(net: DataFrame, tables: Iterable[StageTable], dsn: str) -> dict[int, StagedTable]:
    """Write `net` (NET) into staging tables, from the executors; what is staged, by target.

    Raises:
        CdcReplayError: if a value does not fit its target column, or the subscriber cannot be written.
    """
    stager = Stager.of(tables, dsn)

    def stage_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from stage_with([stager], batches)

    return collect_staged(map_in_arrow(net, stage_partition, PARTS_DDL).collect(), stager.tables)


def collect_staged(rows: Iterable[Row], tables: Mapping[int, StageTable]) -> dict[int, StagedTable]:
    """What the tasks say that they have staged (PARTS), by target.

    Raises:
        CdcReplayError: what one of them has failed with.
    """
    staged: dict[int, list[StagedPart]] = {}
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
            TransientKeys(row["gone"], row["gone_steps"]),
        )
        staged.setdefault(part.target, []).append(part)
    return {target: StagedTable(tables[target], tuple(staged[target])) for target in sorted(staged)}


@dataclass(frozen=True, slots=True)
class Stager:
    """Writes net changes from an executor; picklable."""

    tables: Mapping[int, StageTable]
    dsn: str

    @classmethod
    def of(cls, tables: Iterable[StageTable], dsn: str) -> Self:
        """Into those tables of that database."""
        return cls({table.index: table for table in tables}, dsn)


def stage_with(stagers: Sequence[Stager], batches: Iterator[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Stage batches (NET) of a task by each of `stagers`, and say what each has staged (PARTS).

    Their tables may differ in their names and types only, so that all write the same text.
    """
    context = TaskContext.get()
    counted = frozenset(
        target
        for target in stagers[0].tables
        if all(are_counted(stager.tables[target]) for stager in stagers)
    )
    encoding = Encoding(stagers[0].tables, counted, 0 if context is None else context.taskAttemptId())
    try:
        texts: Iterable[CsvRows] = encoding.texts(batches)
        if len(stagers) > 1:
            texts = list(texts)
        rows = [_written(stager, texts, encoding) for stager in stagers]
    except (UnchangedToastLost, TargetMismatch) as error:
        rows = [[encoding.failure(SerializedError.of(error))]] * len(stagers)
    return [pa.RecordBatch.from_pylist(each, schema=PARTS) for each in rows]


def _written(stager: Stager, texts: Iterable[CsvRows], encoding: Encoding) -> list[dict[str, Any]]:
    """Write all texts; rows of `PARTS`."""
    target: int | None = None
    place: tuple[int, bool] | None = None
    copy: psycopg.Copy | None = None
    try:
        with contextlib.ExitStack() as connected, contextlib.ExitStack() as copying:
            connection: Connection | None = None
            for text_target, is_changes, text in texts:
                if connection is None:
                    connection = connected.enter_context(
                        connect_to_write(stager.dsn, purpose="apply staging")
                    )
                if copy is None or place != (text_target, is_changes):
                    copying.close()  # what it raises is of the target before
                    target, place = text_target, (text_target, is_changes)
                    copy = copying.enter_context(_copy_into(connection, stager.tables[target], is_changes))
                copy.write(text)
                failpoint("replay.mid_staging")
    except psycopg.Error as error:
        failed = None if target is None else stager.tables[target].target
        return [encoding.failure(failure_of(error, failed))]
    return encoding.parts()


def _copy_into(
    connection: Connection, table: StageTable, is_changes: bool
) -> contextlib.AbstractContextManager[psycopg.Copy]:
    # `if not exists` alone fails where another task creates the same table right now. Statements that are
    # sent together are one transaction.
    locked = sql.SQL("select pg_advisory_xact_lock(hashtextextended({}, 0)); {}")
    create = table.create_changes_statement if is_changes else table.create_statement
    connection.execute(locked.format(sql.Literal(table.name), create), prepare=False)
    into = table.changes_identifier if is_changes else table.identifier
    if table.is_of_another and not is_changes:
        check_types(connection, table.identifier, table.target)
    return connection.cursor().copy(copy_statement(into))
