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
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import psycopg
import pyarrow as pa
from pyspark import TaskContext

from cdc_replay.arrow.arrays import Int64s
from cdc_replay.errors import CdcReplayError, TargetMismatch, UnchangedToastLost
from cdc_replay.failpoints import failpoint
from cdc_replay.model.frames import NetKind
from cdc_replay.postgres.connection import Connection
from cdc_replay.replay.apply.conflicts import staging_error
from cdc_replay.replay.apply.encoding import CsvEncoder, CsvRows, StagedPart
from cdc_replay.replay.apply.refused_rows import CopiedLines
from cdc_replay.replay.apply.stage_table import StageTable, copy_statement
from cdc_replay.replay.apply.transient_keys import tracks_integer_keys
from cdc_replay.subscriber.apply_connection import connect_to_write

if TYPE_CHECKING:
    from pyspark.sql import Row

PARTS: Final = pa.schema([("staged", pa.binary())])
"""Rows of a job: what a task has staged for one target (`StagedPart`), or its error; pickled."""


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


def collect_staged(rows: Iterable[Row], tables: Mapping[int, StageTable]) -> dict[int, StagedTable]:
    """What the tasks have staged (rows of PARTS), by target.

    Raises:
        CdcReplayError: the error of a failed task.
    """
    parts: dict[int, list[StagedPart]] = {}
    for row in rows:
        # Pickled by our own tasks, like all results of Spark jobs.
        part = pickle.loads(bytes(row["staged"]))  # noqa: S301 - from this job's tasks
        if isinstance(part, CdcReplayError):
            raise part
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
    results: list[Sequence[StagedPart | CdcReplayError]]
    try:
        texts: Iterable[CsvRows] = encoder.encode(batches)
        if len(stagers) > 1:
            texts = list(texts)
        results = [_copy_texts(stager, texts, encoder) for stager in stagers]
    except (UnchangedToastLost, TargetMismatch) as error:
        results = [[error]] * len(stagers)
    return [
        pa.RecordBatch.from_pydict({"staged": [*map(pickle.dumps, result)]}, schema=PARTS)
        for result in results
    ]


def _copy_texts(
    stager: Stager, texts: Iterable[CsvRows], encoder: CsvEncoder
) -> Sequence[StagedPart | CdcReplayError]:
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
            return [staging_error(error, None)]
        table = stager.tables[target]
        return [staging_error(error, table.target, lines.refused_key(error, table))]
    return encoder.parts()


def _start_copy(
    connection: Connection, table: StageTable, is_changes: bool
) -> contextlib.AbstractContextManager[psycopg.Copy]:
    if is_changes:
        table.create_changes(connection)
        return connection.cursor().copy(copy_statement(table.changes_identifier))
    table.create(connection)
    table.staged_columns.check_types(connection, table.identifier)
    return connection.cursor().copy(copy_statement(table.identifier))
