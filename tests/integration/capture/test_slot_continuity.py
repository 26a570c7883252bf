"""Slot and log: a slot before the log's end, lost, or foreign. Nothing is duplicated or skipped.

What is done to a capture while it runs is in `faults/test_capture_faults.py`; promotions, restores and copies
of the server are in `test_timelines.py`.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.capture.setup import SetupRequest, setup_publisher
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import ChangeLogMismatch, PublisherNotReady, SlotLost
from cdc_replay.postgres.connection import KEEPALIVES, connect
from embedded.postgres import Cluster
from fixtures.captured import Captured
from fixtures.disturbed import TABLE, Disturbed, content, disturb
from fixtures.postgres import IN_LATIN1, Database, create_database, drop_database

SetUp = Callable[..., Captured]


@pytest.fixture
def disturbed(publisher: Database, tmp_path: Path) -> Iterator[Disturbed]:
    publisher.run(TABLE)
    with disturb(publisher, tmp_path) as disturbed:
        yield disturbed


def insert(database: Database, *numbers: int) -> None:
    for number in numbers:
        database.run(f"insert into t values ({number}, 'x')")


def test_slot_reset_by_publisher_crash_duplicates_nothing(
    new_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """R1.30: advance is not written to disk at once; redelivered transactions are in the log already."""
    cluster = new_cluster("crashing", checkpoint_timeout="1h")
    cluster.create()
    cluster.start()
    database = create_database(cluster, "publisher")
    database.run(TABLE)
    with disturb(database, tmp_path, two_phase=True) as disturbed, database.connect() as holder:
        # As long as a transaction is open, restart_lsn stays, and with it what is on disk of the slot.
        holder.autocommit = False
        holder.execute("insert into t values (0, 'open')")
        disturbed.captured.capture()
        insert(database, 1, 2)
        database.run("begin; insert into t values (3, 'prepared'); prepare transaction 'three'")
        disturbed.captured.capture()
        database.run("commit prepared 'three'")
        insert(database, 4)
        disturbed.captured.capture()
        confirmed = disturbed.captured.position
        cluster.stop("immediate")
        cluster.start()
        assert disturbed.captured.position < confirmed == disturbed.captured.log.end_lsn

        insert(database, 5)
        disturbed.check()

        rows = disturbed.captured.rows()
        assert len({(row["commit_lsn"], row["seq"]) for row in rows}) == len(rows) == 5
        holder.close()


def test_redelivery_is_compared_in_bounded_steps(
    disturbed: Disturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four messages a step, that is one or two transactions: the slot follows step by step."""
    insert(disturbed.database, *range(10))
    disturbed.start("capture.after_commit").killed()
    assert disturbed.captured.position < disturbed.captured.log.end_lsn
    monkeypatch.setattr("cdc_replay.capture.redelivery.MESSAGES_PER_STEP", 4)

    disturbed.check()

    assert disturbed.captured.position == disturbed.captured.log.end_lsn


def test_slot_before_pruned_log_is_moved(disturbed: Disturbed) -> None:
    """What the log does not hold any more cannot be compared, and need not be: it was there."""
    insert(disturbed.database, 1)
    disturbed.start("capture.after_commit").killed()
    log = disturbed.captured.log
    log.prune(log.prunable_segments(log.end_lsn))
    assert content(disturbed.captured.log).num_rows == 0
    insert(disturbed.database, 2)

    disturbed.captured.capture()

    assert content(disturbed.captured.log)["kind"].to_pylist() == ["I"]
    assert disturbed.captured.position == disturbed.captured.log.end_lsn


def test_log_restored_to_older_state_is_a_gap(disturbed: Disturbed, tmp_path: Path) -> None:
    """R1.29: a log restored from a copy ends before the slot; the changes in between are lost."""
    log = Path(disturbed.captured.source.change_log)
    insert(disturbed.database, 1)
    disturbed.captured.capture()
    older = tmp_path / "older"
    shutil.copytree(log, older)
    insert(disturbed.database, 2)
    disturbed.captured.capture()
    shutil.rmtree(log)
    older.rename(log)
    with pytest.raises(SlotLost, match="is past the end of its change log") as refused:
        disturbed.captured.capture()
    assert f"the log ends at {disturbed.captured.log.end_lsn}" in str(refused.value.detail)
    assert "cdc-replay snapshot" in str(refused.value.hint)


def test_slot_invalidated_by_wal_limit_is_lost(new_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """R1.33: wal_status lost. Neither capture nor setup goes on as if nothing had happened."""
    cluster = new_cluster("limited", max_slot_wal_keep_size="16MB", min_wal_size="32MB", max_wal_size="32MB")
    cluster.create()
    cluster.start()
    database = create_database(cluster, "publisher")
    database.run(TABLE)
    with disturb(database, tmp_path) as disturbed:
        insert(database, 1)
        disturbed.captured.capture()
        rows = disturbed.captured.rows()
        for number in range(2, 8):
            insert(database, number)
            database.run("select pg_switch_wal()")
        database.run("checkpoint")
        assert disturbed.captured.slot("wal_status") == "lost"

        with pytest.raises(
            SlotLost, match=f'replication slot "{disturbed.captured.source.slot}" is lost'
        ) as lost:
            disturbed.captured.capture()
        assert "invalidated it: " in str(lost.value.detail)
        assert "cdc-replay setup" in str(lost.value.hint)
        assert lost.value.rule == "R1.33"
        with pytest.raises(SlotLost, match="is lost"):
            setup_publisher(disturbed.captured.request)
        assert disturbed.captured.rows() == rows


@pytest.mark.parametrize("plugin", ["test_decoding", "pgoutput"])
def test_slot_of_another_plugin_or_database_is_refused(plugin: str, disturbed: Disturbed) -> None:
    """R1.33: another program created a slot of that name after ours was dropped."""
    slot = disturbed.captured.source.slot
    insert(disturbed.database, 1)
    disturbed.database.run(f"select pg_drop_replication_slot('{slot}')")
    elsewhere = (
        disturbed.database if plugin == "test_decoding" else Database(disturbed.database.cluster, "postgres")
    )
    elsewhere.run(f"select pg_create_logical_replication_slot('{slot}', '{plugin}')")
    try:
        with pytest.raises(PublisherNotReady, match="cannot be used") as refused:
            disturbed.captured.capture()
        assert f'plugin "{plugin}" and database "{elsewhere.name}"' in str(refused.value.detail)
    finally:
        elsewhere.run(f"select pg_drop_replication_slot('{slot}')")


def test_database_whose_name_reads_differently_in_its_encoding_is_captured(
    publisher_cluster: Cluster, tmp_path: Path
) -> None:
    """Names of databases are stored as the bytes of the session that creates them, here of UTF-8."""
    database = create_database(publisher_cluster, "café", IN_LATIN1)
    try:
        database.run(TABLE)
        slot, change_log = "slot_of_latin1", str(tmp_path / "log")
        request = SetupRequest("test", database.dsn, slot, change_log, ("p",))
        setup_publisher(request)
        captured = Captured(database, CaptureSource("test", database.dsn, slot, change_log), request)
        database.run("insert into t values (1, 'très')")
        captured.capture()
        assert captured.changes() == [("I", ("1", "très"))]
    finally:
        drop_database(database)


def test_log_of_another_publisher_is_refused_with_all_differences(
    disturbed: Disturbed,
) -> None:
    captured = disturbed.captured
    with pytest.raises(ChangeLogMismatch, match="belongs to another publisher") as refused:
        captured.capture(change_log=disturbed.undisturbed.source.change_log)
    assert disturbed.undisturbed.source.slot in str(refused.value.detail)
    assert "Correct `dsn`, `slot` or `change_log`" in str(refused.value.hint)
    with pytest.raises(ChangeLogMismatch):
        setup_publisher(
            dataclasses.replace(captured.request, change_log=disturbed.undisturbed.source.change_log)
        )
    assert ChangeLog.open(captured.source.change_log).header.slot == captured.source.slot


def test_silently_lost_server_is_detected(publisher: Database) -> None:
    """A line that is dead ends the session in minutes, not in the hours that the system would take."""
    with connect(publisher.dsn, purpose="test") as connection:
        actual = connection.info.get_parameters()
    assert {name: int(actual[name]) for name in KEEPALIVES} == KEEPALIVES
    with connect(f"{publisher.dsn}?keepalives_idle=7", purpose="test") as connection:
        actual = connection.info.get_parameters()
    assert (actual["keepalives_idle"], actual["keepalives_count"]) == ("7", "4")
