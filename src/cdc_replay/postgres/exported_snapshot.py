"""A snapshot of the database exactly as it was at a known LSN.

Creating a logical slot exports a snapshot that contains precisely the transactions that the slot will not
deliver (R1.34): those with a commit LSN at or below the consistent point. The slot is temporary. Any number
of connections can import the snapshot while the walsender that exported it stays open and idle; its next
command would end the export.

| reads under it        | for                                                           |
|-----------------------|---------------------------------------------------------------|
| the initial copy      | replay then applies what is after the consistent point (R7.9) |
| validation at a fence | both sides are compared as of one position                    |

Creating the slot waits for all transactions that are open at its start, prepared ones included (R1.35). When
a process is killed, the server drops the slot and the export with the session.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import errors as pg
from psycopg import sql

from cdc_replay.errors import MissingPrivilege, PublisherNotReady, ServerUnavailable
from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.connection import Connection, connect, translated_errors
from cdc_replay.postgres.planned_tables import read_only_tables

logger = logging.getLogger(__name__)

# The grammar of replication commands accepts upper case only.
EXPORT: Final = sql.SQL("CREATE_REPLICATION_SLOT {} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')")

MAY_REPLICATE: Final = """
    select rolname::text, rolreplication or rolsuper from pg_catalog.pg_roles where rolname = current_user
"""


@dataclass(frozen=True, slots=True, repr=False)
class SharedSnapshot:
    """What another connection, on any host, needs to import a snapshot."""

    dsn: str
    name: str

    def __repr__(self) -> str:
        # Without the DSN, which may hold a password.
        return f"{type(self).__name__}(name={self.name!r})"


@dataclass(frozen=True, slots=True, repr=False)
class ExportedSnapshot(SharedSnapshot):
    """A snapshot of the transactions whose commit LSN is at or below `consistent_point`."""

    consistent_point: Lsn


@contextlib.contextmanager
def export_snapshot(dsn: str) -> Iterator[ExportedSnapshot]:
    """Export a snapshot of the database for as long as the context is open.

    Raises:
        PublisherNotReady: if the server cannot create a logical slot now (wal_level, max_replication_slots).
        MissingPrivilege: if the role lacks REPLICATION.
        ServerUnavailable: if the server does not answer.
    """
    connection = _walsender(dsn)
    try:
        yield _export(connection, dsn)
    finally:
        connection.close()


def _walsender(dsn: str) -> Connection:
    try:
        return connect(dsn, purpose="exported snapshot", replication=True)
    except ServerUnavailable as error:
        # libpq gives no SQLSTATE for a rejected connection; an ordinary one can find the reason.
        with connect(dsn, purpose="privilege check") as ordinary:
            ((user, may_replicate),) = ordinary.execute(MAY_REPLICATE).fetchall()
        if may_replicate:
            raise
        raise MissingPrivilege(
            f'role "{user}" cannot export a snapshot: it lacks the attribute REPLICATION',
            hint=f'Run `alter role "{user}" replication` on the publisher as a superuser.',
            rule="R1.34",
        ) from error


def _export(connection: Connection, dsn: str) -> ExportedSnapshot:
    slot = sql.Identifier(f"cdc_replay_snapshot_{secrets.token_hex(8)}")
    with translated_errors("cannot export a snapshot"), _not_ready_errors():
        ((_, consistent_point, name, _),) = connection.execute(EXPORT.format(slot)).fetchall()
    snapshot = ExportedSnapshot(dsn, name, Lsn.parse(consistent_point))
    logger.info("exported snapshot %s at consistent point %s", name, consistent_point)
    return snapshot


@contextlib.contextmanager
def _not_ready_errors() -> Iterator[None]:
    try:
        yield
    except (pg.ConfigurationLimitExceeded, pg.ObjectNotInPrerequisiteState) as error:
        raise PublisherNotReady(
            f"cannot export a snapshot: {error.diag.message_primary}",
            detail=error.diag.message_detail,
            hint="Set wal_level to logical, and max_replication_slots above the number of slots in use.",
            rule="R1.34",
        ) from error


def import_snapshot(snapshot: SharedSnapshot, *, purpose: str) -> Connection:
    """A connection inside a read-only transaction that sees the database as of the snapshot.

    The repeatable read transaction stays valid after the export ends, until it is committed or rolled back.
    If row-level security would hide some rows of a table, the server refuses to read it. Callers lock a table
    before they read it (`lock_planned_tables`) and close the connection.

    Raises:
        PublisherNotReady: if the snapshot is no longer exported.
        ServerUnavailable, MissingPrivilege: if the server cannot be reached, or refuses the role.
    """
    connection = connect(snapshot.dsn, purpose=purpose)
    try:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        connection.autocommit = False
        with translated_errors("cannot import a snapshot"), _ended_export_errors(snapshot):
            connection.execute(sql.SQL("set transaction snapshot {}").format(snapshot.name))
            # Rows that a policy hides would look like missing rows.
            connection.execute("set local row_security = off")
            read_only_tables(connection)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _ended_export_errors(snapshot: SharedSnapshot) -> Iterator[None]:
    try:
        yield
    except (pg.InvalidParameterValue, pg.UndefinedObject, pg.ObjectNotInPrerequisiteState) as error:
        raise PublisherNotReady(
            f'snapshot "{snapshot.name}" is no longer exported: {error.diag.message_primary}',
            detail="The process that exported it has ended.",
            hint="Run the command again.",
            rule="R1.34",
        ) from error
