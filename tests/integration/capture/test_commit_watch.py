"""A watch of a real publisher: what is announced, and what becomes of the slot."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from cdc_replay.capture import commit_watch, followers
from cdc_replay.capture.capture_to import capture_to
from cdc_replay.capture.commit_watch import CommitWatch, WatchState
from cdc_replay.capture.followers import connect_follower
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.postgres.connection import Connection
from fixtures.captured import Captured
from fixtures.postgres import Database


def watch_log(
    captured: Captured, *, greatest_seconds: float = 60.0, answer_seconds: float = 60.0
) -> CommitWatch:
    """A watch that announces at once what the log lacks, which is nothing so far."""
    capture_to(captured.source)
    return CommitWatch(captured.source, WatchState(0.0, greatest_seconds, moved_at=0.0), answer_seconds)


def test_only_a_change_that_the_log_lacks_is_announced_and_the_slot_moves_without_one(
    publisher: Database, set_up: Callable[..., Captured], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.run("create table t (id int); create table other (id int); create publication p for table t")
    watch = watch_log(set_up())
    source = watch.source
    publisher.run("insert into other select generate_series(1, 100)")
    assert watch.look() is None

    publisher.run("insert into t values (1)")
    announced = watch.look()
    assert announced is not None
    assert watch.look() is None, "it is announced, and a capture follows"
    capture_to(source)
    assert ChangeLog.open(source.change_log).end_lsn >= announced
    assert watch.look() is None

    monkeypatch.setattr(commit_watch, "MOVE_BYTES", 1)
    publisher.run("insert into other select generate_series(1, 100)")
    before = ChangeLog.open(source.change_log)
    assert watch.look() is None
    after = ChangeLog.open(source.change_log)
    assert after.end_lsn > before.end_lsn
    [(lsn,)] = publisher.rows(
        f"select confirmed_flush_lsn::text from pg_replication_slots where slot_name = '{source.slot}'"
    )
    assert lsn == str(after.end_lsn)

    with connect_follower(source):
        publisher.run("insert into t values (2)")
        assert watch.look() is None, "who follows captures it"
    assert watch.look() is None, "that may take a while"
    monkeypatch.setattr(watch.state, "greatest_seconds", 0.0)
    assert watch.look() is not None, "it was not captured"
    capture_to(source)

    # The connection is lost, as by a restart: the next look has another one.
    publisher.run(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name like '%watch test%' and datname = current_database()"
    )
    publisher.run("insert into t values (2)")
    with pytest.raises(psycopg.OperationalError):
        watch.look()
    assert watch.look() is not None
    watch.close()


def test_what_takes_too_long_to_look_through_is_captured(
    publisher: Database, set_up: Callable[..., Captured], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.run("create table t (id int); create publication p for table t")
    watch = watch_log(set_up(), answer_seconds=2.0)
    publisher.run("insert into t values (1)")

    def decode_for_ever(connection: Connection, *_: object, **__: object) -> bool:
        connection.execute("select pg_sleep(600)")
        return True

    with monkeypatch.context() as much:
        much.setattr(commit_watch, "has_changes", decode_for_ever)
        assert watch.look() is not None
    assert watch.look() is None, "it is announced"
    assert capture_to(watch.source).transactions == 1
    publisher.run("insert into t values (2)")
    assert watch.look() is not None, "the session is still of use"
    watch.close()


def test_who_follows_and_does_nothing_leaves_the_capture_to_others(
    publisher: Database, set_up: Callable[..., Captured], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.run("create table t (id int); create publication p for table t")
    watch = watch_log(set_up(), greatest_seconds=0.0)
    with connect_follower(watch.source):
        publisher.run("insert into t values (1)")
        assert watch.look() is None
        monkeypatch.setattr(followers, "SILENT_SECONDS", 0.0)
        assert watch.look() is not None
    watch.close()
