"""Rows of the publisher as of a fence, found by the replica identity that they have there.

Executors import the fence's snapshot and ask for the rows that wait for a value, a few to a statement: the
values may be large. The text of a value is that of its type's output function, as pgoutput sends it, not that
of a cast to text, which differs for some types.

A TRUNCATE or a rewrite that is committed after the snapshot was taken hides the rows from it all the same.
Rows that are not found in such a table are asked for again by the next run, whose history has the TRUNCATE.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import errors as pg
from psycopg import sql

from cdc_replay.errors import PublisherNotReady
from cdc_replay.fill.follow import as_batch
from cdc_replay.fill.leaves import FollowedLeaf
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.postgres.exported_snapshot import SharedSnapshot, import_snapshot
from cdc_replay.subscriber.tables import Operator, TargetTable, read_target_tables

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
    select attrelid::bigint, attname, atttypid::bigint, atttypmod from pg_attribute
    where attrelid = any(%s::oid[]) and attnum > 0 and not attisdropped
"""

_READ: Final = """
    select wanted.number, {columns}
    from unnest({parameters}) with ordinality as wanted ({names}, number)
    join only {table} as t on {same}
"""

# The catalog's row is the snapshot's, the function answers as of now.
_IS_REWRITTEN: Final = "select pg_relation_filenode(oid) <> relfilenode from pg_class where oid = %s"


@dataclass(frozen=True, slots=True)
class FencedLeaf:
    """How rows of a leaf are read at the fence; picklable.

    `keys` are the columns of the replica identity in order of name, with type and equality operator; `types`
    are (type oid, typmod) of all columns.
    """

    id: int
    name: QualifiedName
    keys: tuple[tuple[str, str, Operator], ...]
    types: Mapping[str, tuple[int, int]]

    def statement(self, columns: Sequence[str]) -> sql.Composed:
        """(number from 1, columns) of the rows that have keys given as one array of texts per key column."""
        names = [sql.Identifier(f"k{number}") for number in range(len(self.keys))]
        same = [
            sql.SQL("t.{} operator({}.{}) wanted.{}::{}").format(
                sql.Identifier(column),
                sql.Identifier(equality.schema),
                sql.SQL(equality.name),
                name,
                sql.SQL(type_sql),
            )
            for name, (column, type_sql, equality) in zip(names, self.keys, strict=True)
        ]
        return sql.SQL(_READ).format(
            columns=sql.SQL(", ").join(sql.Identifier("t", column) for column in columns),
            parameters=sql.SQL(", ").join(sql.SQL("%s::text[]") for _ in names),
            names=sql.SQL(", ").join(names),
            table=sql.Identifier(self.name.schema, self.name.name),
            same=sql.SQL(" and ").join(same),
        )


def fenced_leaves(snapshot: SharedSnapshot, leaves: Iterable[FollowedLeaf]) -> dict[int, FencedLeaf]:
    """Those of `leaves` that are still there with the same replica identity, by oid."""
    by_id = {int(leaf.id): leaf for leaf in leaves}
    found: dict[int, FencedLeaf] = {}
    with contextlib.closing(import_snapshot(snapshot, purpose="unsent values")) as connection:
        names = {
            oid: QualifiedName(schema, name)
            for oid, schema, name in connection.execute(_NAMES, (list(by_id),))
        }
        types: dict[int, dict[str, tuple[int, int]]] = {}
        for oid, column, type_oid, typmod in connection.execute(_TYPES, (list(by_id),)):
            types.setdefault(oid, {})[column] = (type_oid, typmod)
        tables = read_target_tables(connection, names.values())
    for oid, name in names.items():
        if name in tables and (keys := _keys(tables[name], by_id[oid])):
            found[oid] = FencedLeaf(oid, name, keys, types[oid])
    return found


def _keys(table: TargetTable, leaf: FollowedLeaf) -> tuple[tuple[str, str, Operator], ...]:
    """The leaf's key columns as the table has them; none if its identity is another one now."""
    if sorted(table.identity) != list(leaf.key):
        return ()
    columns = [table.column(name) for name in leaf.key]
    return tuple((column.name, column.base_type_sql, column.equality or _EQUALS) for column in columns)


@dataclass(frozen=True, slots=True)
class FenceReader:
    """Reads what entries are waiting for; runs on executors, one connection per task."""

    snapshot: SharedSnapshot
    leaves: Mapping[int, FencedLeaf]
    types: Mapping[int, tuple[tuple[str, int, int], ...]]
    """By relation version: name, type oid and typmod of the tuple's values."""

    def read(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The entries (FOUND) with the values that are there; what is not there is lost."""
        with contextlib.ExitStack() as stack:
            connection: Connection | None = None
            for batch in batches:
                if connection is None and batch.num_rows:
                    opened = import_snapshot(self.snapshot, purpose="unsent values")
                    connection = stack.enter_context(contextlib.closing(opened))
                entries = batch.to_pylist()
                for start in range(0, len(entries), ROWS_PER_STATEMENT):
                    some = entries[start : start + ROWS_PER_STATEMENT]
                    if connection is not None:
                        self._fill(connection, some)
                    yield as_batch(some)

    def _fill(self, connection: Connection, entries: list[dict[str, Any]]) -> None:
        waiting = [entry for entry in entries if entry["missing"]]

        def what(entry: Mapping[str, Any]) -> tuple[int, int, list[int]]:
            return entry["relation_id"], entry["relation_version"], entry["missing"]

        for (leaf, version, missing), group in itertools.groupby(sorted(waiting, key=what), key=what):
            self._fill_alike(connection, list(group), self._readable(leaf, version, missing))

    def _readable(self, leaf: int, version: int, missing: Sequence[int]) -> _Wanted | None:
        """What to read for values that a version holds at `missing`, None if the table has them no more."""
        if leaf not in self.leaves:
            return None
        columns = [self.types[version][position] for position in missing]
        now = self.leaves[leaf].types
        positions = {
            position: name
            for position, (name, *kind) in zip(missing, columns, strict=True)
            if now.get(name) == tuple(kind)
        }
        return _Wanted(self.leaves[leaf], positions) if positions else None

    @staticmethod
    def _fill_alike(connection: Connection, entries: list[dict[str, Any]], wanted: _Wanted | None) -> None:
        rows: dict[int, list[str | None]] = {}
        if wanted is not None:
            rows = wanted.read(connection, [entry["key"] for entry in entries])
            if len(rows) < len(entries):
                wanted.check_not_rewritten(connection)
        for number, entry in enumerate(entries, start=1):
            values = dict(zip(wanted.positions if wanted else (), rows.get(number, ()), strict=False))
            _put(entry, values)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Columns of a leaf, by position in the entries' tuples."""

    leaf: FencedLeaf
    positions: Mapping[int, str]

    def read(self, connection: Connection, keys: Sequence[Sequence[str]]) -> dict[int, list[str | None]]:
        """The values of the rows with these keys, by the key's number from 1."""
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
        """Raises if the snapshot cannot see the table's rows any more.

        Raises:
            PublisherNotReady: then.
        """
        row = connection.execute(_IS_REWRITTEN, (self.leaf.id,)).fetchone()
        if row is None or row[0] is not False:
            raise self._changed("it was truncated or rewritten")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with translated_errors(f'cannot read table "{self.leaf.name}" of the publisher'):
                yield
        except (pg.UndefinedTable, pg.UndefinedColumn, pg.InvalidSchemaName) as error:
            raise self._changed(error.diag.message_primary or "") from error
        except psycopg.DataError as error:
            raise self._changed(error.diag.message_primary or "") from error

    def _changed(self, said: str) -> PublisherNotReady:
        return PublisherNotReady(
            f'table "{self.leaf.name}" of the publisher changed while its rows were read: {said}',
            hint="Nothing of the window is applied. Run the command again.",
            rule="R4.6",
        )


def _put(entry: dict[str, Any], values: Mapping[int, str | None]) -> None:
    """Give the entry what was read; a value that was unchanged and out of line is not NULL."""
    new, kinds = entry["new"], list(entry["new_kinds"])
    for position in entry["missing"]:
        if (value := values.get(position)) is None:
            entry["lost"] += 1
            continue
        new[position], kinds[position] = value, "t"
    entry["new_kinds"], entry["missing"] = "".join(kinds), []


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
