"""The publisher's system catalogs are read as they are, under one snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cdc_replay.catalog.json_form import catalog_from_json, catalog_to_json, same_definitions
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import Generated, PublishAction, PublisherCatalog, Table
from cdc_replay.model.relation import QualifiedName, RelationId, ReplicaIdentity
from cdc_replay.postgres.connection import Connection, connect
from fixtures.postgres import Database

Read = Callable[[], PublisherCatalog]


@pytest.fixture
def connection(publisher: Database) -> Iterator[Connection]:
    with connect(publisher.dsn, purpose="catalog test") as opened:
        yield opened


@pytest.fixture
def read(connection: Connection) -> Read:
    return lambda: read_catalog(connection)


def named(catalog: PublisherCatalog, name: str) -> Table:
    return next(table for table in catalog.tables.values() if str(table.name) == name)


def test_permanent_ordinary_and_partitioned_tables_are_publishable(publisher: Database, read: Read) -> None:
    """R2.1."""
    publisher.run("""
        create table plain (a int);
        create table "Odd.Name" ("Key Col" int primary key);
        create table root (a int) partition by list (a);
        create table leaf partition of root for values in (1);
        create unlogged table unlogged (a int);
        create view seen as select * from plain;
        create materialized view kept as select * from plain;
        create sequence numbers;
    """)

    assert {table.name for table in read().tables.values()} == {
        QualifiedName("public", name) for name in ("plain", "Odd.Name", "root", "leaf")
    }


def test_unlogged_partition_is_read_but_not_publishable(publisher: Database, read: Read) -> None:
    """R2.1: it is never published, yet a copy of its root reads its rows."""
    publisher.run("""
        create table root (a int) partition by list (a);
        create unlogged table leaf partition of root for values in (1);
    """)
    catalog = read()

    assert not named(catalog, "public.leaf").is_publishable
    assert named(catalog, "public.root").is_publishable


def test_columns_have_type_texts_for_ddl(publisher: Database, read: Read) -> None:
    publisher.run("""
        create schema "My Types";
        create type "My Types".mood as enum ('sad', 'happy');
        create collation "My Types"."Fast" (provider = libc, locale = 'C');
        create table t (
            id int primary key, gone int, price numeric(10, 2), code varchar(5),
            mood "My Types".mood, moods "My Types".mood[],
            plain text, exact text collate "C", fast text collate "My Types"."Fast",
            twice int generated always as (id * 2) stored
        );
        alter table t drop column gone;
        create publication p for table t where (id > 0);
    """)
    table = named(read(), "public.t")

    assert [
        (column.attnum, column.name, column.type_sql, column.collation_sql) for column in table.columns
    ] == [
        (1, "id", "integer", None),
        (3, "price", "numeric(10,2)", None),
        (4, "code", "character varying(5)", None),
        (5, "mood", '"My Types".mood', None),
        (6, "moods", '"My Types".mood[]', None),
        (7, "plain", "text", None),
        (8, "exact", "text", 'pg_catalog."C"'),
        (9, "fast", "text", '"My Types"."Fast"'),
        (10, "twice", "integer", None),
    ]
    assert table.dropped_columns == 1
    twice = table.column("twice")
    assert (twice.generated, twice.generation_sql) == (Generated.STORED, "(id * 2)")
    assert (table.column("price").type_oid, table.column("price").typmod) == (1700, (10 << 16 | 2) + 4)


def test_virtual_and_stored_generated_columns_are_distinguished(publisher: Database, read: Read) -> None:
    publisher.require(18, "virtual generated columns")
    publisher.run("create table t (a int, b int generated always as (a + 1) virtual)")
    publisher.run("create publication p for table t where (a > 0)")

    column = named(read(), "public.t").column("b")

    assert (column.generated, column.generation_sql) == (Generated.VIRTUAL, "(a + 1)")


@pytest.mark.parametrize(
    ("definition", "identity", "key", "primary_key"),
    [
        ("(a int, b int, primary key (b, a))", ReplicaIdentity.DEFAULT, ("b", "a"), ("b", "a")),
        ("(a int, b int, primary key (a) include (b))", ReplicaIdentity.DEFAULT, ("a",), ("a",)),
        ("(a int primary key deferrable, b int)", ReplicaIdentity.DEFAULT, (), ("a",)),
        ("(a int, b int)", ReplicaIdentity.DEFAULT, (), ()),
        ("(a int unique not null, b int)", ReplicaIdentity.DEFAULT, (), ()),
        (
            "(a int primary key, b int not null unique); alter table t replica identity using index t_b_key",
            ReplicaIdentity.INDEX,
            ("b",),
            ("a",),
        ),
        ("(a int primary key, b int); alter table t replica identity full", ReplicaIdentity.FULL, (), ("a",)),
        (
            "(a int primary key, b int); alter table t replica identity nothing",
            ReplicaIdentity.NOTHING,
            (),
            ("a",),
        ),
        (
            """(a int, b int not null unique); alter table t replica identity using index t_b_key;
            alter table t drop constraint t_b_key""",
            ReplicaIdentity.INDEX,
            (),
            (),
        ),
    ],
)
def test_replica_identity_key_equals_servers(
    publisher: Database,
    read: Read,
    definition: str,
    identity: ReplicaIdentity,
    key: tuple[str, ...],
    primary_key: tuple[str, ...],
) -> None:
    """R1.8: the identity's character alone does not prove that there is a key."""
    publisher.run(f"create table t {definition}")
    table = named(read(), "public.t")

    assert (table.replica_identity, table.key_columns, table.primary_key) == (identity, key, primary_key)


def test_partition_tree_is_read_as_parents(publisher: Database, read: Read) -> None:
    publisher.run("""
        create schema elsewhere;
        create table root (a int, b int) partition by list (a);
        create table middle partition of root for values in (1) partition by list (b);
        create table elsewhere.leaf partition of middle for values in (1);
        create table once partition of root for values in (2);
        alter table root detach partition once;
        create table parent (a int);
        create table child () inherits (parent);
    """)
    catalog = read()

    def tree(name: str) -> list[str]:
        return [str(ancestor.name) for ancestor in catalog.ancestors(named(catalog, name).id)]

    assert tree("elsewhere.leaf") == ["public.middle", "public.root"]
    assert tree("public.once") == []
    assert tree("public.child") == []
    assert {t.name.name for t in catalog.tables.values() if t.is_partitioned} == {"root", "middle"}


def test_publications_have_options_members_filters_and_lists(publisher: Database, read: Read) -> None:
    publisher.run("""
        create schema s1; create schema s2;
        create table t (id int primary key, gone int, a int, b text);
        alter table t drop column gone;
        create table u (id int primary key);
        create publication "Everything" for all tables with (publish = 'insert');
        create publication part for table t (b, id) where (a > 5 and b = 'x'), table u
            with (publish = 'update, delete', publish_via_partition_root = true);
        create publication whole for tables in schema s1, s2, table u;
        create publication nothing;
    """)
    catalog = read()

    everything = catalog.publication("Everything")
    assert (everything.all_tables, everything.via_root) == (True, False)
    assert everything.actions == {PublishAction.INSERT}
    part = catalog.publication("part")
    assert (part.all_tables, part.via_root, part.schemas) == (False, True, frozenset())
    assert part.actions == {PublishAction.UPDATE, PublishAction.DELETE}
    listed = part.memberships[named(catalog, "public.t").id]
    assert listed.columns == frozenset({"id", "b"})
    assert listed.row_filter is not None
    assert listed.row_filter.sql == "((a > 5) AND (b = 'x'::text))"
    assert listed.row_filter.node_tree.startswith("{BOOLEXPR :boolop and :args ({OPEXPR :opno 521 ")
    unfiltered = part.memberships[named(catalog, "public.u").id]
    assert (unfiltered.row_filter, unfiltered.columns) == (None, None)
    whole = catalog.publication("whole")
    assert whole.schemas == {"s1", "s2"}
    assert list(whole.memberships) == [named(catalog, "public.u").id]
    assert not catalog.publication("nothing").memberships
    assert not any(publication.publish_generated for publication in catalog.publications.values())


def test_inheritance_children_are_separate_members(publisher: Database, read: Read) -> None:
    """R2.16: each with a copy of the WHERE; children that come later are not added."""
    publisher.run("""
        create table parent (id int primary key, a int);
        create table child () inherits (parent);
        create publication p for table parent where (a > 1);
        create publication lonely for table only parent;
        create table later () inherits (parent);
    """)
    catalog = read()

    members = catalog.publication("p").memberships.values()
    assert {str(catalog.tables[member.relation].name) for member in members} == {
        "public.parent",
        "public.child",
    }
    assert {member.row_filter.sql for member in members if member.row_filter} == {"(a > 1)"}
    assert list(catalog.publication("lonely").memberships) == [named(catalog, "public.parent").id]


def test_publish_generated_columns_is_read(publisher: Database, read: Read) -> None:
    """R6.9."""
    publisher.require(18, "publish_generated_columns")
    publisher.run("create publication p with (publish_generated_columns = stored)")

    assert read().publication("p").publish_generated


def test_catalog_in_open_transaction_is_that_of_its_snapshot(publisher: Database) -> None:
    publisher.run("create table t (id int primary key)")
    with connect(publisher.dsn, purpose="catalog test", autocommit=False) as early:
        early.execute("set transaction isolation level repeatable read, read only")
        early.execute("select 1")
        publisher.run("create publication late for table t; create table later (a int)")

        catalog = read_catalog(early, Lsn(42))

    assert catalog.lsn == Lsn(42)
    assert not catalog.publications
    assert [str(table.name) for table in catalog.tables.values()] == ["public.t"]


def test_reading_keeps_session_settings(publisher: Database) -> None:
    with connect(publisher.dsn, purpose="catalog test") as session:
        session.execute("set search_path = public")
        read_catalog(session)

        assert session.execute("show search_path").fetchall() == [("public",)]
        assert session.execute("show transaction_read_only").fetchall() == [("off",)]


def test_texts_are_the_same_with_any_settings_of_the_database(publisher: Database) -> None:
    """R1.11: else the constants of the filter would be unknown as soon as an event trigger has printed it."""
    publisher.run("""
        create table t (id int primary key, j jsonb, of int4range, day date);
        create publication p for table t where (j @> '{"a": 1}' and of @> 5 and day > '2024-02-01');
    """)

    def read() -> PublisherCatalog:
        with connect(publisher.dsn, purpose="catalog test") as connection:
            return read_catalog(connection)

    before = read()
    for setting in ("quote_all_identifiers = on", "datestyle = 'German'", "search_path = pg_catalog, public"):
        publisher.run(f"alter database {publisher.name} set {setting}")

    assert read().publications == before.publications
    assert read().tables == before.tables


def test_position_is_flush_position_at_reading(connection: Connection) -> None:
    before = connection.execute("select pg_current_wal_flush_lsn()::text").fetchall()[0][0]
    catalog = read_catalog(connection)
    after = connection.execute("select pg_current_wal_flush_lsn()::text").fetchall()[0][0]

    assert Lsn.parse(before) <= catalog.lsn <= Lsn.parse(after)


def test_real_catalog_round_trips_through_json(publisher: Database, read: Read) -> None:
    publisher.run("""
        create type mood as enum ('sad', 'happy');
        create table root (id int, mood mood, "größe" text collate "C", primary key (id))
            partition by range (id);
        create table leaf partition of root for values from (0) to (10);
        create table g (id int primary key, twice int generated always as (id * 2) stored);
        create publication p for table root (id, "größe") where ("größe" = 'ß"''') , table g
            with (publish_via_partition_root = true);
        create publication q for tables in schema public with (publish = 'truncate');
    """)
    catalog = read()
    text = catalog_to_json(catalog)

    assert catalog_from_json(text) == catalog
    assert catalog_to_json(catalog_from_json(text)) == text
    assert "\n" not in text


def test_same_definitions_until_one_changes(publisher: Database, read: Read) -> None:
    publisher.run(
        "create table t (id int primary key, a int); create publication p for table t where (a > 1)"
    )
    first = read()
    publisher.run("insert into t values (1, 1)")
    second = read()
    publisher.run("alter publication p set table t where (a > 2)")
    third = read()

    assert first.lsn < second.lsn
    assert same_definitions(first, second)
    assert not same_definitions(second, third)


def test_statement_count_is_independent_of_table_count(publisher: Database, connection: Connection) -> None:
    publisher.run(
        "do $$ begin for i in 1..300 loop"
        " execute format('create table t%s (id int primary key, a int, b text)', i);"
        " end loop; end $$; create publication p for all tables"
    )

    catalog = read_catalog(connection)

    assert len(catalog.tables) == 300
    assert all(len(table.columns) == 3 for table in catalog.tables.values())
    assert all(table.key_columns == ("id",) for table in catalog.tables.values())


def test_ordinary_role_can_read_catalog(publisher: Database) -> None:
    publisher.run("""
        create table t (id int primary key, a int);
        create publication p for table t where (a > 1);
        create role reads_the_catalog login;
    """)
    try:
        dsn = publisher.cluster.dsn(publisher.name, user="reads_the_catalog")
        with connect(dsn, purpose="catalog test") as session:
            catalog = read_catalog(session)
    finally:
        publisher.run("drop role reads_the_catalog")

    (member,) = catalog.publication("p").memberships.values()
    assert member.row_filter is not None
    assert member.row_filter.sql == "(a > 1)"
    assert isinstance(member.relation, int)
    assert RelationId(member.relation) in catalog.tables
