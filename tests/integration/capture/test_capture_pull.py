"""Slot → change log: everything that commits, once, in commit order, whatever happens in between."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cdc_replay.capture.ddl.catalog_snapshot import CatalogSnapshot
from cdc_replay.capture.pull import CaptureSource, capture_changes, current_position
from cdc_replay.capture.slot_lock import only_reader
from cdc_replay.catalog.json_form import catalog_from_json
from cdc_replay.errors import (
    ChangeLogMismatch,
    ChangeLogMissing,
    PublicationMissing,
    SlotActive,
    SlotLost,
    SlotMissing,
)
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublishAction
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.postgres.slot import advance_slot
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS
from fixtures.captured import Captured
from fixtures.postgres import Database
from fixtures.wal_pages import PAGE_BYTES, fill_page

SetUp = Callable[..., Captured]

TABLE = "create table t (id int primary key, a text); create publication p for table t;"


def inserted(captured: Captured) -> list[str | None]:
    """The ids of the inserted rows in the order of the log."""
    return [values[0] for kind, values in captured.changes() if kind == "I"]


def test_log_has_committed_changes_in_commit_order_only(publisher: Database, set_up: SetUp) -> None:
    """R9.1, R9.2: the later transaction commits first; rolled back savepoints and rollbacks leave nothing."""
    publisher.run(TABLE)
    captured = set_up()
    with publisher.connect() as first, publisher.connect() as second:
        first.autocommit = second.autocommit = False
        first.execute("insert into t values (1, 'first')")
        second.execute("insert into t values (2, 'second')")
        second.execute("update t set a = 'changed' where id = 2")
        second.commit()
        first.execute("savepoint s")
        first.execute("insert into t values (3, 'rolled back')")
        first.execute("rollback to s")
        first.execute("insert into t values (4, 'kept')")
        first.commit()
        first.execute("insert into t values (5, 'aborted')")
        first.rollback()
    publisher.run("delete from t where id = 4; truncate t")

    outcome = captured.capture()

    assert captured.changes() == [
        ("I", ("2", "second")),
        ("U", ("2", "changed")),
        ("I", ("1", "first")),
        ("I", ("4", "kept")),
        ("D", ("4", None)),
        ("T", ()),
    ]
    assert [row["seq"] for row in captured.rows()] == [0, 1, 0, 1, 0, 1]
    assert (outcome.transactions, outcome.messages, outcome.pulls) == (3, 6, 1)
    assert outcome.to_lsn == captured.log.end_lsn


def test_log_has_relation_version_of_every_row(publisher: Database, set_up: SetUp) -> None:
    """R1.13: before and after ALTER TABLE there are two versions; a TRUNCATE has none."""
    publisher.run(TABLE)
    captured = set_up()
    publisher.run(
        "insert into t values (1, 'a'); alter table t add b int; insert into t values (2, 'b', 3); truncate t"
    )

    captured.capture()

    first, second, truncate = captured.rows()
    relations = captured.log.relations()
    assert relations[first["relation_version"]].column_names == ("id", "a")
    assert relations[second["relation_version"]].column_names == ("id", "a", "b")
    assert (truncate["relation_id"], truncate["relation_version"]) == (None, None)
    window = Window(Lsn(0), captured.log.end_lsn)
    versions = captured.log.relation_versions(window)
    assert versions == {first["relation_version"], second["relation_version"]}


def test_bounded_pulls_reach_target_without_loss(publisher: Database, set_up: SetUp) -> None:
    """R1.24: a pull ends after a whole transaction once its bound is passed; 3 messages each, bound 4."""
    publisher.run(TABLE)
    captured = set_up(max_changes_per_pull=4)
    for number in range(9):
        publisher.run(f"insert into t values ({number}, 'x')")
    reached: list[Lsn] = []

    outcome = capture_changes(captured.source, progress=lambda end, _: reached.append(end))

    assert inserted(captured) == [str(number) for number in range(9)]
    assert outcome.pulls == len(reached) > 4
    assert reached == sorted(set(reached))
    assert reached[-1] == captured.log.end_lsn == captured.position


def test_pulls_are_bounded_in_wal_by_distance_to_restart_lsn(publisher: Database, set_up: SetUp) -> None:
    """R1.31: an open transaction holds restart_lsn back, and each pull decodes from there."""
    publisher.run(TABLE)
    captured = set_up(wal_bytes_per_pull=1 << 12)
    with publisher.connect() as writer:
        writer.autocommit = False
        writer.execute("insert into t values (-1, 'open')")
        for number in range(200):
            publisher.run(f"insert into t values ({number}, repeat('x', 1000))")
        reached = [captured.log.end_lsn]

        outcome = capture_changes(captured.source, progress=lambda end, _: reached.append(end))

        writer.commit()
    assert inserted(captured) == [str(number) for number in range(200)]
    assert outcome.pulls > 2
    assert reached[1].value - reached[0].value < 1 << 14
    widths = [after.value - before.value for before, after in itertools.pairwise(reached)]
    assert widths[:-1] == sorted(widths[:-1])
    assert widths[-2] > 2 * widths[0]
    captured.capture()
    assert inserted(captured)[-1] == "-1"


def test_empty_pull_moves_log_and_slot_without_new_file(publisher: Database, set_up: SetUp) -> None:
    """Unpublished changes advance the slot too, so that it does not retain their WAL."""
    publisher.run(TABLE + "create table other (id int)")
    captured = set_up()
    before = captured.log.end_lsn
    publisher.run("insert into other select generate_series(1, 100)")

    outcome = captured.capture()

    assert outcome.messages == 0
    assert captured.log.end_lsn > before
    assert captured.log.end_lsn == captured.position
    assert captured.log.segments(Window(Lsn(0), captured.log.end_lsn)) == ()


def test_target_inside_open_transaction_does_not_lose_it(publisher: Database, set_up: SetUp) -> None:
    """R1.21, R1.29: changes before the slot's position are sent if their commit is after it."""
    publisher.run(TABLE)
    captured = set_up()
    with publisher.connect() as writer:
        writer.autocommit = False
        writer.execute("insert into t values (1, 'before')")
        publisher.run("insert into t values (2, 'flushes the first one too')")
        captured.capture(current_position(publisher.dsn))
        assert inserted(captured) == ["2"]
        writer.execute("insert into t values (3, 'after')")
        writer.commit()

    captured.capture()

    assert inserted(captured) == ["2", "1", "3"]


def test_position_after_full_wal_page_is_reachable(publisher: Database) -> None:
    """R1.21: the server's position is after the header of a page that does not exist yet."""
    with publisher.connect() as connection:
        page = next(page for _ in range(50) if (page := fill_page(connection)) is not None)

        assert page.value % PAGE_BYTES == 0
        assert current_position(publisher.dsn) >= page


def test_asynchronous_commits_are_captured(publisher: Database, set_up: SetUp) -> None:
    """R1.21: a commit that is visible but not flushed yet is waited for."""
    publisher.run(TABLE)
    captured = set_up()
    with publisher.connect() as writer:
        writer.execute("set synchronous_commit = off")
        for number in range(5):
            writer.execute("insert into t values (%s, 'x')", (number,))
            captured.capture()
            assert inserted(captured) == [str(value) for value in range(number + 1)]


@pytest.mark.parametrize(
    "failpoint",
    ["capture.after_peek", "capture.after_segment", "capture.after_commit", "capture.after_advance"],
)
def test_killed_capture_neither_loses_nor_duplicates(
    failpoint: str, publisher: Database, set_up: SetUp
) -> None:
    """R1.30: transactions in the log are not added again, the others are read again."""
    publisher.run(TABLE)
    captured = set_up(max_changes_per_pull=4)
    for number in range(4):
        publisher.run(f"insert into t values ({number}, 'x')")

    captured.capture_killed_at(failpoint)
    publisher.run("insert into t values (4, 'after the crash')")
    captured.capture_killed_at(f"{failpoint}@2")
    captured.capture()

    assert inserted(captured) == ["0", "1", "2", "3", "4"]
    rows = captured.rows()
    assert len({(row["commit_lsn"], row["seq"]) for row in rows}) == len(rows)


def test_slot_before_log_end_is_moved_there(publisher: Database, set_up: SetUp) -> None:
    """R1.30: a crash of the publisher can take the slot back; the log is durable."""
    publisher.run(TABLE)
    captured = set_up()
    publisher.run("insert into t values (1, 'x')")
    captured.capture_killed_at("capture.after_commit")
    assert captured.position < captured.log.end_lsn

    captured.capture(captured.log.end_lsn)

    assert captured.position == captured.log.end_lsn
    assert inserted(captured) == ["1"]


def test_second_capture_of_same_slot_is_refused(publisher: Database, set_up: SetUp) -> None:
    publisher.run(TABLE)
    captured = set_up()
    with (
        publisher.connect() as connection,
        only_reader(connection, captured.source.slot),
        pytest.raises(SlotActive, match=captured.source.slot),
    ):
        captured.capture()
    captured.capture()


def test_slot_that_another_process_reads_is_refused(publisher: Database, set_up: SetUp) -> None:
    """R1.33, SQLSTATE 55006: a walsender holds the slot."""
    publisher.run(TABLE + "insert into t values (1, 'x')")
    captured = set_up()
    publisher.run("insert into t values (2, 'x')")
    with contextlib.closing(connect(publisher.dsn, purpose="test", replication=True)) as walsender:
        walsender.pgconn.send_query(
            f"START_REPLICATION SLOT {captured.source.slot} LOGICAL 0/0 (proto_version '1',"
            " publication_names 'cdc_replay_capture_i')".encode()
        )
        deadline = time.monotonic() + 30
        while captured.slot("active") != "true":
            assert time.monotonic() < deadline, "the walsender did not take the slot"
        with pytest.raises(SlotActive, match="is active"):
            captured.capture()


def test_changes_consumed_by_another_reader_are_a_gap(publisher: Database, set_up: SetUp) -> None:
    """A slot ahead of its log: refused with the positions and the way to resynchronise."""
    publisher.run(TABLE)
    captured = set_up()
    publisher.run("insert into t values (1, 'x')")
    with publisher.connect() as connection:
        advance_slot(connection, captured.source.slot, current_position(publisher.dsn))

    with pytest.raises(SlotLost, match="past the end") as refused:
        captured.capture()

    assert str(captured.log.end_lsn) in str(refused.value.detail)
    assert "cdc-replay snapshot" in str(refused.value.hint)


def test_dropped_slot_error_has_remedy(publisher: Database, set_up: SetUp) -> None:
    publisher.run(TABLE)
    captured = set_up()
    publisher.run(f"select pg_drop_replication_slot('{captured.source.slot}')")
    with pytest.raises(SlotMissing, match=captured.source.slot) as refused:
        captured.capture()
    assert "cdc-replay setup" in str(refused.value.hint)


def test_log_of_another_slot_is_refused(publisher: Database, set_up: SetUp) -> None:
    publisher.run(TABLE)
    captured = set_up()
    publisher.run("select pg_create_logical_replication_slot('another_slot', 'pgoutput')")
    with pytest.raises(ChangeLogMismatch, match="belongs to another publisher") as refused:
        captured.capture(slot="another_slot")
    assert "another_slot" in str(refused.value.detail)


def test_capture_before_setup_names_setup(publisher: Database, tmp_path: Path) -> None:
    source = CaptureSource("test", publisher.dsn, "nothing", str(tmp_path / "log"))
    with pytest.raises(ChangeLogMissing) as refused:
        capture_changes(source)
    assert "cdc-replay setup" in str(refused.value.hint)


def test_changed_catalog_is_stored(publisher: Database, set_up: SetUp) -> None:
    """R9.11: without event triggers each version is in force from the end of the pull before it was read."""
    publisher.run(TABLE)
    captured = set_up()
    publisher.run("insert into t values (1, 'x')")
    captured.capture()
    publisher.run("insert into t values (2, 'x')")
    captured.capture()
    end = captured.log.end_lsn
    publisher.run("alter publication p set (publish = 'insert'); insert into t values (3, 'x')")
    captured.capture()

    versions = captured.log.catalogs()
    assert [version.from_lsn for version in versions] == [Lsn(0), end]
    first, second = (catalog_from_json(version.text) for version in versions)
    assert (first.lsn, second.lsn) == (Lsn(0), end)
    assert len(first.publications["p"].actions) == 4
    assert len(second.publications["p"].actions) == 1


def test_a_pull_without_event_triggers_reads_the_catalog_once(
    publisher: Database, set_up: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than everything else in a small pull, if there are thousands of tables."""
    publisher.run(TABLE)
    captured = set_up()
    captured.capture()
    reads = list[object]()
    read = CatalogSnapshot.read

    def counted(connection: Connection) -> CatalogSnapshot:
        reads.append(connection)
        return read(connection)

    monkeypatch.setattr(CatalogSnapshot, "read", counted)
    publisher.run("insert into t values (1, 'x')")
    assert captured.capture().pulls == 1
    assert len(reads) == 1


def test_messages_of_other_programs_are_dropped(publisher: Database, set_up: SetUp) -> None:
    """R9.4, R9.13: neither those outside of transactions, nor those in one."""
    publisher.run(TABLE)
    captured = set_up()
    publisher.run("begin; select pg_logical_emit_message(false, 'p', 'alone'); rollback")
    publisher.run(
        "begin; select pg_logical_emit_message(true, 'p', 'inside'); insert into t values (1); commit"
    )

    captured.capture()

    rows = captured.rows()
    assert [(row["kind"], row["seq"]) for row in rows] == [("I", 0)]
    assert captured.log.summary(Window(Lsn(0), captured.log.end_lsn)).transactions == 1


def test_publication_that_was_missing_meanwhile_stops_the_capture(publisher: Database, set_up: SetUp) -> None:
    """R1.19: PostgreSQL 18 skips its changes with a warning, which no setting of the database may hide."""
    publisher.run(TABLE + f"alter database {publisher.name} set client_min_messages = error")
    captured = set_up()
    insert = CAPTURE_PUBLICATIONS[PublishAction.INSERT]
    publisher.run(f"alter publication {insert} rename to elsewhere")
    publisher.run("insert into t values (1, 'unpublished')")
    publisher.run(f"alter publication elsewhere rename to {insert}")
    publisher.run("insert into t values (2, 'published')")
    end = captured.log.end_lsn

    with pytest.raises(PublicationMissing, match=r"R1\.19"):
        captured.capture()

    assert (captured.changes(), captured.log.end_lsn) == ([], end)


def test_log_has_origin_of_transaction(publisher: Database, set_up: SetUp) -> None:
    """R1.12: O follows B; a local transaction has none."""
    publisher.run(TABLE)
    captured = set_up()
    with publisher.connect() as connection:
        connection.execute("select pg_replication_origin_create(%s)", (f"origin_{publisher.name}",))
        connection.execute("select pg_replication_origin_session_setup(%s)", (f"origin_{publisher.name}",))
        connection.execute("insert into t values (1, 'from elsewhere')")
        connection.execute("select pg_replication_origin_session_reset()")
        connection.execute("insert into t values (2, 'local')")

    captured.capture()

    assert [row["origin"] for row in captured.rows()] == [f"origin_{publisher.name}", None]
    publisher.run(f"select pg_replication_origin_drop('origin_{publisher.name}')")


def test_transaction_larger_than_memory_is_spilled_to_file(
    publisher: Database, set_up: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_replay.capture.spool.MEMORY_BYTES", 100_000)
    monkeypatch.setattr("cdc_replay.postgres.peek.BATCH_ROWS", 500)
    publisher.run(TABLE)
    captured = set_up()
    publisher.run("insert into t select g, repeat('x', 50) from generate_series(1, 5000) g")

    captured.capture()

    assert inserted(captured) == [str(number) for number in range(1, 5001)]
    assert [row["seq"] for row in captured.rows()] == list(range(5000))
