"""Transactions that the server streams before they end are in the log as if it had not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cdc_replay.errors import DecodingFailed
from cdc_replay.model.lsn import Lsn
from cdc_replay.pgoutput.messages import Delete, Insert, Update
from cdc_replay.pgoutput.reader import decode
from cdc_replay.postgres.connection import Connection
from embedded.postgres import Cluster
from fixtures.native import NativeSubscription
from fixtures.postgres import Database, create_database
from integration.capture.twins import WORK_MEMORY, Twins, inserted

TABLE = "create table t (id int primary key, a text); create publication p for table t;"
LARGE = 1000
"""Rows that need more than the server's memory for a transaction."""


def insert_many(connection: Connection, first: int, rows: int = LARGE, table: str = "t") -> None:
    numbers = f"generate_series({first}, {first + rows - 1}) g"
    connection.execute(f"insert into {table} select g, repeat('x', 20) from {numbers}".encode())


def writer(database: Database) -> Connection:
    """A session without autocommit."""
    connection = database.connect()
    connection.autocommit = False
    return connection


def test_stream_without_savepoints_rolled_back_at_several_depths(publisher: Database, tmp_path: Path) -> None:
    """R9.2, R9.5: rolled-back savepoints are dropped with nested ones, released ones keep their position."""
    publisher.run(TABLE + "alter table t replica identity full")
    twins = Twins.of(publisher, tmp_path, streaming=True)
    with writer(publisher) as session:
        insert_many(session, 0)
        session.execute("savepoint outer_one")
        insert_many(session, 10_000)
        session.execute("savepoint inner_one")
        session.execute("update t set a = 'rolled back' where id < 1000")
        session.execute("savepoint innermost")
        session.execute("delete from t")
        session.execute("rollback to inner_one")
        insert_many(session, 20_000)
        session.execute("release inner_one")
        insert_many(session, 30_000)
        session.execute("rollback to outer_one")
        session.execute("savepoint kept")
        session.execute("savepoint kept_below")
        insert_many(session, 40_000)
        session.execute("release kept")
        session.commit()

    assert twins.sent().keys() >= set("SEAc")
    rows = twins.settle()

    assert len(rows) == inserted(rows) == 2 * LARGE


def test_reused_savepoint_name_is_captured(publisher: Database, tmp_path: Path) -> None:
    """R9.5: each use is a subtransaction of its own; some are large enough to be streamed, some are not."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, streaming=True)
    with writer(publisher) as session:
        for number in range(12):
            session.execute("savepoint s")
            insert_many(session, number * 10_000, LARGE if number % 2 else 1)
            session.execute("rollback to s" if number % 3 else "release s")
        session.commit()

    assert twins.sent()["A"] > 0
    rows = twins.settle()

    # Numbers 0, 3, 6 and 9 are released: 1, LARGE, 1 and LARGE rows.
    assert inserted(rows) == len(rows) == 2 + 2 * LARGE


def test_rolled_back_savepoint_that_was_never_streamed_is_dropped(
    publisher: Database, tmp_path: Path
) -> None:
    """R9.5: no A names it, and nothing of it is sent."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, streaming=True)
    with writer(publisher) as session:
        insert_many(session, 0)
        session.execute("savepoint s")
        session.execute("insert into t values (-1, 'rolled back')")
        session.execute("rollback to s")
        insert_many(session, 10_000)
        session.commit()

    rows = twins.settle()

    assert inserted(rows) == len(rows) == 2 * LARGE


def test_transactions_rolled_back_after_streaming_are_dropped(publisher: Database, tmp_path: Path) -> None:
    """R9.2, R9.5, R1.26: while it is open, and once it is not."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, streaming=True)
    with writer(publisher) as session:
        insert_many(session, 0)
        publisher.run("insert into t values (-1, 'kept')")
        assert twins.sent()["S"] > 0
        assert inserted(twins.settle()) == 1
        insert_many(session, 10_000)
        session.rollback()
    publisher.run("insert into t values (-2, 'kept')")

    assert twins.sent()["c"] == 0
    rows = twins.settle()

    assert inserted(rows) == len(rows) == 2


def test_streamed_transactions_without_published_changes_are_empty(
    publisher: Database, tmp_path: Path
) -> None:
    """R9.4, R1.27: S, E and c come for them; they are no transactions of the log."""
    publisher.run(TABLE + "create table other (id int, a text)")
    twins = Twins.of(publisher, tmp_path, streaming=True)
    with writer(publisher) as session:
        insert_many(session, 0, table="other")
        session.execute("savepoint s")
        insert_many(session, 0)
        session.execute("rollback to s")
        session.commit()

    assert twins.sent()["c"] == 1
    outcome = twins.subject.capture()

    assert (outcome.transactions, outcome.messages) == (0, 0)
    assert twins.settle() == []


def test_interleaved_streamed_transactions_are_captured(publisher: Database, tmp_path: Path) -> None:
    """R9.1, R1.28: their blocks alternate, with small ones in between; the order is that of the commits."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, streaming=True)
    with writer(publisher) as session, writer(publisher) as two, writer(publisher) as three:
        for part in range(3):
            for number, connection in enumerate((session, two, three)):
                insert_many(connection, (number + 1) * 100_000 + part * 10_000)
                publisher.run(f"insert into t values ({-10 * part - number - 1}, 'small')")
        three.commit()
        session.rollback()
        two.commit()

    assert twins.sent()["S"] >= 6
    rows = twins.settle()

    xids = list(dict.fromkeys(row["xid"] for row in rows))
    assert [sum(row["xid"] == xid for row in rows) for xid in xids] == [1] * 9 + [3 * LARGE] * 2


@pytest.mark.parametrize("wal_bytes", [1 << 14, 512 << 20])
def test_streamed_transaction_open_over_many_pulls_is_captured(
    publisher: Database, tmp_path: Path, wal_bytes: int
) -> None:
    """R1.24, R1.26: each pull gets it from its beginning again and keeps nothing; its end brings it whole.

    Pulls of any size, in processes that are killed, too.
    """
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, streaming=True, wal_bytes_per_pull=wal_bytes)
    with writer(publisher) as session:
        for part in range(2):
            insert_many(session, part * 10_000)
            session.execute("savepoint s")
            insert_many(session, 100_000 + part * 10_000)
            session.execute("rollback to s")
            publisher.run(f"insert into t values ({-part - 1}, 'small')")
            assert twins.sent()["S"] > part
            twins.subject.capture_killed_at("capture.after_commit")
            assert inserted(twins.subject.rows()) == part + 1
            twins.subject.capture()
        session.commit()
    twins.subject.capture_killed_at("capture.after_segment")

    assert inserted(twins.settle()) == 2 + 2 * LARGE


def test_transaction_streamed_in_one_pull_and_plain_in_next_is_captured_once(
    publisher: Database, tmp_path: Path
) -> None:
    """R1.26: here because the server has more memory for it when it is sent again."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, streaming=True)
    with writer(publisher) as session:
        insert_many(session, 0)
        publisher.run("insert into t values (-1, 'small')")
        assert twins.sent()["S"] > 0
        twins.subject.capture()
        publisher.run(f"alter database {publisher.name} set logical_decoding_work_mem = '64MB'")
        insert_many(session, 10_000)
        session.commit()

    assert twins.sent()["S"] == 0
    assert inserted(twins.settle()) == 1 + 2 * LARGE


def test_relation_versions_change_inside_streamed_transaction(publisher: Database, tmp_path: Path) -> None:
    """R1.16, R9.10: also in a rolled-back savepoint; other transactions commit in between and after."""
    publisher.run(TABLE + "create table u (id int primary key, a text); alter publication p add table u")
    twins = Twins.of(publisher, tmp_path, streaming=True)
    publisher.run("insert into t values (-1, 'before'); insert into u values (-1, 'before')")
    with writer(publisher) as session:
        insert_many(session, 0)
        insert_many(session, 0, table="u")
        publisher.run("insert into u values (-2, 'between')")
        session.execute("alter table t add column b int default 7")
        session.execute("insert into t select g, 'x', 8 from generate_series(30000, 31999) g")
        session.execute("savepoint s")
        session.execute("alter table t add column gone int")
        session.execute("insert into t select g, 'x', 9, 10 from generate_series(40000, 41999) g")
        session.execute("rollback to s")
        publisher.run("insert into u values (-3, 'between')")
        session.commit()
    publisher.run("insert into t values (-2, 'after', 1); insert into u values (-4, 'after')")

    assert twins.sent().keys() >= set("RAc")
    rows = twins.settle()

    relations = twins.subject.log.relations()
    of_t = [relations[row["relation_version"]] for row in rows]
    assert {relation.column_names for relation in of_t} == {("id", "a"), ("id", "a", "b")}
    assert inserted(rows) == len(rows) == 2 + LARGE + LARGE + 2 + 2000 + 2


def test_undecodable_stream_is_read_without_streaming(publisher: Database, tmp_path: Path) -> None:
    """R1.36: changed in a savepoint, rolled back, changed again: it can be decoded once it is complete."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, streaming=True)
    with writer(publisher) as session:
        insert_many(session, 0)
        session.execute("savepoint s")
        session.execute("alter table t add column gone int default 5")
        session.execute("insert into t select g, 'x', 6 from generate_series(10000, 11999) g")
        session.execute("rollback to s")
        insert_many(session, 20_000)
        session.execute("alter table t add column b int default 7")
        session.execute("insert into t select g, 'x', 8 from generate_series(30000, 31999) g")
        publisher.run("create table other (id int)")
        with pytest.raises(DecodingFailed, match="could not map"):
            twins.sent()
        twins.subject.capture()
        assert twins.subject.rows() == []
        session.commit()

    rows = twins.settle()

    assert inserted(rows) == len(rows) == 2 * LARGE + 2000
    relations = twins.subject.log.relations()
    shapes = [relations[row["relation_version"]].column_names for row in rows]
    assert shapes == [("id", "a")] * 2 * LARGE + [("id", "a", "b")] * 2000


def test_streamed_transaction_has_every_kind_of_change(publisher: Database, tmp_path: Path) -> None:
    """TRUNCATE, values stored out of line, ON CONFLICT, updates with and without keys; others' messages."""
    publisher.run(
        TABLE
        + "alter table t alter a set storage external; create table u (id int primary key);"
        + "alter publication p add table u; insert into t values (-1, 'x')"
    )
    twins = Twins.of(publisher, tmp_path, streaming=True)
    with writer(publisher) as session:
        insert_many(session, 0)
        session.execute("select pg_logical_emit_message(true, 'p', 'inside')")
        session.execute("insert into t select g, repeat('y', 9000) from generate_series(10000, 10019) g")
        session.execute("update t set id = id + 1000000 where id = 10000")
        session.execute("update t set a = a where id = 10001")
        session.execute("insert into t values (1, 'new') on conflict (id) do update set a = excluded.a")
        session.execute("insert into t values (1, 'new') on conflict do nothing")
        session.execute("insert into u select generate_series(1, 2000)")
        session.execute("truncate u")
        session.execute("select pg_logical_emit_message(false, 'p', 'at once')")
        session.execute("delete from t where id between 500 and 600")
        session.commit()

    assert twins.sent().keys() >= set("SEc") - set("A")
    rows = twins.settle()

    kinds = [row["kind"] for row in rows]
    assert (kinds.count("M"), kinds.count("T"), kinds.count("D")) == (0, 1, 101)
    assert inserted(rows) == LARGE + 20 + 2000
    updates = [decode(row["message"]) for row in rows if row["kind"] == "U"]
    # Only the one that changes the key has an old tuple (R1.6).
    with_old = [isinstance(update, Update) and update.old is not None for update in updates]
    assert with_old == [True, False, False]
    toasted = [decode(row["message"]) for row in rows if row["kind"] == "I" and len(row["message"]) > 9000]
    assert len(toasted) == sum(isinstance(change, Insert) for change in toasted) == 20


def test_logical_messages_of_rolled_back_savepoints_are_dropped(publisher: Database, tmp_path: Path) -> None:
    """R1.9: streamed messages do not name their savepoint; foreign messages are dropped in both forms."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, streaming=True)
    with writer(publisher) as session:
        insert_many(session, 0)
        session.execute("savepoint s")
        session.execute("select pg_logical_emit_message(true, 'p', 'rolled back')")
        insert_many(session, 10_000)
        session.execute("rollback to s")
        session.commit()

    twins.subject.capture()
    twins.plain.capture()

    streamed, plain = (
        [(row["commit_lsn"], row["kind"], row["message"]) for row in captured.rows()]
        for captured in (twins.subject, twins.plain)
    )
    assert len(plain) == LARGE
    assert streamed == plain


def test_streamed_transaction_has_its_origin(publisher: Database, tmp_path: Path) -> None:
    """R9.6: known from its first block on; a logical message in front hides it, as DDL there does."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, streaming=True)
    name = f"origin_{publisher.name}"
    with writer(publisher) as session:
        session.execute("select pg_replication_origin_create(%s)", (name,))
        session.commit()
        session.execute("select pg_replication_origin_session_setup(%s)", (name,))
        insert_many(session, 0)
        insert_many(session, 10_000)
        session.commit()
        rows = twins.settle()
        assert {row["origin"] for row in rows} == {name}

        session.execute("select pg_logical_emit_message(true, 'p', 'first')")
        insert_many(session, 20_000)
        session.commit()
        session.execute("select pg_replication_origin_session_reset()")
        session.commit()
    twins.subject.capture()
    twins.plain.capture()
    end_lsn = rows[-1]["commit_lsn"]
    origins = [
        {row["origin"] for row in captured.rows() if row["commit_lsn"] > end_lsn}
        for captured in (twins.subject, twins.plain)
    ]
    assert origins == [{None}, {name}]
    publisher.run(f"select pg_replication_origin_drop('{name}')")


def test_unflushed_commits_are_captured(publisher: Database, tmp_path: Path) -> None:
    """R1.21: a streamed transaction that committed with synchronous_commit = off is waited for."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, streaming=True)
    with writer(publisher) as session:
        for number in range(3):
            session.execute("set local synchronous_commit = off")
            insert_many(session, number * 10_000)
            session.commit()
            twins.subject.capture()
            assert inserted(twins.subject.rows()) == (number + 1) * LARGE
    twins.settle()


def test_publisher_crash_ends_open_streams(new_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """R9.16, R1.30: open transactions are lost; captured ones are not captured again."""
    cluster = new_cluster("crashing", logical_decoding_work_mem=WORK_MEMORY)
    cluster.create()
    cluster.start()
    database = create_database(cluster, "crashing")
    database.run(TABLE)
    twins = Twins.of(database, tmp_path, streaming=True)
    session = writer(database)
    insert_many(session, 0)
    database.run("insert into t values (-1, 'before')")
    assert twins.sent()["S"] > 0
    twins.subject.capture()

    cluster.stop("immediate")
    session.close()
    cluster.start()
    database.run("insert into t values (-2, 'after')")
    database.run("checkpoint")
    database.run("insert into t values (-3, 'after')")

    # From 18 on, what is known to be aborted is not streamed at all (R1.27).
    assert ("A" in twins.sent()) == (database.version < 18)
    rows = twins.settle()
    assert inserted(rows) == len(rows) == 3
    lsns = [Lsn(row["commit_lsn"]) for row in rows]
    assert lsns == sorted(set(lsns))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_workload_equals_plain_capture(
    seed: int, publisher: Database, subscriber: Database, tmp_path: Path
) -> None:
    """R9.1-R9.5: three sessions at random, and PostgreSQL's own streaming subscription beside them."""
    publisher.run(TABLE + "alter table t replica identity full")
    subscriber.run("create table t (id int primary key, a text)")
    native = NativeSubscription(publisher, subscriber, f"native_{publisher.name}")
    native.create(["p"], {"streaming": True})
    twins = Twins.of(publisher, tmp_path, streaming=True)
    workload = _Workload(publisher, random.Random(seed))
    for _ in range(30):
        workload.step()
        if workload.random.random() < 0.1:
            twins.subject.capture()
    workload.end()

    rows = twins.settle()

    native.wait()
    state: dict[bytes | None, bytes | None] = {}
    for row in rows:
        match decode(row["message"]):
            case Insert(new=new):
                state[new.values[0]] = new.values[1]
            case Update(old=old, new=new) if old is not None:
                state.pop(old.values[0])
                state[new.values[0]] = new.values[1]
            case Delete(old=old):
                state.pop(old.values[0])
            case other:
                pytest.fail(f"unexpected {other}")
    expected = {str(key).encode(): value.encode() for key, value in subscriber.rows("select id, a from t")}
    assert state == expected, f"seed {seed}"


class _Workload:
    """Three sessions with savepoints, each with keys of its own."""

    def __init__(self, database: Database, source: random.Random) -> None:
        self.random = source
        self._sessions = [writer(database) for _ in range(3)]
        self._depths = [0, 0, 0]
        self._next = [1, 1_000_001, 2_000_001]

    def step(self) -> None:
        number = self.random.randrange(3)
        actions = (self._insert, self._insert, self._change, self._savepoint, self._back, self._finish)
        self.random.choice(actions)(number)

    def end(self) -> None:
        for session in self._sessions:
            session.commit()
            session.close()

    def _insert(self, number: int) -> None:
        rows = self.random.choice((1, 30, LARGE))
        insert_many(self._sessions[number], self._next[number], rows)
        self._next[number] += rows

    def _change(self, number: int) -> None:
        first = number * 1_000_000
        where = f"id > {first} and id <= {first + 1_000_000} and id % 3 = {self.random.randrange(3)}"
        statement = self.random.choice(
            (f"update t set a = a || 'y' where {where}", f"delete from t where {where}")
        )
        self._sessions[number].execute(statement.encode())

    def _savepoint(self, number: int) -> None:
        self._sessions[number].execute(b"savepoint s")
        self._depths[number] += 1

    def _back(self, number: int) -> None:
        if self._depths[number]:
            what = self.random.choice((b"rollback to s", b"release s"))
            self._sessions[number].execute(what)
            self._depths[number] -= what == b"release s"

    def _finish(self, number: int) -> None:
        if self.random.random() < 0.3:
            self._sessions[number].rollback()
        else:
            self._sessions[number].commit()
        self._depths[number] = 0
