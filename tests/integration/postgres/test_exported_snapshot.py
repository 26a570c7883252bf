"""What an exported snapshot contains, how long it lasts, and that it leaves nothing (R1.34, R1.35)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cdc_replay.errors import MissingPrivilege, PublisherNotReady
from cdc_replay.postgres.exported_snapshot import export_snapshot, import_snapshot
from embedded.postgres import Cluster
from fixtures.postgres import Database

SLOTS = "select slot_name from pg_replication_slots where database = current_database()"


def test_snapshot_holds_what_was_committed_before_it_and_nothing_later(publisher: Database) -> None:
    publisher.run("create table t (id int primary key); insert into t values (1)")
    with export_snapshot(publisher.dsn) as snapshot:
        publisher.run("insert into t values (2)")
        with import_snapshot(snapshot, purpose="test") as reader:
            assert reader.execute("select id from public.t").fetchall() == [(1,)]


def test_transactions_in_the_snapshot_are_those_up_to_its_consistent_point(publisher: Database) -> None:
    publisher.run("create table t (id int primary key)")
    with publisher.connect() as connection:
        connection.execute("insert into t values (1)")
        before = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        with export_snapshot(publisher.dsn) as snapshot:
            connection.execute("insert into t values (2)")
            after = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert before is not None
    assert after is not None
    assert publisher.rows(
        f"select '{before[0]}'::pg_lsn <= '{snapshot.consistent_point}'::pg_lsn,"
        f" '{snapshot.consistent_point}'::pg_lsn < '{after[0]}'::pg_lsn"
    ) == [(True, True)]


def test_several_readers_import_one_snapshot_at_the_same_time(publisher: Database) -> None:
    publisher.run("create table t (id int primary key); insert into t values (1)")
    with (
        export_snapshot(publisher.dsn) as snapshot,
        import_snapshot(snapshot, purpose="test") as first,
        import_snapshot(snapshot, purpose="test") as second,
    ):
        publisher.run("delete from t")
        for reader in (first, second):
            assert reader.execute("select count(*) from public.t").fetchone() == (1,)


def test_reader_cannot_write(publisher: Database) -> None:
    publisher.run("create table t (id int primary key)")
    with export_snapshot(publisher.dsn) as snapshot, import_snapshot(snapshot, purpose="test") as reader:
        assert reader.execute("show transaction_read_only").fetchone() == ("on",)


def test_the_export_leaves_no_slot_on_the_publisher(publisher: Database) -> None:
    with export_snapshot(publisher.dsn):
        assert len(publisher.rows(SLOTS)) == 1
    with publisher.connect() as connection:
        # The server ends the session some time after the client.
        connection.execute(
            "do $$ begin while exists (select from pg_stat_activity"
            " where application_name = 'cdc_replay exported snapshot' and datname = current_database())"
            " loop perform pg_sleep(0.01); perform pg_stat_clear_snapshot(); end loop; end $$"
        )
    assert publisher.rows(SLOTS) == []


def test_importing_an_ended_snapshot_is_refused(publisher: Database) -> None:
    with export_snapshot(publisher.dsn) as snapshot:
        pass
    with pytest.raises(PublisherNotReady, match="no longer exported"):
        import_snapshot(snapshot, purpose="test")


def test_a_role_without_replication_gets_an_error_that_names_it(publisher: Database) -> None:
    publisher.run("create role plain_reader login")
    try:
        with (
            pytest.raises(MissingPrivilege, match="REPLICATION"),
            export_snapshot(publisher.cluster.dsn(publisher.name, user="plain_reader")),
        ):
            pass
    finally:
        publisher.run("drop role plain_reader")


def test_server_without_logical_decoding_is_refused(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster("physical", wal_level="replica")
    with pytest.raises(PublisherNotReady, match="wal_level"), export_snapshot(cluster.dsn()):
        pass


def test_a_snapshot_does_not_show_its_dsn(publisher: Database) -> None:
    with export_snapshot(publisher.dsn) as snapshot:
        assert publisher.dsn not in repr(snapshot)
