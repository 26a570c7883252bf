"""What the log says of the publisher's definitions, with event triggers (R9.10, R9.11)."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from cdc_replay.capture.ddl.event_triggers import EVENT_TRIGGERS
from cdc_replay.capture.pull import current_position
from cdc_replay.capture.setup import setup_publisher
from cdc_replay.catalog.diff import differences
from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.model.publication import PublishAction
from fixtures.captured import Captured
from fixtures.log_records import warnings_of
from fixtures.postgres import Database

TABLE = "create table t (id int primary key, a int)"


@pytest.fixture
def captured(publisher: Database, set_up: Callable[..., Captured]) -> Captured:
    """A publisher with a table, a publication of it, event triggers, and a first pull in the log."""
    publisher.run(f"{TABLE}; create publication p for table t")
    result = set_up(max_changes_per_pull=20)
    result.install_event_triggers()
    publisher.run("insert into t values (1)")
    result.capture()
    return result


def check_known(captured: Captured) -> None:
    """The log ends with the definitions of now."""
    history = CatalogHistory(captured.log.catalogs())
    with captured.database.connect() as connection:
        now = read_catalog(connection)
    assert differences(history.at(captured.log.end_lsn), now) == ()


def test_log_ends_with_current_definitions(captured: Captured, caplog: pytest.LogCaptureFixture) -> None:
    """However many commands, in however many pulls; readers need not go back to the first whole catalog."""
    for number in range(8):
        captured.database.run(f"create table t{number} (id int primary key, a int)")
        captured.database.run(f"alter publication p add table t{number} where (id > {number})")
        captured.database.run(f"alter table t{number} add b text; alter table t rename a to a{number}")
        captured.database.run(f"alter table t rename a{number} to a; insert into t values (1{number})")
        if number % 3 == 2:
            captured.database.run(f"drop table t{number - 1}; alter publication p set (publish = 'insert')")
            captured.capture()
            check_known(captured)
    captured.capture()
    check_known(captured)

    versions = captured.log.catalogs()
    full_indexes = [index for index, version in enumerate(versions) if version.owner is None]
    assert len(full_indexes) > 1
    later_rows = versions[full_indexes[-1] + 1 :]
    assert sum(len(row.text) for row in later_rows) <= len(versions[full_indexes[-1]].text)
    assert warnings_of(caplog) == []


def test_capture_without_ddl_adds_no_catalog(captured: Captured) -> None:
    known = captured.log.catalogs()
    captured.database.run("insert into t values (2)")
    captured.capture()
    captured.capture()

    assert captured.log.catalogs() == known


def test_audit_accepts_open_and_late_commits(captured: Captured, caplog: pytest.LogCaptureFixture) -> None:
    """A capture that begins in between sees visible commits, and reads flushed ones."""
    with captured.database.connect() as writer:
        writer.autocommit = False
        writer.execute("alter publication p set (publish = 'insert')")
        writer.execute("insert into t values (3)")
        captured.database.run("create table other (id int); set synchronous_commit = off; drop table other")
        captured.capture()
        captured.database.run("set synchronous_commit = off; create table another (id int)")
        writer.commit()
    captured.capture()
    check_known(captured)
    with captured.database.connect() as writer:
        writer.execute("begin")
        writer.execute("alter publication p set (publish = 'update')")
        writer.execute(f"prepare transaction '{captured.database.name}'".encode())
        captured.capture()
        history = CatalogHistory(captured.log.catalogs())
        known = history.at(captured.log.end_lsn).publications["p"].actions
        assert known == {PublishAction.INSERT}
        writer.execute(f"commit prepared '{captured.database.name}'".encode())
    captured.capture()
    check_known(captured)
    assert warnings_of(caplog) == []


def test_table_being_altered_does_not_block_capture(
    captured: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    """The server prints no filter of it then: `setup` needs none, and a capture compares the next time."""
    captured.database.run("alter publication p set table t where (a > 1); create table other (id int)")
    with captured.database.connect() as writer, writer.transaction():
        writer.execute("alter table t add b int")
        captured.database.run("alter publication p add table other")
        captured.database.run("insert into other values (1)")
        before = captured.log.end_lsn
        captured.install_event_triggers()
        captured.capture()
        assert captured.log.end_lsn > before
        history = CatalogHistory(captured.log.catalogs())
        assert len(history.at(captured.log.end_lsn).publications["p"].memberships) == 2
    captured.capture()
    check_known(captured)
    assert warnings_of(caplog) == []


def test_catalog_read_counts_after_triggers_were_dropped(
    captured: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing shows any more who has written the messages that are left in the stream: they are ignored."""
    captured.database.run("alter publication p set (publish = 'insert'); insert into t values (2)")
    setup_publisher(captured.request)
    captured.database.run("alter publication p set (publish = 'update')")
    start = captured.log.end_lsn
    with caplog.at_level(logging.WARNING):
        captured.capture(max_changes_per_pull=1_000_000)
    check_known(captured)
    first, *_, last = captured.log.catalogs()
    assert (first.owner, last.owner, last.from_lsn) == (None, None, start)
    assert "ignored 4 logical messages" in caplog.text

    caplog.clear()
    end = captured.log.end_lsn
    captured.database.run("alter publication p set (publish = 'delete')")
    captured.capture()
    check_known(captured)
    assert captured.log.catalogs()[-1].from_lsn == end
    assert warnings_of(caplog) == []


def test_capture_continues_to_position_of_new_definitions(
    captured: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    """R9.11: with continuous writes, and captures with a target only."""
    for name in EVENT_TRIGGERS:
        captured.database.run(f"alter event trigger {name} disable")
    captured.database.run("alter publication p set (publish = 'insert')")
    for name in EVENT_TRIGGERS:
        captured.database.run(f"alter event trigger {name} enable always")
    target = current_position(captured.source.dsn)
    captured.database.run("insert into t values (2)")
    with caplog.at_level(logging.WARNING):
        captured.capture(target)
    assert captured.log.end_lsn > target
    assert 'publication "p"' in caplog.text
    check_known(captured)

    target = current_position(captured.source.dsn)
    captured.database.run("insert into t values (3)")
    captured.capture(target)
    assert captured.log.end_lsn == target
