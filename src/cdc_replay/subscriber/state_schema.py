"""What the subscriber knows about itself: schema `cdc_replay` in its database.

The subscriber is the only place where progress is kept, because only there rows and progress can be one
commit (R8.17). Whoever changes rows changes the state in the same transaction; a crash never parts them.

| table              | a row is                                                                       |
|--------------------|--------------------------------------------------------------------------------|
| subscription       | a subscription, the publisher it is bound to, and why it is parked, if it is   |
| subscription_table | the state of one table of it (`model.table_state`), which its oid names        |
| brought            | the definition with which the rows of one table were brought (`brought`)       |
| result             | what one command ended with; the last `RESULTS_KEPT` of each command stay      |
| copy_progress      | how far the running copy of one table is (`subscriber.copy_progress`)               |

A subscribed table is a table of this database, whatever its name, as in `pg_subscription_rel`: renamed, it
keeps its state, and another one that is made in its place is not subscribed to (R7.12). Names in the answers
are those that tables have at that moment; `schema_name` and `table_name` are what a table was called when a
change reached it by its name.

The functions work on an open connection and never commit a transaction that the caller has opened. Those that
only read answer "nothing known" where the schema does not exist yet.
"""

from __future__ import annotations

import weakref
from typing import Final

from cdc_replay.model.publication import STATE_SCHEMA
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.subscriber.ownership import check_state_ownership
from cdc_replay.subscriber.subscription_lock import advisory_key

SCHEMA: Final = STATE_SCHEMA


_INSTALL: Final = (
    # Even `if not exists` asks for CREATE on the database, which an administrator need not give.
    """
    do $$ begin
        if pg_catalog.to_regnamespace('cdc_replay') is null then create schema cdc_replay; end if;
    end $$
    """,
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
        check ((parked_at is null) = (parked_reason is null))
    )
    """,
    """
    create table if not exists cdc_replay.subscription_table (
        subscription text not null references cdc_replay.subscription on delete cascade,
        schema_name text not null,
        table_name text not null,
        state text not null check (state in ('pending', 'copying', 'ready', 'parked')),
        lsn pg_lsn,
        reason text,
        transaction pg_lsn,
        check ((state = 'pending') = (lsn is null)),
        check ((state = 'parked') = (reason is not null))
    )
    """,
    """
    create table if not exists cdc_replay.brought (
        subscription text not null,
        schema_name text not null,
        table_name text not null,
        lsn pg_lsn not null,
        filters text[],
        columns text[] not null,
        relation oid
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
    # What has come since: a schema of an earlier version is brought up to date by whoever writes first.
    """
    alter table cdc_replay.subscription
        add column if not exists publisher_database_oid oid,
        add column if not exists publisher_database_name text,
        add column if not exists null_accepted_at pg_lsn
    """,
    """
    alter table cdc_replay.subscription_table
        add column if not exists relation oid,
        add column if not exists rewritten_at pg_lsn,
        add column if not exists null_accepted_at pg_lsn
    """,
    # Tables were known by name, and by the oid of the one whose rows had been brought, if it was kept.
    # Whoever publishes all tables of this database has rows updated only where they have an identity.
    "alter table cdc_replay.subscription_table replica identity full",
    "alter table cdc_replay.brought replica identity full",
    """
    alter table cdc_replay.brought
        drop constraint if exists brought_subscription_schema_name_table_name_fkey,
        drop constraint if exists brought_relation_fkey,
        drop constraint if exists brought_pkey
    """,
    "alter table cdc_replay.subscription_table drop constraint if exists subscription_table_pkey",
    """
    update cdc_replay.subscription_table as known
    set relation = coalesce(
        (select brought.relation from cdc_replay.brought
         where brought.subscription = known.subscription and brought.schema_name = known.schema_name
             and brought.table_name = known.table_name),
        pg_catalog.to_regclass(pg_catalog.format('%I.%I', schema_name, table_name))::oid)
    where relation is null
    """,
    """
    delete from cdc_replay.subscription_table
    where ctid in (
        select ctid
        from (
            select ctid, relation, pg_catalog.row_number() over (
                partition by subscription, relation
                order by relation = pg_catalog.to_regclass(
                    pg_catalog.format('%I.%I', schema_name, table_name))::oid desc nulls last
            ) as place
            from cdc_replay.subscription_table
        ) as placed
        where relation is null or place > 1
    )
    """,
    """
    update cdc_replay.brought
    set relation = known.relation
    from cdc_replay.subscription_table as known
    where brought.relation is null and brought.subscription = known.subscription
        and brought.schema_name = known.schema_name and brought.table_name = known.table_name
    """,
    """
    delete from cdc_replay.brought
    where not exists (
        select from cdc_replay.subscription_table as known
        where known.subscription = brought.subscription and known.schema_name = brought.schema_name
            and known.table_name = brought.table_name and known.relation = brought.relation
    )
    """,
    # A dump writes the name of a regclass, and its restoration finds the oid that the table has there.
    "alter table cdc_replay.subscription_table alter column relation type regclass",
    "alter table cdc_replay.brought alter column relation type regclass",
    "alter table cdc_replay.subscription_table add primary key (subscription, relation)",
    """
    alter table cdc_replay.brought
        add primary key (subscription, relation),
        add constraint brought_relation_fkey foreign key (subscription, relation)
            references cdc_replay.subscription_table on delete cascade
    """,
    "alter table cdc_replay.subscription_table replica identity default",
    "alter table cdc_replay.brought replica identity default",
)


_IS_INSTALLED: Final = """
    select exists (
        select from pg_catalog.pg_constraint
        where conrelid = pg_catalog.to_regclass('cdc_replay.brought') and conname = 'brought_relation_fkey'
    )
"""
"""What the last statements of `_INSTALL` leave behind."""


_CHECKED: Final[weakref.WeakSet[Connection]] = weakref.WeakSet()
"""Connections on which the schema was found in no other hands; nobody else can take it while it is there."""


def install(connection: Connection) -> None:
    """Create the schema and its tables where they are missing; safe to run at the same time as others.

    Raises:
        MissingPrivilege: if the role may not create a schema in this database.
    """
    if is_installed(connection):
        return
    with translated_errors(f'cannot create schema "{SCHEMA}" on the subscriber'), connection.transaction():
        # `if not exists` alone fails where another session creates the same schema right now.
        connection.execute("select pg_advisory_xact_lock(%s)", (advisory_key("install", ""),))
        if is_installed(connection):
            return  # by another session, which works with it by now
        for statement in _INSTALL:
            connection.execute(statement)


def upgrade(connection: Connection) -> None:
    """Give a schema of an earlier release what it lacks; without it nothing is known to be there.

    Raises:
        MissingPrivilege: if the role may not.
    """
    ((exists,),) = connection.execute("select pg_catalog.to_regclass('cdc_replay.subscription') is not null")
    if exists:
        install(connection)


def is_installed(connection: Connection) -> bool:
    """Whether this database has the schema with all its tables, as this version has them.

    Raises:
        SubscriberNotReady: if the schema is in the hands of another role.
    """
    if connection not in _CHECKED:
        check_state_ownership(connection)
        _CHECKED.add(connection)
    row = connection.execute(_IS_INSTALLED).fetchone()
    return row is not None and bool(row[0])
