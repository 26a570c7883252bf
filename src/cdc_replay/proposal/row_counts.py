"""Counts on the publisher, in one snapshot, which rows the initial copy would have now and then (R7.4).

Both definitions are evaluated in one pass over each table, with the rights of a copy: the tables are locked
and compared with the catalog first (`postgres.planned_tables`), the filters are printed from their trees
(`filters.printed`). Tables whose rows are the same under both are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.errors import CdcReplayError
from cdc_replay.filters.printed import print_filters
from cdc_replay.model.progress import Report, each_table, unreported
from cdc_replay.model.proposed_change import RowsOfTable
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, open_snapshot
from cdc_replay.postgres.identifiers import table_reference
from cdc_replay.postgres.planned_tables import (
    PlannedTable,
    lock_planned_tables,
    publisher_read_errors,
    read_only_tables,
)
from cdc_replay.publication.resolve import SyncedTable

# `offset 0` keeps the planner from evaluating a filter once per count.
_COUNT: Final = """
    select count(*) filter (where is_now), count(*) filter (where is_then),
           count(*) filter (where is_then and not is_now), count(*) filter (where is_now and not is_then)
      from (select {now} as is_now, {then} as is_then from {table} offset 0) as rows
"""
_NOBODY: Final = sql.SQL("false")


@dataclass(frozen=True, slots=True)
class BothCopies:
    """The initial copy of a table now and then; None where the subscription does not list the table."""

    now: SyncedTable | None
    then: SyncedTable | None

    @property
    def has_same_rows(self) -> bool:
        """Whether no row can enter or leave."""
        if self.now is None or self.then is None:
            return False
        return self.now.filters == self.then.filters

    @property
    def synced(self) -> SyncedTable:
        """Either of them."""
        synced = self.now or self.then
        if synced is None:
            raise ValueError("the table has no copy")
        return synced


def count_rows(
    dsn: str, purpose: str, tables: Mapping[QualifiedName, BothCopies], report: Report = unreported
) -> dict[QualifiedName, RowsOfTable]:
    """The counts of all tables whose rows may differ.

    Raises:
        ServerUnavailable, MissingPrivilege: if the publisher does not answer.
    """
    differing = {name: copies for name, copies in tables.items() if not copies.has_same_rows}
    if not differing:
        return {}
    with open_snapshot(dsn, purpose=purpose) as connection:
        return {
            name: _count(connection, differing[name])
            for name in each_table(report, "count rows of", "the publisher", list(differing))
        }


def _count(connection: Connection, copies: BothCopies) -> RowsOfTable:
    table = copies.synced.table
    try:
        # A savepoint: a filter that fails for a row does not end the snapshot.
        with connection.transaction(), publisher_read_errors(table.name):
            read_only_tables(connection)
            lock_planned_tables(connection, [PlannedTable.from_catalog(table)])
            query = sql.SQL(_COUNT).format(
                now=_passes(connection, copies.now),
                then=_passes(connection, copies.then),
                table=table_reference(table.name, is_partitioned=table.is_partitioned),
            )
            return RowsOfTable(*connection.execute(query).fetchall()[0])
    except CdcReplayError as error:
        return RowsOfTable(error=str(error.message))


def _passes(connection: Connection, synced: SyncedTable | None) -> sql.Composable:
    if synced is None:
        return _NOBODY
    condition = print_filters(connection, synced.table, synced.filters)
    return sql.SQL("true") if condition is None else sql.SQL("({}) is true").format(condition)
