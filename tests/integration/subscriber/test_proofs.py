"""Proofs in the subscriber's schema: added to, bounded, kept apart by table, added to the state of old."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proof import BUCKETS, Evidence, subscription_proof
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber import (
    proofs,
    state_schema,
    subscription_records,
    subscription_tables,
)
from cdc_replay.subscriber.proofs import TableSeen
from fixtures.postgres import ANY_DATABASE, Database

T, U = QualifiedName("public", "t"), QualifiedName("public", "u")
NOW = dt.datetime.now(dt.UTC)


@pytest.fixture
def connection(subscriber: Database) -> Iterator[Connection]:
    subscriber.run("create table t (id int); create table u (id int)")
    with connect(subscriber.dsn, purpose="proof test") as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(connection, "nsw", "1", ["p"], ANY_DATABASE)
        for name in (T, U):
            subscription_tables.set_table_state(connection, "nsw", name, Ready(Lsn(1)))
        yield connection


def seen(
    name: QualifiedName, lsn: int, buckets: Collection[int] = range(BUCKETS), *, turn: int = 1
) -> TableSeen:
    evidence = Evidence("d", turn, Lsn(lsn), NOW, frozenset(buckets))
    return TableSeen(name, 10, 0, 8192, 0.5, evidence)


def record(
    connection: Connection, lsn: int, *tables: TableSeen, owed: dict[QualifiedName, int] | None = None
) -> None:
    proofs.record_proofs(connection, "nsw", Lsn(lsn), tables, published=[T, U], owed=owed or {})


def through(connection: Connection) -> dict[str, int | None]:
    found = proofs.read_summaries(connection, "nsw")
    return {
        name.name: None if summary.proven is None else summary.proven.lsn.value
        for name, summary in found.items()
    }


def test_each_table_has_a_proof_of_its_own(connection: Connection) -> None:
    assert proofs.read_summaries(connection, "nsw") == {}
    record(connection, 5, seen(T, 5))
    assert through(connection) == {"t": 5, "u": None}
    assert subscription_proof(proofs.read_summaries(connection, "nsw").values()) is None
    record(connection, 9, seen(U, 9, range(100)))
    record(connection, 11, seen(U, 11, range(100, BUCKETS), turn=2))
    assert through(connection) == {"t": 5, "u": 9}
    point = subscription_proof(proofs.read_summaries(connection, "nsw").values())
    assert point is not None
    assert (point.lsn, point.at) == (Lsn(5), NOW)
    # What the server sums up is what the buckets say.
    stored = {entry.name: entry.proof.summary for entry in proofs.read_proofs(connection, "nsw")}
    assert stored == proofs.read_summaries(connection, "nsw")


def test_what_was_not_reached_is_owed_until_it_is_compared(connection: Connection) -> None:
    record(connection, 5, seen(T, 5), owed={U: 256})
    owed = {entry.name: entry.proof.owed for entry in proofs.read_proofs(connection, "nsw")}
    assert owed == {T: 0, U: 256}
    assert through(connection) == {"t": 5, "u": None}
    record(connection, 6, seen(U, 6))
    assert all(entry.proof.owed == 0 for entry in proofs.read_proofs(connection, "nsw"))


def test_an_error_is_in_the_history_and_proves_nothing(connection: Connection) -> None:
    record(connection, 5, seen(T, 5))
    record(connection, 6, TableSeen(T, 0, 0, 0, 0.1, None, "no <b>right</b>"))
    newest, first = proofs.table_history(connection, "nsw", 10)[T]
    assert (newest.error, newest.buckets, newest.proven_through) == ("no <b>right</b>", 0, "0/5")
    assert (first.error, first.buckets, first.row_count, first.bytes) == (None, BUCKETS, 10, 8192)


def test_the_history_of_a_table_is_bounded(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "ROWS_KEPT_PER_TABLE", 3)
    record(connection, 1, seen(U, 1))
    for lsn in range(1, 12):
        record(connection, lsn, seen(T, lsn, turn=lsn))
    kept = proofs.table_history(connection, "nsw", 100)
    assert [entry.lsn for entry in kept[T]] == ["0/B", "0/A", "0/9"]
    assert len(kept[U]) == 1
    connection.execute("update cdc_replay.proof_history set finished = finished - interval '91 days'")
    record(connection, 12, seen(T, 12, turn=12))
    assert [entry.lsn for entry in proofs.table_history(connection, "nsw", 100)[T]] == ["0/C"]


def test_validations_that_end_together_add_to_each_other(
    connection: Connection, subscriber: Database
) -> None:
    def add(part: int) -> None:
        with connect(subscriber.dsn, purpose="beside") as beside:
            record(beside, 5, seen(T, 5, range(part * 32, part * 32 + 32)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    assert through(connection)["t"] == 5


def test_proofs_go_with_their_table_and_a_new_table_of_its_name_has_none(
    connection: Connection, subscriber: Database
) -> None:
    record(connection, 5, seen(T, 5), seen(U, 5))
    subscriber.run("drop table t; create table t (id int)")
    assert through(connection) == {"t": 5, "u": 5}  # of the dropped one
    subscription_tables.set_table_state(connection, "nsw", T, Ready(Lsn(1)))
    assert through(connection) == {"t": None, "u": 5}
    record(connection, 7, seen(T, 7))
    assert through(connection) == {"t": 7, "u": 5}
    connection.execute("delete from cdc_replay.subscription where name = 'nsw'")
    assert connection.execute("select from cdc_replay.table_proof").fetchall() == []
    assert connection.execute("select from cdc_replay.proof_history").fetchall() == []
