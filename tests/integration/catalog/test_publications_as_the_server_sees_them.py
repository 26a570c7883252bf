"""Our interpretation of a set of publications equals the server's behaviour.

Two oracles, for the same random sets over one partition tree (levels, schemas, inheritance, a generated and a
dropped column):

* `pg_get_publication_tables` says what a native subscription would list and copy (R7.1-R7.6);
* pgoutput itself, asked to decode an insert, update, delete and truncate of every table, says which relation,
  columns, actions and filters apply (sections 2, 3 and 6), or refuses.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psycopg
import pytest
from psycopg import sql

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.errors import PublicationRefused
from cdc_replay.model.publication import PublishAction, PublisherCatalog, RowFilter, Table
from cdc_replay.pgoutput.messages import Delete, Insert, RelationMessage, Truncate, Update
from cdc_replay.pgoutput.reader import decode
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.publication.resolve import listed_tables, resolve, synced_tables
from fixtures.postgres import Database

TREE = """
    create schema s1; create schema s2;
    create table s1.root (
        id int, k int, a int, g int generated always as (a * 2) stored, note text, primary key (id, k, a)
    ) partition by list (k);
    create table s2.middle partition of s1.root for values in (2, 3) partition by list (k);
    create table s1.leaf1 partition of s1.root for values in (1);
    create table s2.leaf2 partition of s2.middle for values in (2);
    create table s1.leaf3 (note text, a int, gone int, k int, id int, primary key (id, k, a));
    alter table s1.leaf3 drop column gone;
    alter table s1.leaf3 add column g int generated always as (a * 2) stored;
    alter table s2.middle attach partition s1.leaf3 for values in (3);
    create table s1.plain (id int, k int, a int, note text, primary key (id, k, a));
    create table s2.parent (id int, k int, a int, note text, primary key (id, k, a));
    create table s2.child (primary key (id, k, a)) inherits (s2.parent);
"""
"""All filtered columns are in the key, so that no set makes the publisher refuse an update (R5.6, R6.6)."""

# The k of the rows of each table that stores rows.
LEAVES = {"s1.leaf1": 1, "s2.leaf2": 2, "s1.leaf3": 3, "s1.plain": 4, "s2.parent": 5, "s2.child": 6}
TABLES = (*LEAVES, "s1.root", "s2.middle")
PARTITIONED = ("s1.root", "s2.middle")
FILTERS = ("a > 1", "a < 3", "id <> 2", "k = 2")
LISTS = ("(id, k, a)", "(a, id, k)", "(note, id, k, a)", "")
VALUES = (1, 2, 3)
SEED = 20260701
SETS = 40

_PEEK = """
    select data from pg_logical_slot_peek_binary_changes('probe', null, null,
        'proto_version', '1', 'publication_names', %s)
"""


@dataclass(frozen=True)
class Sent:
    """A change on the wire: action, relation and columns as which it was sent, and the row's id."""

    action: str
    relation: str
    columns: tuple[str, ...] = ()
    id: int | None = None


@pytest.fixture
def connection(publisher: Database) -> Iterator[Connection]:
    publisher.run(TREE)
    with connect(publisher.dsn, purpose="publication test") as opened:
        opened.execute("select pg_create_logical_replication_slot('probe', 'pgoutput')")
        yield opened


def has_arrays(connection: Connection) -> bool:
    """16 and later evaluate several publications together (R7.2)."""
    return connection.info.server_version >= 160000


def named(catalog: PublisherCatalog, name: str) -> Table:
    return next(table for table in catalog.tables.values() if str(table.name) == name)


def random_publication(choose: random.Random, name: str, version: int) -> str:
    """A `create publication` that the server accepts (R3.3, R6.1, R6.2)."""
    via_root = choose.random() < 0.6
    actions = choose.sample([action.value for action in PublishAction], choose.randint(1, 4))
    options = [
        f"publish = '{', '.join(actions)}'",
        f"publish_via_partition_root = {str(via_root).lower()}",
    ]
    if version >= 180000 and choose.random() < 0.4:
        options.append("publish_generated_columns = stored")
    scope = choose.choice(["tables", "tables", "tables", "schema", "both", "all"])
    lists = choose.random() < 0.3 and scope == "tables"
    members = []
    if scope in {"tables", "both"}:
        for table in choose.sample(TABLES, choose.randint(1, 3)):
            simple = via_root or table not in PARTITIONED
            columns = choose.choice(LISTS) if lists and simple else ""
            where = f"where ({choose.choice(FILTERS)})" if simple and choose.random() < 0.6 else ""
            members.append(f"table only {table} {columns} {where}")
    if scope in {"schema", "both"}:
        members.append(f"tables in schema {choose.choice(['s1', 's2'])}")
    target = "for all tables" if scope == "all" else f"for {', '.join(members)}"
    return f"create publication {name} {target} with ({', '.join(options)})"


def random_sets(version: int) -> Iterator[list[str]]:
    choose = random.Random(SEED)
    for _ in range(SETS):
        yield [random_publication(choose, f"p{n}", version) for n in range(choose.randint(1, 3))]


def created(connection: Connection, statements: Sequence[str]) -> list[str]:
    """Replace all publications by these; their names."""
    for (name,) in connection.execute("select pubname from pg_publication").fetchall():
        connection.execute(sql.SQL("drop publication {}").format(sql.Identifier(name)))
    for statement in statements:
        connection.execute(statement.encode())
    return [statement.split()[2] for statement in statements]


def listed_by_server(connection: Connection, names: Sequence[str]) -> dict[int, set[tuple[object, ...]]]:
    """The publications' column names and filter, per relation."""
    rows = connection.execute(
        "select p.relid, array(select a.attname::text from pg_attribute a"
        "   where a.attrelid = p.relid and a.attnum = any(p.attrs) order by a.attnum),"
        " pg_get_expr(p.qual, p.relid)"
        " from pg_get_publication_tables(variadic %s::text[]) p",
        (list(names),),
    ).fetchall()
    result: dict[int, set[tuple[object, ...]]] = {}
    for relation, columns, condition in rows:
        result.setdefault(relation, set()).add((tuple(columns), condition))
    return result


def test_published_tables_equal_servers(connection: Connection) -> None:
    """R7.1."""
    for statements in random_sets(connection.info.server_version):
        names = created(connection, statements)
        catalog = read_catalog(connection)
        for name in names:
            rows = connection.execute("select relid from pg_get_publication_tables(%s)", (name,)).fetchall()
            ours = listed_tables(catalog, catalog.publication(name))
            assert ours == {relation for (relation,) in rows}, statements


def test_initial_copy_equals_servers(connection: Connection) -> None:
    """R7.1-R7.6: tables, columns and filters; refused where the server's answers cannot be reconciled."""
    if not has_arrays(connection):
        pytest.skip("15 evaluates each publication by itself (R7.2)")
    for statements in random_sets(connection.info.server_version):
        names = created(connection, statements)
        theirs = listed_by_server(connection, names)
        refused = any(len({columns for columns, _ in entries}) > 1 for entries in theirs.values())
        try:
            ours = synced_tables(read_catalog(connection), names)
        except PublicationRefused:
            assert refused, statements
            continue
        assert not refused, statements
        assert {synced.table.id for synced in ours} == set(theirs), statements
        for synced in ours:
            entries = theirs[synced.table.id]
            conditions = {condition for _, condition in entries}
            filters = {None} if synced.filters is None else {row_filter.sql for row_filter in synced.filters}
            assert {columns for columns, _ in entries} == {synced.columns}, statements
            assert filters == ({None} if None in conditions else conditions), statements


def changes_of(connection: Connection, script: str, names: Sequence[str]) -> list[Sent] | None:
    """What pgoutput sends for the script, a transaction of its own; None if it refuses the set."""
    connection.execute(script.encode())
    quoted = ",".join(f'"{name}"' for name in names)
    try:
        messages = [decode(row[0]) for row in connection.execute(_PEEK, (quoted,)).fetchall()]
    except psycopg.errors.FeatureNotSupported:
        return None
    finally:
        connection.execute("select pg_replication_slot_advance('probe', pg_current_wal_flush_lsn())")
    relations = {message.relation: message for message in messages if isinstance(message, RelationMessage)}
    sent: list[Sent] = []
    for message in messages:
        if isinstance(message, Truncate):
            sent.extend(Sent("truncate", str(relations[oid].name)) for oid in message.relations)
        elif isinstance(message, Insert | Update | Delete):
            relation = relations[message.relation]
            columns = tuple(column.name for column in relation.columns)
            row = message.old if isinstance(message, Delete) else message.new
            (value,) = (row.values[columns.index("id")] or b"",)
            sent.append(Sent(type(message).__name__.lower(), str(relation.name), columns, int(value)))
    return sent


def rows_that_pass(connection: Connection, k: int, filters: tuple[RowFilter, ...] | None) -> list[int]:
    """The ids of a table's rows that pass, as the server says."""
    condition = " or ".join(row_filter.sql for row_filter in filters) if filters else "true"
    rows = ", ".join(f"({value}, {k}, {value})" for value in VALUES)
    query = f"select id from (values {rows}) t(id, k, a) where {condition} order by id"
    return [row[0] for row in connection.execute(query.encode()).fetchall()]


def expected(
    connection: Connection, catalog: PublisherCatalog, names: Sequence[str], leaf: Table
) -> list[Sent]:
    """What R2.1-R3.12 and R6.3-R6.9 say is sent for three rows inserted, updated, deleted, and a TRUNCATE."""
    published = resolve(catalog, names, leaf.id)
    if published is None:
        return []
    name = str(published.table.name)
    sent = [
        Sent(action.value, name, published.columns, value)
        for action in (PublishAction.INSERT, PublishAction.UPDATE, PublishAction.DELETE)
        if action in published.actions
        for value in rows_that_pass(connection, LEAVES[str(leaf.name)], published.filters[action])
    ]
    if PublishAction.TRUNCATE in published.actions and published.table is leaf:
        sent.append(Sent("truncate", name))
    return sent


def assert_published_alike(connection: Connection, catalog: PublisherCatalog, names: Sequence[str]) -> int:
    """Every table's changes are sent as we expect, or refused on both sides; how many tables are refused."""
    refused = 0
    for name, k in LEAVES.items():
        rows = ", ".join(f"({value}, {k}, {value})" for value in VALUES)
        theirs = changes_of(
            connection,
            f"insert into {name} (id, k, a) values {rows}; update only {name} set note = 'x';"
            f" delete from only {name}; truncate only {name}",
            names,
        )
        try:
            ours: list[Sent] | None = expected(connection, catalog, names, named(catalog, name))
        except PublicationRefused:
            ours = None
        refused += ours is None
        assert ours == theirs, name
    return refused


def test_published_changes_equal_servers(connection: Connection) -> None:
    """R2.1-R2.9, R3.2-R3.7, R6.3-R6.9: relation, columns, actions, filters; or refused on both sides."""
    refused = 0
    for statements in random_sets(connection.info.server_version):
        names = created(connection, statements)
        try:
            refused += assert_published_alike(connection, read_catalog(connection), names)
        except AssertionError as difference:
            difference.add_note(f"seed {SEED}, publications: {statements}")
            raise
    assert refused


def test_column_lists_of_publications_without_row_actions_do_not_conflict(connection: Connection) -> None:
    """R6.7: they are refused at the subscription, not in the stream."""
    names = created(
        connection,
        [
            "create publication p for table s1.plain (id) with (publish = 'truncate')",
            "create publication q for table s1.plain with (publish = 'truncate')",
        ],
    )

    assert assert_published_alike(connection, read_catalog(connection), names) == 0


def test_full_column_list_equals_no_list(connection: Connection) -> None:
    """R6.5: on 15 the generated and the dropped columns of the partitions count."""
    names = created(
        connection,
        [
            "create publication p for all tables",
            (
                "create publication q for table s1.plain (id, k, a, note), s1.leaf1 (id, k, a, note),"
                " s1.leaf3 (id, k, a, note)"
            ),
        ],
    )
    refused = assert_published_alike(connection, read_catalog(connection), names)

    assert refused == (2 if connection.info.server_version < 160000 else 0)


def test_filtered_table_moved_to_published_schema_is_unfiltered(connection: Connection) -> None:
    """R3.4: the schema counts, whatever the publication lists besides."""
    names = created(
        connection, ["create publication p for table s1.plain where (a > 1), tables in schema s2"]
    )
    connection.execute("alter table s1.plain set schema s2")
    catalog = read_catalog(connection)
    published = resolve(catalog, names, named(catalog, "s2.plain").id)
    theirs = changes_of(connection, "insert into s2.plain (id, k, a) values (1, 4, 1)", names)

    assert theirs == [Sent("insert", "s2.plain", ("id", "k", "a", "note"), 1)]
    assert published is not None
    assert published.filters[PublishAction.INSERT] is None


def test_publications_must_agree_on_generated_columns(connection: Connection) -> None:
    """R6.9."""
    if connection.info.server_version < 180000:
        pytest.skip("publish_generated_columns exists from PostgreSQL 18 on")
    names = created(
        connection,
        [
            "create publication p for tables in schema s2",
            "create publication q for tables in schema s2 with (publish_generated_columns = stored)",
        ],
    )
    connection.execute("create table s2.v (id int primary key, v int generated always as (id + 1) virtual)")
    catalog = read_catalog(connection)

    assert changes_of(connection, "insert into s2.v values (1)", names) is None
    with pytest.raises(PublicationRefused, match="publish_generated_columns"):
        resolve(catalog, names, named(catalog, "s2.v").id)


def test_unlogged_partition_is_listed_as_by_server(connection: Connection) -> None:
    """R2.1, R7.1: as a leaf of a listed root, not as a table of its own."""
    connection.execute("create unlogged table s1.leaf7 partition of s1.root for values in (7)")
    names = created(
        connection,
        [
            "create publication by_root for table s1.root",
            "create publication by_schema for tables in schema s1",
            "create publication by_nothing for all tables",
        ],
    )
    catalog = read_catalog(connection)
    leaf = named(catalog, "s1.leaf7").id

    for name, is_listed in zip(names, (True, True, False), strict=True):
        rows = connection.execute("select relid from pg_get_publication_tables(%s)", (name,)).fetchall()
        assert ((leaf,) in rows) is is_listed
        assert (leaf in listed_tables(catalog, catalog.publication(name))) is is_listed
    assert resolve(catalog, names, leaf) is None


def test_published_truncate_of_root_equals_servers(connection: Connection) -> None:
    """R2.10, R2.11, R2.13: the remaining relations are those published as themselves."""
    for statements in random_sets(connection.info.server_version):
        names = created(connection, statements)
        catalog = read_catalog(connection)
        theirs = changes_of(connection, "truncate s1.root", names)
        truncated = [named(catalog, name) for name in (*PARTITIONED, "s1.leaf1", "s2.leaf2", "s1.leaf3")]
        try:
            resolved = [resolve(catalog, names, table.id) for table in truncated]
        except PublicationRefused:
            assert theirs is None, statements
            continue
        assert theirs is not None, statements
        assert {sent.relation for sent in theirs} == {
            str(published.table.name)
            for published in resolved
            if published and PublishAction.TRUNCATE in published.actions
            if published.table.id == published.leaf
        }, statements
