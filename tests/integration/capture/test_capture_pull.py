"""Slot → change log: everything that commits, once, in commit order, whatever happens in between."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from fixtures.captured import Captured
from fixtures.postgres import Database

from cdc_replay.capture.pull import capture_changes, current_position
from cdc_replay.capture.slot import only_reader
from cdc_replay.catalog.history import catalog_from_json
from cdc_replay.errors import ChangeLogMismatch, ChangeLogMissing, SlotActive, SlotLost, SlotMissing
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.postgres.replication import advance_slot

SetUp = Callable[..., Captured]

TABLE = "create table t (id int primary key, a text); create publication p for table t;"


def inserted(captured: Captured) -> list[str | None]:
    """The ids of the inserted rows in the order of the log."""
    return [values[0] for kind, values in captured.changes() if kind == "I"]


def test_committed_changes_are_in_the_log_in_commit_order_and_aborted_ones_are_not(
    publisher: Database, set_up: SetUp
) -> None:
    """R9.1, R9.2: the later transaction commits first; a rolled back savepoint and a rollback leave nothing."""
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


def test_every_row_names_a_relation_version_that_the_log_can_describe(
    publisher: Database, set_up: SetUp
) -> None:
    """R1.13: the shape before and after ALTER TABLE are two versions; a truncate has none."""
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
    assert captured.log.relation_versions(window) == {first["relation_version"], second["relation_version"]}


def test_bounded_pulls_reach_the_target_and_lose_nothing(publisher: Database, set_up: SetUp) -> None:
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
    assert reached[-1] == captured.log.end_lsn == Lsn.parse(captured.slot("confirmed_flush_lsn"))


def test_an_empty_pull_moves_the_log_and_the_slot_but_adds_no_file(publisher: Database, set_up: SetUp) -> None:
    """Changes that nobody publishes still let the slot go on, so that it does not retain their WAL."""
    publisher.run(TABLE + "create table other (id int)")
    captured = set_up()
    before = captured.log.end_lsn
    publisher.run("insert into other select generate_series(1, 100)")

    outcome = captured.capture()

    assert outcome.messages == 0
    assert captured.log.end_lsn > before
    assert captured.log.end_lsn == Lsn.parse(captured.slot("confirmed_flush_lsn"))
    assert captured.log.segments(Window(Lsn(0), captured.log.end_lsn)) == ()


def test_a_target_inside_an_open_transaction_does_not_lose_it(publisher: Database, set_up: SetUp) -> None:
    """R1.21, R1.29: changes before the slot's position are sent if their commit is behind it."""
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


def test_asynchronous_commits_are_captured(publisher: Database, set_up: SetUp) -> None:
    """R1.21: a commit that is visible but not flushed yet is waited for."""
    publisher.run(TABLE)
    captured = set_up()
    with publisher.connect() as writer:
        writer.execute("set synchronous_commit = off")
        for number in range(5):
            writer.execute("insert into t values (%s, 'x')", (number,))
            captured.capture()
            assert inserted(captured) == [str(one) for one in range(number + 1)]


@pytest.mark.parametrize(
    "failpoint", ["capture.after_peek", "capture.after_segment", "capture.after_commit", "capture.after_advance"]
)
def test_a_killed_capture_loses_and_doubles_nothing(
    failpoint: str, publisher: Database, set_up: SetUp
) -> None:
    """R1.30: what the log holds already is not added again, what it does not hold is read again."""
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


def test_a_slot_that_is_behind_its_log_is_moved_to_the_log(publisher: Database, set_up: SetUp) -> None:
    """R1.30: a crash of the publisher can take the slot back; the log is durable."""
    publisher.run(TABLE)
    captured = set_up()
    publisher.run("insert into t values (1, 'x')")
    captured.capture_killed_at("capture.after_commit")
    assert Lsn.parse(captured.slot("confirmed_flush_lsn")) < captured.log.end_lsn

    captured.capture(captured.log.end_lsn)

    assert Lsn.parse(captured.slot("confirmed_flush_lsn")) == captured.log.end_lsn
    assert inserted(captured) == ["1"]


def test_streamed_transactions_have_the_same_rows_as_others(publisher: Database, set_up: SetUp) -> None:
    """R9.5, R1.26: two interleaved large transactions with savepoints rolled back, streamed and not."""
    publisher.run(TABLE + "alter table t replica identity full")
    captured = set_up(streaming=True)
    other = f"{captured.source.slot}_plain"
    plain = Captured(
        publisher,
        *_beside(captured, other),
    )
    with publisher.connect() as first, publisher.connect() as second:
        first.autocommit = second.autocommit = False
        for part in range(3):
            for number, connection in enumerate((first, second)):
                start = number * 1_000_000 + part * 10_000
                connection.execute(
                    "insert into t select g, repeat('x', 20) from generate_series(%s::int, %s::int) g",
                    (start, start + 1500),
                )
                connection.execute("savepoint s")
                connection.execute("update t set a = 'rolled back'")
                connection.execute("savepoint deeper")
                connection.execute("delete from t where id %% 2 = %s", (part % 2,))
                connection.execute("rollback to s")
                connection.execute("update t set a = 'kept' where id %% 100 = %s", (part,))
        second.commit()
        first.execute("select pg_logical_emit_message(true, 'p', 'transactional')")
        first.commit()
    with publisher.connect() as reader:
        reader.execute("set logical_decoding_work_mem = '64kB'")
        streamed = {
            bytes(data[:1])
            for (data,) in reader.execute(
                "select data from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version', '2',"
                " 'streaming', 'on', 'publication_names', 'cdc_replay_capture_i,cdc_replay_capture_u,"
                "cdc_replay_capture_d,cdc_replay_capture_t')",
                (captured.source.slot,),
            ).fetchall()
        }
    assert {b"S", b"E", b"A", b"c"} <= streamed, "the workload must stream for the test to mean anything"

    publisher.run(f"alter database {publisher.name} set logical_decoding_work_mem = '64kB'")
    captured.capture()
    publisher.run(f"alter database {publisher.name} reset logical_decoding_work_mem")
    plain.capture()

    assert captured.rows() == plain.rows()
    assert len(captured.rows()) > 9000


def _beside(captured: Captured, slot: str) -> tuple[object, object]:
    raise NotImplementedError
