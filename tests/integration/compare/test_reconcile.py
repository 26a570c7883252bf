"""`refresh --reconcile`: a changed filter takes effect on existing rows, and little is moved.

What is right is what a native subscription holds that is made then, with the same publications: every test
compares with one, before and after further changes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.prune import prune
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.replay import replay
from cdc_replay.errors import (
    ApplyConflict,
    InvalidFilter,
    PublisherNotReady,
    SubscriberLocked,
    TargetMismatch,
)
from cdc_replay.model.results import RefreshResult
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, export_snapshot
from cdc_replay.postgres.planned_tables import PlannedTable, lock_planned_tables
from fixtures.native import NativeSubscription
from fixtures.postgres import FIRE_ALWAYS, Database
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

ORDERS = "create table t (id int primary key, region text, total numeric)"
SOME_ORDERS = """
    insert into t select i, case i % 2 when 0 then 'NSW' else 'VIC' end, i * 1.5
    from generate_series(1, 100) i
"""

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Fresh:
    """A native subscription that is made in the middle of a test, and has copied everything."""

    database: Database
    native: NativeSubscription


def fresh_native(twin: Twin, tables: str, *publications: str) -> Fresh:
    database = twin.database(tables)
    native = NativeSubscription(twin.publisher, database, f"fresh_{next(_numbers)}_{twin.publisher.name}")
    native.create(publications)
    native.wait()
    return Fresh(database, native)


def texts(database: Database, table: str = "t", columns: str = "x") -> list[Any]:
    return [text for (text,) in database.rows(f"select ({columns})::text from {table} x order by 1")]


def reconcile(twin: Twin, name: str = "s") -> RefreshResult:
    return refresh(twin.config, name, reconcile=True)


def changed(result: RefreshResult) -> tuple[int, int, int]:
    return result.inserted, result.updated, result.deleted


def check(twin: Twin, tables: str, *names: str, columns: str = "x") -> Fresh:
    """Our table equals that of a native subscription created now."""
    fresh = fresh_native(twin, tables, *twin.pairs["s"].publications)
    for name in names or ("t",):
        assert texts(twin.pairs["s"].ours, name, columns) == texts(fresh.database, name, columns)
    return fresh


@pytest.fixture
def orders(twin: Twin) -> Twin:
    """100 orders; the 50 of NSW are published and copied."""
    twin.publisher.run(f"{ORDERS}; alter table t replica identity full; {SOME_ORDERS}")
    twin.publisher.run("create publication p for table t where (region = 'NSW')")
    twin.subscribe("s", "p", tables=ORDERS, native=False)
    twin.sync_ours()
    return twin


@pytest.mark.parametrize(
    ("publication", "expected"),
    [
        ("set table t where (region = 'NSW' and id > 10)", (0, 0, 5)),  # narrowed: 2, 4, 6, 8, 10 leave
        ("set table t where (region = 'NSW' or id <= 10)", (5, 0, 0)),  # widened: 1, 3, 5, 7, 9 enter
        ("set table t where (region = 'VIC' and id <= 20 or id = 2)", (10, 0, 49)),
        ("set table t", (50, 0, 0)),  # dropped
        ("set table t where (id < 0)", (0, 0, 50)),  # nothing is left
        ("set table t where (region = 'NSW')", (0, 0, 0)),
    ],
    ids=["narrowed", "widened", "both", "dropped", "nothing", "same"],
)
def test_changed_filter_takes_effect(orders: Twin, publication: str, expected: tuple[int, int, int]) -> None:
    """R9.12: natively existing rows stay; here they are those of a new subscription."""
    orders.publish(f"alter publication p {publication}")
    result = reconcile(orders)

    assert changed(result) == expected
    fresh = check(orders, ORDERS)
    assert result.to_lsn is not None
    assert orders.states("s") == {"t": Ready(result.to_lsn)}
    assert changed(reconcile(orders)) == (0, 0, 0)

    # Further changes, in and out of the filter, arrive as they do natively.
    orders.publish(
        "update t set region = 'NSW' where id in (1, 31);\nupdate t set region = 'VIC' where id in (2, 40);\n"
        "update t set total = total + 1;\ninsert into t values (-1, 'NSW', 1), (1001, 'VIC', 2);\n"
        "delete from t where id in (5, 6, 60)"
    )
    (synced,) = orders.sync_ours()
    assert synced.replay.error is None
    fresh.native.wait()
    assert texts(orders.pairs["s"].ours) == texts(fresh.database)
    assert changed(reconcile(orders)) == (0, 0, 0)


def test_columns_added_to_a_column_list_are_updated_in_place(orders: Twin) -> None:
    """R6.3: a list that grows changes every row; a column of the subscriber's own keeps its value."""
    ours = orders.pairs["s"].ours
    orders.publish(
        "alter publication p set table t (id, region) where (id % 2 = 0);\n"
        "alter table t replica identity default"
    )
    orders.publish("update t set total = 0 where id <= 10")  # not published: ours keeps the old totals
    orders.sync_ours()
    assert ours.rows("select total from t where id = 2") == [(3,)]
    ours.run("alter table t add mine text default 'kept', alter total set default 7")
    ours.run("update t set mine = 'mine' where id = 100")

    assert changed(reconcile(orders)) == (0, 0, 0)  # unpublished columns are not touched
    orders.publish("alter publication p set table t (id, total, region) where (id % 2 = 0)")
    assert changed(reconcile(orders)) == (0, 5, 0)
    check(orders, ORDERS, columns="(x.id, x.region, x.total)")
    assert ours.rows("select distinct mine from t order by 1") == [("kept",), ("mine",)]


def test_filters_of_publications_are_ored(twin: Twin) -> None:
    """R7.4: a row stays if one publication lets it through, and all rows once one has no filter."""
    twin.publisher.run(f"{ORDERS}; {SOME_ORDERS}")
    twin.publisher.run("create publication p for table t where (id <= 50)")
    twin.publisher.run("create publication q for table t where (id > 40)")
    twin.subscribe("s", "p", "q", tables=ORDERS, native=False)
    twin.sync_ours()

    twin.publish(
        "alter publication q set table t where (id > 90);\nalter publication p set table t where (id < 3)"
    )
    assert changed(reconcile(twin)) == (0, 0, 88)
    check(twin, ORDERS)
    twin.publish("alter publication q set table t")
    assert changed(reconcile(twin)) == (88, 0, 0)
    check(twin, ORDERS)
    twin.change("s", "p")  # the list in the configuration counts too
    assert changed(reconcile(twin)) == (0, 0, 98)
    check(twin, ORDERS)


PARTITIONED = """
    create table t (a int, b int, c text, primary key (a, b)) partition by range (b);
    create table t_1 partition of t for values from (0) to (50);
    create table t_2 (c text, b int not null, a int not null);
    alter table t attach partition t_2 for values from (50) to (100)
"""
PLAIN = "create table t (c text, note text default 'own', b int, a int, primary key (b, a))"
OTHERWISE_PARTITIONED = """
    create table t (a int, b int, c text, primary key (a, b)) partition by hash (a);
    create table t_x partition of t for values with (modulus 2, remainder 0);
    create table t_y partition of t for values with (modulus 2, remainder 1)
"""


@pytest.mark.parametrize(
    "target", [PARTITIONED, PLAIN, OTHERWISE_PARTITIONED], ids=["same", "plain", "other"]
)
def test_partition_tree_is_reconciled_via_its_root(twin: Twin, target: str) -> None:
    """R7.6: the whole tree is read; rows are found in whatever partition the subscriber has them."""
    twin.publisher.run(
        f"{PARTITIONED}; insert into t select i, i % 100, 'v' || i from generate_series(1, 200) i"
    )
    twin.publisher.run(
        "create publication p for table t where (b >= 10 and b < 60) with (publish_via_partition_root)"
    )
    twin.subscribe("s", "p", tables=target, native=False)
    twin.sync_ours()
    ours = twin.pairs["s"].ours
    #  damage: one row differs, one is missing, one is too much
    ours.run(
        "update t set c = 'damaged' where a = 11; delete from t where a = 12; insert into t values".replace(
            "t values", "t (a, b, c) values (1000, 20, 'too much')"
        )
    )

    twin.publish("alter publication p set table t where (b >= 20 and b < 70)")
    # per hundred 20 to 59 stay; 10 to 19, with both damaged rows, leave, and 60 to 69 enter
    assert changed(reconcile(twin)) == (20, 0, 20)
    check(twin, target, columns="(x.a, x.b, x.c)")
    ours.run("update t set c = 'damaged' where a = 20")
    assert changed(reconcile(twin)) == (0, 1, 0)
    check(twin, target, columns="(x.a, x.b, x.c)")


def test_rows_without_a_key_are_a_multiset(twin: Twin) -> None:
    """As many duplicates stay as the publisher has, and no row is touched that is right."""
    table = "create table t (n int, note text)"
    twin.publisher.run(f"{table}; alter table t replica identity full")
    twin.publisher.run("insert into t select n, 'note' from generate_series(1, 5) n, generate_series(1, n)")
    twin.publisher.run("insert into t values (null, null), (null, null)")
    twin.publisher.run("create publication p for table t where (n <> 3)")
    twin.subscribe("s", "p", tables=table, native=False)
    twin.sync_ours()
    ours = twin.pairs["s"].ours
    places = "select ctid::text, n from t where n = 4 order by 1"
    before = ours.rows(places)
    ours.run(
        "delete from t where ctid = (select min(ctid) from t where n = 5); insert into t values (2, 'note')"
    )

    twin.publish("alter publication p set table t where (n <> 1 or n is null)")
    assert changed(reconcile(twin)) == (1 + 3 + 2, 0, 1 + 1)
    check(twin, table)
    assert ours.rows(places) == before


def test_few_differences_move_few_bytes(twin: Twin) -> None:
    """The bytes are in proportion to the difference: here one row in a thousand of a table of 30 MB."""
    table = "create table t (id int primary key, kind int, pad text)"
    twin.publisher.run(f"{table}; create publication p for table t where (kind <> 7)")
    twin.publisher.run(
        "insert into t select i, i % 1000, repeat(md5(i::text), 9) from generate_series(1, 100000) i"
    )
    twin.subscribe("s", "p", tables=table, native=False)
    ((copied,),) = [twin.sync_ours()]
    whole = copied.snapshot.bytes
    assert whole > 29_000_000

    equal = reconcile(twin)
    assert changed(equal) == (0, 0, 0)
    assert equal.reconciled[0].rows_read == 0
    assert equal.bytes < whole / 50

    twin.publish("alter publication p set table t where (kind <> 8)")
    result = reconcile(twin)
    assert changed(result) == (100, 0, 100)
    assert result.bytes < whole / 20
    assert (
        result.bytes - equal.bytes < 200 * 6000
    )  # for a row of 300 bytes: its neighbours, and their digests
    check(twin, table)


def test_nearly_complete_difference_is_reconciled(twin: Twin) -> None:
    """Then it is about as much as a copy."""
    table = "create table t (id int primary key, a int, pad text)"
    twin.publisher.run(f"{table}; create publication p for table t (id, pad)")
    twin.publisher.run("insert into t select i, i, repeat('x', 100) from generate_series(1, 20000) i")
    twin.subscribe("s", "p", tables=table, native=False)
    twin.sync_ours()

    twin.publish("alter publication p set table t")
    result = reconcile(twin)
    assert changed(result) == (0, 20000, 0)
    assert result.reconciled[0].rows_read == 20000
    check(twin, table)


def test_types_and_text_forms_may_differ_between_sides(twin: Twin) -> None:
    """R8.2: types may differ; the subscriber's input functions decide about equality."""
    twin.publisher.run(
        """
        create type mood as enum ('good', 'bad');
        create table t (
            id bigint primary key, doc json, at timestamptz, amount numeric, raw bytea, single real,
            tags text[], pair point, fixed char(5), m mood, big varchar(4)
        );
        insert into t values
            (1, '{"b":1,  "a":2}', '2013-07-01 12:00:00.123456+10', 1.500, '\\x00ff', 0.1,
             array['a,b', null, '"'], '(1,2)', 'ab', 'good', 'abcd'),
            (2, null, 'infinity', 'NaN', '', 'NaN', '{}', null, '', null, ''),
            (3, '[]', null, 1e40, null, -0.0, null, null, null, 'bad', null),
            (4, '{}', now(), 4, null, 4, null, null, null, 'bad', null);
        create publication p for table t where (id <= 3)
        """
    )
    tables = """
        create table t (
            big text, id int primary key, m text, doc jsonb, at text, amount text, raw bytea, single float8,
            tags text[], pair point, fixed text
        )
    """
    twin.subscribe("s", "p", tables=tables, native=False)
    twin.sync_ours()
    assert changed(reconcile(twin)) == (0, 0, 0)
    twin.pairs["s"].ours.run(
        "update t set raw = null where id = 2; update t set amount = '1.50' where id = 1"
    )
    twin.publish("alter publication p set table t where (id > 1)")
    assert changed(reconcile(twin)) == (1, 1, 1)
    check(twin, tables)


def test_rows_that_update_cannot_change_in_place_are_reinserted(twin: Twin) -> None:
    """Unique values that were exchanged, GENERATED ALWAYS identities; own columns keep their values."""
    twin.publisher.run("create table t (id int primary key, u int unique, g int)")
    twin.publisher.run(
        "insert into t select i, i, i from generate_series(1, 9) i; create publication p for table t"
    )
    tables = """
        create table t (
            mine text, id int primary key, u int unique, g int generated always as identity,
            twice int generated always as (u * 2) stored
        )
    """
    twin.subscribe("s", "p", tables=tables, native=False)
    twin.sync_ours()
    ours = twin.pairs["s"].ours
    ours.run("update t set mine = 'row ' || id")
    # The rows differ without replay, as if the subscriber had been restored from elsewhere.
    ours.run("update t set u = -u; update t set u = 10 + u; delete from t where id = 9")
    assert changed(reconcile(twin)) == (1, 7, 0)  # 5 is 10 - 5
    assert ours.rows("select id, u, g, twice, mine from t where id in (1, 9) order by id") == [
        (1, 1, 1, 2, "row 1"),
        (9, 9, 9, 18, None),
    ]

    ours.run("alter table t drop g; alter table t add g int")
    assert changed(reconcile(twin)) == (0, 9, 0)
    ours.run("update t set u = 10 - u + 100; update t set u = u - 100")
    assert changed(reconcile(twin)) == (0, 8, 0)
    assert ours.rows("select count(*) from t where u = id and mine is not distinct from 'row ' || id") == [
        (8,)
    ]


def test_changes_while_reconciling_arrive_once(orders: Twin) -> None:
    """R1.34: transactions after the consistent point are not in the snapshot, and replay applies it."""
    stop = threading.Event()

    def write() -> int:
        rounds = 0
        with orders.publisher.connect() as connection:
            while not stop.is_set():
                connection.execute(
                    "update t set total = total + 1, region = case when mod(id, 7) = %s then 'NSW'"
                    " else region end where mod(id, 10) = %s",
                    (rounds % 7, rounds % 10),
                )
                connection.execute(
                    "insert into t values (%s, 'NSW', 1), (%s, 'VIC', 2)",
                    (1000 + 2 * rounds, 1001 + 2 * rounds),
                )
                connection.execute("delete from t where id = %s", (1000 + 2 * (rounds // 2),))
                rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        try:
            for publication in ("(id % 3 = 0)", "(region = 'VIC' or id > 1050)", "(total > 50)"):
                orders.publish(f"alter publication p set table t where {publication}")
                reconcile(orders)
        finally:
            stop.set()
        assert writer.result() > 0
    (synced,) = orders.sync_ours()
    assert synced.replay.error is None
    check(orders, ORDERS)


def test_tables_that_others_replay_past_the_snapshot_do_not_return_to_it(
    orders: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the snapshot is awaited the subscription is unlocked; its log may be pruned after that replay."""
    exports = itertools.count()

    @contextlib.contextmanager
    def export_beside_others(dsn: str) -> Iterator[ExportedSnapshot]:
        with export_snapshot(dsn) as exported:
            if next(exports) == 0:
                orders.publish("insert into t values (201, 'NSW', 1);\ndelete from t where id = 2")
                orders.sync_ours()
                prune(orders.config, "pub", keep_hours=0)
            yield exported

    monkeypatch.setattr("cdc_replay.subscriber.session.export_snapshot", export_beside_others)
    assert changed(reconcile(orders)) == (0, 0, 0)
    orders.publish("insert into t values (202, 'NSW', 1)")
    capture(orders.config, "pub")
    (replayed,) = replay(orders.config, ["s"])
    assert replayed.error is None
    check(orders, ORDERS)


def test_parked_subscription_is_repaired(orders: Twin) -> None:
    """A conflict stops replay; reconciling corrects the table, whatever its position."""
    ours = orders.pairs["s"].ours
    ours.run("insert into t values (1000, 'damage', 1)")
    orders.publish("insert into t values (1000, 'NSW', 2), (1002, 'NSW', 3)")
    (failed,) = orders.sync_ours()
    assert failed.replay.error is not None

    assert changed(reconcile(orders)) == (1, 1, 0)
    check(orders, ORDERS)
    orders.publish("insert into t values (1004, 'NSW', 3)")
    (synced,) = orders.sync_ours()
    assert synced.replay.error is None
    check(orders, ORDERS)


def test_tables_are_added_and_removed(twin: Twin) -> None:
    """R7.13: a table that left keeps its rows; when it enters again they are reconciled, not in the way."""
    tables = "create table t (id int primary key); create table u (id int primary key)"
    twin.publisher.run(f"{tables}; insert into t values (1), (2); insert into u values (1), (2)")
    twin.publisher.run("create publication p for table t")
    twin.subscribe("s", "p", tables=tables, native=False)
    twin.sync_ours()
    ours = twin.pairs["s"].ours

    twin.publish("alter publication p set table u")
    result = reconcile(twin)
    assert (result.added, result.removed) == (("public.u",), ("public.t",))
    assert (result.snapshot.rows, changed(result)) == (2, (0, 0, 0))  # an empty table is copied
    assert ours.rows("table t order by 1") == ours.rows("table u order by 1") == [(1,), (2,)]

    twin.publish("delete from t where id = 1;\ninsert into t values (3);\nalter publication p add table t")
    result = reconcile(twin)
    assert (result.added, result.snapshot.rows, changed(result)) == (("public.t",), 0, (1, 0, 1))
    assert {type(state) for state in twin.states("s").values()} == {Ready}
    check(twin, tables, "t", "u")


def test_reconciling_without_a_copy_inserts_all_rows(twin: Twin) -> None:
    """`copy_data: false` starts from now; reconciling covers all published rows."""
    twin.publisher.run(f"{ORDERS}; {SOME_ORDERS}; create publication p for table t")
    twin.subscribe(
        "s", "p", tables="create table t (id int primary key, region text)", native=False, copy_data=False
    )
    twin.sync_ours()
    with pytest.raises(TargetMismatch, match="cannot receive"):
        reconcile(twin)
    twin.pairs["s"].ours.run("alter table t add total numeric")
    assert changed(reconcile(twin)) == (100, 0, 0)
    check(twin, ORDERS)


def test_refusal_changes_nothing(orders: Twin) -> None:
    """R8.5: one transaction for all tables; a failing filter, a constraint, another writer."""
    ours = orders.pairs["s"].ours
    before, states = texts(ours), orders.states("s")
    orders.publish("alter publication p set table t where (1000 / (id - 50) > 0)")
    with pytest.raises(InvalidFilter, match="division by zero"):
        reconcile(orders)

    orders.publish("alter publication p set table t where (id <= 20)")
    ours.run("alter table t add check (region <> 'VIC')")
    with pytest.raises(ApplyConflict, match=r"public\.t.*check"):
        reconcile(orders)
    ours.run("alter table t drop constraint t_region_check")

    orders.change("s", lock_timeout=0.2)
    with ours.connect() as writer, writer.transaction():
        writer.execute("update t set total = total where id = 2")
        with pytest.raises(SubscriberLocked, match="cannot lock"):
            reconcile(orders)
    assert (texts(ours), orders.states("s")) == (before, states)
    assert changed(reconcile(orders)) == (10, 0, 40)
    check(orders, ORDERS)


@pytest.mark.parametrize("change", ["alter table t add note float default random()", "truncate t"])
def test_rows_that_the_snapshot_does_not_see_any_more_are_not_deleted(
    orders: Twin, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """TRUNCATE and rewrites hide rows from earlier snapshots; a rewrite sends none of them again."""

    def change_and_lock(connection: Connection, tables: Iterable[PlannedTable]) -> None:
        orders.publisher.run(change)
        lock_planned_tables(connection, tables)

    before = texts(orders.pairs["s"].ours)
    with monkeypatch.context() as patched:
        patched.setattr("cdc_replay.compare.reconcile.lock_planned_tables", change_and_lock)
        with pytest.raises(PublisherNotReady, match="truncated, rewritten, attached or detached"):
            reconcile(orders)
    assert texts(orders.pairs["s"].ours) == before

    orders.pairs["s"].ours.run("alter table t add if not exists note float")
    assert reconcile(orders).deleted == (50 if change == "truncate t" else 0)


@pytest.mark.parametrize("child", ["a", "z"])
def test_foreign_key_that_would_delete_rows_of_another_table_is_refused(twin: Twin, child: str) -> None:
    """Rows that exchange unique values are deleted and inserted again, and a cascade would follow."""
    tables = f"""
        create table t (id int primary key, u int unique);
        create table {child} (id int primary key, parent int references t on delete cascade)
    """
    twin.publisher.run(f"{tables}; insert into t values (1, 1), (2, 2); insert into {child} values (5, 1)")
    twin.publisher.run(f"create publication p for table t, {child}")
    twin.subscribe("s", "p", tables=tables, native=False)
    twin.sync_ours()
    ours = twin.pairs["s"].ours
    ours.run(FIRE_ALWAYS)
    for statement in ("set u = -id", "set u = 3 - id"):
        ours.run(f"update t {statement}")

    with pytest.raises(
        ApplyConflict, match=r'refers to table "public"\."t" of the subscriber would change rows'
    ):
        reconcile(twin)
    assert texts(ours, child) == ["(5,1)"]


@pytest.mark.parametrize(
    "damage",
    [
        "delete from {child}; delete from t",
        "insert into t values (3, 3); insert into {child} values (7, 3)",
        "insert into t values (3, 3); update {child} set parent = 3",
        "delete from {child}; delete from t; insert into t values (3, 1)",
        "insert into t values (3, 3); update {child} set id = 7, parent = 3 where id = 5",
    ],
    ids=["missing", "surplus", "moved", "unique", "other row"],
)
@pytest.mark.parametrize("child", ["a", "z"])
def test_tables_that_a_firing_foreign_key_links_are_merged_in_its_order(
    twin: Twin, child: str, damage: str
) -> None:
    """Natively, too: the copy of a referring table is tried again until that of the other is there."""
    tables = f"""
        create table t (id int primary key, u int unique);
        create table {child} (id int primary key, parent int references t)
    """
    twin.publisher.run(f"{tables}; insert into t values (1, 1), (2, 2)")
    twin.publisher.run(f"insert into {child} values (5, 1), (6, 2)")
    twin.publisher.run(f"create publication p for table t, {child}")
    twin.subscribe("s", "p", tables=tables, native=False)
    twin.sync_ours()
    for statement in (FIRE_ALWAYS, *damage.format(child=child).split("; ")):
        twin.pairs["s"].ours.run(statement)

    result = reconcile(twin)

    assert changed(result) != (0, 0, 0)
    assert [table.table for table in result.reconciled] == sorted(["public.t", f"public.{child}"])
    check(twin, tables, "t", child)
    assert changed(reconcile(twin)) == (0, 0, 0)


EQUAL_KEYS = {
    "numeric": ("numeric", "1.0", "1.00"),
    "float": ("float8", "0", "-0"),
    "interval": ("interval", "1 day", "24:00:00"),
    "jsonb": ("jsonb", "[1.0]", "[1.00]"),
    "array": ("numeric[]", "{1.0}", "{1.00}"),
    "citext": ("citext", "a", "A"),
}


@pytest.mark.parametrize("owner", ["ours", "another"])
@pytest.mark.parametrize("key", EQUAL_KEYS)
def test_row_whose_key_has_another_text_is_updated_in_place(twin: Twin, key: str, owner: str) -> None:
    """Natively an UPDATE finds it by the equality of the key's index, and own columns keep their values."""
    type_sql, before, after = EQUAL_KEYS[key]
    table = f"create extension citext; create table t (n int, id {type_sql}, note text, primary key (n, id))"
    twin.publisher.run(f"{table}; insert into t values (1, '{before}', 'x'), (2, '{after}', 'x')")
    twin.publisher.run("create publication p for table t")
    twin.subscribe("s", "p", tables=table, native=False)
    twin.sync_ours()
    ours = twin.pairs["s"].ours
    ours.run("alter table t add mine text; update t set mine = 'row ' || n")
    if owner == "another":
        ours.run(f"create role {ours.name}_owner; alter table t owner to {ours.name}_owner")

    twin.publish(f"update t set id = '{after}', note = 'y';\ninsert into t values (3, '{before}', 'x')")

    assert changed(reconcile(twin)) == (1, 2, 0)
    check(twin, table, columns="(x.n, x.id, x.note)")
    assert ours.rows("select n, mine from t order by n") == [(1, "row 1"), (2, "row 2"), (3, None)]
    assert changed(reconcile(twin)) == (0, 0, 0)
    if owner == "another":
        ours.run(f"reassign owned by {ours.name}_owner to current_user; drop role {ours.name}_owner")
