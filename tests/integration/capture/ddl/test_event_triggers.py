"""The event triggers' messages of a DDL command lead to the catalog after it (R9.10, R9.11)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import psycopg
import pytest
from psycopg import sql

from cdc_replay.capture.ddl.event_triggers import apply_plan, plan_event_triggers
from cdc_replay.catalog.ddl_change import (
    CATALOG_PREFIX,
    REWRITE_PREFIX,
    DdlChange,
    apply_ddl_change,
    parse_ddl_change,
    parse_rewrite,
)
from cdc_replay.catalog.reader import read_catalog, without_generation_texts
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import RelationId
from cdc_replay.pgoutput.messages import LogicalMessage
from cdc_replay.pgoutput.reader import decode
from cdc_replay.postgres.connection import Connection, connect
from embedded.postgres import Cluster
from fixtures.postgres import Database, create_database, drop_database
from integration.capture.ddl.commands import COMMANDS, MEETING, SCHEMA, SILENT_COMMANDS, lines


class Source:
    """A database with the event triggers, and a slot that reads their messages."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.connection = database.connect()
        self.connection.execute("create publication none_of_these")
        self.connection.execute("select pg_create_logical_replication_slot(current_database(), 'pgoutput')")

    def catalog(self) -> PublisherCatalog:
        with connect(self.database.dsn, purpose="test") as connection:
            return read_catalog(connection, Lsn(0))

    def messages(self) -> list[LogicalMessage]:
        """Those of committed transactions since the last call."""
        read = self.connection.execute(
            "select data from pg_logical_slot_get_binary_changes(current_database(), null, null,"
            " 'proto_version', '1', 'publication_names', 'none_of_these', 'messages', 'true')"
        ).fetchall()
        result = [decode(message) for (message,) in read]
        return [message for message in result if isinstance(message, LogicalMessage)]

    def changes(self) -> list[DdlChange]:
        return [
            parse_ddl_change(message.content)
            for message in self.messages()
            if message.prefix == CATALOG_PREFIX
        ]


def install(connection: Connection, slot: str) -> None:
    assert apply_plan(connection, plan_event_triggers(connection, slot, ("p",))) is None


@pytest.fixture(scope="module")
def template(publisher_cluster: Cluster) -> Iterator[Database]:
    """A database with all kinds of objects and with the event triggers, to be copied."""
    database = create_database(publisher_cluster, "template")
    with database.connect() as connection:
        connection.execute("create role cdc_replay_somebody")
        connection.execute(SCHEMA.encode())
        install(connection, "s")
    yield database
    drop_database(database)
    with connect(publisher_cluster.dsn(), purpose="test") as admin:
        admin.execute("drop role cdc_replay_somebody")


@pytest.fixture
def source(template: Database) -> Iterator[Source]:
    with copied(template) as source:
        yield source


@contextlib.contextmanager
def copied(template: Database) -> Iterator[Source]:
    name = f"{template.name}_copy"
    with connect(template.cluster.dsn(), purpose="test") as admin:
        admin.execute(
            sql.SQL("create database {} template {}").format(
                sql.Identifier(name), sql.Identifier(template.name)
            )
        )
    source = Source(Database(template.cluster, name))
    try:
        yield source
    finally:
        source.connection.close()
        drop_database(source.database)


def after(catalog: PublisherCatalog, changes: Sequence[DdlChange]) -> PublisherCatalog:
    return functools.reduce(apply_ddl_change, changes, catalog)


@pytest.mark.parametrize("command", lines(COMMANDS))
def test_messages_of_command_lead_to_catalog_after_it(source: Source, command: str) -> None:
    """R9.11: the catalog before, and the messages of the transaction, give the catalog after."""
    before = source.catalog()

    source.connection.execute(command.encode())

    changes = source.changes()
    assert changes
    assert after(before, changes) == source.catalog()


def test_command_without_definition_change_writes_no_message(source: Source) -> None:
    before = source.catalog()
    states = {}
    for command in lines(SILENT_COMMANDS):
        source.connection.execute(command.encode())
        states[command] = source.messages()

    assert [command for command, messages in states.items() if messages] == []
    assert before == source.catalog()


def test_rolled_back_savepoint_writes_no_message(source: Source) -> None:
    """R9.10: its changes have no effect."""
    before = source.catalog()

    source.database.run("""
        begin;
        alter table plain add column kept int;
        savepoint s;
        alter table plain add column gone int;
        alter publication p drop table plain;
        rollback to s;
        alter table leaf rename to blade;
        commit;
    """)

    changes = source.changes()
    assert len(changes) == 2
    assert after(before, changes) == source.catalog()


def test_commands_of_transaction_write_messages_in_order(source: Source) -> None:
    """R9.10: each applies to later changes of the same transaction."""
    before = source.catalog()
    with source.database.connect() as connection, connection.transaction():
        seen = [before]
        for command in (
            "create table t (id int primary key) partition by list (id)",
            "create table t1 partition of t for values in (1)",
            "create publication fresh for table t",
            "alter table t rename to u",
            "alter table t1 rename to t",
            "alter table u add column a int",
            "alter table u detach partition t",
            "drop table u",
            "alter publication fresh add table t where (id > 5)",
            "drop publication fresh",
            "alter table plain rename to t2; drop table t; alter table t2 rename to t",
        ):
            connection.execute(b"set local search_path = public; " + command.encode())
            # As the reader's own sessions have it: texts of types and expressions depend on it.
            connection.execute("set local search_path = ''")
            seen.append(read_catalog(connection, Lsn(0)))

    states = [before]
    for change in source.changes():
        states.append(apply_ddl_change(states[-1], change))

    # Every state that the transaction saw was told, in that order; some commands have several messages.
    indexes = [states.index(catalog) for catalog in seen]
    assert indexes == sorted(indexes)
    assert states[-1] == seen[-1] == source.catalog()


def test_two_open_transactions_keep_each_others_changes(source: Source) -> None:
    """R9.11: whichever commits first."""
    before = source.catalog()
    with (
        source.database.connect() as session,
        source.database.connect() as other_session,
        session.transaction(),
    ):
        session.execute("alter table plain add column x int")
        session.execute("alter publication p set (publish = 'insert')")
        with other_session.transaction():
            other_session.execute("alter table s.other rename to another")
            other_session.execute("alter publication q add table loose")
        first = source.changes()
        session.execute("alter table root rename to trunk")
    second = source.changes()

    assert (len(first), len(second)) == (2, 3)
    assert after(after(before, first), second) == source.catalog()


@pytest.mark.slow
@pytest.mark.parametrize("first", lines(MEETING))
def test_concurrent_commands_keep_each_others_changes(template: Database, first: str) -> None:
    """R9.11: each with each that does not wait for it, whichever commits first."""
    undone = []
    met = 0
    commands = lines(MEETING)
    after_it = [*commands, *commands][commands.index(first) + 1 :]
    others = after_it[: len(commands) // 2]  # so that each pair comes once
    for second, is_first_to_commit in itertools.product(others, (False, True)):
        with copied(template) as source, contextlib.ExitStack() as opened:
            before = source.catalog()
            session, other_session = (opened.enter_context(source.database.connect()) for _ in range(2))
            if not all(
                at_once(opened_session, text)
                for opened_session, text in ((session, first), (other_session, second))
            ):
                continue
            met += 1
            for connection in (other_session, session) if is_first_to_commit else (session, other_session):
                connection.execute("commit")
            # A function's new name is told for tables with a row filter; a later capture reads the rest.
            if without_texts(after(before, source.changes())) != without_texts(source.catalog()):
                undone.append((second, is_first_to_commit))

    assert met
    assert not undone


def without_texts(catalog: PublisherCatalog) -> PublisherCatalog:
    """The catalog without the texts of generation expressions, which are for display."""
    tables = {relation: without_generation_texts(table) for relation, table in catalog.tables.items()}
    return dataclasses.replace(catalog, tables=tables)


def at_once(connection: Connection, command: str) -> bool:
    """Whether the command and its message, in a new transaction, succeed without waiting."""
    notices: list[psycopg.errors.Diagnostic] = []
    connection.add_notice_handler(notices.append)
    connection.execute("set lock_timeout = '100ms'; begin")
    try:
        connection.execute(command.encode())
    except psycopg.errors.LockNotAvailable:
        return False
    return not any("cdc-replay could not" in (notice.message_primary or "") for notice in notices)


@pytest.mark.parametrize(
    ("command", "other"),
    [
        ("alter publication p add table loose where (a > 2)", "drop table plain cascade"),
        ("alter publication p set (publish = 'insert')", "alter publication p add table loose"),
        ("alter publication p rename to renamed", "drop table plain cascade"),
        ("alter publication q set (publish = 'delete')", "alter publication q add tables in schema public"),
        ("drop schema s cascade", "alter publication q add tables in schema public"),
        ("alter type mood rename to feeling", "alter table plain add column z int"),
        ("alter type mood rename to feeling", "drop table plain cascade"),
        ("drop publication p", "alter table plain add column z int"),
        ("alter index keyed_j rename to keyed_jay", "alter table keyed add column z int"),
    ],
)
def test_changes_of_one_object_by_two_transactions_are_kept(source: Source, command: str, other: str) -> None:
    """R9.11: a message has only what its command changed and locked."""
    before = source.catalog()
    with source.database.connect() as connection, connection.transaction():
        connection.execute(command.encode())
        source.connection.execute("set lock_timeout = '10s'")
        source.connection.execute(other.encode())

    assert after(before, source.changes()) == source.catalog()


@pytest.mark.parametrize(
    ("earlier", "command", "other"),
    [
        (
            "alter table leaf alter a set statistics 5",
            "alter table root replica identity full",
            "alter publication p add table leaf where (id > 2)",
        ),
        (
            "create unique index late on keyed (id, k)",
            "alter index late rename to later",
            "alter table keyed add column z int",
        ),
        (
            "drop index keyed_k; create index droppable on loose (a)",
            "drop index droppable",
            "alter table keyed add column z int",
        ),
        (
            "create unique index lone on only sprig (id); create unique index lone_bud on bud (id)",
            "alter index lone attach partition lone_bud",
            "alter publication p add table sprig",
        ),
        (
            "create table quiet (id int primary key)",
            "grant select on leaf to cdc_replay_somebody; alter table root replica identity full",
            "alter publication p add table leaf where (id > 2)",
        ),
        (
            "alter table only sprig add primary key (id); alter table bud add primary key (id)",
            "alter index sprig_pkey attach partition bud_pkey",
            "alter publication p add table sprig",
        ),
    ],
)
def test_tables_that_other_transactions_have_altered_are_not_reported(
    source: Source, earlier: str, command: str, other: str
) -> None:
    """R9.11: relatives with rows of later transactions, tables that lost their index, those of an index."""
    before = source.catalog()
    with source.database.connect() as connection, connection.transaction():
        connection.execute("select pg_current_xact_id()")
        source.connection.execute(earlier.encode())
        connection.execute(command.encode())
        source.connection.execute("set lock_timeout = '10s'")
        source.connection.execute(other.encode())

    assert after(before, source.changes()) == source.catalog()


def test_rewrite_that_may_change_values_names_tables(source: Source) -> None:
    """R11.9: another type, or a default that is computed per row; leaves for a partitioned table."""
    numbers = dict(
        source.database.rows("select relname::text, oid::bigint from pg_class where relnamespace = 2200")
    )

    def rewritten(command: str) -> set[str]:
        source.connection.execute(command.encode())
        actual = [
            parse_rewrite(message.content)
            for message in source.messages()
            if message.prefix == REWRITE_PREFIX
        ]
        return {
            name for name, oid in numbers.items() if any(RelationId(oid) in relations for relations in actual)
        }

    assert rewritten("alter table plain add column r float default random()") == {"plain"}
    assert rewritten("alter table keyed alter column j type bigint using j + 100") == {"keyed"}
    assert rewritten("alter table sprig alter column a type bigint") == {"bud"}
    assert rewritten("alter table plain add column z int default 5") == set()
    assert rewritten("vacuum full plain") == set()
    assert rewritten("alter table unlogged set logged") == set()
    assert rewritten("create temp table t (a int); alter table t alter column a type bigint") == set()


def test_failing_function_warns_and_command_succeeds(source: Source) -> None:
    source.connection.execute("drop materialized view cdc_replay_capture.secret")
    source.connection.execute("grant create on schema public to cdc_replay_somebody")
    before = source.catalog()
    warnings: list[str] = []
    with source.database.connect() as connection:
        connection.add_notice_handler(lambda notice: warnings.append(str(notice.message_primary)))
        connection.execute("set role cdc_replay_somebody")

        connection.execute("create table t (a int); alter table t alter column a type bigint")

    assert [text for text in warnings if "cdc-replay could not record" in text] == warnings
    assert len(warnings) == 3
    assert all('cdc_replay_capture.secret" does not exist' in warning for warning in warnings)
    assert source.messages() == []
    assert len(source.catalog().tables) == len(before.tables) + 1


def test_commands_of_ordinary_role_write_messages(source: Source) -> None:
    """It has no right on the schema of the functions, and a search path and settings of its own."""
    source.connection.execute("grant create on schema public to cdc_replay_somebody")
    source.connection.execute("alter table plain owner to cdc_replay_somebody")
    source.connection.execute("alter publication p owner to cdc_replay_somebody")
    source.connection.execute(
        f"grant create on database {source.database.name} to cdc_replay_somebody".encode()
    )
    before = source.catalog()
    with source.database.connect() as connection:
        connection.execute(
            "set role cdc_replay_somebody; set quote_all_identifiers = on; set datestyle = 'SQL, DMY';"
            " set timezone = 'Asia/Tokyo'; set search_path = pg_temp, public;"
            " create temp table pg_class (oid oid); create temp table pg_publication (pubname text)"
        )
        connection.execute("create table public.mine (id int primary key, at timestamptz, m public.mood)")
        connection.execute("alter table public.plain add column at timestamptz")
        connection.execute(
            "alter publication p set table public.plain where (id > 3),"
            " public.mine where (at > '2020-02-01 00:00')"
        )

    assert after(before, source.changes()) == source.catalog()


def test_session_with_replication_role_replica_writes_messages(source: Source) -> None:
    before = source.catalog()
    with source.database.connect() as connection:
        connection.execute("set session_replication_role = replica; alter table plain rename to t")

    assert after(before, source.changes()) == source.catalog()


def test_message_is_utf8_in_any_database_encoding(template: Database) -> None:
    """UTF-8, whatever the database's encoding is."""
    name = f"{template.name}_latin1"
    with connect(template.cluster.dsn(), purpose="test") as admin:
        admin.execute(
            sql.SQL("create database {} template template0 encoding latin1 locale 'C'").format(
                sql.Identifier(name)
            )
        )
    database = Database(template.cluster, name)
    try:
        with database.connect() as connection:
            install(connection, "s")
        source = Source(database)
        before = source.catalog()
        source.connection.execute('create table "Größe" ("ß" text default \'é\')')

        changes = source.changes()
        source.connection.close()
        assert after(before, changes) == source.catalog()
    finally:
        drop_database(database)


def test_partition_message_size_is_independent_of_tree_size(source: Source) -> None:
    """Only altered relatives are reported with their rows; the others are listed as unchanged."""
    source.connection.execute(
        "do $$ begin for i in 1000..1019 loop execute format('create table many_%s"
        " partition of root for values from (%s) to (%s)', i, i, i + 1); end loop; end $$"
    )
    source.messages()
    (root,) = [oid for oid, table in source.catalog().tables.items() if table.name.name == "root"]

    def tables_told(command: str) -> int:
        source.connection.execute(command.encode())
        return max(len(change.tables) for change in source.changes())

    assert tables_told("create table fresh partition of root for values from (2000) to (2001)") == 1
    assert tables_told("alter table root detach partition many_1000") == 1
    assert tables_told("alter table root attach partition many_1000 for values from (1000) to (1001)") == 2
    assert tables_told("alter table many_1001 replica identity full") == 1
    assert tables_told("alter table root rename to trunk") == 1
    assert tables_told("alter table trunk add column z int") == 1 + sum(
        root in [ancestor.id for ancestor in source.catalog().ancestors(oid)]
        for oid in source.catalog().tables
    )
