"""Promotions, restores and copies of the publisher: the log goes on where it can, and is refused where not.

A log may go on with a server whose history holds all that the log holds, and whose slot sends all that comes
next. Each test makes real servers: a primary, and standbys or copies of its files.

| the server is                             | the log                                          |
|-------------------------------------------|--------------------------------------------------|
| a promoted standby that has the slot      | goes on, also over two promotions                |
| a promoted standby that was behind it     | refused: it never had what the log holds         |
| a standby that captures wait for          | goes on: that one is never behind                |
| a promoted standby without the slot       | refused: a new slot would leave a gap            |
| a standby that is not promoted            | refused until it is                              |
| a primary that another one has replaced   | refused                                          |
| restored to a point in time before it     | refused: it never had what the log holds         |
| an older copy of the files                | refused, at once and after it was written to     |
| a copy of the files as of the log's end   | goes on; then the original is refused            |
| the same, after a pull that died          | goes on without what that pull has stored        |
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from psycopg import sql

from cdc_replay.capture.pull import CaptureSource, current_position
from cdc_replay.capture.setup import SetupRequest, setup_publisher
from cdc_replay.errors import ChangeLogMismatch, PublisherNotReady, SlotMissing
from cdc_replay.postgres.connection import connect
from embedded.postgres import Cluster
from fixtures.captured import Captured
from fixtures.disturbed import TABLE
from fixtures.native import wait_for
from fixtures.postgres import Database, create_database

NewCluster = Callable[..., Cluster]

COPY_ALL_AGAIN = ("cdc-replay teardown", "cdc-replay setup", "cdc-replay snapshot", "--table")


@pytest.fixture
def captured(new_cluster: NewCluster, tmp_path: Path) -> Captured:
    """A primary of its own, set up for capture."""
    return set_up_primary(new_cluster, tmp_path)


def set_up_primary(new_cluster: NewCluster, tmp_path: Path, *, two_phase: bool = False) -> Captured:
    cluster = new_cluster("primary")
    cluster.create()
    cluster.start()
    database = create_database(cluster, "publisher")
    database.run(TABLE)
    slot, change_log = f"slot_{database.name}", str(tmp_path / "log")
    request = SetupRequest("test", database.dsn, slot, change_log, ("p",), two_phase)
    setup_publisher(request)
    source = CaptureSource("test", database.dsn, slot, change_log, two_phase=two_phase)
    return Captured(database, source, request)


def insert(database: Database, *numbers: int) -> None:
    for number in numbers:
        database.run(f"insert into t values ({number}, 'x')")


def numbers(captured: Captured) -> list[int]:
    """The ids that were inserted, in the order of the log."""
    return [int(values[0] or "") for kind, values in captured.changes() if kind == "I"]


def standby_of(primary: Database, new_cluster: NewCluster, name: str) -> Database:
    """A running standby of the primary's server."""
    cluster = new_cluster(name, hot_standby_feedback="on")
    cluster.follow(primary.cluster)
    cluster.start()
    return Database(cluster, primary.name)


def wait_until_replayed(primary: Database, standby: Database) -> None:
    position = current_position(primary.dsn)
    wait_for(
        lambda: standby.rows(f"select pg_last_wal_replay_lsn() >= '{position}'") == [(True,)],
        f"the standby to replay up to {position}",
    )


def synchronise_slots(captured: Captured, primary: Database, standby: Database) -> None:
    """Bring the slot to the standby, ready to be taken over: it must not lie before the standby's start."""
    primary.require(17, "slots that a standby gets of its primary")

    def is_synchronised() -> bool:
        primary.run("select pg_log_standby_snapshot()")
        captured.capture(dsn=primary.dsn)
        wait_until_replayed(primary, standby)
        standby.run("select pg_sync_replication_slots()")
        result = standby.rows(f"select not temporary from pg_replication_slots where slot_name = '{slot}'")
        return result == [(True,)]

    slot = captured.source.slot
    wait_for(is_synchronised, "the slot to be synchronised")


def refusal(captured: Captured, dsn: str, error: type[Exception], message: str) -> str:
    """The text of the error with which a capture is refused, twice; the log is not touched."""
    end, rows = captured.log.end_lsn, captured.rows()
    with pytest.raises(error, match=message):
        captured.capture(dsn=dsn)
    with pytest.raises(error, match=message) as refused:
        captured.capture(dsn=dsn)
    assert captured.log.end_lsn == end
    assert captured.rows() == rows
    return str(refused.value)


def test_promoted_standby_with_slot_continues_capture(captured: Captured, new_cluster: NewCluster) -> None:
    """The standby's slot is before the log's end; redelivery is recognised, and nothing is lost."""
    primary = captured.database
    standby = standby_of(primary, new_cluster, "standby")
    synchronise_slots(captured, primary, standby)
    insert(primary, 1, 2)
    captured.capture()
    insert(primary, 3)
    wait_until_replayed(primary, standby)
    primary.cluster.stop("immediate")
    standby.cluster.promote()
    insert(standby, 4)

    captured.capture(dsn=standby.dsn)

    assert numbers(captured) == [1, 2, 3, 4]
    assert captured.log.header.timeline == 2

    second = standby_of(standby, new_cluster, "second")
    synchronise_slots(captured, standby, second)
    insert(standby, 5)
    captured.capture(dsn=standby.dsn)
    wait_until_replayed(standby, second)
    standby.cluster.stop()
    second.cluster.promote()
    insert(second, 6)
    captured.capture(dsn=second.dsn)

    assert numbers(captured) == [1, 2, 3, 4, 5, 6]
    assert captured.log.header.timeline == 3

    primary.cluster.start()
    text = refusal(
        captured,
        primary.dsn,
        ChangeLogMismatch,
        "timeline 1 of the publisher does not descend from timeline 3",
    )
    assert "a replaced primary" in text
    assert "Point `dsn` at the server that took over" in text


def test_log_continues_over_two_promotions(captured: Captured, new_cluster: NewCluster) -> None:
    """Nobody captured while timeline 2 was written; it is read on timeline 3, which comes from it."""
    primary = captured.database
    standby = standby_of(primary, new_cluster, "standby")
    synchronise_slots(captured, primary, standby)
    insert(primary, 1)
    wait_until_replayed(primary, standby)
    primary.cluster.stop("immediate")
    standby.cluster.promote()
    insert(standby, 2)
    standby.cluster.stop()
    (standby.cluster.data / "standby.signal").touch()
    standby.cluster.start()
    standby.cluster.promote()
    insert(standby, 3)

    captured.capture(dsn=standby.dsn)

    assert numbers(captured) == [1, 2, 3]
    assert captured.log.header.timeline == 3


def test_promoted_standby_that_lagged_log_is_refused(captured: Captured, new_cluster: NewCluster) -> None:
    """The log has changes that the new timeline never had; subscribers may have applied them."""
    primary = captured.database
    standby = standby_of(primary, new_cluster, "standby")
    synchronise_slots(captured, primary, standby)
    standby.cluster.stop()
    insert(primary, 1, 2)
    captured.capture()
    primary.cluster.stop("immediate")
    standby.cluster.start()
    standby.cluster.promote()
    insert(standby, *range(10, 30))

    text = refusal(
        captured, standby.dsn, ChangeLogMismatch, "timeline 2 of the publisher branched off timeline 1 at"
    )

    assert f"ends at {captured.log.end_lsn}" in text
    assert "holds 2 transactions that the publisher never had" in text
    assert all(word in text for word in COPY_ALL_AGAIN)


def test_capture_waits_for_failover_standby(captured: Captured, new_cluster: NewCluster) -> None:
    """R1.32: with synchronized_standby_slots the log is never ahead of that standby."""
    primary = captured.database
    standby = standby_of(primary, new_cluster, "standby")
    synchronise_slots(captured, primary, standby)
    primary.run("alter system set synchronized_standby_slots = 'standby'")
    primary.run("select pg_reload_conf()")
    standby.cluster.stop()
    insert(primary, 1)
    end = captured.log.end_lsn
    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(captured.capture, split_bytes=0)
        wait_for(lambda: waits_for_standby(primary), "the capture to wait for the standby")
        assert captured.log.end_lsn == end
        # A copy of the slot would not wait.
        assert primary.rows("select from pg_stat_activity where application_name ~ 'capture ahead'") == []
        standby.cluster.start()
        assert outcome.result(60).transactions == 1
    primary.cluster.stop("immediate")
    standby.cluster.promote()
    insert(standby, 2)

    captured.capture(dsn=standby.dsn)

    assert numbers(captured) == [1, 2]


def waits_for_standby(primary: Database) -> bool:
    waiting = "application_name = 'cdc_replay capture test' and wait_event = 'WaitForStandbyConfirmation'"
    return primary.rows(f"select from pg_stat_activity where {waiting}") != []


def test_standby_is_refused_and_after_promotion_its_missing_slot(
    captured: Captured, new_cluster: NewCluster
) -> None:
    """R1.33: a slot created after the promotion would start after changes that are in no log."""
    primary = captured.database
    standby = standby_of(primary, new_cluster, "standby")
    insert(primary, 1)
    captured.capture()
    wait_until_replayed(primary, standby)
    assert "primary" in refusal(captured, standby.dsn, PublisherNotReady, "is a standby")
    primary.cluster.stop("immediate")
    standby.cluster.promote()
    insert(standby, 2)

    text = refusal(captured, standby.dsn, SlotMissing, captured.source.slot)

    assert f"The log ends at {captured.log.end_lsn}; a new slot would start later" in text
    assert "on timeline 2, the log on 1: the promoted standby" in text
    assert "cdc-replay snapshot" in text
    with pytest.raises(SlotMissing, match="no longer exists"):
        setup_publisher(dataclasses.replace(captured.request, dsn=standby.dsn))


@pytest.mark.parametrize("has_slot", [False, True], ids=["backup", "files"])
def test_publisher_restored_to_before_log_end_is_refused(
    has_slot: bool, captured: Captured, new_cluster: NewCluster
) -> None:
    """Recovery ends at an earlier position and begins a timeline there. A base backup brings no slots."""
    restored = copy_of(captured.database, new_cluster, "restored")
    insert(captured.database, 1)
    captured.capture()
    (restored.cluster.data / "recovery.signal").touch()
    restored.cluster.settings["restore_command"] = "false"
    if not has_slot:
        shutil.rmtree(restored.cluster.data / "pg_replslot" / captured.source.slot)
    restored.cluster.start()
    wait_for(lambda: restored.rows("select pg_is_in_recovery()") == [(False,)], "the end of the recovery")
    insert(restored, *range(10, 30))

    text = refusal(
        captured, restored.dsn, ChangeLogMismatch, "timeline 2 of the publisher branched off timeline 1 at"
    )

    assert "holds 1 transactions that the publisher never had" in text


def copy_of(database: Database, new_cluster: NewCluster, name: str) -> Database:
    """The files of the server as they are, in another cluster that is not started yet."""
    cluster = new_cluster(name)
    database.cluster.stop()
    cluster.copy(database.cluster)
    database.cluster.start()
    return Database(cluster, database.name)


def test_older_copy_of_publisher_is_refused_even_after_growth(
    captured: Captured, new_cluster: NewCluster
) -> None:
    """Same identifier, same timeline, and a slot before the log's end, as after any crash (R1.30)."""
    insert(captured.database, 1)
    captured.capture()
    copy = copy_of(captured.database, new_cluster, "copy")
    insert(captured.database, 2)
    captured.capture()
    copy.cluster.start()

    text = refusal(captured, copy.dsn, ChangeLogMismatch, "the WAL of the publisher at")
    assert "restored from an older copy" in text

    insert(copy, *range(10, 30))
    text = refusal(captured, copy.dsn, ChangeLogMismatch, "sends other transactions than change log")
    assert "only the log has transaction" in text or "only the server has transaction" in text
    assert all(word in text for word in COPY_ALL_AGAIN)

    insert(captured.database, 3)
    captured.capture()
    assert numbers(captured) == [1, 2, 3]


def test_copy_at_log_end_replaces_original(captured: Captured, new_cluster: NewCluster) -> None:
    """The copy has all that the log holds. What the original does later is another history."""
    insert(captured.database, 1)
    captured.capture()
    copy = copy_of(captured.database, new_cluster, "copy")
    copy.cluster.start()
    insert(copy, 2)
    captured.capture(dsn=copy.dsn)
    assert numbers(captured) == [1, 2]

    insert(captured.database, *range(10, 30))
    refusal(captured, captured.database.dsn, ChangeLogMismatch, "sends other transactions than change log")


def test_prepared_transaction_of_a_dead_pull_is_forgotten_with_the_original(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    """On the copy, which never had it, another transaction has its xid, and no published changes."""
    captured = set_up_primary(new_cluster, tmp_path, two_phase=True)
    insert(captured.database, 1)
    captured.capture()
    copy = copy_of(captured.database, new_cluster, "copy")
    captured.database.run("begin; insert into t values (9, 'lost'); prepare transaction 'lost'")
    captured.capture_killed_at("capture.after_segment")
    xids = "select transaction::text from pg_prepared_xacts"
    (lost,) = captured.database.rows(xids)
    captured.database.cluster.stop()
    copy.cluster.start()
    copy.run("begin; create table unpublished (); prepare transaction 'kept'")
    assert copy.rows(xids) == [lost]
    copy.run("commit prepared 'kept'")
    insert(copy, 2)

    captured.capture(dsn=copy.dsn)

    assert numbers(captured) == [1, 2]
    assert captured.log.prepared.list_keys() == ()


def test_another_cluster_at_same_address_is_refused(captured: Captured, new_cluster: NewCluster) -> None:
    """Its slot has the name, its publications are the same; its system identifier is another."""
    other = new_cluster("other")
    other.create()
    other.start()
    database = Database(other, captured.database.name)
    with connect(other.dsn(), purpose="test") as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(database.name)))
    database.run(TABLE)
    request = dataclasses.replace(captured.request, dsn=database.dsn, change_log=f"{captured.log.uri}_other")
    setup_publisher(request)
    insert(database, *range(10, 30))

    text = refusal(captured, database.dsn, ChangeLogMismatch, "belongs to another publisher")

    assert "system identifier" in text
    assert "Correct `dsn`, `slot` or `change_log`" in text
