"""Errors of executors reach the driver unchanged, and none shows a whole row."""

from __future__ import annotations

import pickle

import pytest
from psycopg import errors as pg

from cdc_replay.errors import (
    ApplyConflict,
    CdcReplayError,
    MissingPrivilege,
    Retry,
    ServerUnavailable,
    SubscriberLocked,
    SubscriberNotWritable,
    TargetMismatch,
)
from cdc_replay.model.frames import ConflictKind
from cdc_replay.model.relation import QualifiedName
from cdc_replay.replay.apply.conflicts import apply_errors, duplicate_key, staging_error

TARGET = QualifiedName("public", "t")


@pytest.mark.parametrize(
    ("server_says", "ours"),
    [
        (pg.InvalidTextRepresentation("bad"), ApplyConflict),
        (pg.NumericValueOutOfRange("bad"), ApplyConflict),
        (pg.InsufficientPrivilege("bad"), MissingPrivilege),
        (pg.AdminShutdown("bad"), ServerUnavailable),
        (pg.OperationalError("connection lost"), ServerUnavailable),
        (pg.DiskFull("bad"), SubscriberNotWritable),
        (pg.ReadOnlySqlTransaction("bad"), SubscriberNotWritable),
        (pg.LockNotAvailable("bad"), SubscriberLocked),
        (pg.DeadlockDetected("bad"), SubscriberLocked),
        (pg.UndefinedColumn("bad"), TargetMismatch),
        (pg.RaiseException("bad"), ApplyConflict),
        (pg.ProgramLimitExceeded("bad"), ApplyConflict),
        (pg.InternalError_("bad"), CdcReplayError),
    ],
)
def test_staging_errors_reach_the_driver_without_loss(
    server_says: pg.Error, ours: type[CdcReplayError]
) -> None:
    error = pickle.loads(pickle.dumps(staging_error(server_says, TARGET)))
    assert type(error) is ours
    assert str(server_says) in error.message
    known_by_table = ours not in {MissingPrivilege, ServerUnavailable}
    assert error.table == (("public", "t") if known_by_table else None)


def test_cancelled_statement_may_be_retried() -> None:
    error = staging_error(pg.QueryCanceled("bad"), TARGET)
    assert (type(error), error.retry) == (ServerUnavailable, Retry.LATER)
    assert 'table "public"."t" of the subscriber: bad' in error.message


def test_missing_privilege_names_the_table_and_the_grant() -> None:
    """The server's message has neither schema nor side."""
    denied = pg.InsufficientPrivilege("permission denied for table t")
    failed = staging_error(denied, TARGET)
    assert 'table "public"."t" of the subscriber: permission denied for table t' in failed.message
    with pytest.raises(MissingPrivilege) as raised, apply_errors(TARGET):
        raise denied
    assert 'table "public"."t" of the subscriber: permission denied for table t' in raised.value.message
    for error in (failed, raised.value):
        assert "On the subscriber, grant the role SELECT, INSERT, UPDATE and DELETE" in str(error.hint)


def test_read_only_subscriber_is_named_as_such() -> None:
    error = staging_error(pg.ReadOnlySqlTransaction("cannot execute INSERT"), TARGET)
    assert (type(error), error.retry) == (SubscriberNotWritable, Retry.LATER)
    for words in ("The subscriber is read-only", "standby", "default_transaction_read_only", "primary"):
        assert words in str(error.hint)


@pytest.mark.parametrize(
    ("kind", "retry"),
    [
        (ApplyConflict, Retry.NEVER),
        (TargetMismatch, Retry.NEVER),
        (SubscriberNotWritable, Retry.LATER),
        (SubscriberLocked, Retry.LATER),
        (ServerUnavailable, Retry.LATER),
    ],
)
def test_error_class_decides_whether_to_retry(kind: type[CdcReplayError], retry: Retry) -> None:
    """Only permanent errors park."""
    assert kind.retry is retry


def test_conflicts_name_the_first_keys_and_count_the_others() -> None:
    error = duplicate_key(ConflictKind.INSERT_EXISTS, TARGET, "t_pkey", 7, ["(id)=(1)", "(id)=(2)"])
    assert error.message == 'duplicate key value violates unique constraint "t_pkey" of table "public"."t"'
    assert error.detail == "insert_exists: key (id)=(1), (id)=(2) already exists, and 5 more."
