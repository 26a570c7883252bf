"""The owner of a published table makes no command wait or fail by what its row filter is (R9.10).

PostgreSQL prints no expression of a table that another session has locked, and none that is nested too
deeply.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from cdc_replay.capture.setup import setup_publisher
from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.model.publication import PublisherCatalog, RowFilter
from cdc_replay.postgres.connection import connect
from fixtures.captured import Captured
from fixtures.postgres import Database
from security.stranger import Stranger

SetUp = Callable[..., Captured]

LEVELS: Final = 4600
"""So deeply nested that PostgreSQL stores the filter, but cannot print it."""

DEEP: Final = f"{'abs(' * LEVELS}n{')' * LEVELS} > 0"


@pytest.fixture(params=[False, True], ids=["without triggers", "with triggers"])
def captured(
    request: pytest.FixtureRequest, set_up: SetUp, publisher: Database, stranger: Stranger
) -> Captured:
    """A captured publication of one table, and one of the stranger's with a row filter."""
    publisher.run(
        "create table t (id int primary key); create publication p for table t;"
        f" create schema m authorization {stranger.name};"
        f" grant create on database {publisher.name} to {stranger.name}"
    )
    stranger.run("create table m.t (n int, g int generated always as (n + 1) stored)")
    stranger.run("create publication theirs for table m.t where (n > 0)")
    captured = set_up("p", "theirs")
    captured.capture()
    if request.param:
        captured.install_event_triggers()
        captured.capture()
    return captured


@contextlib.contextmanager
def locked(stranger: Stranger) -> Iterator[None]:
    """The stranger locks his table all the while: whoever waits for it never returns."""
    with connect(stranger.dsn, purpose="innocent") as session, session.transaction():
        session.execute("lock table m.t in access exclusive mode")
        yield


def capture_insert(captured: Captured, publisher: Database) -> None:
    publisher.run("insert into t select coalesce(max(id), 0) + 1 from t")
    captured.capture()
    assert captured.changes()[-1][0] == "I"


def their_filter(catalog: PublisherCatalog) -> RowFilter:
    [membership] = catalog.publications["theirs"].memberships.values()
    assert membership.row_filter is not None
    return membership.row_filter


def logged_filter(captured: Captured) -> RowFilter:
    return their_filter(CatalogHistory(captured.log.catalogs()).at(captured.log.end_lsn))


def test_a_locked_table_stops_no_capture_and_changes_nothing(
    captured: Captured, publisher: Database, stranger: Stranger
) -> None:
    before = captured.log.catalogs()
    with locked(stranger):
        capture_insert(captured, publisher)
    assert captured.log.catalogs() == before
    assert logged_filter(captured).sql == "(n > 0)"


def test_a_deep_filter_stops_no_capture_and_is_recorded(
    captured: Captured, publisher: Database, stranger: Stranger
) -> None:
    stranger.run(f"alter publication theirs set table m.t where ({DEEP})")
    for _ in range(2):
        capture_insert(captured, publisher)
        assert not logged_filter(captured).is_printed
    versions = captured.log.catalogs()
    capture_insert(captured, publisher)
    assert captured.log.catalogs() == versions

    stranger.run("alter publication theirs set table m.t where (n > 1)")
    capture_insert(captured, publisher)
    assert logged_filter(captured).sql == "(n > 1)"


def test_a_text_that_could_not_be_read_is_read_later(
    captured: Captured, publisher: Database, stranger: Stranger
) -> None:
    publisher.run("drop event trigger if exists cdc_replay_ddl")
    stranger.run("alter publication theirs set table m.t where (n > 2)")
    with locked(stranger):
        capture_insert(captured, publisher)
        assert not logged_filter(captured).is_printed
    capture_insert(captured, publisher)
    assert logged_filter(captured).sql == "(n > 2)"


def test_setup_waits_for_no_table(captured: Captured, stranger: Stranger) -> None:
    request = dataclasses.replace(captured.request, event_trigger=True)
    captured.database.run("drop event trigger if exists cdc_replay_ddl")
    with locked(stranger):
        setup_publisher(request)
    captured.capture()
    assert logged_filter(captured).sql == "(n > 0)"


@pytest.mark.usefixtures("captured")
def test_other_tables_have_their_texts(publisher: Database, stranger: Stranger) -> None:
    publisher.run("create table u (a int, b int generated always as (a + 1) stored)")
    publisher.run("create publication others for table u where (a > 5)")
    with locked(stranger), publisher.connect() as connection:
        timeout = connection.execute("show lock_timeout").fetchall()
        catalog = read_catalog(connection)
        assert connection.execute("show lock_timeout").fetchall() == timeout
    [membership] = catalog.publications["others"].memberships.values()
    assert membership.row_filter is not None
    assert membership.row_filter.sql == "(a > 5)"
    assert catalog.tables[membership.relation].column("b").generation_sql == "(a + 1)"
    assert not their_filter(catalog).is_printed
