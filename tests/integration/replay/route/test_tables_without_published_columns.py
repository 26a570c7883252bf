"""Tables of which nothing is published but that there are rows: all columns are generated, or there is none.

A native subscription brings a row for each. In the change stream it has the target's defaults. The initial
copy of PostgreSQL 18 brings the generated values too, where the target has plain columns for them: an empty
list of published columns means "no list" there (pg_get_publication_tables). Other targets stop a native copy
for good; here their rows have the target's defaults.
"""

from __future__ import annotations

import pytest

from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.validate import validate
from cdc_replay.model.relation import QualifiedName
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

GENERATED = """
    create table g (
        a int generated always as (7) stored, b text generated always as ('x' || 'y') stored
    )
"""
VIRTUAL = "create table g (a int generated always as (7) virtual, b text generated always as ('xy') virtual)"
PLAIN = "create table g (number serial, b text default 'own', a int default 5, more int default 6)"
COPIED = "native copies of generated values (R7.6)"
ROWS = "insert into g select from generate_series(1, 10)"


@pytest.mark.parametrize("source", [GENERATED, VIRTUAL], ids=["stored", "virtual"])
@pytest.mark.parametrize("where", ["", "where (true)"], ids=["whole", "filtered"])
def test_tables_of_generated_columns_are_copied_and_replayed_as_natively(
    twin: Twin, source: str, where: str
) -> None:
    """R6.9, R7.3: the copy brings values where the target has plain columns, the stream brings none."""
    twin.publisher.require(18, COPIED)
    twin.publisher.run(f"{source}; {ROWS}; create publication p for table g {where}")
    twin.subscribe("s", "p", tables=PLAIN)
    twin.sync()
    assert len(twin.rows("s", "g")) == 10
    assert twin.pairs["s"].ours.rows("select distinct a, b, more from g") == [(7, "xy", 6)]

    twin.publisher.run("insert into g select from generate_series(1, 3)")
    twin.sync()
    assert len(twin.rows("s", "g")) == 13
    assert twin.pairs["s"].ours.rows("select count(*) from g where a = 5 and b = 'own'") == [(3,)]
    assert validate(twin.config, "s").success

    twin.publish("truncate g;\ninsert into g default values")
    twin.sync()
    assert len(twin.rows("s", "g")) == 1
    assert validate(twin.config, "s").success


TARGETS = {
    "other columns": ("create table g (number serial, more text default 'd')", "(1,d)"),
    "generated, too": (
        "create table g (a int generated always as (1) stored, b text, n serial)",
        "(1,xy,1)",
    ),
    "one text": ("create table g (more text default 'd')", "(d)"),
    "one integer": ("create table g (more int)", "()"),
    "no column": ("create table g ()", "()"),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("chunk", ["256MB", "8kB"])
def test_rows_have_the_defaults_of_a_target_that_native_cannot_fill(
    twin: Twin, name: str, chunk: str
) -> None:
    """R8.2: straight into the target, and through staging tables."""
    target, first = TARGETS[name]
    if twin.publisher.version < 18:
        first = first.replace("xy", "")  # R7.6: before, no copy has generated values
    twin.publisher.run(f"{GENERATED}; insert into g select from generate_series(1, 1000)")
    twin.publisher.run("create publication p for table g")
    twin.subscribe("s", "p", tables=target, native=False, snapshot_chunk=chunk)
    (done,) = twin.sync_ours()
    ours = twin.pairs["s"].ours
    assert (done.snapshot.rows, ours.rows("select count(*) from g")) == (1000, [(1000,)])
    assert ours.rows('select min(g::text collate "C") from g') == [(first,)]
    assert done.snapshot.tables[0].chunks_read > (1 if chunk == "8kB" else 0)
    twin.publisher.run(ROWS)
    twin.sync_ours()
    assert ours.rows("select count(*) from g") == [(1010,)]
    assert validate(twin.config, "s").success


def test_staged_rows_have_the_generated_values(twin: Twin) -> None:
    """A copy in several chunks, and one that replaces rows, are what a copy in one piece is."""
    twin.publisher.require(18, COPIED)
    twin.publisher.run(f"{GENERATED}; insert into g select from generate_series(1, 1000)")
    twin.publisher.run("create publication p for table g")
    twin.subscribe("s", "p", tables=PLAIN, snapshot_chunk="8kB")
    twin.sync()
    assert len(twin.rows("s", "g")) == 1000
    copied = snapshot(twin.config, "s", tables=[QualifiedName("public", "g")])
    assert copied.rows == 1000
    assert twin.pairs["s"].ours.rows("select count(*), min(a), max(b) from g") == [(1000, 7, "xy")]


def test_table_without_columns_is_copied_and_replayed(twin: Twin) -> None:
    """Nothing distinguishes its rows: as many are deleted as on the publisher."""
    table = "create table g ()"
    twin.publisher.run(
        f"{table}; alter table g replica identity full; {ROWS}; create publication p for table g"
    )
    twin.subscribe("s", "p", tables=table)
    twin.sync()
    assert len(twin.rows("s", "g")) == 10
    twin.publish(
        "delete from g where ctid in ('(0,1)', '(0,2)', '(0,3)');\ninsert into g default values;\n"
        "delete from g where ctid = '(0,4)'"
    )
    twin.sync()
    assert len(twin.rows("s", "g")) == 7
    assert validate(twin.config, "s").success
    twin.publish("truncate g;\ninsert into g default values")
    twin.sync()
    assert len(twin.rows("s", "g")) == 1


@pytest.mark.parametrize("source", [GENERATED, "create table g ()"], ids=["generated", "none"])
def test_reconcile_counts_rows_without_published_columns(twin: Twin, source: str) -> None:
    """As many rows as the publisher has; those that are there keep their values."""
    twin.publisher.run(f"{source}; {ROWS}; create publication p for table g")
    twin.subscribe("s", "p", tables="create table g (number serial, mine int default 1)", native=False)
    twin.sync_ours()
    ours = twin.pairs["s"].ours
    ours.run("update g set mine = 2; delete from g where number > 7")
    dry_run = refresh(twin.config, "s", reconcile=True, dry_run=True)
    done = refresh(twin.config, "s", reconcile=True)
    assert [(counts.inserted, counts.updated, counts.deleted) for counts in (dry_run, done)] == [
        (3, 0, 0)
    ] * 2
    assert ours.rows("select mine, count(*) from g group by 1 order by 1") == [(1, 3), (2, 7)]
    ours.run("insert into g default values")
    dry_run = refresh(twin.config, "s", reconcile=True, dry_run=True)
    done = refresh(twin.config, "s", reconcile=True)
    assert [(counts.inserted, counts.updated, counts.deleted) for counts in (dry_run, done)] == [
        (0, 0, 1)
    ] * 2
    assert ours.rows("select count(*) from g") == [(10,)]
