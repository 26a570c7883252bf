"""A past range of the log, applied again: it repairs rows, and never takes one back in time."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc_replay.commands.backfill import backfill, plan_backfill
from cdc_replay.commands.capture import capture
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.errors import InvalidConfiguration, SubscriberNotReady
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import BackfillResult
from embedded.postgres import Cluster
from fixtures.postgres import Database, create_database
from fixtures.twin import Twin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TABLES = """
    create table t (id int primary key, a int, own text);
    create table u (id int primary key, a int);
    create table w (id int primary key, a int)
"""
ROWS = "table t order by id"
TRANSACTIONS = (
    "insert into t values (4, 4), (5, 5), (100, 100); insert into w values (3, 0)",
    """
    update t set a = 20 where id = 2; update t set id = 30, a = 30 where id = 3; delete from t
    where id = 1; update w set a = 10
    """,
    "update t set a = a + 1; insert into u values (1, 1)",
    """
    delete from t where id = 5; update t set id = 1 where id = 30; update t set id = 6 where id = 100
    """,
)


class History:
    """Four transactions between five positions; the subscriber has all of them."""

    def __init__(self, twin: Twin) -> None:
        self.twin = twin
        twin.publisher.run("""
            create table t (id int primary key, a int);
            create table u (id int primary key, a int);
            create table w (id int primary key, a int);
            create publication p for table t where (id < 100), u;
            create publication q for table w with (publish = 'update');
            insert into t values (1, 0), (2, 0), (3, 0);
            insert into w values (1, 0), (2, 0)
        """)
        twin.subscribe("s", "p", "q", tables=TABLES, native=False)
        twin.sync_ours()
        self.positions = [twin.position()]
        self.times = [self.now()]
        for statement in TRANSACTIONS:
            twin.publish(statement)
            self.positions.append(twin.position())
            self.times.append(self.now())
        twin.sync_ours()
        self.ours = twin.pairs["s"].ours

    def now(self) -> str:
        """The publisher's clock, which no commit has reached yet or shares."""
        [(moment,)] = self.twin.publisher.rows("select clock_timestamp()")
        assert isinstance(moment, dt.datetime)
        return moment.isoformat()

    def fill(
        self, begin: int, end: int, into: Database | None = None, *, dry_run: bool = False
    ) -> BackfillResult:
        return backfill(
            self.twin.config,
            "s",
            str(self.positions[begin]),
            str(self.positions[end]),
            into=None if into is None else into.dsn,
            dry_run=dry_run,
        )


#   after  t on the publisher, id < 100
STATES = (
    [(1, 0), (2, 0), (3, 0)],
    [(1, 0), (2, 0), (3, 0), (4, 4), (5, 5)],
    [(2, 20), (4, 4), (5, 5), (30, 30)],
    [(2, 21), (4, 5), (5, 6), (30, 31)],
    [(1, 31), (2, 21), (4, 5), (6, 101)],
)


@pytest.fixture
def history(twin: Twin) -> History:
    history = History(twin)
    assert shared(history.ours) == STATES[4]
    return history


def shared(database: Database) -> list[tuple[int, int]]:
    return [(key, value) for key, value, _ in database.rows(ROWS)]


def test_subscriber_is_repaired_and_no_row_goes_back_in_time(history: History) -> None:
    """The range touches 4, 5 (later deleted) and 2, 3, 1; their later changes are applied as well."""
    everything = history.fill(0, 4)
    assert shared(history.ours) == STATES[4]
    assert everything.transactions == 4
    assert not everything.dry_run

    # A row that is missing, one that was changed, two that should be gone, and a column's own value.
    history.ours.run("""
        delete from t where id = 4; update t set a = -1, own = 'kept' where id = 2;
        insert into t values (5, 55), (30, 300); delete from u
    """)
    counted = history.fill(0, 2, dry_run=True)
    assert counted.dry_run
    assert shared(history.ours) == [(1, 31), (2, -1), (5, 55), (6, 101), (30, 300)]
    assert sum(counted.applied.values()) > 0

    result = history.fill(0, 2)
    assert shared(history.ours) == STATES[4]
    assert history.ours.rows("select own from t where id = 2") == [("kept",)]
    # The range (0, 2] has nothing of u: that stays damaged until a range is replayed that has.
    assert history.ours.rows("table u") == []
    assert (result.from_lsn, result.to_lsn, result.transactions) == (*history.positions[0:3:2], 2)
    assert sum(result.conflicts.values()) > 0
    history.fill(2, 3)
    assert history.ours.rows("table u") == [(1, 1)]
    assert shared(history.ours) == STATES[4]

    # Replay goes on where it was.
    history.twin.publish("insert into t values (7, 7)")
    (synced,) = history.twin.sync_ours()
    assert synced.replay.applied["insert"] == 1
    assert shared(history.ours) == [*STATES[4], (7, 7)]


def test_dry_run_replays_nothing(history: History) -> None:
    """A table that was copied is ahead of the others: only the backfill itself brings these up to it."""
    twin = history.twin
    twin.publish("insert into t values (7, 7); insert into u values (2, 2)")
    snapshot(twin.config, "s", tables=[QualifiedName("public", "t")])
    capture(twin.config, "pub")

    counted = history.fill(2, 3, dry_run=True)
    assert history.ours.rows("table u") == [(1, 1)]

    assert counted.applied["insert"] == sum(history.fill(2, 3).applied.values())
    assert history.ours.rows("table u order by id") == [(1, 1), (2, 2)]


def test_update_that_matches_no_row_natively_inserts_none(history: History) -> None:
    """R4.1, R8.4: with publish = 'update' row 3 never existed, and nothing proves that row 2 does."""
    assert history.ours.rows("table w order by id") == [(1, 10), (2, 10)]
    history.ours.run("update w set a = -1 where id = 1; delete from w where id = 2")

    history.fill(1, 2)

    assert history.ours.rows("table w order by id") == [(1, 10)]


def test_another_database_gets_the_range_as_it_was(history: History) -> None:
    """It has the state at `--from`, so it has that at `--to` afterwards; nothing else is left there."""
    database = history.twin.database(TABLES)
    database.run("insert into t values (1, 0), (2, 0), (3, 0)")
    for end in range(1, 5):
        history.fill(end - 1, end, database)
        assert shared(database) == STATES[end], end
    assert database.rows("select from pg_namespace where nspname = 'cdc_replay'") == []
    assert database.rows("table u") == [(1, 1)]

    # Empty tables get the rows that the range inserts or updates whole.
    empty = history.twin.database(TABLES)
    history.fill(1, 3, empty)
    #  1: deleted; 2, 4, 5: updated; 3 → 30
    assert shared(empty) == [(2, 21), (4, 5), (5, 6), (30, 31)]
    assert shared(history.ours) == STATES[4]


def test_update_of_a_row_that_was_not_copied_inserts_none(twin: Twin) -> None:
    """R8.4: with `copy_data: false` the rows before the subscription are not there, and stay away."""
    twin.publisher.run("""
        create table t (id int primary key, a int);
        create publication p for table t; insert into t values (1, 0), (2, 0)
    """)
    twin.subscribe("s", "p", tables=TABLES, copy_data=False)
    twin.sync()
    begin = twin.position()
    twin.publish("insert into t values (3, 0);\nupdate t set a = 1 where id > 1")
    middle = twin.position()
    twin.publish("update t set a = a + 1;\nupdate t set id = 5 where id = 1")
    end = twin.position()
    twin.sync()
    assert twin.rows("s", "t") == [(3, 2, None)]

    twin.pairs["s"].ours.run("delete from t where id = 3")
    backfill(twin.config, "s", str(begin), str(end))
    assert twin.rows("s", "t") == [(3, 2, None)]

    other = twin.database(TABLES)
    other.run("insert into t values (3, 1)")
    backfill(twin.config, "s", str(middle), str(end), into=other.dsn)
    assert shared(other) == [(3, 2)]
    # Empty tables get whatever the range writes whole.
    empty = twin.database(TABLES)
    backfill(twin.config, "s", str(middle), str(end), into=empty.dsn)
    assert shared(empty) == [(2, 2), (3, 2), (5, 1)]


def test_update_of_a_row_that_a_filter_excluded_before_inserts_none(twin: Twin) -> None:
    """R9.12: a filter that is widened within the range brings no existing row, and no UPDATE of one does."""
    twin.publisher.run("""
        create table t (id int primary key, a int);
        create publication p for table t where (id < 10); insert into t values (1, 0), (11, 0)
    """)
    twin.subscribe("s", "p", tables=TABLES)
    twin.sync()
    begin = twin.position()
    twin.publish("update t set a = 1;\nalter publication p set table t where (id < 20);\nupdate t set a = 2")
    end = twin.position()
    twin.sync()
    assert twin.rows("s", "t") == [(1, 2, None)]

    backfill(twin.config, "s", str(begin), str(end))
    assert twin.rows("s", "t") == [(1, 2, None)]

    other = twin.database(TABLES)
    other.run("insert into t values (1, 0)")
    backfill(twin.config, "s", str(begin), str(end), into=other.dsn)
    assert shared(other) == [(1, 2)]


def test_range_may_be_given_by_timestamps(history: History) -> None:
    """Up to the last transaction that was committed by then."""
    database = history.twin.database(TABLES)
    database.run("insert into t values (1, 0), (2, 0), (3, 0), (4, 4), (5, 5)")
    result = backfill(history.twin.config, "s", history.times[1], history.times[3], into=database.dsn)

    assert shared(database) == STATES[3]
    assert result.transactions == 2
    assert history.positions[0] < result.from_lsn < result.to_lsn <= history.positions[3]


def test_table_truncated_since_gets_the_changes_after_the_truncate(history: History) -> None:
    """In the range or after it: the TRUNCATE empties what was written; later rows are part of the repair."""
    history.twin.publish(
        "truncate t;\ninsert into t values (8, 8), (9, 9);\nupdate t set a = 90 where id = 9"
    )
    history.positions.append(history.twin.position())
    history.twin.publish("insert into t values (10, 10)")
    history.twin.sync_ours()
    for begin, end in ((0, 1), (4, 5)):
        history.ours.run("insert into t values (4, 4); delete from t where id = 8")

        history.fill(begin, end)

        assert shared(history.ours) == [(8, 8), (9, 90), (10, 10)]


def test_range_that_cannot_be_replayed_is_refused(history: History) -> None:
    twin, config = history.twin, history.twin.config
    first, second = (str(lsn) for lsn in history.positions[:2])
    with pytest.raises(InvalidConfiguration, match="is empty"):
        backfill(config, "s", second, first)
    for begin, end in (
        (history.times[1], history.times[1]),
        ("2020-01-01T00:00:00Z", "2020-01-02T00:00:00Z"),
    ):
        with pytest.raises(
            InvalidConfiguration, match=r"(?s)is empty.*with a transaction of the log between them"
        ):
            backfill(config, "s", begin, end)
    for begin, end in ((first, "FFFF/0"), ("0/1", second)):
        with pytest.raises(
            InvalidConfiguration, match=r"(?s)is not in the change log.*The log holds \(.*, committed from 20"
        ):
            backfill(config, "s", begin, end)
    with pytest.raises(InvalidConfiguration, match='"yesterday" is neither a WAL position nor a timestamp'):
        backfill(config, "s", "yesterday", second)
    with pytest.raises(InvalidConfiguration, match=r"(?s)is the subscriber of.*Leave out `--into`"):
        backfill(config, "s", first, second, into=history.ours.dsn)
    with pytest.raises(InvalidConfiguration, match='the destination is the publisher "pub" itself'):
        backfill(config, "s", first, second, into=twin.publisher.dsn)
    with pytest.raises(SubscriberNotReady, match=r'(?s)"public"."t".*"public"."u"'):
        backfill(config, "s", first, str(history.positions[3]), into=twin.database().dsn)

    history.ours.run("alter table t drop constraint t_pkey")
    with pytest.raises(SubscriberNotReady, match=r"(?s)without a key cannot be repaired: public\.t.*--table"):
        backfill(config, "s", first, second)

    twin.publish("insert into t values (51, 51)")
    snapshot(config, "s", tables=[QualifiedName("public", "t")])
    with pytest.raises(SubscriberNotReady, match="ahead of the change log"):
        backfill(config, "s", first, second)


def test_publisher_is_no_destination_without_its_slot(
    spark: SparkSession,
    new_cluster: Callable[..., Cluster],
    publisher: Database,
    subscriber_cluster: Cluster,
    tmp_path: Path,
) -> None:
    """The slot is gone once it was lost, and on a promoted standby. A copy on purpose is a destination."""
    assert spark.version
    primary, copied = new_cluster("primary"), new_cluster("copied")
    primary.create()
    primary.start()
    twin = Twin(create_database(primary, "publisher"), subscriber_cluster, tmp_path)
    try:
        history = History(twin)
        twin.publisher.run(f"select pg_drop_replication_slot('{twin.slot}')")
        copied.follow(primary)
        copied.start()
        copied.promote()
        copy = Database(copied, twin.publisher.name)
        first, second = (str(lsn) for lsn in history.positions[:2])

        def fill(into: Database) -> None:
            backfill(twin.config, "s", first, second, into=into.dsn)

        before = twin.publisher.rows(ROWS)
        with pytest.raises(InvalidConfiguration, match='the destination is the publisher "pub" itself'):
            fill(twin.publisher)
        assert twin.publisher.rows(ROWS) == before
        # What the publisher's `dsn` leads to is the publisher, whatever the log is of: after pg_upgrade.
        twin.options["dsn"] = publisher.dsn
        with pytest.raises(InvalidConfiguration, match='the destination is the publisher "pub" itself'):
            fill(publisher)

        del twin.options["dsn"]
        fill(copy)
        assert {(4, 4), (5, 5)} <= set(copy.rows(ROWS))
        primary.stop()
        with pytest.raises(InvalidConfiguration, match=r"(?s)itself.*while the publisher can be reached"):
            fill(copy)
    finally:
        twin.drop()


CHOICE = """
    create table parent (id int primary key, a int);
    create table child (id int primary key, parent int references parent on delete cascade);
    create table root (id int primary key, a int) partition by range (id);
    create table leaf partition of root for values from (0) to (100)
"""
PARENT, CHILD, ROOT, LEAF = (QualifiedName("public", name) for name in ("parent", "child", "root", "leaf"))
ALL_ROWS = {PARENT: [(5, 5)], CHILD: [(5, 5)], ROOT: [(5, 5)]}
DAMAGED = {PARENT: [(5, -1)], CHILD: [], ROOT: [(5, -1), (6, 6)]}


def test_backfill_of_chosen_tables_leaves_other_tables_alone(twin: Twin) -> None:
    """The range has a TRUNCATE of all three, and a DELETE that cascades where triggers fire (R8.13)."""
    twin.publisher.run(f"""
        {CHOICE};
        create publication p for table parent, child, root with (publish_via_partition_root)
    """)
    twin.subscribe("s", "p", tables=CHOICE, native=False)
    twin.sync_ours()
    begin = twin.position()
    rows = "insert into parent values ({0}, {0}); insert into child values ({0}, {0});"
    twin.publish(f"{rows.format(1)} insert into root values (1, 1);\ndelete from parent where id = 1")
    twin.publish(f"{rows.format(2)} truncate parent, child, root")
    twin.publish(f"{rows.format(5)} insert into root values (5, 5)")
    end = twin.position()
    twin.sync_ours()
    ours = twin.pairs["s"].ours

    def damage() -> None:
        ours.run("delete from child; update parent set a = -1; update root set a = -1 where id = 5")
        ours.run("insert into root values (6, 6) on conflict do nothing")

    def rows_now() -> dict[QualifiedName, list[tuple[object, ...]]]:
        return {table: ours.rows(f"table {table} order by id") for table in ALL_ROWS}

    def fill(*tables: QualifiedName, dry_run: bool = False) -> BackfillResult:
        return backfill(twin.config, "s", str(begin), str(end), tables=tables, dry_run=dry_run)

    for chosen in ((CHILD,), (ROOT,), (PARENT, CHILD)):
        damage()
        result = fill(*chosen)
        assert rows_now() == {**DAMAGED, **{table: ALL_ROWS[table] for table in chosen}}
        assert result.tables == tuple(map(str, chosen))
        assert result.applied["truncate"] == len(chosen)

    # The subscriber's foreign key does not matter, as `child` is not chosen.
    damage()
    assert fill(PARENT, dry_run=True).applied == {"insert": 1, "update": 0, "delete": 0, "truncate": 1}
    fill(PARENT)
    assert rows_now() == {**DAMAGED, PARENT: ALL_ROWS[PARENT]}
    with pytest.raises(
        InvalidConfiguration,
        match=r"(?s)no table public\.leaf.*It has: public\.child, public\.parent, public\.",
    ):
        fill(ROOT, LEAF)

    # Another database needs the chosen tables only.
    other = twin.database("create table root (id int primary key, a int)")
    backfill(twin.config, "s", str(begin), str(end), tables=[ROOT], into=other.dsn)
    assert other.rows("table root") == ALL_ROWS[ROOT]


def test_table_that_is_not_ready_is_refused_by_name_and_others_are_backfilled(history: History) -> None:
    """A keyless table can be left out, too."""
    config, (begin, *_, end) = history.twin.config, map(str, history.positions)
    history.ours.run(
        "update cdc_replay.subscription_table set state = 'pending', lsn = null where table_name = 'u'"
    )
    assert backfill(config, "s", begin, end).left_out == ("public.u",)
    history.ours.run("alter table w drop constraint w_pkey; delete from t where id = 4")
    with pytest.raises(SubscriberNotReady, match=r'(?s)table public\.u of subscription "s" is not ready'):
        plan_backfill(config, "s", begin, end, tables=[QualifiedName("public", "u")], into_subscriber=True)
    with pytest.raises(InvalidConfiguration, match=r"(?s)no table public\.tt.*Did you mean public\.t\?"):
        plan_backfill(config, "s", begin, end, tables=[QualifiedName("public", "tt")], into_subscriber=True)
    with pytest.raises(
        SubscriberNotReady, match=r"(?s)cannot be repaired: public\.w.*Choose the other tables"
    ):
        backfill(config, "s", begin, end)
    backfill(config, "s", begin, end, tables=[QualifiedName("public", "t")])
    assert shared(history.ours) == STATES[4]


def test_range_before_a_column_was_dropped_on_both_sides_names_the_way_out(twin: Twin) -> None:
    """Nobody can create it again: the publisher does not have it any more."""
    twin.publisher.run("create table t (id int primary key, a int, b int); create publication p for table t")
    twin.subscribe("s", "p", tables="create table t (id int primary key, a int, b int)", native=False)
    twin.sync_ours()
    begin = twin.position()
    twin.publish("insert into t values (1, 1, 1);\nalter table t drop b")
    middle = twin.position()
    twin.publish("insert into t values (2, 2)")
    end = twin.position()
    twin.sync_ours()
    ours = twin.pairs["s"].ours
    ours.run("alter table t drop b; delete from t")

    with pytest.raises(SubscriberNotReady, match='missing column "b"') as refused:
        backfill(twin.config, "s", str(begin), str(end))
    assert "dropped on both sides since, choose a range that begins after that" in str(refused.value.hint)

    assert backfill(twin.config, "s", str(middle), str(end)).applied["insert"] == 1
    assert ours.rows("table t") == [(2, 2)]


@pytest.mark.parametrize("event_trigger", [True, False])
def test_update_of_a_lost_row_whose_columns_are_not_all_published_any_more_inserts_none(
    twin: Twin, event_trigger: bool
) -> None:
    """The row would lack the value that the subscriber had before."""
    table = "create table t (id int primary key, a int, b int)"
    twin.options |= {"event_trigger": event_trigger}
    twin.publisher.run(
        f"{table}; create publication p for table t (id, a, b); insert into t values (1, 1, 1)"
    )
    twin.subscribe("s", "p", tables=table, native=False)
    twin.sync_ours()
    twin.publish("alter publication p set table t (id, a);\nalter table t add c int")
    begin = twin.position()
    twin.publish("update t set a = 2;\ninsert into t values (2, 2, 2)")
    end = twin.position()
    twin.sync_ours()
    ours = twin.pairs["s"].ours
    ours.run("delete from t")

    backfill(twin.config, "s", str(begin), str(end))

    assert ours.rows("table t") == [(2, 2, None)]
