"""What the subscriber knows about itself: schema `cdc_replay` in its database.

The subscriber is the only place where progress is kept, because only there rows and progress can be one
commit (R8.17). Whoever changes rows changes the state in the same transaction; a crash never parts them.

| table              | a row is                                                                       |
|--------------------|--------------------------------------------------------------------------------|
| subscription       | a subscription, the publisher it is bound to, and why it is parked, if it is   |
| subscription_table | the state of one table of it (`model.table_state`), which its oid names        |
| brought            | the definition with which the rows of one table were brought (`brought`)       |
| result             | what one command ended with; the last `RESULTS_KEPT` of each command stay      |
| copy_progress      | how far the running copy of one table is (`subscriber.progress`)               |

A subscribed table is a table of this database, whatever its name, as in `pg_subscription_rel`: renamed, it
keeps its state, and another one that is made in its place is not subscribed to (R7.12). Names in the answers
are those that tables have at that moment; `schema_name` and `table_name` are what a table was called when a
change reached it by its name.

The functions work on an open connection and never commit a transaction that the caller has opened. Those that
only read answer "nothing known" where the schema does not exist yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, assert_never

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from cdc_replay.errors import AnotherPublisher, SubscriptionInUse
from cdc_replay.failpoints import failpoint
from cdc_replay.model.database import Database
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import STATE_SCHEMA
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready, TableState
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.subscriber.ownership import check_state_ownership
from cdc_replay.subscriber.replication_origin import drop_origins

SCHEMA: Final = STATE_SCHEMA

RESULTS_KEPT: Final = 20
"""Results kept per subscription and command."""

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

_TABLES: Final = """
    select known.relation::oid::bigint, known.schema_name, known.table_name, namespace.nspname, class.relname,
        known.state, known.lsn::text, known.reason, known.transaction::text
    from cdc_replay.subscription_table as known
    left join pg_catalog.pg_class as class on class.oid = known.relation and class.relkind in ('r', 'p')
    left join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
    where known.subscription = %s
    order by namespace.nspname, class.relname, known.schema_name, known.table_name
"""

_CHECKED: Final[weakref.WeakSet[Connection]] = weakref.WeakSet()
"""Connections on which the schema was found in no other hands; nobody else can take it while it is there."""

_SET_TABLE_STATE: Final = """
    insert into cdc_replay.subscription_table
        (subscription, schema_name, table_name, relation, state, lsn, reason, transaction)
    select %s, namespace.nspname, class.relname, class.oid, %s, %s, %s, %s
    from pg_catalog.pg_class as class
    join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
    where namespace.nspname = %s and class.relname = %s and class.relkind in ('r', 'p')
    on conflict (subscription, relation)
    do update set state = excluded.state, lsn = excluded.lsn, reason = excluded.reason,
        transaction = excluded.transaction
"""

_ADVANCE_TABLES: Final = """
    update cdc_replay.subscription_table
    set state = 'ready', lsn = %s, reason = null, transaction = null
    where subscription = %s and relation::oid = any(%s::oid[])
"""

_RECORD_NAMES: Final = """
    update cdc_replay.subscription_table as known
    set schema_name = namespace.nspname, table_name = class.relname
    from pg_catalog.pg_class as class
    join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
    where known.subscription = %s and class.oid = known.relation and known.relation::oid = any(%s::oid[])
        and (known.schema_name, known.table_name) is distinct from (namespace.nspname, class.relname)
"""

_REMEMBER: Final = """
    insert into cdc_replay.subscription (
        name, publisher_system_identifier, publications, publisher_database_oid, publisher_database_name
    )
    values (%s, %s, %s, %s, %s)
    on conflict (name) do update set publications = excluded.publications
"""

_SET_DATABASE: Final = """
    update cdc_replay.subscription set publisher_database_oid = %s, publisher_database_name = %s
    where name = %s
"""

_FORGET_OLD_RESULTS: Final = """
    delete from cdc_replay.result
    where subscription = %(subscription)s and command = %(command)s and number <= (
        select number from cdc_replay.result
        where subscription = %(subscription)s and command = %(command)s
        order by number desc offset %(kept)s limit 1
    )
"""

_NULL_ACCEPTED: Final = """
    select namespace.nspname, class.relname,
        greatest(subscription.null_accepted_at, known.null_accepted_at)::text
    from cdc_replay.subscription_table as known
    join cdc_replay.subscription on name = known.subscription
    join pg_catalog.pg_class as class on class.oid = known.relation
    join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
    where name = %s and coalesce(subscription.null_accepted_at, known.null_accepted_at) is not null
"""

# The table is the one that has the schema and the name now.
_MARK_REWRITTEN: Final = """
    update cdc_replay.subscription_table set rewritten_at = %s where subscription = %s
        and relation = pg_catalog.to_regclass(pg_catalog.format('%%I.%%I', %s::text, %s::text))
"""

_FORGET_REWRITE: Final = """
    update cdc_replay.subscription_table set rewritten_at = null
    where subscription = %s and rewritten_at is not null
        and relation = pg_catalog.to_regclass(pg_catalog.format('%%I.%%I', %s::text, %s::text))
"""

_ACCEPT_NULL: Final = """
    update cdc_replay.subscription_table set null_accepted_at = %s where subscription = %s
        and relation = pg_catalog.to_regclass(pg_catalog.format('%%I.%%I', %s::text, %s::text))
"""

_REWRITTEN: Final = """
    select namespace.nspname, class.relname, known.rewritten_at::text
    from cdc_replay.subscription_table as known
    join pg_catalog.pg_class as class on class.oid = known.relation
    join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
    where known.subscription = %s and known.rewritten_at is not null
    order by namespace.nspname, class.relname
"""

_LOCK_HOLDER: Final = """
    select activity.pid, activity.application_name
    from pg_locks
    join pg_stat_activity as activity using (pid)
    where locktype = 'advisory' and granted and objsubid = 1
        and pg_locks.database = (select oid from pg_database where datname = current_database())
        and classid::bigint = (%(key)s::bigint >> 32) & 4294967295
        and objid::bigint = %(key)s::bigint & 4294967295
"""


@dataclass(frozen=True, slots=True)
class SubscriptionRecord:
    """A subscription as its subscriber knows it; `parked_at` and `parked_reason` go together.

    `parked_transaction` is where the transaction was committed that the subscriber refuses, if it is one.
    """

    name: str
    publisher_system_identifier: str
    publications: tuple[str, ...]
    parked_at: Lsn | None
    parked_reason: str | None
    created: datetime
    parked_transaction: Lsn | None = None
    publisher_database: Database | None = None
    """None until the log says it, which one of an earlier release does not before its next capture."""

    def is_of(self, publisher_system_identifier: str, database: Database | None) -> bool:
        """Whether its rows come from that database, as far as it is known."""
        known = self.publisher_database
        if self.publisher_system_identifier != publisher_system_identifier:
            return False
        return known is None or database is None or known.oid == database.oid


@dataclass(frozen=True, slots=True)
class KnownTable:
    """A table of a subscription: its oid, by what name changes last reached it, its name now, and its state.

    One that was dropped on the subscriber has no `name`.
    """

    relation: int
    recorded_name: QualifiedName
    name: QualifiedName | None
    state: TableState

    @property
    def is_renamed(self) -> bool:
        """It is there under another name than it is recorded by."""
        return self.name is not None and self.name != self.recorded_name


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """What a command ended with, as its JSON object."""

    command: str
    finished: datetime
    result: Mapping[str, object]


def install(connection: Connection) -> None:
    """Create the schema and its tables where they are missing; safe to run at the same time as others.

    Raises:
        MissingPrivilege: if the role may not create a schema in this database.
    """
    if is_installed(connection):
        return
    with translated_errors(f'cannot create schema "{SCHEMA}" on the subscriber'), connection.transaction():
        # `if not exists` alone fails where another session creates the same schema right now.
        connection.execute("select pg_advisory_xact_lock(%s)", (_advisory_key("install", ""),))
        if is_installed(connection):
            return  # by another session, which works with it by now
        for statement in _INSTALL:
            connection.execute(statement)


def bring_up_to_date(connection: Connection) -> None:
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


@contextlib.contextmanager
def lock(connection: Connection, subscription: str) -> Iterator[None]:
    """Hold the subscription for the duration: one process at a time changes its rows and its state.

    The lock belongs to the session, so that it is gone with the process, however that ends.

    Raises:
        SubscriptionBusy: if another session holds it.
    """
    key = _advisory_key("subscription", subscription)
    row = connection.execute("select pg_try_advisory_lock(%s)", (key,)).fetchone()
    if row is None or not row[0]:
        raise SubscriptionInUse(
            f'another process is working on subscription "{subscription}"',
            detail=_lock_holder(connection, key),
            hint="Wait until it has finished; runs of one subscription never overlap.",
        )
    try:
        yield
    finally:
        # Where the connection is lost or in a failed transaction, its end releases the lock.
        with contextlib.suppress(psycopg.Error):
            connection.execute("select pg_advisory_unlock(%s)", (key,))


@contextlib.contextmanager
def unlocked(connection: Connection, subscription: str) -> Iterator[None]:
    """Inside of `lock`: let others hold the subscription, then wait until it is free again."""
    key = _advisory_key("subscription", subscription)
    connection.execute("select pg_advisory_unlock(%s)", (key,))
    yield
    with translated_errors(f'cannot lock subscription "{subscription}" again'):
        connection.execute("select pg_advisory_lock(%s)", (key,))


def remember_subscription(
    connection: Connection,
    subscription: str,
    publisher_system_identifier: str,
    publications: Iterable[str],
    database: Database | None = None,
) -> None:
    """Bind the subscription to its publisher, or take over its changed list of publications.

    Raises:
        AnotherPublisher: if the subscription is bound to another cluster, or another database of it.
    """
    check_publisher(connection, subscription, publisher_system_identifier, database)
    oid, name = (None, None) if database is None else (database.oid, database.name)
    values = (subscription, publisher_system_identifier, list(publications), oid, name)
    connection.execute(_REMEMBER, values)


def check_publisher(
    connection: Connection, subscription: str, publisher_system_identifier: str, database: Database | None
) -> None:
    """Check that the subscription, if it is known, is bound to that database of that cluster.

    Its name is brought up to date, and taken over where it is not known yet.

    Raises:
        AnotherPublisher: if it is bound to another one, which has brought its rows.
    """
    record = subscription_record(connection, subscription)
    if record is None:
        return
    if not record.is_of(publisher_system_identifier, database):
        raise _another_publisher(record, publisher_system_identifier, database)
    if database is not None and record.publisher_database != database:
        connection.execute(_SET_DATABASE, (database.oid, database.name, subscription))


def _another_publisher(
    record: SubscriptionRecord, system_identifier: str, database: Database | None
) -> AnotherPublisher:
    return AnotherPublisher(
        f'subscription "{record.name}" belongs to another publisher',
        detail="The subscriber's rows come from"
        f" {_place(record.publisher_system_identifier, record.publisher_database)},"
        f" the change log of the configuration is of {_place(system_identifier, database)}.",
        hint="Correct the configuration; two deployments with one subscriber need different names of"
        " subscriptions. To feed it from another database, run"
        f" `cdc-replay teardown {record.name}`, empty its tables, and start again.",
    )


def _place(system_identifier: str, database: Database | None) -> str:
    cluster = f"the cluster with system identifier {system_identifier}"
    return cluster if database is None else f"database {database} of {cluster}"


def subscription_record(connection: Connection, subscription: str) -> SubscriptionRecord | None:
    """What is known of the subscription; None if it has never been set up here."""
    if not is_installed(connection):
        return None
    row = connection.execute(
        "select name, publisher_system_identifier, publications, parked_at::text, parked_reason, created,"
        " parked_transaction::text, publisher_database_oid, publisher_database_name"
        " from cdc_replay.subscription where name = %s",
        (subscription,),
    ).fetchone()
    if row is None:
        return None
    name, system_identifier, publications, parked_at, parked_reason, created, transaction, *database = row
    return SubscriptionRecord(
        name,
        system_identifier,
        tuple(publications),
        None if parked_at is None else Lsn.parse(parked_at),
        parked_reason,
        created,
        None if transaction is None else Lsn.parse(transaction),
        None if database[0] is None else Database(*database),
    )


def known_tables(connection: Connection, subscription: str) -> tuple[KnownTable, ...]:
    """Every table of the subscription in the order of their names; none where nothing is known."""
    if not is_installed(connection):
        return ()
    return tuple(
        KnownTable(
            relation,
            QualifiedName(schema, name),
            None if present is None else QualifiedName(present_schema, present),
            _state(*stored),
        )
        for relation, schema, name, present_schema, present, *stored in connection.execute(
            _TABLES, (subscription,)
        )
    )


def table_states(connection: Connection, subscription: str) -> dict[QualifiedName, TableState]:
    """The state of every table of the subscription that is there, by the name that it has now."""
    return {each.name: each.state for each in known_tables(connection, subscription) if each.name is not None}


def enter_tables(connection: Connection, subscription: str, names: Iterable[QualifiedName]) -> None:
    """Take tables into a remembered subscription, all or none: they are `Pending`."""
    with connection.transaction():
        for name in names:
            set_table_state(connection, subscription, name, Pending())
        connection.execute(
            "update cdc_replay.subscription set has_tables_listed = true where name = %s", (subscription,)
        )


def has_tables_listed(connection: Connection, subscription: str) -> bool:
    """Whether its tables were entered; a subscription whose publications list none has none then."""
    if not is_installed(connection):
        return False
    query = "select has_tables_listed from cdc_replay.subscription where name = %s"
    row = connection.execute(query, (subscription,)).fetchone()
    return row is not None and bool(row[0])


def set_table_state(
    connection: Connection, subscription: str, name: QualifiedName, state: TableState
) -> None:
    """Store the state of the table that has this name now, new or known to a remembered subscription.

    A table that is not there any more has none.
    """
    connection.execute(_SET_TABLE_STATE, (subscription, *_stored(state), name.schema, name.name))


def advance_tables(
    connection: Connection, subscription: str, relations: Iterable[int], applied_lsn: Lsn
) -> None:
    """Make all these tables, given by oid, `Ready(applied_lsn)` in one statement."""
    connection.execute(_ADVANCE_TABLES, (str(applied_lsn), subscription, list(relations)))


def mark_rewritten(
    connection: Connection, subscription: str, names: Iterable[QualifiedName], commit_lsn: Lsn
) -> None:
    """Note that values of these tables were not compared since the publisher rewrote them (R11.9)."""
    for name in names:
        connection.execute(_MARK_REWRITTEN, (str(commit_lsn), subscription, name.schema, name.name))


def forget_rewrite(connection: Connection, subscription: str, name: QualifiedName) -> None:
    """The table's values have been compared, or copied, behind the rewrite."""
    connection.execute(_FORGET_REWRITE, (subscription, name.schema, name.name))


def rewritten_tables(connection: Connection, subscription: str) -> dict[QualifiedName, Lsn]:
    """The tables of which values have not been compared since a rewrite, with the end of its transaction."""
    if not is_installed(connection):
        return {}
    rows = connection.execute(_REWRITTEN, (subscription,))
    return {QualifiedName(schema, name): Lsn.parse(lsn) for schema, name, lsn in rows}


def record_names(connection: Connection, subscription: str, relations: Iterable[int]) -> None:
    """Record that changes have reached these tables, given by oid, by the names that they have now."""
    connection.execute(_RECORD_NAMES, (subscription, list(relations)))


def forget_table(connection: Connection, subscription: str, relation: int) -> None:
    """Drop the table, given by oid, from the subscription; its rows stay (R7.13)."""
    connection.execute(
        "delete from cdc_replay.subscription_table where subscription = %s and relation = %s::oid",
        (subscription, relation),
    )


def park(
    connection: Connection, subscription: str, at: Lsn, reason: str, transaction: Lsn | None = None
) -> None:
    """Stop replaying the subscription until it is unparked; `at` is the position that it could not pass.

    With `transaction`, the commit LSN of what the subscriber refuses, replay tries that one again.
    """
    connection.execute(
        "update cdc_replay.subscription set parked_at = %s, parked_reason = %s, parked_transaction = %s"
        " where name = %s",
        (str(at), reason, None if transaction is None else str(transaction), subscription),
    )


def unpark(connection: Connection, subscription: str) -> None:
    """Let the subscription be replayed again."""
    connection.execute(
        "update cdc_replay.subscription"
        " set parked_at = null, parked_reason = null, parked_transaction = null where name = %s",
        (subscription,),
    )


def accept_null(
    connection: Connection, subscription: str, upto: Lsn, tables: Iterable[QualifiedName] = ()
) -> None:
    """Let replay store NULL for unsent values of rows that enter up to a commit (R4.6).

    In all tables of the subscription, or in those that are named.
    """
    names = list(tables)
    if not names:
        connection.execute(
            "update cdc_replay.subscription set null_accepted_at = %s where name = %s",
            (str(upto), subscription),
        )
    for name in names:
        connection.execute(_ACCEPT_NULL, (str(upto), subscription, name.schema, name.name))


def null_accepted(connection: Connection, subscription: str) -> dict[QualifiedName, Lsn]:
    """Up to which commit NULL is accepted, by table; those where it is not are left out."""
    rows = connection.execute(_NULL_ACCEPTED, (subscription,))
    return {QualifiedName(schema, name): Lsn.parse(upto) for schema, name, upto in rows}


def forget_null_accepted(connection: Connection, subscription: str, applied_lsn: Lsn) -> None:
    """What was accepted up to there is applied, and says nothing of what comes."""
    for table, column in (("subscription", "name"), ("subscription_table", "subscription")):
        connection.execute(
            sql.SQL(
                "update cdc_replay.{} set null_accepted_at = null where {} = %s and null_accepted_at <= %s"
            ).format(sql.Identifier(table), sql.Identifier(column)),
            (subscription, str(applied_lsn)),
        )


def record_result(
    connection: Connection, subscription: str, command: str, result: Mapping[str, object]
) -> None:
    """Keep what a command ended with, in the transaction of the work itself, and forget very old results."""
    connection.execute(
        "insert into cdc_replay.result (subscription, command, result) values (%s, %s, %s)",
        (subscription, command, Jsonb(dict(result))),
    )
    connection.execute(
        _FORGET_OLD_RESULTS, {"subscription": subscription, "command": command, "kept": RESULTS_KEPT}
    )


def last_result(connection: Connection, subscription: str, command: str) -> RecordedResult | None:
    """The newest result of the command for this subscription."""
    if not is_installed(connection):
        return None
    row = connection.execute(
        "select command, finished, result from cdc_replay.result"
        " where subscription = %s and command = %s order by number desc limit 1",
        (subscription, command),
    ).fetchone()
    return None if row is None else RecordedResult(*row)


def remove_subscription(connection: Connection, subscription: str) -> None:
    """Forget the subscription with all that belongs to it, its replication origins too.

    With the last one the schema goes.

    The rows of the subscribed tables stay.
    """
    if not is_installed(connection):
        return
    with connection.transaction():
        connection.execute("select pg_advisory_xact_lock(%s)", (_advisory_key("install", ""),))
        connection.execute("delete from cdc_replay.subscription where name = %s", (subscription,))
        left = connection.execute("select exists (select from cdc_replay.subscription)").fetchone()
        if left is not None and not left[0]:
            connection.execute("drop schema cdc_replay cascade")
    failpoint("teardown.after_state")
    drop_origins(connection, subscription)


def stable_hash(subscription: str) -> int:
    """A signed 64-bit number for the name, the same in every process and release."""
    return _advisory_key("subscription", subscription)


def _advisory_key(purpose: str, name: str) -> int:
    digest = hashlib.sha256(f"cdc_replay {purpose} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def lock_holder(connection: Connection, subscription: str) -> str | None:
    """Which session holds the subscription, in words; None if nobody does."""
    return _lock_holder(connection, _advisory_key("subscription", subscription))


def _lock_holder(connection: Connection, key: int) -> str | None:
    row = connection.execute(_LOCK_HOLDER, {"key": key}).fetchone()
    return None if row is None else f'It is server process {row[0]} ("{row[1]}") of the subscriber.'


def _stored(state: TableState) -> tuple[str, str | None, str | None, str | None]:
    match state:
        case Pending():
            return "pending", None, None, None
        case Copying(consistent_point):
            return "copying", str(consistent_point), None, None
        case Ready(applied_lsn):
            return "ready", str(applied_lsn), None, None
        case Parked(applied_lsn, reason, transaction):
            return "parked", str(applied_lsn), reason, None if transaction is None else str(transaction)
    assert_never(state)


def _state(word: str, lsn: str | None, reason: str | None, transaction: str | None) -> TableState:
    match word, lsn, reason:
        case "copying", str(), _:
            return Copying(Lsn.parse(lsn))
        case "ready", str(), _:
            return Ready(Lsn.parse(lsn))
        case "parked", str(), str():
            return Parked(Lsn.parse(lsn), reason, None if transaction is None else Lsn.parse(transaction))
        case _:
            return Pending()
