"""Rows of the publisher as of a fence, found by the replica identity that they have there.

Executors import the fence's snapshot and read the rows with missing values, a few per statement: the values
may be large. The text of a value is that of its type's output function, as pgoutput sends it, not that of a
cast to text, which differs for some types.

| at the fence                            | the value                                                        |
|-----------------------------------------|------------------------------------------------------------------|
| the row and the column exist            | is the row's                                                     |
| the row, column or table does not exist | is given up: it does not exist any more                          |
| the column has another type             | is lost: nothing proves what it was                              |
| the row cannot be looked up             | is lost: its key is unknown, or is another one now               |

A TRUNCATE or a rewrite that commits after the snapshot was taken hides the rows from it all the same. Rows
that are not found in such a table are read by the next run, whose history has the TRUNCATE.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import psycopg
from psycopg import errors as pg
from psycopg import sql

from cdc_replay.errors import PublisherNotReady
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.postgres.exported_snapshot import SharedSnapshot, import_snapshot
from cdc_replay.postgres.planned_tables import PlannedTable, lock_planned_tables, same_key
from cdc_replay.replay.toast.row_history import give_up, resolved_batch
from cdc_replay.replay.toast.tracked_leaf import TrackedLeaf, TupleColumn
from cdc_replay.subscriber.target_tables import Operator, TargetTable, read_target_tables

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_STATEMENT: Final = 100

_EQUALS: Final = Operator("pg_catalog", "=")

_NAMES: Final = """
    select pg_class.oid::bigint, nspname, relname
    from pg_class join pg_namespace on pg_namespace.oid = relnamespace
    where pg_class.oid = any(%s::oid[]) and relkind = 'r'
"""

_TYPES: Final = """
    select attrelid::bigint, attname, attnum::int, atttypid::bigint, atttypmod from pg_attribute
    where attrelid = any(%s::oid[]) and attnum > 0 and not attisdropped
"""

_READ: Final = """
    select wanted.number{columns}
    from unnest({parameters}) with ordinality as wanted ({names}, number)
    join only {table} as t on {same}
"""

# The catalog's row is the snapshot's, the function's result is current.
_IS_REWRITTEN: Final = "select pg_relation_filenode(oid) <> relfilenode from pg_class where oid = %s"


@dataclass(frozen=True, slots=True)
class PublisherLeaf:
    """How to read rows of a leaf at the fence, where it is `table`; picklable.

    `keys` are the columns of the replica identity in order of attribute number, with type and equality
    operator.
    """

    table: PlannedTable
    keys: tuple[tuple[str, str, Operator], ...]

    def statement(self, columns: Sequence[str]) -> sql.Composed:
        """(index from 1, columns) of the rows with the given keys: one array of texts per key column."""
        names = [sql.Identifier(f"k{index}") for index in range(len(self.keys))]
        same = [
            same_key(
                sql.Identifier("t", column),
                type_sql,
                (equality.schema, equality.name),
                sql.SQL("wanted.{}").format(name),
            )
            for name, (column, type_sql, equality) in zip(names, self.keys, strict=True)
        ]
        return sql.SQL(_READ).format(
            columns=sql.SQL("").join(sql.SQL(", {}").format(sql.Identifier("t", name)) for name in columns),
            parameters=sql.SQL(", ").join(sql.SQL("%s::text[]") for _ in names),
            names=sql.SQL(", ").join(names),
            table=self.table.identifier,
            same=sql.SQL(" and ").join(same),
        )


@dataclass(frozen=True, slots=True)
class PublisherTables:
    """The leaves' tables at the fence; picklable.

    `columns` are the column names of existing tables, by oid; `readable` are the tables whose rows can be
    looked up, as they have the replica identity under which rows were tracked.
    """

    snapshot: SharedSnapshot
    columns: Mapping[int, Mapping[TupleColumn, str]]
    readable: Mapping[int, PublisherLeaf]

    @classmethod
    def at_fence(cls, snapshot: SharedSnapshot, leaves: Iterable[TrackedLeaf]) -> Self:
        """The tables of `leaves` at the fence."""
        by_id = {int(leaf.id): leaf for leaf in leaves}
        with contextlib.closing(import_snapshot(snapshot, purpose="unsent values")) as connection:
            names = {
                oid: QualifiedName(schema, name)
                for oid, schema, name in connection.execute(_NAMES, (list(by_id),))
            }
            columns: dict[int, dict[TupleColumn, str]] = {oid: {} for oid in names}
            for oid, name, *column in connection.execute(_TYPES, (list(names),)):
                columns[oid][TupleColumn(*column)] = name
            tables = read_target_tables(connection, names.values())
        readable = {
            oid: PublisherLeaf(_planned_table(oid, name, columns[oid]), keys)
            for oid, name in names.items()
            if name in tables and (keys := _keys(tables[name], by_id[oid], columns[oid]))
        }
        return cls(snapshot, columns, readable)

    def is_gone(self, leaf: int, column: TupleColumn) -> bool:
        """Whether the column, or its table, was dropped."""
        return column.attnum not in {existing.attnum for existing in self.columns.get(leaf, ())}


def _planned_table(oid: int, name: QualifiedName, columns: Mapping[TupleColumn, str]) -> PlannedTable:
    column_ids = {column: (column_id.attnum, column_id.type_oid) for column_id, column in columns.items()}
    return PlannedTable(oid, name, is_partitioned=False, columns=column_ids)


def _keys(
    table: TargetTable, leaf: TrackedLeaf, names: Mapping[TupleColumn, str]
) -> tuple[tuple[str, str, Operator], ...]:
    """The leaf's key columns as the table has them; none if its identity is another one now."""
    name_by_attnum = {column.attnum: name for column, name in names.items()}
    key = [name_by_attnum.get(attnum) for attnum in leaf.key]
    if sorted(table.identity) != sorted(name for name in key if name is not None):
        return ()
    columns = [table.column(name) for name in key if name is not None]
    return tuple((column.name, column.base_type_sql, column.equality or _EQUALS) for column in columns)


@dataclass(frozen=True, slots=True)
class PublisherRowReader:
    """Reads missing values of entries; runs on executors, one connection per task."""

    tables: PublisherTables
    leaves: Mapping[int, TrackedLeaf]

    def read(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The entries (RESOLVED) with the values that exist; others are given up or lost."""
        with contextlib.ExitStack() as stack:
            session: _Session | None = None
            for batch in batches:
                if session is None and batch.num_rows:
                    connection = import_snapshot(self.tables.snapshot, purpose="unsent values")
                    session = _Session(stack.enter_context(contextlib.closing(connection)))
                entries = batch.to_pylist()
                for start in range(0, len(entries), ROWS_PER_STATEMENT):
                    chunk = entries[start : start + ROWS_PER_STATEMENT]
                    if session is not None:
                        self._fill(session, chunk)
                    yield resolved_batch(chunk)

    def _fill(self, session: _Session, entries: list[dict[str, Any]]) -> None:
        unresolved = [entry for entry in entries if entry["missing"]]

        def shape_of(entry: Mapping[str, Any]) -> tuple[int, int, int, bool, list[int]]:
            shape = entry["relation_version"], entry["catalog_version"]
            return entry["relation_id"], *shape, entry["key"] is not None, entry["missing"]

        for (leaf, *_), group in itertools.groupby(sorted(unresolved, key=shape_of), key=shape_of):
            entries_alike = list(group)
            columns = self._columns(entries_alike[0])
            is_gone = [position for position, column in columns.items() if self.tables.is_gone(leaf, column)]
            self._fill_alike(session, entries_alike, self._readable(entries_alike[0], columns), is_gone)

    def _columns(self, entry: Mapping[str, Any]) -> dict[int, TupleColumn]:
        """The missing columns by position, unless they are ambiguous."""
        shape = entry["relation_version"], entry["catalog_version"]
        columns = self.leaves[entry["relation_id"]].columns_of(shape, len(entry["new"]))
        return {
            position: column for position in entry["missing"] if (column := columns[position]) is not None
        }

    def _readable(
        self, entry: Mapping[str, Any], columns: Mapping[int, TupleColumn]
    ) -> _WantedColumns | None:
        """What to read of the entry's row; None if it cannot be looked up."""
        leaf = entry["relation_id"]
        if entry["key"] is None or leaf not in self.tables.readable:
            return None
        names = self.tables.columns[leaf]
        positions = {position: names[column] for position, column in columns.items() if column in names}
        return _WantedColumns(self.tables.readable[leaf], positions) if columns else None

    @staticmethod
    def _fill_alike(
        session: _Session,
        entries: list[dict[str, Any]],
        to_read: _WantedColumns | None,
        is_gone: Sequence[int],
    ) -> None:
        rows: dict[int, list[str | None]] = {}
        if to_read is not None:
            session.hold(to_read.leaf.table)
            rows = to_read.read(session.connection, [entry["key"] for entry in entries])
            if len(rows) < len(entries):
                to_read.check_not_rewritten(session.connection)
        for index, entry in enumerate(entries, start=1):
            if to_read is not None and index not in rows:
                _set_values(entry, {}, entry["missing"])
            else:
                values = dict(zip(to_read.positions, rows[index], strict=True)) if to_read else {}
                _set_values(entry, values, is_gone)


@dataclass(frozen=True, slots=True)
class _Session:
    """A connection inside the fence's snapshot, and the tables that it has locked."""

    connection: Connection
    _locked: set[int] = field(default_factory=set)

    def hold(self, table: PlannedTable) -> None:
        if table.oid not in self._locked:
            lock_planned_tables(self.connection, [table])
            self._locked.add(table.oid)


@dataclass(frozen=True, slots=True)
class _WantedColumns:
    """Columns of a leaf, by position in the entries' tuples."""

    leaf: PublisherLeaf
    positions: Mapping[int, str]

    def read(self, connection: Connection, keys: Sequence[Sequence[str]]) -> dict[int, list[str | None]]:
        """The values of the rows with these keys, by the key's index from 1."""
        # The index alone shows that the row exists.
        statement = self.leaf.statement(tuple(self.positions.values()))
        parameters = [list(texts) for texts in zip(*keys, strict=True)]
        with self._errors():
            result = connection.execute(statement, parameters).pgresult
        if result is None:
            return {}
        width = len(self.positions)
        return {
            int(result.get_value(row, 0) or b""): [
                _text(result.get_value(row, column)) for column in range(1, width + 1)
            ]
            for row in range(result.ntuples)
        }

    def check_not_rewritten(self, connection: Connection) -> None:
        """Check that the snapshot still sees the table's rows.

        Raises:
            PublisherNotReady: if it does not.
        """
        row = connection.execute(_IS_REWRITTEN, (self.leaf.table.oid,)).fetchone()
        if row is None or row[0] is not False:
            raise self._changed_error("it was truncated or rewritten")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with translated_errors(f'cannot read table "{self.leaf.table.name}" of the publisher'):
                yield
        except (pg.UndefinedTable, pg.UndefinedColumn, pg.InvalidSchemaName) as error:
            raise self._changed_error(error.diag.message_primary or "") from error
        except psycopg.DataError as error:
            raise self._changed_error(error.diag.message_primary or "") from error

    def _changed_error(self, reason: str) -> PublisherNotReady:
        return PublisherNotReady(
            f'table "{self.leaf.table.name}" of the publisher changed while its rows were read: {reason}',
            hint="Nothing of the window is applied. Run the command again.",
            rule="R4.6",
        )


def _set_values(entry: dict[str, Any], values: Mapping[int, str | None], is_gone: Sequence[int]) -> None:
    """Set the values that were read; an unchanged TOAST value is not NULL."""
    new, kinds = entry["new"], list(entry["new_kinds"])
    for position in entry["missing"]:
        if (value := values.get(position)) is not None:
            new[position], kinds[position] = value, "t"
        else:
            entry["lost"] += position not in is_gone
    entry["new_kinds"], entry["missing"] = "".join(kinds), []
    entry |= give_up(entry, is_gone)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
