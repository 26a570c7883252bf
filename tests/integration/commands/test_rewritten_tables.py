"""A table rewrite sends nothing, changes values all the same, and is made good by a copy (R9.3, R11.9)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.status import status
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Parked, Ready
from integration.commands.twin import Twin

pytestmark = pytest.mark.spark

PUBLISHER = """
    create table t (id int primary key, a int);
    create table u (id int primary key, a int);
    create table r (id int, part text, a int, primary key (id, part)) partition by list (part);
    create table r_n partition of r for values in ('n');
    create table r_s partition of r for values in ('s');
    create publication p for table t, u;
    create publication via_root for table r with (publish_via_partition_root = true);
    insert into t values (1, 1), (2, 2);
    insert into u values (1, 1);
    insert into r values (1, 'n', 1), (2, 's', 2)
"""
SUBSCRIBER = """
    create table t (id bigint primary key, a int);
    create table u (id int primary key, a int);
    create table r (id int, part text, a int, primary key (id, part))
"""
RENUMBERED = "alter table t alter id type bigint using id + 100"


def ours(twin: Twin, table: str, name: str = "s") -> list[tuple[Any, ...]]:
    return twin.pairs[name].ours.rows(f"select * from {table} as t order by t::text")


def subscribed(twin: Twin, *, native: bool = True, **options: object) -> None:
    twin.publisher.run(PUBLISHER)
    twin.subscribe("s", "p", "via_root", tables=SUBSCRIBER, native=native, **options)


def test_a_sync_copies_a_rewritten_table_and_no_other(twin: Twin, caplog: pytest.LogCaptureFixture) -> None:
    """R11.9: the UPDATE of id 101 finds nothing at a native subscriber."""
    subscribed(twin)
    twin.sync()
    twin.publish("update t set a = 10 where id = 1;\nupdate u set a = 10")
    twin.publish(RENUMBERED)
    twin.publish(
        "update t set a = 20 where id = 101;\ninsert into t values (7, 7);\ndelete from t where id = 102"
    )
    caplog.set_level(logging.WARNING)

    (synced,) = twin.sync_ours()
    twin.native("s").wait()

    assert (synced.replay.error, synced.replay.conflicts) == (None, {})
    assert ours(twin, "t") == [(101, 20), (7, 7)]
    assert twin.pairs["s"].native.rows("table t order by id") == [(1, 10), (2, 2), (7, 7)]
    assert twin.rows("s", "u") == [(1, 10)]
    assert twin.rows("s", "r") == [(1, "n", 1), (2, "s", 2)]
    assert [each.table for each in synced.snapshot.tables] == ["public.t"]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["public.t" in record.getMessage() for record in warnings] == [True]

    twin.publish("update t set a = 30 where id = 101")
    (synced,) = twin.sync_ours()
    assert (synced.snapshot.tables, synced.replay.conflicts) == ((), {})
    assert ours(twin, "t") == [(101, 30), (7, 7)]


def test_a_rewritten_partition_parks_its_published_root_until_it_is_copied(twin: Twin) -> None:
    """R2.5, R11.9: whatever comes after the rewrite is not applied to the old rows."""
    subscribed(twin, native=False)
    twin.sync_ours()
    twin.publish("insert into r values (3, 's', 3)")
    twin.publish("alter table r alter a type bigint using a * a")
    twin.publish("insert into r values (4, 's', 4)")
    twin.publish("insert into u values (2, 2)")
    capture(twin.config, "pub")

    (replayed,) = replay(twin.config, ["s"])

    assert replayed.error is None
    assert ours(twin, "r") == [(1, "n", 1), (2, "s", 2)]
    assert ours(twin, "u") == [(1, 1), (2, 2)]
    states = twin.states("s")
    assert isinstance(states["r"], Parked)
    assert isinstance(states["t"], Ready)
    [shown] = [each.state for each in status(twin.config).tables if each.table == "public.r"]
    assert "parked" in shown
    assert "R11.9" in shown


def test_a_table_that_is_never_copied_unasked_goes_on_as_natively(
    twin: Twin, caplog: pytest.LogCaptureFixture
) -> None:
    """R7.11: copy_data = false. Changes from before and behind the rewrite are not mixed in one window."""
    subscribed(twin, copy_data=False)
    twin.sync()
    twin.publish("insert into t values (3, 3), (4, 4);\nupdate t set a = 30 where id = 3")
    twin.publish(RENUMBERED)
    twin.publish(
        "insert into t values (7, 7);\nupdate t set a = 40 where id = 104;\ninsert into u values (2, 2)"
    )

    twin.sync()

    assert twin.rows("s", "t") == [(3, 30), (4, 4), (7, 7)]
    assert twin.rows("s", "u") == [(2, 2)]
    assert "because copy_data is false; `cdc-replay refresh s --reconcile` brings what differs" in caplog.text

    snapshot(twin.config, "s", tables=[QualifiedName("public", "t")])
    twin.publish("update t set a = 8 where id = 7")
    (synced,) = twin.sync_ours()
    assert synced.replay.error is None
    assert ours(twin, "t") == [(101, 1), (102, 2), (103, 30), (104, 40), (7, 8)]


T = "create table t (id int primary key, a int)"
WIDENED = "alter table t alter a type bigint"


@pytest.mark.parametrize(
    ("before", "publication", "because"),
    [
        ("", "for table t with (publish = 'insert')", "the publications do not publish update, delete"),
        ("alter publication p set table t where (id > 1)", "for table t where (id < 9)", "its row filter"),
    ],
)
def test_a_table_that_does_not_mirror_the_publisher_keeps_its_rows(
    twin: Twin, caplog: pytest.LogCaptureFixture, before: str, publication: str, because: str
) -> None:
    """R2.2, R9.12: what a copy would take away is rightly there."""
    twin.publisher.run(f"{T}; create publication p {publication}")
    twin.publisher.run("insert into t values (1, 1), (2, 2)")
    twin.subscribe("s", "p", tables="create table t (id int primary key, a bigint)")
    twin.sync()
    if before:
        twin.publish(before)
    twin.publish(f"update t set a = 5 where id = 2;\n{WIDENED};\ninsert into t values (3, 30000000000)")

    twin.sync()

    assert [row[0] for row in twin.rows("s", "t")] == [1, 2, 3]
    assert f"because {because}" in caplog.text


@pytest.mark.parametrize(
    ("listed", "ddl"), [("", WIDENED), (" (id, a)", "alter table t add serial bigserial")]
)
def test_a_rewrite_that_changes_nothing_moves_nothing(twin: Twin, listed: str, ddl: str) -> None:
    """R8.2: integer to bigint, and a column that is not published; `own` is the subscriber's."""
    twin.publisher.run(f"{T}; create publication p for table t{listed}")
    twin.publisher.run("insert into t values (1, 1), (2, 2)")
    there = "create table t (id bigint primary key, a bigint, own text default 'own')"
    twin.subscribe("s", "p", tables=there)
    twin.sync()
    for database in (twin.pairs["s"].ours, twin.pairs["s"].native):
        database.run("update t set own = 'kept'")
    twin.publish(f"{ddl};\nupdate t set a = 5 where id = 2")

    (synced,) = twin.sync_ours()
    twin.native("s").wait()

    assert [(each.table, each.rows) for each in synced.snapshot.tables] == [("public.t", 1)]
    assert twin.rows("s", "t") == [(1, 1, "kept"), (2, 5, "kept")]
