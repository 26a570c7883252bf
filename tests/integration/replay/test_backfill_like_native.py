"""After a backfill, rows are what a native subscription holds: none that was never sent, no other values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from cdc_replay.commands.backfill import backfill
from cdc_replay.commands.setup import setup
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from fixtures.postgres import Database
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

PUBLISHER = "create table t (id int primary key, a int, b text)"
SUBSCRIBER = "create table t (id int primary key, a int, b text, own text default 'own')"

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Range:
    """A range of the log, and the native subscriber's rows at both of its ends."""

    twin: Twin
    start: Lsn
    end: Lsn
    before: Mapping[str, list[Row]]
    after: Mapping[str, list[Row]]

    @property
    def ours(self) -> Database:
        return self.twin.pairs["s"].ours

    def check(self, subscriber: str = SUBSCRIBER) -> None:
        """Neither the subscriber nor another database, which had `before`, differs from native afterwards."""
        self.fill()
        other = self.twin.database(subscriber)
        for table, rows in self.before.items():
            put(other, table, rows)
        self.fill(into=other)
        for table, rows in self.after.items():
            assert self.ours.rows(f"table {table} order by 1") == rows, table
            assert other.rows(f"table {table} order by 1") == rows, table

    def fill(self, into: Database | None = None, *, dry_run: bool = False) -> None:
        config, dsn = self.twin.config, None if into is None else into.dsn
        backfill(config, "s", str(self.start), str(self.end), into=dsn, dry_run=dry_run)


def put(database: Database, table: str, rows: list[Row]) -> None:
    with database.connect() as connection:
        for row in rows:
            values = ", ".join(["%s"] * len(row))
            connection.execute(f"insert into {table} values ({values})".encode(), row)


def apply_range(twin: Twin, script: str, table: str = "t") -> Range:
    """Publish the statements, and apply them on both sides."""
    twin.sync()
    before, start = {table: natively(twin, table)}, twin.position()
    twin.publish(script)
    end = twin.position()
    twin.sync()
    return Range(twin, start, end, before, {table: natively(twin, table)})


def natively(twin: Twin, table: str) -> list[Row]:
    twin.rows("s", table)
    return twin.pairs["s"].native.rows(f"table {table} order by 1")


def test_moved_row_keeps_the_columns_that_are_not_sent_in_another_database(twin: Twin) -> None:
    """R8.3: those of a narrowed column list, and those that only the subscriber has."""
    twin.publisher.run(f"{PUBLISHER}; create publication p for table t; insert into t values (1, 0, 'b')")
    twin.subscribe("s", "p", tables=SUBSCRIBER)
    twin.sync()
    for database in (twin.pairs["s"].ours, twin.pairs["s"].native):
        database.run("update t set own = 'kept'")
    twin.publish("alter publication p set table t (id, a)")

    moved = apply_range(twin, "update t set id = 2, a = 5")

    assert moved.after == {"t": [(2, 5, "b", "kept")]}
    moved.check()


INSERT = "insert into t values (11, 0)"
NEVER_SENT = {
    "row filter": ("table t where (id < 10)", f"{INSERT};\nalter publication p set table t where (id < 20)"),
    "membership": (
        "table t",
        f"alter publication p drop table t;\n{INSERT};\nalter publication p add table t",
    ),
    "action": (
        "table t",
        f"""alter publication p set (publish = 'update');\n{INSERT};
        alter publication p set (publish = 'insert, update, delete, truncate')""",
    ),
}
"""Publications, and how they come to publish row 11 without sending it."""


@pytest.mark.parametrize("changed", NEVER_SENT)
def test_update_of_a_row_that_was_never_sent_inserts_none(twin: Twin, changed: str) -> None:
    """R7.12, R8.4, R9.12: whether the range has the change of the publication, or begins after it."""
    published, change = NEVER_SENT[changed]
    twin.publisher.run(f"{PUBLISHER}; create publication p for {published}; insert into t values (1, 0)")
    twin.subscribe("s", "p", tables=SUBSCRIBER)

    with_change = apply_range(twin, f"{change};\nupdate t set a = 1")
    with_change.check()
    after_change = apply_range(twin, "update t set a = 2")

    assert after_change.after == {"t": [(1, 2, None, "own")]}
    after_change.check()


def test_update_of_a_row_that_came_with_a_partition_inserts_none(twin: Twin) -> None:
    """R11.6: rows of a table that becomes a partition are not sent; those of a new partition are."""
    root = "create table root (id int primary key, a int)"
    twin.publisher.run(f"""
        {root} partition by range (id); create table leaf partition of root for values from (0) to (10);
        create table other (id int primary key, a int); insert into other values (11, 0);
        create publication p for table root with (publish_via_partition_root); insert into root values (1, 0)
    """)
    twin.subscribe("s", "p", tables=root)

    created = apply_range(
        twin,
        """create table new partition of root for values from (20) to (30);
        insert into root values (21, 0);\nalter table root detach partition leaf""",
        "root",
    )
    created.check(root)
    updated = apply_range(twin, "update root set a = 1", "root")
    assert updated.after == {"root": [(1, 0), (21, 1)]}
    updated.ours.run("delete from root where id = 21")
    updated.check(root)

    attached = """alter table root attach partition other for values from (10) to (20);
        update root set a = a + 1"""
    apply_range(twin, attached, "root").check(root)
    updated = apply_range(twin, "update root set a = a + 1", "root")
    assert updated.after == {"root": [(1, 0), (21, 3)]}
    updated.check(root)


def test_update_of_a_row_with_a_rewritten_key_inserts_none(twin: Twin) -> None:
    """R11.9: a rewrite sends nothing, so the subscriber has the row with its old key."""
    twin.publisher.run(f"{PUBLISHER}; create publication p for table t; insert into t values (1, 0)")
    twin.subscribe("s", "p", tables=SUBSCRIBER)
    twin.sync()
    twin.publish("alter table t alter id type int using id + 100")

    updated = apply_range(twin, "update t set a = 1")

    assert updated.after == {"t": [(1, 0, None, "own")]}
    updated.check()


def test_range_before_a_rewrite_is_refused_until_the_table_is_copied_again(twin: Twin) -> None:
    """R11.9: a repair applies what follows the range, too, and the log lacks the rewritten values."""
    twin.publisher.run(f"{PUBLISHER}; create publication p for table t; insert into t values (1, 0)")
    twin.subscribe("s", "p", tables=SUBSCRIBER, native=False)
    twin.sync_ours()
    start = twin.position()
    twin.publish("update t set a = 1")
    before = Range(twin, start, twin.position(), {}, {})
    twin.publish("alter table t alter a type int using a + 100")
    after = Range(twin, before.end, twin.position(), {}, {})
    twin.sync_ours()

    for refused in (before, after):
        with pytest.raises(
            SubscriberNotReady, match=r"(?s)rewritten public\.t in that range or since.*begins after it"
        ):
            refused.fill()
    other = twin.database(SUBSCRIBER)
    with pytest.raises(SubscriberNotReady, match=r"(?s)rewritten public\.t in that range \[.*ends before it"):
        after.fill(into=other)
    before.fill(into=other)
    assert other.rows("select id, a from t") == [(1, 1)]

    snapshot(twin.config, "s", tables=[QualifiedName("public", "t")])
    twin.publish("update t set a = a + 1")
    later = dataclasses.replace(before, end=twin.position())
    twin.sync_ours()
    before.ours.run("update t set a = -1")
    later.fill()
    assert before.ours.rows("select id, a from t") == [(1, 102)]


def test_update_of_a_row_of_another_origin_inserts_none(twin: Twin) -> None:
    """R8.19: `origin: none` drops its INSERT, and applies the publisher's own UPDATE."""
    twin.publisher.run(f"{PUBLISHER}; create publication p for table t; insert into t values (1, 0)")
    twin.subscribe("s", "p", tables=SUBSCRIBER, origin="none")
    twin.sync()
    origin = f"'backfill_{twin.publisher.name}'"
    twin.publish(f"""select pg_replication_origin_create({origin});
        select pg_replication_origin_session_setup({origin});\n{INSERT};
        select pg_replication_origin_session_reset();\nselect pg_replication_origin_drop({origin})""")

    updated = apply_range(twin, "update t set a = 1")

    assert updated.after == {"t": [(1, 1, None, "own")]}
    updated.check()


def test_rows_that_the_subscriber_has_written_are_not_set_back(twin: Twin) -> None:
    """R8.19: they come back to the log with an origin, and `origin: none` does not apply them."""
    twin.publisher.run(f"{PUBLISHER}; create publication p for table t; insert into t values (1, 0)")
    twin.subscribe("s", "p", tables=SUBSCRIBER, origin="none")
    origin = f"'backfill_{twin.publisher.name}'"
    local = "update t set a = 5 where id = 2;\ninsert into t values (3, 5)"
    written = apply_range(
        twin,
        f"""insert into t values (2, 0), (3, 0);\ndelete from t where id = 3;
        select pg_replication_origin_create({origin}); select pg_replication_origin_session_setup({origin});
        {local}; select pg_replication_origin_session_reset();
        select pg_replication_origin_drop({origin})""",
    )
    for database in (written.ours, twin.pairs["s"].native):
        database.run(local)
    rows = [(1, 0, None, "own"), (2, 5, None, "own"), (3, 5, None, "own")]

    for dry_run in (True, False):
        with pytest.raises(SubscriberNotReady, match=r"public\.t cannot be repaired.*another origin"):
            written.fill(dry_run=dry_run)
    assert natively(twin, "t") == rows

    later = apply_range(twin, "update t set a = 6 where id = 1")
    later.ours.run("update t set a = 0 where id = 1")
    later.fill()
    assert later.ours.rows("table t order by 1") == [(1, 6, None, "own"), *rows[1:]]


@pytest.mark.parametrize("leaf", range(3))
def test_rows_that_the_subscriber_has_written_to_any_partition_are_not_set_back(
    twin: Twin, leaf: int
) -> None:
    """R8.19, R3.2: the partitions are one table there."""
    partitions = "".join(
        f"create table t{number} partition of t for values in ({number});" for number in range(3)
    )
    twin.publisher.run(f"""
        create table t (id int primary key, a int) partition by list (id); {partitions}
        create publication p for table t with (publish_via_partition_root)
    """)
    twin.subscribe("s", "p", tables="create table t (id int primary key, a int)", origin="none")
    origin = f"'backfill_{twin.publisher.name}'"
    written = apply_range(
        twin,
        f"""insert into t values (0, 0), (1, 0), (2, 0);
        select pg_replication_origin_create({origin}); select pg_replication_origin_session_setup({origin});
        update t{leaf} set a = 5; select pg_replication_origin_session_reset();
        select pg_replication_origin_drop({origin})""",
    )
    with pytest.raises(SubscriberNotReady, match=r"public\.t cannot be repaired.*another origin"):
        written.fill()


COPIED_AGAIN = {
    "unsent DELETE": ("insert, update", "delete from t where id = 11"),
    "row filter": ("insert, update, delete", "alter publication p set table t where (id < 10)"),
}
"""What is published, and why a copy does not have row 11 any more."""


@pytest.mark.parametrize("reason", COPIED_AGAIN)
def test_row_that_a_later_copy_does_not_have_stays_away(twin: Twin, reason: str) -> None:
    """R7.4: what the range says of it is older than the copy."""
    publish, change = COPIED_AGAIN[reason]
    twin.publisher.run(f"""
        {PUBLISHER}; insert into t values (1, 0);
        create publication p for table t with (publish = '{publish}')
    """)
    twin.subscribe("s", "p", tables=SUBSCRIBER)
    inserted = apply_range(twin, "insert into t values (2, 0), (11, 0)")
    twin.publish(change)
    snapshot(twin.config, "s", tables=[QualifiedName("public", "t")])
    twin.sync_ours()
    inserted.fill()
    assert inserted.ours.rows("select id from t order by id") == [(1,), (2,)]

    # What follows the copy is repaired as ever, though the range begins before it.
    twin.publish("insert into t values (3, 0);\nupdate t set a = 1 where id = 3")
    later = dataclasses.replace(inserted, end=twin.position())
    twin.sync_ours()
    inserted.ours.run("delete from t where id = 3")
    later.fill()
    assert inserted.ours.rows("select id, a from t order by id") == [(1, 0), (2, 0), (3, 1)]


def test_changes_of_a_table_that_took_the_name_over_count_from_then_on(twin: Twin) -> None:
    """R8.1: natively a change goes to the table that has the published name at that time."""
    twin.publisher.run(f"{PUBLISHER}; create publication p for all tables; insert into t values (1, 0)")
    twin.subscribe("s", "p", tables=SUBSCRIBER)
    twin.sync()
    for database in (twin.publisher, twin.pairs["s"].ours, twin.pairs["s"].native):
        database.run(PUBLISHER.replace("table t", "table second"))
    setup(twin.config, "pub")

    exchanged = apply_range(
        twin,
        """insert into second values (7, 0);\ninsert into t values (3, 0);\nalter table t rename to first;
        alter table second rename to t;\ninsert into t values (8, 0);\nupdate t set a = 1""",
    )

    assert exchanged.after == {"t": [(1, 0, None, "own"), (3, 0, None, "own"), (8, 1, None, "own")]}
    exchanged.check()


def test_row_that_was_inserted_after_a_truncate_keeps_what_only_the_subscriber_has(twin: Twin) -> None:
    """R8.3, R8.15: to repeat a TRUNCATE would take these values, and restart sequences."""
    subscriber = f"{SUBSCRIBER[:-1]}, n serial)"
    twin.publisher.run(f"{PUBLISHER}; create publication p for table t; insert into t values (1, 0)")
    twin.subscribe("s", "p", tables=subscriber)
    truncated = apply_range(twin, "truncate t restart identity;\ninsert into t values (2, 0), (3, 0)")
    truncated.ours.run("update t set own = 'kept', n = id + 100; select setval('t_n_seq', 500)")
    kept = truncated.ours.rows("table t order by id")
    # A row from before the TRUNCATE is back, another one is missing, and one has another value.
    truncated.ours.run("insert into t values (1, 0); delete from t where id = 3; update t set a = 1")

    truncated.fill()

    assert truncated.ours.rows("table t order by id") == [kept[0], (3, 0, None, "own", 502)]


def test_truncate_of_a_table_with_rows_of_another_subscription_is_not_repeated(twin: Twin) -> None:
    twin.publisher.run(f"""
        {PUBLISHER}; insert into t values (1, 0); create publication p for table t where (id < 10);
        create publication q for table t where (id >= 10) with (publish = 'insert, update, delete')
    """)
    twin.subscribe("s", "p", tables=SUBSCRIBER)
    twin.subscribe_beside("s", "other", "q")
    truncated = apply_range(twin, "truncate t;\ninsert into t values (2, 0)")
    twin.publish("insert into t values (12, 0)")
    twin.sync()

    for dry_run in (True, False):
        with pytest.raises(SubscriberNotReady, match=r'(?s)public\.t was truncated.*"other" feeds it, too'):
            truncated.fill(dry_run=dry_run)
    assert twin.rows("s", "t") == [(12, 0, None, "own"), (2, 0, None, "own")]


def test_row_that_has_moved_to_another_subscription_stays(twin: Twin) -> None:
    """R8.5: for the subscription that the row has left, it is deleted; the other one has inserted it."""
    twin.publisher.run(f"""
        {PUBLISHER}; alter table t replica identity full;
        create publication p for table t where (a < 10); create publication q for table t where (a >= 10)
    """)
    twin.subscribe("s", "p", tables=SUBSCRIBER)
    twin.subscribe_beside("s", "other", "q")
    moved = apply_range(
        twin,
        "insert into t values (1, 0), (2, 0), (3, 0);\ndelete from t where id = 3;\nupdate t set b = 'x'",
    )
    moved.ours.run("update t set b = 'lost'")
    moved.fill()
    assert moved.ours.rows("table t order by id") == moved.after["t"]

    moved = apply_range(twin, "update t set a = 10 where id = 1;\nupdate t set b = 'y' where id = 2")
    with pytest.raises(SubscriberNotReady, match=r'(?s)rows of table public\.t.*subscription "other" feeds'):
        moved.fill()

    assert twin.rows("s", "t") == [(1, 10, "x", "own"), (2, 0, "y", "own")]
