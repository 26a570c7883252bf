"""A locked table is the planned one until the transaction ends, on all server versions (R2.1)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from psycopg.errors import WrongObjectType

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.errors import MissingPrivilege, PublisherNotReady
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.postgres.exported_snapshot import export_snapshot, import_snapshot
from cdc_replay.postgres.planned_tables import PlannedTable, check_unchanged, lock_planned_tables
from fixtures.native import wait_for
from fixtures.postgres import Database

TABLES = """
    create table "T t" (id int primary key, a int, b text);
    create table keyless (id int);
    create table root (id int) partition by range (id);
    create table leaf partition of root for values from (0) to (9);
    create domain low as int; create domain high as low;
    create table of_domains (id low, a high, b int)
"""

FOREIGN = "create extension file_fdw; create server s foreign data wrapper file_fdw"
FILE = "server s options (filename '/dev/null')"


@pytest.fixture
def reader(publisher: Database) -> Iterator[Connection]:
    """A snapshot session of a server that cannot restrict the kinds of relations to read."""
    publisher.run(TABLES)
    with export_snapshot(publisher.dsn) as exported:
        connection = import_snapshot(exported, purpose="test")
    with closing(connection):
        connection.execute(
            "select set_config(name, '', true) from pg_settings"
            " where name = 'restrict_nonsystem_relation_kind'"
        )
        yield connection


def planned(reader: Connection, name: str) -> PlannedTable:
    tables = read_catalog(reader).tables.values()
    return next(PlannedTable.from_catalog(table) for table in tables if table.name.name == name)


REPLACED = {
    "dropped": ('drop table "T t"', "does not exist"),
    "renamed": ('alter table "T t" rename to u', "does not exist"),
    "another table": (
        'alter table "T t" rename to u; create table "T t" (id int, a int, b text)',
        'another relation now, table public."T t"',
    ),
    "view": (
        'alter table "T t" rename to u; create view "T t" as select * from u',
        'another relation now, view public."T t"',
    ),
    "materialized view": (
        'alter table "T t" rename to u; create materialized view "T t" as select * from u',
        "another relation now, materialized view",
    ),
    "foreign table": (
        f'alter table "T t" rename to u; {FOREIGN}; create foreign table "T t" (id int) {FILE}',
        "another relation now, foreign table",
    ),
    "type": ('alter table "T t" alter a type bigint', "columns were replaced, or changed their types: a"),
    "column": (
        'alter table "T t" drop a; alter table "T t" rename b to a',
        "columns were replaced, or changed their types: a",
    ),
}


@pytest.mark.parametrize(("script", "message"), REPLACED.values(), ids=REPLACED)
def test_another_relation_of_the_same_name_is_refused(
    publisher: Database, reader: Connection, script: str, message: str
) -> None:
    table = planned(reader, "T t")
    publisher.run(script)
    with pytest.raises(PublisherNotReady, match=r'cannot read table "public\.T t" of the publisher') as error:
        lock_planned_tables(reader, [table])
    assert message in error.value.message
    assert error.value.hint == "The table changed while the command ran: run it again."


def test_added_and_dropped_columns_are_ignored(publisher: Database, reader: Connection) -> None:
    table = planned(reader, "T t")
    publisher.run('alter table "T t" drop b, add c int')
    lock_planned_tables(reader, [table])
    assert reader.execute('select id, a from only public."T t"').fetchall() == []


def test_a_column_of_a_domain_is_recognized(publisher: Database, reader: Connection) -> None:
    """The description of a statement's result has the domain's base type."""
    table = planned(reader, "of_domains")
    with reader.transaction(force_rollback=True):
        lock_planned_tables(reader, [table])

    publisher.run("alter table of_domains alter a type text")

    with pytest.raises(PublisherNotReady, match="columns were replaced, or changed their types: a"):
        lock_planned_tables(reader, [table])


@pytest.mark.parametrize("name", ["T t", "root"])
def test_a_locked_table_keeps_its_name_until_the_transaction_ends(
    publisher: Database, reader: Connection, name: str
) -> None:
    lock_planned_tables(reader, [planned(reader, name)])
    with ThreadPoolExecutor(1) as other:
        renaming = other.submit(publisher.run, f'alter table "{name}" rename to other')
        waiting = "select count(*) from pg_locks where not granted and mode = 'AccessExclusiveLock'"
        wait_for(lambda: publisher.rows(waiting) == [(1,)], "the owner to wait for the reader")
        assert publisher.rows(f"select to_regclass('\"{name}\"') is not null") == [(True,)]
        reader.rollback()
        renaming.result(timeout=300)


def test_a_role_that_may_read_some_columns_may_lock_the_table(
    publisher: Database, reader: Connection
) -> None:
    """As native COPY, which reads only these."""
    table, role = planned(reader, "T t"), f"clerk_{publisher.name}"
    publisher.run(f'create role {role} login; grant select (id, a) on "T t" to {role}')
    try:
        with connect(publisher.cluster.dsn(publisher.name, role), purpose="test", autocommit=False) as clerk:
            lock_planned_tables(clerk, [table])
            assert clerk.execute('select id, a from public."T t"').fetchall() == []
            publisher.run("revoke usage on schema public from public")
            with pytest.raises(MissingPrivilege, match="permission denied for schema public"):
                lock_planned_tables(clerk, [table])
    finally:
        publisher.run(f"drop owned by {role}; drop role {role}")


def test_a_partition_on_another_server_is_read_through_its_root(publisher: Database) -> None:
    """As natively: COPY of the root reads it (R7.6). It is not read directly."""
    partition = f"create foreign table far partition of root for values from (10) to (19) {FILE}"
    publisher.run(f"{TABLES}; {FOREIGN}; {partition}")
    with export_snapshot(publisher.dsn) as exported:
        again = import_snapshot(exported, purpose="test")
    with closing(again):
        table = planned(again, "root")
        with pytest.raises(Exception, match="foreign table is restricted"), again.transaction():
            again.execute("select * from public.far")
        lock_planned_tables(again, [table])
        assert again.execute("select * from public.root").fetchall() == []


def test_a_table_turned_into_a_view_is_refused(publisher: Database, reader: Connection) -> None:
    """It keeps its oid. 16 and later refuse the rule."""
    table = planned(reader, "keyless")
    rule = 'create rule "_RETURN" as on select to keyless do instead select 1 as id'
    if publisher.version >= 16:
        with pytest.raises(WrongObjectType):
            publisher.run(rule)
        lock_planned_tables(reader, [table])
    else:
        publisher.run(rule)
        with pytest.raises(PublisherNotReady, match="stores no rows any more, and is view public"):
            lock_planned_tables(reader, [table])


@pytest.mark.parametrize(
    ("change", "table", "changed"),
    [
        ('truncate "T t"', "T t", 'public."T t"'),
        ('alter table "T t" add r float default random()', "T t", 'public."T t"'),
        ("truncate leaf", "root", "public.leaf"),
        ("alter table root detach partition leaf", "root", "public.leaf"),
        ("alter table root detach partition leaf; drop table leaf", "root", "public.leaf"),
        ("create table new partition of root for values from (10) to (19)", "root", "table public.new"),
        ("insert into root values (1); create index on root (id); analyze root", "root", None),
    ],
)
def test_a_snapshot_that_lacks_rows_of_a_table_is_noticed(
    publisher: Database, reader: Connection, change: str, table: str, changed: str | None
) -> None:
    """TRUNCATE and rewrites hide rows from earlier snapshots; a root is read with its partitions of now."""
    read = planned(reader, table)
    publisher.run(change)
    lock_planned_tables(reader, [read])
    if changed is None:
        check_unchanged(reader, [read])
        return
    with pytest.raises(PublisherNotReady, match="truncated, rewritten, attached or detached") as error:
        check_unchanged(reader, [read])
    assert f": {changed} was" in error.value.message


def test_the_check_of_a_table_reads_no_others(publisher: Database, reader: Connection) -> None:
    """Each table of a copy or comparison is checked; with thousands that would be quadratic.

    With the statistics that autovacuum keeps the server chooses another plan than without.
    """
    publisher.run(
        "do $$ begin for i in 1..4000 loop execute format('create table t_%s ()', i); end loop; end $$;"
        " analyze pg_class"
    )
    read = planned(reader, "keyless")
    count = "select pg_stat_get_xact_tuples_returned('pg_class'::regclass)"
    ((before,),) = reader.execute(count).fetchall()

    check_unchanged(reader, [read])

    ((after,),) = reader.execute(count).fetchall()
    assert after - before < 10
