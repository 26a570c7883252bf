"""R8.4, R8.5: conflicts with the subscriber's rows are counted, decided by policy, never half-applied."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from cdc_replay.errors import ApplyConflict, CdcReplayError, SubscriberNotReady
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import ConflictPolicy
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import recorded_results, subscription_tables
from fixtures.postgres import Database
from integration.replay.apply.windows import Changes, Target

Make = Callable[[ConflictPolicy], Target]

TABLE = """
    create table t (id int primary key, a int, own text default 'default');
    insert into t values (1, 1, 'own 1'), (2, 2, 'own 2'), (3, 3, 'own 3')
"""
UNTOUCHED = [(1, 1, "own 1"), (2, 2, "own 2"), (3, 3, "own 3")]


@pytest.fixture
def make(subscriber: Database) -> Make:
    def target(policy: ConflictPolicy) -> Target:
        subscriber.run(TABLE)
        return Target(subscriber.dsn, {"t": ("id", "a")}, policy)

    return target


@pytest.mark.parametrize("policy", ConflictPolicy)
def test_missing_row_is_counted_and_never_an_error(make: Make, policy: ConflictPolicy) -> None:
    """R8.4: an UPDATE never becomes an INSERT. Each message that matches no row counts."""
    target = make(policy)
    changes = target.window()
    changes.update("t", 10, 0)
    changes.update("t", 10, 1)
    changes.update("t", 11, 0)
    changes.delete("t", 11)
    changes.delete("t", 12)
    changes.update("t", 20, 0, old=[13])
    changes.update("t", 20, 1)
    applied = target.apply(changes)
    assert target.rows("select * from t order by id") == UNTOUCHED
    assert applied.conflicts == {"update_missing": 5, "delete_missing": 2}
    assert (applied.insert, applied.update, applied.delete) == (0, 0, 0)


def test_first_rows_of_each_kind_are_named_by_their_keys_only(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """At most five of each kind and table, whatever they hold otherwise."""
    caplog.set_level(logging.INFO)
    target = make(ConflictPolicy.SKIP)
    changes = target.window()
    changes.update("t", 3, 33)
    for number in range(10, 17):
        changes.update("t", number, 777)
    changes.delete("t", 20)
    changes.update("t", 31, 777)
    changes.delete("t", 31)
    changes.insert("t", 1, 777)
    changes.update("t", 2, 777, old=[3])
    applied = target.apply(changes)
    assert applied.conflicts == {
        "update_missing": 8,
        "delete_missing": 2,
        "insert_exists": 1,
        "update_exists": 1,
    }
    keys = applied.conflict_keys
    assert (keys["insert_exists"], keys["update_exists"]) == (["public.t (id)=(1)"], ["public.t (id)=(2)"])
    assert sorted(keys["delete_missing"]) == ["public.t (id)=(20)", "public.t (id)=(31)"]
    assert len(keys["update_missing"]) == 5
    missing = {f"public.t (id)=({number})" for number in (*range(10, 17), 31)}
    assert set(keys["update_missing"]) <= missing
    logged = [record.getMessage() for record in caplog.records if " x " in record.getMessage()]
    assert len(logged) == 4
    assert not any("777" in line for line in logged)


def test_rows_without_a_key_are_counted_and_not_shown(subscriber: Database) -> None:
    subscriber.run("create table k (a int, b text)")
    target = Target(subscriber.dsn, {"k": ("a", "b")})
    changes = target.window()
    changes.delete("k", 1, "secret")
    changes.update("k", 2, "secret", old=[1, "other"])
    applied = target.apply(changes)
    assert applied.conflicts == {"delete_missing": 1, "update_missing": 1}
    assert not any(applied.conflict_keys.values())


def test_moved_rows_are_not_counted_as_missing(make: Make) -> None:
    """1 → 5 leaves key 1 before the check whether 10 existed."""
    target = make(ConflictPolicy.ERROR)
    changes = target.window()
    changes.update("t", 5, 50, old=[1])
    changes.update("t", 10, 100)
    applied = target.apply(changes)
    assert target.rows("select id from t order by id") == [(2,), (3,), (5,)]
    assert (applied.update, applied.conflicts) == (1, {"update_missing": 1})
    assert applied.conflict_keys == {"update_missing": ["public.t (id)=(10)"]}


def insert_exists(changes: Changes) -> None:
    changes.insert("t", 1, 10)
    changes.insert("t", 4, 40)
    changes.insert("t", 2, 20)
    changes.update("t", 2, 21)
    changes.insert("t", 3, 30)
    changes.delete("t", 3)


def update_exists(changes: Changes) -> None:
    changes.update("t", 2, 10, old=[1])
    changes.insert("t", 4, 40)


def passed_and_left(changes: Changes) -> None:
    changes.update("t", 2, 10, old=[1])
    changes.update("t", 4, 20, old=[2])


def passed_and_deleted(changes: Changes) -> None:
    changes.update("t", 2, 10, old=[1])
    changes.delete("t", 2)


def passed_and_taken_again(changes: Changes) -> None:
    """Beside an inserted and deleted row, for which rows that move are taken out."""
    passed_and_left(changes)
    changes.insert("t", 2, 21)
    changes.insert("t", 9, 9)
    changes.delete("t", 9)


def claimed_twice(changes: Changes) -> None:
    changes.insert("t", 4, 40)
    changes.insert("t", 4, 41)
    changes.insert("t", 5, 50)
    changes.update("t", 4, 51, old=[5])


@pytest.mark.parametrize(
    ("conflict", "words"),
    [
        (insert_exists, r"insert_exists: key \(id\)=\(\d\)"),
        (update_exists, r"update_exists: key \(id\)=\(2\) already exists"),
        (passed_and_left, r"update_exists: key \(id\)=\(2\) already exists"),
        (passed_and_deleted, r"update_exists: key \(id\)=\(2\) already exists"),
        (passed_and_taken_again, r"update_exists: key \(id\)=\(2\) already exists"),
        (claimed_twice, r"claim the same keys"),
    ],
)
def test_policy_error_applies_nothing_of_the_window(
    make: Make, conflict: Callable[[Changes], None], words: str
) -> None:
    target = make(ConflictPolicy.ERROR)
    changes = target.window()
    changes.update("t", 3, 33)
    conflict(changes)
    with pytest.raises(ApplyConflict, match="duplicate key value violates unique constraint") as raised:
        target.apply(changes)
    raised.match('table "public"."t"')
    raised.match(words)
    assert target.rows("select * from t order by id") == UNTOUCHED
    assert staging_tables(target) == []


@pytest.mark.parametrize(
    ("policy", "rows"),
    [
        # The publisher's values, the subscriber's own columns; 3 was deleted after its insert.
        (ConflictPolicy.OVERWRITE, [(1, 10, "own 1"), (2, 21, "own 2"), (4, 40, "default")]),
        (ConflictPolicy.SKIP, [(1, 1, "own 1"), (2, 2, "own 2"), (4, 40, "default")]),
    ],
)
def test_inserted_row_that_exists(make: Make, policy: ConflictPolicy, rows: list[tuple[object, ...]]) -> None:
    target = make(policy)
    changes = target.window()
    insert_exists(changes)
    applied = target.apply(changes)
    assert target.rows("select * from t order by id") == rows
    assert applied.conflicts == {"insert_exists": 3}
    assert applied.insert == 1


OVERWRITTEN = [(2, 10, "own 1"), (3, 3, "own 3"), (4, 40, "default")]
SKIPPED = [*UNTOUCHED, (4, 40, "default")]
LEFT = [(3, 3, "own 3"), (4, 20, "own 1")]
TAKEN_AGAIN = [(2, 21, "default"), *LEFT]


@pytest.mark.parametrize(
    ("conflict", "policy", "rows"),
    [
        (update_exists, ConflictPolicy.OVERWRITE, OVERWRITTEN),
        (update_exists, ConflictPolicy.SKIP, SKIPPED),
        (passed_and_left, ConflictPolicy.OVERWRITE, LEFT),
        (passed_and_left, ConflictPolicy.SKIP, LEFT),
        (passed_and_deleted, ConflictPolicy.OVERWRITE, LEFT[:1]),
        (passed_and_deleted, ConflictPolicy.SKIP, LEFT[:1]),
        (passed_and_taken_again, ConflictPolicy.OVERWRITE, TAKEN_AGAIN),
        (passed_and_taken_again, ConflictPolicy.SKIP, TAKEN_AGAIN),
    ],
)
def test_moved_row_whose_new_key_exists(
    make: Make, conflict: Callable[[Changes], None], policy: ConflictPolicy, rows: list[tuple[object, ...]]
) -> None:
    """R8.5: if the row has moved on, changes of the blocking row were applied to it: that one is deleted."""
    target = make(policy)
    changes = target.window()
    conflict(changes)
    applied = target.apply(changes)
    assert target.rows("select * from t order by id") == rows
    assert applied.conflicts == {"update_exists": 1}


def test_free_transit_key_is_no_conflict(make: Make, subscriber: Database) -> None:
    """Rows that move on, or return, are updated in place, as natively (R8.13)."""
    target = make(ConflictPolicy.ERROR)
    subscriber.run(
        "create function refuse() returns trigger language plpgsql as $$ begin raise 'never'; end $$;"
        " create trigger refuse before delete on t for each row execute function refuse();"
        " alter table t enable replica trigger refuse"
    )
    changes = target.window()
    for old, new in ((3, 4), (1, 7), (4, 5), (7, 1)):
        changes.update("t", new, 10 * new, old=[old])
    applied = target.apply(changes)
    assert target.rows("select * from t order by id") == [(1, 10, "own 1"), (2, 2, "own 2"), (5, 50, "own 3")]
    assert (applied.update, applied.conflicts) == (2, {})


def test_row_that_returns_by_an_equal_key_does_not_block_itself(subscriber: Database) -> None:
    """R8.8: 1.0 and 1.00 are one key on the subscriber, and two texts."""
    subscriber.run("create table n (id numeric primary key, a int); insert into n values (1.0, 0)")
    target = Target(subscriber.dsn, {"n": ("id", "a")})
    changes = target.window()
    changes.update("n", "1.00", 1, old=["1.0"])
    changes.update("n", "1.0", 2, old=["1.00"])
    applied = target.apply(changes)
    assert target.rows("select id::text, a from n") == [("1.0", 2)]
    assert (applied.update, applied.conflicts) == (1, {})


def test_row_that_returns_to_its_key_blocks_the_next_under_skip(make: Make, subscriber: Database) -> None:
    """3 → 9 is blocked by the subscriber's own row 9, so 2 → 3 and 1 → 2 are blocked too."""
    target = make(ConflictPolicy.SKIP)
    subscriber.run("insert into t values (9, 9, 'own 9')")
    changes = target.window()
    for old, new in ((3, 9), (2, 3), (1, 2)):
        changes.update("t", new, -new, old=[old])
    applied = target.apply(changes)
    assert target.rows("select * from t order by id") == [*UNTOUCHED, (9, 9, "own 9")]
    assert (applied.update, applied.conflicts) == (0, {"update_exists": 3})


@pytest.mark.parametrize(
    ("policy", "rows"),
    [
        (ConflictPolicy.OVERWRITE, [*UNTOUCHED, (4, 51, "default")]),
        (ConflictPolicy.SKIP, [*UNTOUCHED, (4, 40, "default"), (5, 50, "default")]),
    ],
)
def test_rows_of_one_window_that_claim_one_key(
    make: Make, policy: ConflictPolicy, rows: list[tuple[object, ...]]
) -> None:
    target = make(policy)
    changes = target.window()
    claimed_twice(changes)
    applied = target.apply(changes)
    assert target.rows("select * from t order by id") == rows
    assert applied.conflicts == {"insert_exists": 1, "update_exists": 1}


@pytest.mark.parametrize("policy", [ConflictPolicy.ERROR, ConflictPolicy.OVERWRITE])
@pytest.mark.parametrize(
    "case",
    [
        ("alter table t alter a set not null", ApplyConflict, '"a".*not-null constraint'),
        ("alter table t add constraint positive check (a > 0)", ApplyConflict, '"positive"'),
        ("alter table t add constraint once unique (a)", ApplyConflict, '"once"'),
        ("alter table t alter a type smallint", ApplyConflict, "out of range for type smallint"),
        (
            "alter table t alter a type bool using true",
            ApplyConflict,
            "invalid input syntax for type boolean",
        ),
        ("alter table t drop a", SubscriberNotReady, 'table "public"."t": missing column "a"'),
        ("drop table t", SubscriberNotReady, "does not exist"),
        (
            "alter table t drop a; alter table t add a int generated always as (id) stored",
            SubscriberNotReady,
            "generated on the subscriber",
        ),
    ],
)
def test_refused_change_names_the_table_and_leaves_it_unchanged(
    make: Make, subscriber: Database, policy: ConflictPolicy, case: tuple[str, type[CdcReplayError], str]
) -> None:
    ddl, error, words = case
    target = make(policy)
    changes = target.window()
    changes.insert("t", 10, 5)
    changes.insert("t", 11, None)
    changes.insert("t", 12, -5)
    changes.insert("t", 13, 1)
    changes.insert("t", 14, 1000000)
    subscriber.run(ddl)
    there = target.rows("table t") if "drop table" not in ddl else []
    with pytest.raises(error, match=words) as raised:
        target.apply(changes)
    raised.match('"public"."t"')
    assert "drop table" in ddl or target.rows("table t") == there
    assert staging_tables(target) == []


def test_progress_and_the_callers_record_commit_with_the_window(make: Make) -> None:
    """R8.17: rows, applied LSN and result are one commit; if the record fails nothing is applied."""
    target = make(ConflictPolicy.ERROR)
    changes = target.window()
    changes.insert("t", 4, 4)
    with pytest.raises(RuntimeError, match="no record"):
        target.apply(changes, before_commit=lambda _connection, _applied: refuse())
    assert target.rows("select * from t order by id") == UNTOUCHED
    with connect(target.dsn, purpose="test") as connection:
        assert subscription_tables.table_states(connection, "nsw") == {}
    target.apply(
        changes,
        before_commit=lambda connection, applied: recorded_results.record_result(
            connection, "nsw", "replay", {"insert": applied.insert}
        ),
    )
    with connect(target.dsn, purpose="test") as connection:
        assert subscription_tables.table_states(connection, "nsw") == {
            QualifiedName("public", "t"): Ready(Lsn(100))
        }
        result = recorded_results.last_result(connection, "nsw", "replay")
    assert result is not None
    assert result.result == {"insert": 1}


def refuse() -> None:
    raise RuntimeError("no record")


def staging_tables(target: Target) -> list[tuple[object, ...]]:
    return target.rows("select relname from pg_class where relname like 'stage%'")


@pytest.mark.parametrize("policy", ConflictPolicy)
@pytest.mark.parametrize("key_type", ["smallint", "int", "bigint", "numeric", "text"])
def test_row_at_a_transient_key_is_a_conflict(
    subscriber: Database, key_type: str, policy: ConflictPolicy
) -> None:
    """R8.5: its INSERT finds the key used; unless that is an error, its DELETE removes that row."""
    subscriber.run(f"create table t (id {key_type} primary key, a int); insert into t values (2, 2), (4, 4)")
    target = Target(subscriber.dsn, {"t": ("id", "a")}, policy)
    changes = target.window()
    for number in (1, 2, 3, 5, 6):  # 2 stands there; 5 and 6 are greater than all that do
        changes.insert("t", number, 0)
        changes.delete("t", number)
    changes.insert("t", 6, 60)
    if policy is ConflictPolicy.ERROR:
        with pytest.raises(ApplyConflict, match="insert_exists") as caught:
            target.apply(changes)
        assert "(id)=(2)" in str(caught.value)
        assert target.rows("select id::text, a from t order by 1") == [("2", 2), ("4", 4)]
        return
    applied = target.apply(changes)
    assert applied.conflicts == {"insert_exists": 1}
    assert target.rows("select id::text, a from t order by 1") == [("4", 4), ("6", 60)]


def test_transient_row_in_an_empty_table_is_no_conflict(subscriber: Database) -> None:
    subscriber.run("create table t (id int primary key, a int)")
    target = Target(subscriber.dsn, {"t": ("id", "a")}, ConflictPolicy.ERROR)
    changes = target.window()
    changes.insert("t", 1, 0)
    changes.delete("t", 1)
    applied = target.apply(changes)
    assert applied.conflicts == {}
    assert target.rows("select * from t") == []
