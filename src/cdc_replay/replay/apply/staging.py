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
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from psycopg import sql
from pyspark import TaskContext

from cdc_replay.arrow.arrays import Int64s, ascii_bytes
from cdc_replay.errors import TargetMismatch, UnchangedToastLost
from cdc_replay.failpoints import failpoint
from cdc_replay.model.frames import NetKind
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import SubscribedTable
from cdc_replay.postgres.connection import Connection
from cdc_replay.replay.apply.conflicts import SerializedError, failure_of, key_text, unknown_value
from cdc_replay.replay.apply.transient_keys import TransientKeys, are_counted, split_transient_keys
from cdc_replay.replay.contingent_changes import changes_text
from cdc_replay.spark.nullable_lists import map_in_arrow
from cdc_replay.subscriber.apply_connection import connect_to_write
from cdc_replay.subscriber.staged_columns import check_types, staged_type, typed_value
from cdc_replay.subscriber.state_schema import SCHEMA
from cdc_replay.subscriber.subscription_lock import stable_hash
from cdc_replay.subscriber.target_tables import TargetColumn, TargetTable

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

_CSV: Final = pa_csv.WriteOptions(include_header=False, quoting_style="needed")

KEY_CHANGED: Final = "moved"
"""Beside the kinds of net changes: how many UPDATEs change their row's key."""

UPDATE_MAY_MISS: Final = "unsure"
"""Beside them: how many INSERTs come after UPDATEs of a row that may not be there."""

TRANSIENT_MAY_MISS: Final = "gone unsure"
"""Beside them: how many rows that came and went do so after changes of a row that may not be there."""

_ORPHANS: Final = """
    select relname from pg_class
    where relnamespace = (select oid from pg_namespace where nspname = 'cdc_replay')
        and relkind = 'r' and starts_with(relname, %s)
"""


_STAGED: Final = (
    "attempt bigint, kind text, kinds text, moved boolean, update_missing int, delete_missing int"
)
"""The columns of every staging table, before those of its target."""
_STAGED_NAMES: Final = tuple(column.split()[0] for column in _STAGED.split(", "))


@dataclass(frozen=True, slots=True)
class StageTable:
    """The staging table of one target; picklable.

    Columns: attempt, kind, kinds, moved, update_missing, delete_missing, born where INSERTs follow the log's
    order, then `b0`… for the base key and `v0`… for the values, in the order of the subscribed table's
    `identity` and `columns`. What a row of that kind usually has is NULL: `kinds` where all values were sent,
    `moved` where false, `update_missing` and `delete_missing` where 0.
    """

    index: int
    target: QualifiedName
    name: str
    keys: tuple[TargetColumn, ...]
    values: tuple[TargetColumn, ...]
    key_positions: tuple[int, ...]
    """Where the identity columns are among the values."""
    is_keyed: bool
    has_own_key: bool
    """The target's own index says that no two rows have equal identities."""
    inserts_in_log_order: bool
    """The target shows in which order rows are inserted (`TargetTable.shows_order_of_inserts`)."""
    is_by_leaf: bool = False
    """Rows are found in their leaf, by its key, if it has one."""
    owner_is_untrusted: bool = False
    """The target's owner is another role, whose code must not run as ours (R8.21)."""

    @property
    def identifier(self) -> sql.Identifier:
        """The qualified name."""
        return sql.Identifier(SCHEMA, self.name)

    @property
    def changes_identifier(self) -> sql.Identifier:
        """The qualified name of the table with the changes of contingent lineages."""
        return sql.Identifier(SCHEMA, f"{self.name}_changes")

    @property
    def create_changes_statement(self) -> sql.Composed:
        """DDL that makes that table if it is not there."""
        return sql.SQL(
            "create unlogged table if not exists {} (attempt bigint, changes text)"
            " with (autovacuum_enabled = false)"
        ).format(self.changes_identifier)

    @property
    def create_statement(self) -> sql.Composed:
        """DDL that makes the table if it is not there."""
        born = [sql.SQL("born bigint")] if self.inserts_in_log_order else []
        typed = [sql.SQL(_STAGED), *born, *map(self._typed, self._data_columns)]
        return sql.SQL(
            "create unlogged table if not exists {} ({}) with (autovacuum_enabled = false)"
        ).format(self.identifier, sql.SQL(", ").join(typed))

    @property
    def view(self) -> sql.Identifier:
        """A view of the table in the session's temporary schema, which others can be let read."""
        return sql.Identifier("pg_temp", f"view_{self.name}")

    @property
    def create_view_statement(self) -> sql.Composed:
        """DDL that makes the view; who reads it reads the values that are staged as text."""
        plain = ["ctid", *_STAGED_NAMES, *(["born"] if self.inserts_in_log_order else [])]
        columns = [sql.Identifier(name) for name in plain]
        typed = (self._read_as_type(*each) for each in self._data_columns)
        return sql.SQL("create temporary view {} as select {} from {}").format(
            self.view, sql.SQL(", ").join([*columns, *typed]), self.identifier
        )

    @property
    def _data_columns(self) -> list[tuple[str, TargetColumn]]:
        return [
            (f"{letter}{number}", column)
            for letter, columns in (("b", self.keys), ("v", self.values))
            for number, column in enumerate(columns)
        ]

    def _typed(self, named: tuple[str, TargetColumn]) -> sql.Composed:
        name, column = named
        return sql.SQL("{} {}").format(
            sql.Identifier(name), staged_type(column, owner_is_untrusted=self.owner_is_untrusted)
        )

    def _read_as_type(self, name: str, column: TargetColumn) -> sql.Composed:
        value = typed_value(sql.Identifier(name), column, owner_is_untrusted=self.owner_is_untrusted)
        return sql.SQL("{} as {}").format(value, sql.Identifier(name))


@dataclass(frozen=True, slots=True)
class StagedPart:
    """What one task attempt has staged for one target.

    `counts` are rows by `NetKind` value, besides `KEY_CHANGED`, `UPDATE_MAY_MISS` and `TRANSIENT_MAY_MISS`.
    `unsent` are positions of values that some UPDATE did not send, `omitted` the distinct texts with `-`
    where an INSERT leaves a column to its default and a blank elsewhere. `gone` are the keys of rows that
    came and went and are not staged; `counts` does not count them.
    """

    target: int
    attempt: int
    counts: Mapping[str, int]
    unsent: frozenset[int]
    omitted: frozenset[str]
    conflicts: Mapping[str, int]
    gone: TransientKeys

    @property
    def is_contingent(self) -> bool:
        """Its net changes are right only as long as the target has the rows that they are for."""
        return self.attempt < 0


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


def stage_table(subscription: str, run: str, table: SubscribedTable, target: TargetTable) -> StageTable:
    """Where the net changes of `table` go in the run named `run`."""
    return StageTable(
        table.index,
        table.name,
        f"{_prefix(subscription)}{run}_{table.index}",
        tuple(target.column(name) for name in table.identity),
        tuple(target.column(name) for name in table.columns),
        tuple(table.columns.index(name) for name in table.identity),
        table.is_keyed,
        table.has_own_key,
        target.shows_order_of_inserts(table.columns),
        table.is_by_leaf,
        target.acting.rights.owner_is_untrusted,
    )


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
        texts: Iterable[_CsvRows] = encoding.texts(batches)
        if len(stagers) > 1:
            texts = list(texts)
        rows = [_written(stager, texts, encoding) for stager in stagers]
    except (UnchangedToastLost, TargetMismatch) as error:
        rows = [[encoding.failure(SerializedError.of(error))]] * len(stagers)
    return [pa.RecordBatch.from_pylist(each, schema=PARTS) for each in rows]


def drop_staging(
    connection: Connection, subscription: str, *, run: str = "", beside: str | None = None
) -> None:
    """Drop the subscription's staging tables.

    Those of one `run`, or of all, dead ones too, but not of the run `beside`. The caller holds the
    subscription's lock, so that no other process is using them.
    """
    found = [name for (name,) in connection.execute(_ORPHANS, (_prefix(subscription) + run,))]
    names = [name for name in found if beside is None or not name.startswith(_prefix(subscription) + beside)]
    if names:
        tables = sql.SQL(", ").join(sql.Identifier(SCHEMA, name) for name in names)
        connection.execute(sql.SQL("drop table if exists {}").format(tables))


def _prefix(subscription: str) -> str:
    return f"stage_{stable_hash(subscription) & 0xFFFFFFFFFFFFFFFF:016x}_"


@dataclass(slots=True)
class _StagedCounts:
    """What a task has written for one target."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    unsent: set[int] = field(default_factory=set)
    omitted: set[str] = field(default_factory=set)
    conflicts: collections.Counter[str] = field(default_factory=collections.Counter)
    gone: list[Int64s] = field(default_factory=lambda: [np.zeros(0, np.int64)])

    def part(self, target: int, attempt: int) -> StagedPart:
        """What it comes to."""
        return StagedPart(
            target,
            attempt,
            dict(self.counts),
            frozenset(self.unsent),
            frozenset(self.omitted),
            dict(self.conflicts),
            TransientKeys.of(np.concatenate(self.gone)),
        )


_CsvRows: TypeAlias = tuple[int, bool, memoryview]
"""Some rows of a target as COPY's CSV; whether they are changes of contingent lineages."""


@dataclass(slots=True)
class Encoding:
    """Makes the text of what an attempt stages, and counts it by target.

    Of the targets in `counted` what came and went is not staged (`replay.apply.transient_keys`).
    """

    tables: Mapping[int, StageTable]
    counted: frozenset[int]
    attempt: int
    _tallies: dict[tuple[int, int], _StagedCounts] = field(default_factory=dict)
    """By target and attempt."""

    def texts(self, batches: Iterable[pa.RecordBatch]) -> Iterator[_CsvRows]:
        """Texts of the batches' rows, in the order in which targets come.

        Raises:
            UnknownValue: if a row is to be inserted with a value that was not sent.
        """
        for target, rows in _by_target(batches):
            changes = changes_text(rows)
            attempt = self.attempt if changes is None else contingent_attempt(self.attempt)
            tally = self._tally(target, attempt)
            staged = rows
            if target in self.counted:
                staged, gone = split_transient_keys(rows)
                tally.gone.append(gone)
            # Also of no rows: whoever merges takes it that the staging table is there.
            yield target, False, _csv(staged, self.tables[target], attempt, tally)
            if changes is not None:
                yield target, True, csv_of([pa.array([attempt]), pa.array([changes])])

    def part(self, target: int) -> StagedPart:
        """What was staged for one target under the attempt's first number."""
        return self._tally(target, self.attempt).part(target, self.attempt)

    def _tally(self, target: int, attempt: int) -> _StagedCounts:
        return self._tallies.setdefault((target, attempt), _StagedCounts())

    def parts(self) -> list[dict[str, Any]]:
        """What was staged, if all texts were written; rows of `PARTS`."""
        return [_part_row(tally.part(*place)) for place, tally in self._tallies.items()]

    def failure(self, failure: SerializedError) -> dict[str, Any]:
        """The row of `PARTS` that says why it was not."""
        return {"attempt": self.attempt, "failure": failure.texts}


def contingent_attempt(attempt: int) -> int:
    """The number under which an attempt stages the net changes of contingent lineages."""
    return -1 - attempt


def _part_row(part: StagedPart) -> dict[str, Any]:
    return {
        "target": part.target,
        "attempt": part.attempt,
        "counts": list(part.counts.items()),
        "unsent": sorted(part.unsent),
        "omitted": sorted(part.omitted),
        "conflicts": list(part.conflicts.items()),
        "gone": part.gone.count,
        "gone_steps": part.gone.steps,
        "failure": None,
    }


def _written(stager: Stager, texts: Iterable[_CsvRows], encoding: Encoding) -> list[dict[str, Any]]:
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
    if table.owner_is_untrusted and not is_changes:
        check_types(connection, table.identifier, table.target)
    return connection.cursor().copy(copy_statement(into))


def copy_statement(table: sql.Identifier) -> sql.Composed:
    """COPY of rows of CSV into a table."""
    return sql.SQL("copy {} from stdin (format csv)").format(table)


def _by_target(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    for batch in batches:
        targets = batch["target"].to_numpy()
        borders = [0, *(np.flatnonzero(np.diff(targets)) + 1).tolist(), len(targets)]
        for start, end in itertools.pairwise(borders):
            if start < end:
                yield int(targets[start]), batch.slice(start, end - start)


def _csv(rows: pa.RecordBatch, table: StageTable, attempt: int, tally: _StagedCounts) -> memoryview:
    """`rows` of one target as COPY's CSV; counts them in `tally`.

    Raises:
        UnknownValue: if a row is to be inserted with a value that was not sent.
    """
    kind = rows["kind"]
    _check_known(rows, table)
    keys = [pc.list_element(rows["base_key"], position) for position in range(len(table.keys))]
    values = [pc.list_element(rows["values"], position) for position in range(len(table.values))]
    moved = _moved(kind, keys, [values[position] for position in table.key_positions], table)
    is_whole = _count(rows, moved, tally)
    # An INSERT is found by its values; its base key would be the same once more.
    keyed = pc.not_equal(kind, NetKind.INSERT.value)
    columns = [
        pa.repeat(pa.scalar(attempt, pa.int64()), rows.num_rows),
        kind,
        pa.nulls(rows.num_rows, pa.string()) if is_whole else rows["kinds"],
        _or_null(moved, moved),
        *(_or_null(pc.greater(rows[name], 0), rows[name]) for name in ("update_missing", "delete_missing")),
        *([rows["born"]] if table.inserts_in_log_order else []),
        *(_or_null(keyed, key) for key in keys),
        *values,
    ]
    return csv_of(columns)


def csv_of(columns: Sequence[pa.Array]) -> memoryview:
    """The columns as rows of COPY's CSV."""
    sink = pa.BufferOutputStream()
    names = [str(number) for number in range(len(columns))]
    pa_csv.write_csv(pa.RecordBatch.from_arrays(columns, names=names), sink, _CSV)
    return memoryview(sink.getvalue())


def _check_known(rows: pa.RecordBatch, table: StageTable) -> None:
    """A native worker stores NULL here and loses the value (R4.6)."""
    lacking = pc.and_(pc.equal(rows["kind"], NetKind.INSERT.value), pc.match_substring(rows["kinds"], "u"))
    if not pc.any(lacking).as_py():
        return
    found = rows.filter(pc.fill_null(lacking, False))
    first = found.slice(0, 1).to_pylist()[0]
    columns = [column.name for column, kind in zip(table.values, first["kinds"], strict=True) if kind == "u"]
    key = key_text(table.keys, first["base_key"][: len(table.keys)])
    raise unknown_value(table.target, columns, key, first["last_lsn"], found.num_rows)


def _or_null(where: pa.BooleanArray, values: pa.Array) -> pa.Array:
    """The values, NULL elsewhere: what is NULL costs the server next to nothing."""
    return pc.if_else(where, values, pa.scalar(None, values.type))


def _moved(
    kind: pa.Array, keys: Sequence[pa.Array], sent: Sequence[pa.Array], table: StageTable
) -> pa.BooleanArray:
    """Whether a row's key as sent differs from its base key."""
    moved = pa.repeat(pa.scalar(False), len(kind))
    if not table.is_keyed:
        return moved
    is_update = pc.equal(kind, NetKind.UPDATE.value)
    for key, value in zip(keys, sent, strict=True):
        moved = pc.or_(moved, pc.fill_null(pc.and_(is_update, pc.not_equal(value, key)), False))
    return moved


def _count(rows: pa.RecordBatch, moved: pa.Array, tally: _StagedCounts) -> bool:
    """Add the rows to `tally`; whether each of them has all values."""
    for found in pc.value_counts(rows["kind"]).to_pylist():
        tally.counts[found["values"]] += found["counts"]
    tally.counts[KEY_CHANGED] += pc.sum(moved).as_py() or 0
    misses = pc.or_(pc.greater(rows["update_missing"], 0), pc.greater(rows["delete_missing"], 0))
    for kind, name in ((NetKind.INSERT, UPDATE_MAY_MISS), (NetKind.NOTHING, TRANSIENT_MAY_MISS)):
        tally.counts[name] += pc.sum(pc.and_(misses, pc.equal(rows["kind"], kind.value))).as_py() or 0
    for conflicts in rows["conflicts"].drop_null().to_pylist():
        tally.conflicts.update(json.loads(conflicts))
    kinds = _kinds(rows, NetKind.UPDATE)
    unsent = (kinds != ord("n")) & (kinds != ord("t"))
    tally.unsent.update(np.flatnonzero(unsent.any(axis=0)).tolist())
    omitted = _kinds(rows, NetKind.INSERT) == ord("-")
    patterns = np.unique(omitted, axis=0) if omitted.any() else omitted[:1]
    tally.omitted.update("".join("-" if left else " " for left in pattern) for pattern in patterns)
    return not (unsent.any() or omitted.any())


def _kinds(rows: pa.RecordBatch, kind: NetKind) -> npt.NDArray[np.uint8]:
    """The kinds of the values of all changes of one kind: one row each, one byte per value."""
    kinds = rows["kinds"].filter(pc.equal(rows["kind"], kind.value))
    if len(kinds) == 0:
        return np.zeros((0, 0), np.uint8)
    return ascii_bytes(kinds).reshape(len(kinds), -1)
