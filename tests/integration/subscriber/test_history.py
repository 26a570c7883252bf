"""The history of windows and validations: appended, bounded, summed up for charts, added to old state."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

import pytest

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import ReplayResult
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber import history, proofs, state_schema, subscription_records
from cdc_replay.subscriber.history import TimeRange
from fixtures.postgres import ANY_DATABASE, Database


@pytest.fixture
def connection(subscriber: Database) -> Iterator[Connection]:
    with connect(subscriber.dsn, purpose="history test") as connection:
        state_schema.install(connection)
        for name in ("nsw", "act"):
            subscription_records.bind_subscription(connection, name, "1", ["p"], ANY_DATABASE)
        yield connection


def window(after: int, upto: int, changes_read: int = 0) -> ReplayResult:
    return ReplayResult(
        "nsw",
        Lsn(after),
        Lsn(upto),
        1.5,
        changes_read=changes_read,
        filtered_out=changes_read // 2,
        updates_to_insert=1,
        applied={"insert": 2, "update": 1},
        conflicts={"update_missing": 3},
    )


def ends(connection: Connection) -> list[str]:
    return [record.end_lsn for record in history.last_windows(connection, "nsw", 100)]


def test_windows_are_read_newest_first_as_they_were_appended(connection: Connection) -> None:
    history.append_window(connection, window(1, 2, 10), lag_seconds=4.0, lag_bytes=99)
    history.append_window(connection, window(2, 3).failed_with(ValueError("no such <b>row</b>")))
    failed, applied = history.last_windows(connection, "nsw", 10)
    assert (applied.from_lsn, applied.end_lsn, applied.changes_read, applied.filtered_out) == (
        "0/1",
        "0/2",
        10,
        5,
    )
    assert (applied.applied, applied.conflicts, applied.lag_seconds, applied.lag_bytes) == (3, 3, 4.0, 99)
    assert (failed.error, failed.lag_seconds) == ("no such <b>row</b>", None)
    assert history.last_windows(connection, "act", 10) == ()


def test_empty_windows_are_appended_once_a_minute(connection: Connection) -> None:
    for upto in (2, 3, 4):
        history.append_window(connection, window(1, upto))
    history.append_window(connection, window(4, 5, 1))
    assert ends(connection) == ["0/5", "0/2"]
    connection.execute("update cdc_replay.window_history set finished = finished - interval '61 seconds'")
    history.append_window(connection, window(5, 6))
    assert ends(connection) == ["0/6", "0/5", "0/2"]


def test_old_rows_are_deleted(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "ROWS_KEPT", 3)
    for upto in range(2, 12):
        history.append_window(connection, window(1, upto, 1))
    assert len(ends(connection)) <= 4
    connection.execute("update cdc_replay.window_history set finished = finished - interval '31 days'")
    history.append_window(connection, window(1, 99, 1))
    assert ends(connection) == ["0/63"]


def test_points_of_a_chart_have_the_greatest_lag_and_the_sum_of_the_rows(connection: Connection) -> None:
    for lag in (1.0, 7.0, 2.0):
        history.append_window(connection, window(1, 2, 10), lag_seconds=lag, lag_bytes=int(lag))
    connection.execute("update cdc_replay.window_history set finished = '2001-01-01' where lag_seconds = 2")
    connection.execute("update cdc_replay.window_history set finished = now() where lag_seconds > 2")
    connection.execute("update cdc_replay.window_history set finished = now() where lag_seconds = 1")
    for time_range in TimeRange:
        points = history.history_points(connection, "nsw", time_range)
        assert max(point.lag_seconds or 0 for point in points) == 7.0
        assert sum(point.applied for point in points) == 6


def test_validations_are_kept(connection: Connection) -> None:
    values: dict[str, int | float | str | bool] = {
        "consistent": False,
        "tables": 3,
        "differing_tables": 1,
        "differing_rows": 12,
        "seconds": 0.5,
        "report": "x.html",
    }
    history.append_validation(connection, "nsw", Lsn(9), values)
    (validation,) = history.last_validations(connection, "nsw", 10)
    assert (validation.lsn, validation.consistent, validation.differing_rows) == ("0/9", False, 12)
    assert dt.datetime.now(dt.UTC) - validation.finished < dt.timedelta(minutes=1)


def test_state_of_an_earlier_version_gets_the_tables(connection: Connection, subscriber: Database) -> None:
    connection.execute(
        "drop table cdc_replay.window_history, cdc_replay.validation_history, cdc_replay.proof_history,"
        " cdc_replay.table_proof, cdc_replay.lock_key"
    )
    assert history.last_windows(connection, "nsw", 10) == ()
    assert (proofs.read_summaries(connection, "nsw"), proofs.table_history(connection, "nsw", 9)) == ({}, {})
    assert subscription_records.subscription_record(connection, "nsw") is not None
    with connect(subscriber.dsn, purpose="upgrade") as writer:
        state_schema.install(writer)
    history.append_window(connection, window(1, 2, 1))
    assert ends(connection) == ["0/2"]
    assert subscription_records.subscription_record(connection, "nsw") is not None
