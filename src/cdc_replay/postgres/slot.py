"""The logical slot through the server's SQL functions: create, inspect, advance, drop. `peek` reads it.

| cause                                             | error             |
|---------------------------------------------------|-------------------|
| the slot does not exist                           | SlotMissing       |
| another process reads the slot (55006)            | SlotActive        |
| the slot was invalidated (55000, wal_status lost) | SlotLost          |
| the server cannot decode at all (wal_level, …)    | PublisherNotReady |
| a publication is unknown to the historic catalog  | PublicationMissing|
| the server cannot decode a change (XX000)         | DecodingFailed    |
| the role lacks a privilege                        | MissingPrivilege  |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import errors as pg
from psycopg import sql

from cdc_replay.errors import (
    CdcReplayError,
    DecodingFailed,
    MissingPrivilege,
    PublicationMissing,
    PublisherNotReady,
    SlotLost,
    SlotMissing,
)
from cdc_replay.model.database import Database
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.postgres.server_version import version_problem

PLUGIN: Final = "pgoutput"

RESYNCHRONIZE: Final = (
    "Run `cdc-replay teardown` for the publisher, move its change log away, run `cdc-replay setup`, then"
    " `cdc-replay snapshot` for each of its subscriptions."
)
"""The remedy for lost changes, which cannot be recovered (R1.33)."""

RESYNCHRONIZE_ALL: Final = (
    RESYNCHRONIZE[:-1] + ", naming every table (`--table`): their positions are on another timeline."
)
"""The remedy if the server's history differs from the log's: positions cannot be compared any more."""

REBUILD_ALL: Final = (
    "move the change log away, run `cdc-replay setup`, and rebuild each of its subscriptions: run"
    " `cdc-replay teardown` for it, empty its tables, and run `cdc-replay sync`."
)
"""The remedy if the log was captured from another database: no row of the subscribers came from this one."""

SLOT_STATUS: Final = """
    select plugin::text, database::text, database = current_database(), restart_lsn::text,
           confirmed_flush_lsn::text, wal_status, safe_wal_size, two_phase,
           to_jsonb(s) ->> 'invalidation_reason',
           case when not pg_is_in_recovery()
                then pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint end
    from pg_replication_slots s
    where slot_name = %s
"""

SYSTEM_IDENTITY: Final = """
    select system_identifier::text,
           ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int,
           database.oid::bigint, datname::text
    from pg_control_system(), pg_database as database
    where datname = current_database()
"""

READINESS: Final = """
    select current_setting('wal_level'), pg_is_in_recovery(), current_user::text,
           (select rolreplication or rolsuper from pg_roles where rolname = current_user)
"""

# The argument `failover` exists from this version on. An administrator may execute this with any search path.
CREATE_SLOT: Final = sql.SQL(
    "select lsn::pg_catalog.text from pg_catalog.pg_create_logical_replication_slot("
    "slot_name => {slot}, plugin => {plugin}, temporary => false, twophase => {two_phase}{failover})"
)
FAILOVER_SINCE: Final = 170000

DROP_SLOT: Final = """
    select pg_drop_replication_slot(slot_name)
    from pg_replication_slots
    where slot_name = %s and plugin = %s and database = current_database()
"""


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """A row of pg_replication_slots; `retained_wal_bytes` is the WAL that the slot retains."""

    name: str
    plugin: str
    database: str
    is_of_this_database: bool
    """Compared by the server: in another encoding, the name may read differently than in the DSN."""
    restart_lsn: Lsn | None
    confirmed_flush: Lsn
    """The confirmed position; 0 for a physical slot."""
    wal_status: str | None
    safe_wal_size_bytes: int | None
    two_phase: bool
    invalidation_reason: str | None
    retained_wal_bytes: int | None

    @property
    def is_lost(self) -> bool:
        """The slot cannot be read or advanced any more (R1.33)."""
        return self.wal_status == "lost" or self.restart_lsn is None or self.invalidation_reason is not None


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """A cluster, its timeline, and a database of it."""

    system_identifier: str
    timeline: int
    database: Database


def slot_exists(connection: Connection, slot: str) -> bool:
    """There is a slot of that name."""
    cursor = connection.execute("select from pg_replication_slots where slot_name = %s", (slot,))
    return cursor.rowcount > 0


def slot_status(connection: Connection, slot: str) -> SlotStatus:
    """The slot's row in pg_replication_slots.

    Raises:
        SlotMissing: if there is no slot of that name.
    """
    row = connection.execute(SLOT_STATUS, (slot,)).fetchone()
    if row is None:
        raise SlotMissing(
            f'replication slot "{slot}" does not exist',
            hint="If the publisher had no slot before, run `cdc-replay setup`. Otherwise changes are lost. "
            + RESYNCHRONIZE,
            rule="R1.33",
        )
    plugin, database, is_of_this_database, restart_lsn, confirmed_flush, *properties = row
    return SlotStatus(
        slot, plugin, database, is_of_this_database,
        None if restart_lsn is None else Lsn.parse(restart_lsn),
        ZERO if confirmed_flush is None else Lsn.parse(confirmed_flush),
        *properties,
    )  # fmt: skip


def check_slot(connection: Connection, slot: str) -> SlotStatus:
    """The slot's status, if this session's database can read it with pgoutput.

    Raises:
        SlotMissing: if there is no slot of that name.
        SlotLost: if it was invalidated.
        PublisherNotReady: if it belongs to another database or plugin.
    """
    status = slot_status(connection, slot)
    if status.plugin != PLUGIN or not status.is_of_this_database:
        raise PublisherNotReady(
            f'replication slot "{slot}" cannot be used',
            detail=f'It belongs to plugin "{status.plugin}" and database "{status.database}".',
            hint="Choose another `slot` in the configuration, or drop this one.",
            rule="R1.33",
        )
    if status.is_lost:
        reason = status.invalidation_reason or "it no longer reserves WAL"
        raise SlotLost(
            f'replication slot "{slot}" is lost',
            detail=f"The server invalidated it: {reason}.",
            hint=RESYNCHRONIZE,
            rule="R1.33",
        )
    return status


def server_problems(connection: Connection) -> tuple[CdcReplayError, ...]:
    """Why this role cannot decode on this server; empty if it can (R1.33, R2.18)."""
    wal_level, in_recovery, role, may_replicate = _one_row(connection.execute(READINESS))
    problems: list[CdcReplayError] = []
    if (problem := version_problem(connection)) is not None:
        problems.append(problem)
    if wal_level != "logical":
        hint = "Set wal_level to logical and restart the server."
        problems.append(PublisherNotReady(f'wal_level of the publisher is "{wal_level}"', hint=hint))
    if in_recovery:
        hint = "Connect to the primary server."
        problems.append(PublisherNotReady("the publisher is a standby", hint=hint))
    if not may_replicate:
        hint = f'Run `alter role "{role}" replication` as a superuser.'
        problems.append(MissingPrivilege(f'role "{role}" lacks the attribute REPLICATION', hint=hint))
    return tuple(problems)


def check_server(connection: Connection, *, grants_follow: bool = False) -> None:
    """Check that this role can decode on this server; `grants_follow`: missing privileges will be granted.

    Raises:
        PublisherNotReady, MissingPrivilege: the problem, or one error that lists all of them.
    """
    problems = [
        problem
        for problem in server_problems(connection)
        if not (grants_follow and isinstance(problem, MissingPrivilege))
    ]
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise PublisherNotReady(
            "the publisher cannot be captured: " + "; ".join(problem.message for problem in problems),
            hint=" ".join(problem.hint for problem in problems if problem.hint),
            rule="R1.33",
        )


def create_slot(connection: Connection, slot: str, *, two_phase: bool) -> Lsn:
    """Create the slot and return its consistent point. Waits for all transactions open at its start (R1.35).

    From PostgreSQL 17 on it is a failover slot, which is synchronized to standbys.

    Raises:
        PublisherNotReady: if the server has no slot left.
        MissingPrivilege: if the role lacks REPLICATION.
    """
    action = f'cannot create replication slot "{slot}"'
    try:
        with translated_errors(action):
            created = connection.execute(create_slot_statement(connection, slot, two_phase=two_phase))
            return Lsn.parse(_one_row(created)[0])
    except pg.ConfigurationLimitExceeded as error:
        hint = "Raise max_replication_slots and restart the server, or drop an unused slot."
        raise PublisherNotReady(f"{action}: {error.diag.message_primary}", hint=hint, rule="R1.33") from error


def create_slot_statement(connection: Connection, slot: str, *, two_phase: bool) -> sql.Composed:
    """The statement of `create_slot`."""
    has_failover = connection.info.server_version >= FAILOVER_SINCE
    return CREATE_SLOT.format(
        slot=sql.Literal(slot),
        plugin=sql.Literal(PLUGIN),
        two_phase=sql.Literal(two_phase),
        failover=sql.SQL(", failover => true" if has_failover else ""),
    )


def advance_slot(connection: Connection, slot: str, upto: Lsn) -> Lsn:
    """Confirm that everything before `upto` is durable elsewhere, and return the slot's new position (R1.29).

    Raises:
        SlotMissing, SlotActive, SlotLost: as for `peek`.
    """
    with slot_errors(f'cannot advance replication slot "{slot}"'):
        advanced = connection.execute(
            "select end_lsn::text from pg_replication_slot_advance(%s, %s::pg_lsn)", (slot, str(upto))
        )
        return Lsn.parse(_one_row(advanced)[0])


def copy_slot(connection: Connection, slot: str, name: str) -> None:
    """Create a copy of the slot at its position, which ends with the session; it lacks two_phase.

    Raises:
        SlotMissing, SlotLost: as for `peek`.
        ServerUnavailable, MissingPrivilege: if the server has no slot left, or the role lacks REPLICATION.
    """
    with slot_errors(f'cannot copy replication slot "{slot}"'):
        connection.execute("select pg_copy_logical_replication_slot(%s, %s, true)", (slot, name))


def drop_slot(connection: Connection, slot: str) -> bool:
    """Drop the slot; False if this database has no pgoutput slot of that name.

    Raises:
        SlotActive: if a process uses it.
    """
    with slot_errors(f'cannot drop replication slot "{slot}"'):
        return connection.execute(DROP_SLOT, (slot, PLUGIN)).rowcount > 0


def system_identity(connection: Connection) -> SystemIdentity:
    """The session's cluster, current timeline and database. Not during recovery."""
    system_identifier, timeline, oid, name = _one_row(connection.execute(SYSTEM_IDENTITY))
    return SystemIdentity(system_identifier, timeline, Database(oid, name))


def _one_row(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    [row] = cursor.fetchall()
    return row


@contextlib.contextmanager
def slot_errors(action: str) -> Iterator[None]:
    """As `translated_errors`, with the errors that only slots have."""
    try:
        with translated_errors(action):
            yield
    except pg.UndefinedObject as error:
        message = f"{action}: {error.diag.message_primary}"
        hint = "A capture publication was missing when a change was made; this slot is blocked. "
        raise PublicationMissing(message, hint=hint + RESYNCHRONIZE, rule="R1.19") from error
    except pg.InternalError_ as error:
        raise DecodingFailed(
            f"{action}: {error.diag.message_primary}",
            detail=error.diag.message_detail,
            hint="The error repeats until the server can decode the change: check its log, and whether there"
            " is a newer minor version. " + RESYNCHRONIZE,
            rule="R1.36",
        ) from error
    except pg.ObjectNotInPrerequisiteState as error:
        message, detail = f"{action}: {error.diag.message_primary}", error.diag.message_detail
        raise SlotLost(message, detail=detail, hint=RESYNCHRONIZE, rule="R1.33") from error
