"""The staging table of one target: its columns, and the statements that create, read and drop it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import SubscribedTable
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.staged_columns import staged_type, typed_value
from cdc_replay.subscriber.state import SCHEMA, stable_hash
from cdc_replay.subscriber.tables import TargetColumn, TargetTable

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
    is_of_another: bool = False
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
            sql.Identifier(name), staged_type(column, is_of_another=self.is_of_another)
        )

    def _read_as_type(self, name: str, column: TargetColumn) -> sql.Composed:
        value = typed_value(sql.Identifier(name), column, is_of_another=self.is_of_another)
        return sql.SQL("{} as {}").format(value, sql.Identifier(name))


def stage_table(subscription: str, run: str, table: SubscribedTable, target: TargetTable) -> StageTable:
    """Where the net changes of `table` go in the run named `run`."""
    return StageTable(
        table.index,
        table.name,
        f"{staging_prefix(subscription)}{run}_{table.index}",
        tuple(target.column(name) for name in table.identity),
        tuple(target.column(name) for name in table.columns),
        tuple(table.columns.index(name) for name in table.identity),
        table.is_keyed,
        table.has_own_key,
        target.shows_order_of_inserts(table.columns),
        table.is_by_leaf,
        target.acting.rights.is_of_another,
    )


def drop_staging(
    connection: Connection, subscription: str, *, run: str = "", beside: str | None = None
) -> None:
    """Drop the subscription's staging tables.

    Those of one `run`, or of all, dead ones too, but not of the run `beside`. The caller holds the
    subscription's lock, so that no other process is using them.
    """
    found = [name for (name,) in connection.execute(_ORPHANS, (staging_prefix(subscription) + run,))]
    names = [
        name for name in found if beside is None or not name.startswith(staging_prefix(subscription) + beside)
    ]
    if names:
        tables = sql.SQL(", ").join(sql.Identifier(SCHEMA, name) for name in names)
        connection.execute(sql.SQL("drop table if exists {}").format(tables))


def staging_prefix(subscription: str) -> str:
    """What the names of all staging tables of a subscription begin with."""
    return f"stage_{stable_hash(subscription) & 0xFFFFFFFFFFFFFFFF:016x}_"


def copy_statement(table: sql.Identifier) -> sql.Composed:
    """COPY of rows of CSV into a table."""
    return sql.SQL("copy {} from stdin (format csv)").format(table)
