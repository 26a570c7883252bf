"""Prepared transactions are in the log at COMMIT PREPARED, as for a slot that knows nothing of PREPARE."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cdc_replay.postgres.peek import identifier_list
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS
from embedded.postgres import Cluster
from fixtures.native import NativeSubscription
from fixtures.postgres import Database, create_database
from integration.capture.twins import WORK_MEMORY, Twins, inserted

TABLE = "create table t (id int primary key, a text); create publication p for table t;"
LARGE = 2000


def prepare(database: Database, gid: str, first: int, rows: int = 1, more: str = "") -> None:
    """Insert rows and prepare the transaction; gids are the cluster's, so it gets the database's name too."""
    insert = f"insert into t select g, '{gid}' from generate_series({first}, {first + rows - 1}) g"
    database.run(f"begin; {more}; {insert}; prepare transaction '{gid}_{database.name}'")


def finish(database: Database, what: str, gid: str) -> None:
    database.run(f"{what} prepared '{gid}_{database.name}'")


def ids(twins: Twins) -> list[int]:
    """The inserted ids in the order of the subject's log."""
    return [int(values[0] or "") for kind, values in twins.subject.changes() if kind == "I"]


@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prepared_transactions_open_over_many_pulls_are_captured(
    publisher: Database, tmp_path: Path, *, streaming: bool
) -> None:
    """R9.7, R9.8: their order is that of their outcomes; both slots hold the same log after each pull.

    Prepared streamed and not; a gid is used again while the log still waits for nothing of its first use.
    """
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, two_phase=True, streaming=streaming)
    prepare(publisher, "one", 1, LARGE)
    prepare(publisher, "two", 10_001)
    prepare(publisher, "three", 20_001, LARGE)
    assert twins.sent().keys() >= set("Sp" if streaming else "bP")
    assert twins.settle() == []
    assert len(twins.subject.log.prepared.list_keys()) == 3

    publisher.run("insert into t values (0, 'ordinary')")
    twins.subject.capture_killed_at("capture.after_commit")
    finish(publisher, "rollback", "one")
    assert inserted(twins.settle()) == 1
    prepare(publisher, "one", 30_001, LARGE)
    twins.subject.capture_killed_at("capture.after_segment")
    finish(publisher, "commit", "three")
    assert inserted(twins.settle()) == 1 + LARGE
    finish(publisher, "commit", "one")
    assert inserted(twins.settle()) == 1 + 2 * LARGE
    finish(publisher, "commit", "two")
    assert inserted(twins.settle()) == 1 + 2 * LARGE + 1

    assert ids(twins) == [0, *range(20_001, 20_001 + LARGE), *range(30_001, 30_001 + LARGE), 10_001]
    assert twins.subject.log.prepared.list_keys() == ()


@pytest.mark.parametrize(
    "failpoint",
    ["capture.after_peek", "capture.after_segment", "capture.after_commit", "capture.after_advance"],
)
def test_capture_killed_before_and_at_outcome_loses_nothing(
    publisher: Database, tmp_path: Path, failpoint: str
) -> None:
    """R9.8, R1.30: the content is there once and goes once it is not needed."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, two_phase=True)
    prepare(publisher, "one", 1)
    prepare(publisher, "two", 2)
    twins.subject.capture_killed_at(failpoint)
    twins.settle()
    assert len(twins.subject.log.prepared.list_keys()) == 2
    finish(publisher, "commit", "one")
    finish(publisher, "rollback", "two")
    twins.subject.capture_killed_at(failpoint)
    publisher.run("insert into t values (3, 'after')")

    twins.settle()

    assert ids(twins) == [1, 3]
    assert twins.subject.log.prepared.list_keys() == ()


def test_transaction_prepared_and_finished_in_one_pull_is_captured(
    publisher: Database, tmp_path: Path
) -> None:
    """R9.8: among plain ones, with savepoints, with changing relations, and rolled-back ones in between."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, two_phase=True, streaming=True)
    savepoint = "savepoint s; insert into t select generate_series(500001, 503000); rollback to s"
    prepare(publisher, "one", 1, LARGE, more=savepoint)
    publisher.run("insert into t values (-1, 'between')")
    prepare(publisher, "two", 100_001)
    finish(publisher, "rollback", "two")
    finish(publisher, "commit", "one")
    prepare(publisher, "three", 200_001, LARGE, more="alter table t add column b int default 3")
    finish(publisher, "commit", "three")
    publisher.run("insert into t values (-2, 'after', 4)")

    rows = twins.settle()

    assert ids(twins) == [-1, *range(1, LARGE + 1), *range(200_001, 200_001 + LARGE), -2]
    relations = twins.subject.log.relations()
    assert [relations[rows[at]["relation_version"]].column_names for at in (0, 1, -2, -1)] == [
        ("id", "a"), ("id", "a"), ("id", "a", "b"), ("id", "a", "b"),
    ]  # fmt: skip


def test_prepared_transactions_without_changes_are_ignored(publisher: Database, tmp_path: Path) -> None:
    """R9.4, R9.9: only row locks, only unpublished changes; with either outcome, at once and later."""
    publisher.run(TABLE + "create table other (id int); insert into t values (1, 'x')")
    twins = Twins.of(publisher, tmp_path, two_phase=True)
    for outcome in ("commit", "rollback"):
        for number, statement in enumerate(("select from t for update", "insert into other values (1)")):
            gid = f"{outcome}_{number}_{publisher.name}"
            publisher.run(f"begin; {statement}; prepare transaction '{gid}'")
            if number == 0:
                publisher.run(f"{outcome} prepared '{gid}'")
    twins.settle()
    for outcome in ("commit", "rollback"):
        publisher.run(f"{outcome} prepared '{outcome}_1_{publisher.name}'")

    assert twins.settle() == []
    assert twins.subject.log.prepared.list_keys() == ()


def test_transaction_prepared_before_two_phase_is_captured(publisher: Database, tmp_path: Path) -> None:
    """R9.9: b, P and K are then sent together, at the commit. R1.25: one peek with two_phase enables it."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path)
    prepare(publisher, "early", 1)
    prepare(publisher, "dropped", 101)
    assert twins.settle() == []
    with publisher.connect() as connection:
        connection.execute(
            "select from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version', '3',"
            " 'two_phase', 'on', 'publication_names', %s)",
            (twins.subject.source.slot, identifier_list(tuple(CAPTURE_PUBLICATIONS.values()))),
        )
    assert twins.subject.slot("two_phase") == "true"
    prepare(publisher, "late", 201)
    twins.settle()
    finish(publisher, "commit", "late")
    finish(publisher, "rollback", "dropped")
    finish(publisher, "commit", "early")
    assert twins.sent()["P"] == 1

    twins.settle()

    assert ids(twins) == [201, 1]
    assert twins.subject.log.prepared.list_keys() == ()


def test_slot_option_two_phase_decides(publisher: Database, tmp_path: Path) -> None:
    """R1.25: with the lowest protocol version, and never asked for two_phase, b, P and K are sent."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, two_phase=True)
    prepare(publisher, "one", 1)
    finish(publisher, "commit", "one")

    with publisher.connect() as connection:
        first_bytes = connection.execute(
            "select chr(get_byte(data, 0)) from pg_logical_slot_peek_binary_changes(%s, null, null,"
            " 'proto_version', '1', 'publication_names', %s)",
            (twins.subject.source.slot, identifier_list(tuple(CAPTURE_PUBLICATIONS.values()))),
        ).fetchall()

    assert [letter for (letter,) in first_bytes] == list("bRIPK")
    twins.settle()
    assert ids(twins) == [1]


def test_prepared_transaction_has_its_origin(publisher: Database, tmp_path: Path) -> None:
    """R1.12: sent at PREPARE, needed at COMMIT PREPARED, which may come from another session."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, two_phase=True)
    name = f"origin_{publisher.name}"
    publisher.run(f"select pg_replication_origin_create('{name}')")
    setup = f"select pg_replication_origin_session_setup('{name}')"
    with publisher.connect() as connection:
        connection.execute(setup.encode())
        connection.execute(b"begin")
        connection.execute(b"insert into t values (1, 'far')")
        connection.execute(f"prepare transaction 'one_{publisher.name}'".encode())
    twins.subject.capture()
    finish(publisher, "commit", "one")

    twins.subject.capture()

    assert [row["origin"] for row in twins.subject.rows()] == [name]
    publisher.run(f"select pg_replication_origin_drop('{name}')")


@pytest.mark.parametrize("mode", [pytest.param("fast", marks=pytest.mark.slow), "immediate"])
def test_publisher_restart_keeps_prepared_transactions(
    new_cluster: Callable[..., Cluster], tmp_path: Path, mode: str
) -> None:
    """R1.30: after a crash P may be sent again, before and after the log's end."""
    cluster = new_cluster("restarting", logical_decoding_work_mem=WORK_MEMORY)
    cluster.create()
    cluster.start()
    database = create_database(cluster, "restarting")
    database.run(TABLE)
    twins = Twins.of(database, tmp_path, two_phase=True, streaming=True)
    prepare(database, "captured", 1, LARGE)
    twins.settle()
    prepare(database, "not captured", 100_001)
    prepare(database, "rolled back", 200_001)

    cluster.stop(mode)
    cluster.start()
    database.run("insert into t values (0, 'after')")
    twins.settle()
    assert len(twins.subject.log.prepared.list_keys()) == 3
    finish(database, "commit", "not captured")
    cluster.stop(mode)
    cluster.start()
    finish(database, "commit", "captured")
    finish(database, "rollback", "rolled back")

    twins.settle()

    assert ids(twins) == [0, 100_001, *range(1, LARGE + 1)]
    assert twins.subject.log.prepared.list_keys() == ()


def test_native_subscription_applies_prepared_transactions_with_log(
    publisher: Database, subscriber: Database, native: Database, tmp_path: Path
) -> None:
    """R9.7, R9.8: with two_phase and without, rows are there at COMMIT PREPARED."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, two_phase=True)
    subscriptions = []
    for database, two_phase in ((subscriber, False), (native, True)):
        database.run("create table t (id int primary key, a text)")
        subscription = NativeSubscription(publisher, database, f"native_{two_phase}_{publisher.name}".lower())
        subscription.create(["p"], {"two_phase": two_phase, "copy_data": False})
        subscription.wait()
        subscriptions.append(subscription)
    steps: tuple[Callable[[], None], ...] = (
        lambda: prepare(publisher, "one", 1, 3),
        lambda: prepare(publisher, "two", 11, 3),
        lambda: finish(publisher, "rollback", "one"),
        lambda: publisher.run("insert into t values (21, 'ordinary')"),
        lambda: finish(publisher, "commit", "two"),
    )
    for step in steps:
        step()
        twins.settle()
        for subscription in subscriptions:
            subscription.wait()
            seen = subscription.subscriber.rows("select id from t order by id")
            assert [number for (number,) in seen] == sorted(ids(twins))
    assert ids(twins) == [21, 11, 12, 13]
