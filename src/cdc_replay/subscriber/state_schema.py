"""The subscriber's state: schema `cdc_replay` in its database, and its installation.

Progress is stored in the subscriber, because only there one transaction can contain both rows and progress
(R8.17). Every transaction that changes rows also changes the state, so a crash never separates them.

| table              | a row is                                                                       |
|--------------------|--------------------------------------------------------------------------------|
| subscription       | a subscription, its publisher, and why it is parked (`subscription_records`)   |
| subscription_table | the state of one of its tables, keyed by oid (`subscription_tables`)           |
| brought            | the definition that one table was copied with (`copy_definitions`)             |
| result             | the result of one command (`recorded_results`)                                 |
| copy_progress      | the progress of the running copy of one table (`copy_progress`)                |
| window_history     | a window that was applied, or failed (`history`)                               |
| validation_history | a validation (`history`)                                                       |
| proof_history      | what a validation has seen of one table (`proofs`)                             |
| table_proof        | the last comparison of each bucket of one table (`proofs`)                     |
| lock_key           | the present key of a subscription's lock (`subscription_lock`)                 |

A subscribed table is identified by its oid, as in `pg_subscription_rel`: a renamed table keeps its state, and
a new table of the same name is not subscribed to (R7.12). Functions return the current names. `schema_name`
and `table_name` record the name under which a change last reached the table.

All functions work on an open connection and never commit a transaction of the caller. Functions that only
read return nothing if the schema does not exist.
"""

from __future__ import annotations

import weakref
from typing import Final

from psycopg import sql

from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.publication import STATE_SCHEMA
from cdc_replay.postgres.advisory_locks import CREATE_LOCK_KEY_TABLE, LOCK_KEY_TABLE
from cdc_replay.postgres.connection import CREATED_MEANWHILE, DROPPED_MEANWHILE, Connection, translated_errors
from cdc_replay.subscriber.ownership import check_state_ownership

SCHEMA: Final = STATE_SCHEMA


_INSTALL: Final = (
    """
    create table if not exists cdc_replay.subscription (
        name text primary key,
        publisher_system_identifier text not null,
        publications text[] not null,
        parked_at pg_lsn,
        parked_reason text,
        parked_transaction pg_lsn,
        has_tables_listed boolean not null default false,
        created timestamptz not null default pg_catalog.now(),
        publisher_database_oid oid not null,
        publisher_database_name text not null,
        null_accepted_at pg_lsn,
        check ((parked_at is null) = (parked_reason is null))
    )
    """,
    # A dump contains the name of a regclass; the restore resolves it to the new oid.
    """
    create table if not exists cdc_replay.subscription_table (
        subscription text not null references cdc_replay.subscription on delete cascade,
        relation regclass not null,
        schema_name text not null,
        table_name text not null,
        state text not null check (state in ('pending', 'copying', 'ready', 'parked')),
        lsn pg_lsn,
        reason text,
        transaction pg_lsn,
        rewritten_at pg_lsn,
        null_accepted_at pg_lsn,
        primary key (subscription, relation),
        check ((state = 'pending') = (lsn is null)),
        check ((state = 'parked') = (reason is not null))
    )
    """,
    """
    create table if not exists cdc_replay.brought (
        subscription text not null,
        relation regclass not null,
        schema_name text not null,
        table_name text not null,
        lsn pg_lsn not null,
        filters text[],
        columns text[] not null,
        primary key (subscription, relation),
        foreign key (subscription, relation) references cdc_replay.subscription_table on delete cascade
    )
    """,
    """
    create table if not exists cdc_replay.result (
        subscription text not null references cdc_replay.subscription on delete cascade,
        command text not null,
        number bigint generated always as identity,
        finished timestamptz not null default pg_catalog.clock_timestamp(),
        result jsonb not null,
        primary key (subscription, command, number)
    )
    """,
    """
    create table if not exists cdc_replay.copy_progress (
        subscription text not null references cdc_replay.subscription on delete cascade,
        schema_name text not null,
        table_name text not null,
        rows bigint not null,
        bytes bigint not null,
        expected_bytes bigint not null,
        bytes_per_second float8 not null,
        started timestamptz not null default pg_catalog.clock_timestamp(),
        updated timestamptz not null default pg_catalog.clock_timestamp(),
        primary key (subscription, schema_name, table_name)
    )
    """,
    """
    create table if not exists cdc_replay.window_history (
        subscription text not null references cdc_replay.subscription on delete cascade,
        number bigint generated always as identity,
        finished timestamptz not null default pg_catalog.clock_timestamp(),
        from_lsn pg_lsn not null,
        end_lsn pg_lsn not null,
        changes_read bigint not null,
        filtered_out bigint not null,
        updates_to_insert bigint not null,
        updates_to_delete bigint not null,
        applied bigint not null,
        conflicts bigint not null,
        seconds float8 not null,
        lag_seconds float8,
        lag_bytes bigint,
        error text,
        primary key (subscription, finished, number)
    )
    """,
    """
    create table if not exists cdc_replay.validation_history (
        subscription text not null references cdc_replay.subscription on delete cascade,
        number bigint generated always as identity,
        finished timestamptz not null default pg_catalog.clock_timestamp(),
        lsn pg_lsn not null,
        consistent boolean not null,
        tables int not null,
        differing_tables int not null,
        differing_rows bigint not null,
        seconds float8 not null,
        report text not null,
        is_partial boolean not null default false,
        primary key (subscription, finished, number)
    )
    """,
    """
    create table if not exists cdc_replay.proof_history (
        subscription text not null references cdc_replay.subscription on delete cascade,
        schema_name text not null,
        table_name text not null,
        number bigint generated always as identity,
        finished timestamptz not null default pg_catalog.clock_timestamp(),
        lsn pg_lsn not null,
        buckets int not null,
        row_count bigint not null,
        differing_rows bigint not null,
        bytes bigint not null,
        seconds float8 not null,
        error text,
        proven_through pg_lsn,
        proven_at timestamptz,
        primary key (subscription, schema_name, table_name, finished, number)
    )
    """,
    """
    create table if not exists cdc_replay.table_proof (
        subscription text not null,
        relation regclass not null,
        is_published boolean not null default true,
        definition text not null,
        owed int not null,
        turns bigint[] not null,
        lsns pg_lsn[] not null,
        times timestamptz[] not null,
        are_equal boolean[] not null,
        primary key (subscription, relation),
        foreign key (subscription, relation) references cdc_replay.subscription_table on delete cascade
    )
    """,
    sql.SQL(CREATE_LOCK_KEY_TABLE).format(table=sql.Identifier(SCHEMA, LOCK_KEY_TABLE)),
)
"""Release 0.1.0 has those up to `copy_progress`: the first writer adds the others, readers do without."""

_IS_COMPLETE: Final = "select pg_catalog.to_regclass('cdc_replay.lock_key') is not null"
"""The last statement of `_INSTALL` has run."""

_EXISTS: Final = "select pg_catalog.to_regclass('cdc_replay.subscription') is not null"

_MAY_CREATE: Final = (
    "Let an administrator run in psql what `cdc-replay setup PUBLISHER --dry-run --subscription NAME` prints."
)

_TRIES: Final = 10
"""Each try of an installation that finds the objects of others finds those of one more."""


_CHECKED: Final[weakref.WeakSet[Connection]] = weakref.WeakSet()
"""Connections that have found the schema, and nobody else in control of it: only `drop` makes that untrue.

One that has not found it does not belong here: anybody with CREATE on the database can make it meanwhile."""

_INSTALLED: Final[weakref.WeakSet[Connection]] = weakref.WeakSet()
"""Connections that have seen the tables; only `drop` makes that untrue."""


def install(connection: Connection) -> None:
    """Create or upgrade the schema; concurrent calls are safe.

    Raises:
        MissingPrivilege: if the role may not create a schema in this database.
        SubscriberNotReady: if another role controls the schema, or has created it meanwhile.
    """
    if is_complete(connection):
        return
    for is_last in (*(False,) * (_TRIES - 1), True):
        try:
            _install(connection)
        except (*CREATED_MEANWHILE, *DROPPED_MEANWHILE) as error:
            if is_last:
                raise SubscriberNotReady(
                    f'other sessions create and drop schema "{SCHEMA}" of the subscriber at the same time',
                    hint="Run the command again. It uses the schema, or names the role that controls it.",
                ) from error
        else:
            return


def _install(connection: Connection) -> None:
    with (
        translated_errors(f'cannot create schema "{SCHEMA}" on the subscriber', grant=_MAY_CREATE),
        connection.transaction(),
    ):
        lock(connection)
        # Another session, of anybody, may have created it meanwhile.
        if not check_state_ownership(connection):
            connection.execute("create schema cdc_replay")
        for statement in _INSTALL:
            connection.execute(statement)


def lock(connection: Connection) -> None:
    """Let no other session upgrade or drop the schema until the end of the transaction, if it exists.

    Its lock is that of a table, which no stranger can hold. After it the ownership is checked anew.

    Raises:
        SubscriberNotReady: if another role controls the schema.
        UndefinedTable, InvalidSchemaName: if another session drops it at this moment.
    """
    # So that what others have committed before the lock is visible after it.
    connection.execute("set transaction isolation level read committed")
    _forget(connection)
    if not check_state_ownership(connection):
        return
    ((exists,),) = connection.execute(_EXISTS)
    if exists:
        connection.execute("lock table cdc_replay.subscription in share update exclusive mode")


def upgrade(connection: Connection) -> None:
    """Upgrade the schema of an earlier release, if there is one.

    Raises:
        MissingPrivilege: if the role may not.
    """
    ((exists,),) = connection.execute(_EXISTS)
    if exists:
        install(connection)


def drop(connection: Connection) -> None:
    """Drop the schema, with the state of all subscriptions."""
    connection.execute("drop schema cdc_replay cascade")
    _forget(connection)


def _forget(connection: Connection) -> None:
    _CHECKED.discard(connection)
    _INSTALLED.discard(connection)


def is_installed(connection: Connection) -> bool:
    """Whether this database has the schema with its tables, except perhaps those that 0.1.0 lacks.

    Raises:
        SubscriberNotReady: if another role controls the schema.
    """
    if connection in _INSTALLED:
        return True
    if connection not in _CHECKED:
        if not check_state_ownership(connection):
            return False
        _CHECKED.add(connection)
    ((exists,),) = connection.execute(_EXISTS)
    if exists:
        _INSTALLED.add(connection)
    return bool(exists)


def is_complete(connection: Connection) -> bool:
    """Whether this database has all tables.

    Raises:
        SubscriberNotReady: if another role controls the schema.
    """
    return is_installed(connection) and bool(connection.execute(_IS_COMPLETE).fetchall()[0][0])
