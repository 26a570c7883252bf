"""The owner of an unpublished table makes no command wait or fail by what the table is defined as (R9.10).

Whoever may create a table in the publisher's database can define a generated column that PostgreSQL cannot
print, or that is very long, and can hold a lock on the table for as long as they like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from psycopg.errors import StatementTooComplex

from cdc_replay.catalog import json_form
from cdc_replay.catalog.json_form import catalog_from_json, catalog_to_json
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.errors import InvalidFilter, PublisherNotReady
from cdc_replay.filters.check_table import CheckTable, Question
from cdc_replay.model.publication import PublisherCatalog, Table
from cdc_replay.postgres.connection import connect
from embedded.postgres import Cluster
from fixtures.captured import Captured
from fixtures.postgres import Database, drop_database
from security.stranger import Stranger

SetUp = Callable[..., Captured]

MOST_LEVELS = 4600
"""So deeply nested that PostgreSQL 18 stores the expression, but cannot print it."""

LONG = "create table m.long (t text, g text generated always as (t || repeat('{}', 1)) stored)".format(
    "x" * 20_000
)

PLAIN = "create table m.mine (n int, g int generated always as (n + 1) stored)"

LOCKED_SECONDS = 5


@pytest.fixture(params=[False, True], ids=["without triggers", "with triggers"])
def captured(
    request: pytest.FixtureRequest, set_up: SetUp, publisher: Database, stranger: Stranger
) -> Captured:
    """A captured publication of one table; the stranger has a schema of their own."""
    publisher.run(
        "create table t (id int primary key); create publication p for table t;"
        f" create schema m authorization {stranger.name}"
    )
    captured = set_up()
    captured.capture()
    if request.param:
        captured.install_event_triggers()
        captured.capture()
    return captured


def define_deep(stranger: Stranger) -> None:
    """Define the deepest column that this server stores."""
    for levels in range(MOST_LEVELS, 1000, -200):
        expression = "abs(" * levels + "n" + ")" * levels
        with suppress(StatementTooComplex):
            stranger.run(f"create table m.deep (n int, g int generated always as ({expression}) stored)")
            return
    pytest.fail("the server stores no deep expression")


@contextmanager
def locked(stranger: Stranger, table: str) -> Iterator[None]:
    """Hold the strongest lock on the table."""
    with connect(stranger.dsn, purpose="test") as session, session.transaction():
        session.execute(f"lock table {table} in access exclusive mode".encode())
        yield


def catalog_of(database: Database) -> PublisherCatalog:
    with database.connect() as connection:
        connection.execute(f"set lock_timeout = '{LOCKED_SECONDS}s'".encode())
        return read_catalog(connection)


def table_of(catalog: PublisherCatalog, name: str) -> Table:
    (table,) = (table for table in catalog.tables.values() if table.name.name == name)
    return table


@pytest.mark.parametrize(
    "define",
    [define_deep, lambda stranger: stranger.run(LONG), lambda stranger: stranger.run(PLAIN)],
    ids=["deep", "long", "plain"],
)
def test_unpublished_table_stops_no_capture(
    captured: Captured, publisher: Database, stranger: Stranger, define: Callable[[Stranger], None]
) -> None:
    define(stranger)
    publisher.run("insert into t values (1)")
    captured.capture()
    assert captured.changes()[-1] == ("I", ("1",))


def test_lock_on_unpublished_table_stops_no_command(publisher: Database, stranger: Stranger) -> None:
    publisher.run(f"create schema m authorization {stranger.name}")
    publisher.run("create publication everything for all tables")
    stranger.run(PLAIN)
    with locked(stranger, "m.mine"):
        catalog = catalog_of(publisher)
    assert table_of(catalog, "mine").column("g").generation_sql is None


def test_long_expressions_are_not_in_the_catalog(publisher: Database, stranger: Stranger) -> None:
    publisher.run(f"create schema m authorization {stranger.name}")
    stranger.run(LONG)
    assert len(catalog_to_json(catalog_of(publisher))) < len(LONG)


def test_deep_expression_of_a_table_with_a_filter_fails_no_reading(
    publisher: Database, stranger: Stranger
) -> None:
    publisher.run(f"create schema m authorization {stranger.name}")
    define_deep(stranger)
    publisher.run("create publication p for table m.deep where (n > 0)")
    column = table_of(catalog_of(publisher), "deep").column("g")
    assert (column.generation_sql, column.generation_tree) == (None, None)


def test_filter_that_reads_a_deep_expression_names_its_table(publisher: Database, stranger: Stranger) -> None:
    publisher.run(f"create schema m authorization {stranger.name}")
    define_deep(stranger)
    publisher.run("create publication p for table m.deep where (n > 0)")
    table = table_of(catalog_of(publisher), "deep")
    with (
        publisher.connect() as connection,
        pytest.raises(InvalidFilter, match=r'table "m\.deep": .* too long'),
    ):
        CheckTable.for_question(Question(1, (), table.columns, table.name), connection)


@pytest.fixture
def windows(publisher_cluster: Cluster) -> Iterator[Database]:
    """A database of Windows' encoding, in which 0x81 is no character."""
    database = Database(publisher_cluster, "of_windows")
    with connect(publisher_cluster.dsn(), purpose="test") as admin:
        admin.execute("create database of_windows encoding 'WIN1252' template template0 locale 'C'")
    yield database
    drop_database(database)


def test_name_without_a_form_in_utf8_is_an_error_that_says_so(windows: Database) -> None:
    """R1.11: it is that of any table; a retry does not help."""
    with windows.connect() as session:
        session.execute("set client_encoding = 'SQL_ASCII'")
        session.execute(b'create table "\x81" (id int)')
        with pytest.raises(PublisherNotReady, match="0x81") as raised:
            catalog_of(windows)
        assert "rename or drop it" in (raised.value.hint or "")
        session.execute(b'drop table "\x81"')
    assert catalog_of(windows).tables == {}


def test_catalog_that_could_not_be_read_again_is_not_written(
    publisher: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.run("create table small (id int); create table large (id int, a int, b int, c int)")
    catalog = catalog_of(publisher)
    text = catalog_to_json(catalog)
    monkeypatch.setattr(json_form, "MAX_CATALOG_BYTES", len(text))
    assert catalog_from_json(text) == catalog
    monkeypatch.setattr(json_form, "MAX_CATALOG_BYTES", len(text) - 1)
    with pytest.raises(PublisherNotReady, match=r'table "public\.large"'):
        catalog_to_json(catalog)
