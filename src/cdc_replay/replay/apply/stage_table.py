"""The staging table of one target: its columns, and the statements that create, read and drop it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import SubscribedTable
from cdc_replay.postgres.connection import CREATED_MEANWHILE, Connection
from cdc_replay.postgres.identifiers import commas
from cdc_replay.subscriber.as_owner import TargetSession
from cdc_replay.subscriber.staged_columns import StagedColumns
from cdc_replay.subscriber.state_schema import SCHEMA
from cdc_replay.subscriber.subscription_lock import stable_hash
from cdc_replay.subscriber.target_tables import TargetColumn, TargetTable

_ORPHANS: Final = """
    select relname from pg_class
    where relnamespace = (select oid from pg_namespace where nspname = 'cdc_replay')
        and relkind = 'r' and starts_with(relname, %s)
"""

_COMMON_COLUMNS: Final = (
    "attempt bigint, kind text, kinds text, moved boolean, update_missing int, delete_missing int"
)
"""The columns of every staging table, before those of its target."""

_COMMON_NAMES: Final = tuple(column.split()[0] for column in _COMMON_COLUMNS.split(", "))


@dataclass(frozen=True, slots=True)
class StageTable:
    """The staging table of one target; picklable.

    Columns: attempt, kind, kinds, moved, update_missing, delete_missing, born where INSERTs follow the log's
    order, then `b0`… for the base key and `v0`… for the values, in the order of the subscribed table's
    `identity` and `columns`. Usual contents are NULL: `kinds` if all values were sent, `moved` if false,
    `update_missing` and `delete_missing` if 0.
    """

    index: int
    target: QualifiedName
    name: str
    keys: tuple[TargetColumn, ...]
    values: tuple[TargetColumn, ...]
    key_positions: tuple[int, ...]
    """Positions of the identity columns among the values."""
    is_keyed: bool
    has_own_key: bool
    """A unique index of the target covers the identity."""
    inserts_in_log_order: bool
    """The target shows the order of INSERTs (`TargetTable.shows_order_of_inserts`)."""
    is_by_leaf: bool = False
    """Rows are found in their leaf, by its key if it has one."""
    owner_is_untrusted: bool = False
    """Another role owns the target: its code must not run as ours (R8.21)."""

    @property
    def identifier(self) -> sql.Identifier:
        """The qualified name."""
        return sql.Identifier(SCHEMA, self.name)

    @property
    def changes_identifier(self) -> sql.Identifier:
        """The table with the changes of contingent lineages."""
        return sql.Identifier(SCHEMA, f"{self.name}_changes")

    def create(self, connection: Connection) -> None:
        """Create the table, unless there is one; other tasks may do so at the same time."""
        ordinal_column = [sql.SQL("born bigint")] if self.inserts_in_log_order else []
        typed = commas([sql.SQL(_COMMON_COLUMNS), *ordinal_column, *self.staged_columns.definitions()])
        _create(connection, self.identifier, typed)

    def create_changes(self, connection: Connection) -> None:
        """The same for the table with the changes of contingent lineages."""
        _create(connection, self.changes_identifier, sql.SQL("attempt bigint, changes text"))

    @property
    def view(self) -> sql.Identifier:
        """A temporary view of the table, on which other roles can be granted SELECT."""
        return sql.Identifier("pg_temp", f"view_{self.name}")

    def share(self, connection: Connection, session: TargetSession) -> None:
        """Create the view and let the session read it."""
        others = ("ctid", *_COMMON_NAMES, *(("born",) if self.inserts_in_log_order else ()))
        self.staged_columns.share(connection, session, self.identifier, self.view, others=others)

    @property
    def staged_columns(self) -> StagedColumns:
        """The columns of base keys and values."""
        columns = tuple(
            (f"{letter}{index}", column)
            for letter, columns in (("b", self.keys), ("v", self.values))
            for index, column in enumerate(columns)
        )
        return StagedColumns(self.target, columns, self.owner_is_untrusted)


def _create(connection: Connection, table: sql.Identifier, columns: sql.Composable) -> None:
    statement = "create unlogged table if not exists {} ({}) with (autovacuum_enabled = false)"
    with contextlib.suppress(*CREATED_MEANWHILE):
        connection.execute(sql.SQL(statement).format(table, columns), prepare=False)


def stage_table(subscription: str, run: str, table: SubscribedTable, target: TargetTable) -> StageTable:
    """The staging table of `table` in the run named `run`."""
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
        target.acting.rights.owner_is_untrusted,
    )


def drop_staging(
    connection: Connection, subscription: str, *, run: str = "", except_run: str | None = None
) -> None:
    """Drop the subscription's staging tables: those of one `run`, or of all runs but `except_run`.

    The caller holds the subscription's lock, so that no other process is using them.
    """
    existing = [name for (name,) in connection.execute(_ORPHANS, (staging_prefix(subscription) + run,))]
    names = [
        name
        for name in existing
        if except_run is None or not name.startswith(staging_prefix(subscription) + except_run)
    ]
    if names:
        tables = commas(sql.Identifier(SCHEMA, name) for name in names)
        connection.execute(sql.SQL("drop table if exists {}").format(tables))


def staging_prefix(subscription: str) -> str:
    """Prefix of the names of all staging tables of a subscription."""
    return f"stage_{stable_hash(subscription) & 0xFFFFFFFFFFFFFFFF:016x}_"


def copy_statement(table: sql.Identifier) -> sql.Composed:
    """COPY of CSV into a table."""
    return sql.SQL("copy {} from stdin (format csv)").format(table)
