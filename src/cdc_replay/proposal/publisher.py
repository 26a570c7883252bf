"""Parses a proposal on the publisher: executes it in a transaction, reads the catalogs, and rolls it back.

Nothing of it remains, and nothing reaches the slot: logical messages of the event triggers are transactional.
Until the rollback, a few milliseconds, the tables that the statements name are locked (SHARE UPDATE
EXCLUSIVE) against DDL, VACUUM, ANALYZE and CREATE INDEX CONCURRENTLY; reads and writes go on. The transaction
waits at most `LOCK_TIMEOUT` for a lock, less than the second after which PostgreSQL would cancel an
autovacuum for it. Event triggers of the database, which superusers create, are executed too.

Before that, the tables are locked (ACCESS SHARE) and checked: a WHERE clause that names a column of a
user-defined type is not parsed here, since reading a literal of that type could run its owner's code
(`statements`). PostgreSQL refuses such a clause anyway (R5.3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import psycopg
from psycopg import errors as pg

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.errors import CdcReplayError
from cdc_replay.filters.names import BUILT_IN
from cdc_replay.model.proposed_change import ProposalRefused
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.postgres.connection import Connection, connect, is_read_only, translated_errors
from cdc_replay.postgres.planned_tables import PlannedTable, lock_planned_tables
from cdc_replay.proposal.execution import Definitions, execute
from cdc_replay.proposal.statements import Statement

LOCK_TIMEOUT: Final = "500ms"

PUBLISHER: Final = "the publisher, in a transaction that was rolled back"


def parse_on_publisher(dsn: str, purpose: str, statements: Sequence[Statement]) -> Definitions | str:
    """What the proposal would make of the publisher's catalog; or why the publisher cannot parse it.

    Raises:
        ServerUnavailable, MissingPrivilege: if the publisher does not answer, or its catalog cannot be read.
    """
    if foreign := next((statement.foreign for statement in statements if statement.foreign), None):
        return foreign
    with translated_errors("cannot try the proposal"), _rolled_back(dsn, purpose) as connection:
        if is_read_only(connection):
            return "the publisher is read-only"
        present = read_catalog(connection)
        if (refusal := _not_publishable(present, statements)) is not None:
            return Definitions(present, None, PUBLISHER, refusal=refusal)
        try:
            if (column := _user_defined_column(connection, present, statements)) is not None:
                return f"a WHERE clause reads column {column}, which has a user-defined type"
            refusal = execute(connection, statements)
            proposed = None if refusal is not None else read_catalog(connection, present.lsn)
        except (CdcReplayError, psycopg.Error) as error:
            if (reason := _other_reason(error)) is None:
                raise
            return reason
    return Definitions(present, proposed, PUBLISHER, refusal=refusal)


@contextlib.contextmanager
def _rolled_back(dsn: str, purpose: str) -> Iterator[Connection]:
    """A repeatable-read transaction that is rolled back at the end, whatever happens."""
    with contextlib.closing(connect(dsn, purpose=purpose)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.autocommit = False
        connection.execute("select pg_catalog.set_config('lock_timeout', %s, true)", (LOCK_TIMEOUT,))
        try:
            yield connection
        finally:
            connection.rollback()


def _other_reason(error: CdcReplayError | psycopg.Error) -> str | None:
    """Why another server must parse the proposal, if the error says nothing about the proposal itself."""
    cause = error.__cause__ if isinstance(error, CdcReplayError) else error
    match cause:
        case pg.InsufficientPrivilege():
            return f"the role may not do it there: {cause.diag.message_primary}"
        case pg.LockNotAvailable():
            return "another session has locked a table or publication of it"
        case pg.ReadOnlySqlTransaction():
            return "the publisher is read-only"
        case _:
            return None


def _not_publishable(catalog: PublisherCatalog, statements: Sequence[Statement]) -> ProposalRefused | None:
    """The refusal of a WHERE clause for what is no table of the catalog.

    PostgreSQL would parse the clause first, with the columns of a view, or of an unlogged table.
    """
    names = {table.name for table in catalog.tables.values()}
    for statement in statements:
        for table in statement.tables if statement.where_names else ():
            if table not in names:
                return ProposalRefused(
                    f'relation "{table}" does not exist, or is no table that can be published',
                    statement.line,
                    detail="Views, foreign, temporary and unlogged tables cannot be published.",
                    rule="R2.1",
                )
    return None


def _user_defined_column(
    connection: Connection, catalog: PublisherCatalog, statements: Sequence[Statement]
) -> str | None:
    """A column of a user-defined type that a WHERE clause may read; the clauses' tables are locked."""
    for statement in statements:
        if not statement.where_names:
            continue
        names = frozenset(statement.tables)
        tables = [table for table in catalog.tables.values() if table.name in names]
        # Locked and compared: their owners cannot give a column another type before the rollback.
        lock_planned_tables(connection, [PlannedTable.from_catalog(table) for table in tables])
        for table in tables:
            for column in table.columns:
                if column.type_oid >= BUILT_IN and column.name in statement.where_names:
                    return f"{table.name}.{column.name}"
    return None
