"""`refresh --reconcile` never deletes rows of another feed of the table, and announces what it deletes.

What is right is what native subscriptions leave: REFRESH PUBLICATION deletes no row (R7.13, R9.12). Here a
reconciliation deletes rows, so rows of another feed must be identified, or the table is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import subprocess
from typing import Any

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.setup import setup
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.teardown import teardown
from cdc_replay.commands.validate import validate
from cdc_replay.commands.validate_and_repair import validate_and_repair
from cdc_replay.errors import NotConfirmed, ReconcileRefused, SubscriberNotReady
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import RefreshResult
from fixtures.command_line import NO_JAVA, PROGRAM
from fixtures.native import NativeSubscription
from fixtures.postgres import Database
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

PUBLISHED = "create table t (id int primary key, region text)"
TABLE = "create table t (id int primary key, region text, note text default 'own')"
ROWS = "insert into t select i, case i % 2 when 0 then 'NSW' else 'VIC' end from generate_series(1, 200) i"


def share(twin: Twin, name: str, *publications: str, beside: str, **options: object) -> None:
    """A further subscription into the database of subscription `beside`."""
    pair = twin.pairs[beside]
    twin.pairs[name] = dataclasses.replace(pair, publications=publications, options=options)
    setup(twin.config, "pub")


def two_feeds(twin: Twin, ours: str, other: str, **options: object) -> Database:
    """Subscriptions `a` and `b` of one database feed `t`, each by its own row filter; both are in sync."""
    twin.publisher.run(f"{PUBLISHED}; {ROWS}")
    twin.publisher.run(f"create publication pa for table t {ours}; create publication pb for table t {other}")
    twin.subscribe("a", "pa", tables=TABLE, native=False, **options)
    share(twin, "b", "pb", beside="a")
    twin.sync_ours("a")
    return twin.pairs["a"].ours


def ids(database: Database, condition: str = "true") -> list[int]:
    return [number for (number,) in database.rows(f"select id from t where {condition} order by 1")]


def everything(database: Database) -> list[Any]:
    """All rows by ctid and all state: unchanged by a command that changes nothing."""
    state = "subscription", "subscription_table", "brought", "result"
    rows = database.rows("select ctid::text, xmin::text, t::text from t order by 1")
    return [rows, *(database.rows(f"select x::text from cdc_replay.{table} x order by 1") for table in state)]


def run_on_terminal(twin: Twin, *arguments: str, answer: str = "") -> tuple[int, str]:
    """The exit code of the program, and the output on the terminal."""
    ours, of_program = pty.openpty()
    command = [str(PROGRAM), *arguments, "--config", str(twin.file)]
    environment = {**os.environ, **NO_JAVA}
    with subprocess.Popen(
        command, env=environment, stdin=of_program, stdout=of_program, stderr=of_program
    ) as running:
        os.close(of_program)
        os.write(ours, answer.encode())
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal ends
            while block := os.read(ours, 4096):
                shown += block
    os.close(ours)
    return running.returncode, shown.decode()


def changed(result: RefreshResult) -> tuple[int, int, int]:
    return result.inserted, result.updated, result.deleted


def test_reconcile_keeps_rows_of_a_complementary_filter(twin: Twin) -> None:
    """Two subscriptions share a table; each reconciles its own rows, in any order."""
    database = two_feeds(twin, "where (id < 100)", "where (id >= 100)")
    twin.sync_ours("b")
    assert ids(database) == list(range(1, 201))

    database.run("delete from t where id in (7, 107); update t set note = 'mine' where id in (8, 108)")
    database.run("update t set region = 'damaged' where id in (9, 109); insert into t values (-5, 'extra')")
    assert changed(refresh(twin.config, "a", reconcile=True)) == (1, 1, 1)
    assert ids(database) == [row_id for row_id in range(1, 201) if row_id != 107]
    assert database.rows("select region from t where id = 109") == [("damaged",)]

    database.run("insert into t values (500, 'extra')")
    assert changed(refresh(twin.config, "b", reconcile=True)) == (1, 1, 1)
    assert ids(database) == list(range(1, 201))
    assert database.rows("select note from t where id in (8, 108)") == [("mine",), ("mine",)]


@pytest.mark.parametrize("chosen", [[QualifiedName("public", "t")], []])
def test_table_is_not_copied_again_over_rows_of_another_feed(twin: Twin, chosen: list[QualifiedName]) -> None:
    """R7.13: neither by name, nor after a lost slot, when every table is copied again."""
    database = two_feeds(twin, "where (id < 100)", "where (id >= 100)")
    twin.sync_ours("b")
    before = database.rows("select ctid::text, t::text from t order by 1")
    if not chosen:
        teardown(twin.config, "pub")
        twin.change_log.rename(twin.folder / "old_log")
        setup(twin.config, "pub")
    for name, other in (("a", "b"), ("b", "a")):
        with pytest.raises(SubscriberNotReady, match=rf'"public\.t" would be deleted.*"{other}" feeds it'):
            snapshot(twin.config, name, tables=chosen)
    assert database.rows("select ctid::text, t::text from t order by 1") == before

    for name in ("a", "b"):
        refresh(twin.config, name, reconcile=True)
    twin.publish("update t set region = 'new' where id in (1, 100)")
    assert [result.replay.error for result in twin.sync_ours()] == [None, None]
    assert ids(database) == list(range(1, 201))
    assert database.rows("select id from t where region = 'new' order by id") == [(1,), (100,)]


def test_validation_counts_no_row_of_another_feed(twin: Twin) -> None:
    """Each is validated by the feed that it is of; a row of none is outside both filters."""
    database = two_feeds(twin, "where (id < 100)", "where (id >= 150)")
    twin.sync_ours("b")

    def errors(*names: str) -> list[str | None]:
        return [validate(twin.config, name).error for name in names]

    assert errors("a", "b") == [None, None]
    database.run("delete from t where id = 160")
    of_a, of_b = errors("a", "b")
    assert of_a is None
    assert "publisher 51, subscriber 50" in str(of_b)
    assert validate_and_repair(twin.config, "b").success
    database.run("insert into t values (120, 'of none')")
    assert all("1 row outside the present filter" in str(error) for error in errors("a", "b"))


def test_reconcile_after_a_boundary_between_two_filters_moved(twin: Twin) -> None:
    """A narrower filter loses its rows, except those that the other feed claims."""
    database = two_feeds(twin, "where (id < 100)", "where (id >= 100)")
    twin.sync_ours("b")
    twin.publish("alter publication pa set table t where (id < 50)")
    assert changed(refresh(twin.config, "a", reconcile=True)) == (0, 0, 50)
    assert ids(database) == [*range(1, 50), *range(100, 201)]

    twin.publish("alter publication pb set table t where (id >= 50)")
    assert changed(refresh(twin.config, "b", reconcile=True)) == (50, 0, 0)
    assert ids(database) == list(range(1, 201))
    twin.publish("update t set region = 'new' where id in (60, 160);\ndelete from t where id in (10, 110)")
    twin.sync_ours()
    assert ids(database, "region = 'new'") == [60, 160]
    assert ids(database) == [row_id for row_id in range(1, 201) if row_id not in (10, 110)]


def test_reconcile_keeps_rows_that_overlapping_filters_both_claim(twin: Twin) -> None:
    """A row inside of both filters that the publisher lacks may be the other's: it stays."""
    database = two_feeds(twin, "where (id <= 100)", "where (region = 'NSW')")
    twin.change("b", on_conflict="overwrite", copy_data=False)
    twin.sync_ours("b")
    twin.publish("insert into t values (1000, 'NSW')")
    twin.sync_ours()
    database.run("insert into t values (-2, 'NSW'), (-3, 'VIC'), (300, 'VIC')")
    assert changed(refresh(twin.config, "a", reconcile=True)) == (0, 0, 2)
    assert ids(database) == [-2, *range(1, 101), 1000]


def test_reconcile_without_a_key_keeps_rows_of_the_other_feed(twin: Twin) -> None:
    """Rows that pass only the other filter stay, all duplicates included."""
    table = "create table t (id int, region text)"
    twin.publisher.run(f"{table}; alter table t replica identity full")
    twin.publisher.run("insert into t select i % 5, 'NSW' from generate_series(1, 20) i")
    twin.publisher.run("create publication pa for table t where (id < 2)")
    twin.publisher.run("create publication pb for table t where (id >= 2)")
    twin.subscribe("a", "pa", tables=table, native=False)
    share(twin, "b", "pb", beside="a")
    twin.sync_ours("a")
    twin.sync_ours("b")
    database = twin.pairs["a"].ours
    database.run("insert into t values (1, 'NSW'), (3, 'NSW'); delete from t where id = 0")
    assert changed(refresh(twin.config, "a", reconcile=True)) == (4, 0, 1)
    assert [ids(database).count(number) for number in range(5)] == [4, 4, 4, 5, 4]


@pytest.mark.parametrize(
    ("other", "says"),
    [("", "no row filter"), ("where (region ~ 'N')", "cannot evaluate")],
    ids=["unfiltered", "regular expression"],
)
def test_reconcile_refuses_a_table_whose_other_claim_is_unknown(twin: Twin, other: str, says: str) -> None:
    """All rows may be the other's, or the subscriber cannot identify them exactly."""
    database = two_feeds(twin, "where (id < 100)", other)
    twin.change("b", on_conflict="overwrite")
    twin.pairs["a"].ours.run("delete from t where id < 100")
    twin.sync_ours("b")
    twin.publish("alter publication pa set table t where (id < 50)")
    before = everything(database)
    for dry_run in (True, False):
        with pytest.raises(ReconcileRefused, match=says) as refused:
            refresh(twin.config, "a", reconcile=True, dry_run=dry_run)
        assert '"b"' in str(refused.value)
        assert "public.t" in str(refused.value)
    assert everything(database) == before


def test_reconcile_keeps_rows_of_former_filters_of_the_other_feed(twin: Twin) -> None:
    """R9.12: a changed filter leaves existing rows, until the other feed itself is reconciled."""
    database = two_feeds(twin, "where (id < 100)", "where (id >= 100)")
    twin.sync_ours("b")
    twin.publish(
        "alter publication pb set table t where (id >= 180);\n"
        "alter publication pb set table t where (id >= 150)"
    )
    twin.publish("alter publication pa set table t where (id < 50)")
    assert changed(refresh(twin.config, "a", reconcile=True)) == (0, 0, 50)
    assert ids(database) == [*range(1, 50), *range(100, 201)]
    assert changed(refresh(twin.config, "b", reconcile=True)) == (0, 0, 50)
    assert ids(database) == [*range(1, 50), *range(150, 201)]

    twin.publish(
        "alter publication pa set table t where (id < 100);\n"
        "alter table t rename id to number;\nalter publication pb set table t where (number >= 100)"
    )
    database.run("alter table t rename id to number")
    with pytest.raises(ReconcileRefused, match="cdc-replay capture pub"):
        refresh(twin.config, "b", reconcile=True)
    capture(twin.config, "pub")
    assert changed(refresh(twin.config, "b", reconcile=True)) == (50, 0, 0)
    assert changed(refresh(twin.config, "a", reconcile=True)) == (50, 0, 0)
    assert database.rows("select count(*), min(number), max(number) from t") == [(200, 1, 200)]


def test_reconcile_refuses_a_table_whose_other_feed_had_no_filter_meanwhile(twin: Twin) -> None:
    """R9.12: the current filter does not identify earlier rows."""
    database = two_feeds(twin, "where (id < 100)", "where (id >= 100)")
    twin.sync_ours("b")
    twin.publish("alter publication pb set table t;\nalter publication pb set table t where (id >= 100)")
    twin.sync_ours("b")
    before = everything(database)
    with pytest.raises(ReconcileRefused, match="had no row filter"):
        refresh(twin.config, "a", reconcile=True)
    assert everything(database) == before
    assert changed(refresh(twin.config, "b", reconcile=True)) == (0, 0, 0)
    assert changed(refresh(twin.config, "a", reconcile=True)) == (0, 0, 0)


def test_reconcile_refuses_a_table_whose_other_feed_is_not_configured(twin: Twin) -> None:
    """Its publications belong to an unknown publisher."""
    database = two_feeds(twin, "where (id < 100)", "where (id >= 100)")
    twin.sync_ours("b")
    del twin.pairs["b"]
    before = everything(database)
    with pytest.raises(ReconcileRefused, match=r'"b".*not in the configuration'):
        refresh(twin.config, "a", reconcile=True)
    assert everything(database) == before


def test_reconcile_refuses_a_table_of_a_native_subscription(twin: Twin) -> None:
    """Only its own publisher knows its rows."""
    database = two_feeds(twin, "where (id < 100)", "where (id >= 100)")
    del twin.pairs["b"]
    native = NativeSubscription(twin.publisher, database, f"beside_{twin.publisher.name}")
    native.create(["pb"])
    native.wait()
    assert ids(database) == list(range(1, 201))
    before = everything(database)
    with pytest.raises(ReconcileRefused, match=f'native subscription "{native.name}"'):
        refresh(twin.config, "a", reconcile=True)
    assert everything(database) == before


def test_reconcile_refuses_a_root_whose_partition_has_another_feed(twin: Twin) -> None:
    """The rows of a partition are rows of the partitioned table too."""
    tree = """
        create table t (id int primary key) partition by range (id);
        create table t_1 partition of t for values from (0) to (100);
        create table t_2 partition of t for values from (100) to (200)
    """
    twin.publisher.run(f"{tree}; insert into t select generate_series(0, 199)")
    twin.publisher.run("create publication pa for table t where (id < 100) with (publish_via_partition_root)")
    twin.publisher.run("create publication pb for table t_2 where (id >= 100)")
    twin.subscribe("a", "pa", tables=tree, native=False)
    share(twin, "b", "pb", beside="a")
    twin.sync_ours("a")
    twin.sync_ours("b")
    database = twin.pairs["a"].ours
    for name, table in (("a", "t_2"), ("b", "t")):
        with pytest.raises(ReconcileRefused, match=rf"public\.{table}"):
            refresh(twin.config, name, reconcile=True)
    assert ids(database) == list(range(200))


def test_reconcile_with_origin_none_only_inserts(twin: Twin) -> None:
    """R8.19: rows written on this side cannot be distinguished from the publisher's."""
    twin.publisher.run(f"{PUBLISHED}; {ROWS}; create publication pa for table t")
    twin.subscribe("a", "pa", tables=TABLE, native=False, origin="none")
    twin.sync_ours()
    database = twin.pairs["a"].ours
    database.run("delete from t where id = 3")
    assert changed(refresh(twin.config, "a", reconcile=True)) == (1, 0, 0)

    database.run("insert into t values (1000, 'made here'); update t set region = 'here' where id = 4")
    before = everything(database)
    for dry_run in (True, False):
        with pytest.raises(ReconcileRefused, match="1 row would be deleted, 1 updated"):
            refresh(twin.config, "a", reconcile=True, dry_run=dry_run)
    assert everything(database) == before


def test_dry_run_counts_and_changes_nothing(twin: Twin) -> None:
    """Also where tables enter and leave, and where a sequence would be used."""
    tables = f"""
        {TABLE.replace("note text", "number serial, note text")};
        create table u (id int primary key); create table gone (id int primary key)
    """
    twin.publisher.run(
        f"{PUBLISHED}; {ROWS}; create table u (id int primary key); insert into u values (1), (2)"
    )
    twin.publisher.run(
        "create table gone (id int primary key); create publication pa for table t where (id < 100), gone"
    )
    twin.subscribe("a", "pa", tables=tables, native=False)
    twin.sync_ours()
    database = twin.pairs["a"].ours
    database.run("delete from t where id in (60, 61); update t set region = 'damaged' where id = 70")
    twin.publish("alter publication pa set table t where (id >= 50 and id < 103), u")
    before, sequence = everything(database), database.rows("table t_number_seq")
    captured = "select prrelid::regclass::text, prpubid from pg_publication_rel order by 1, 2"
    carried = twin.publisher.rows(captured)

    preview = refresh(twin.config, "a", reconcile=True, dry_run=True)
    assert preview.dry_run
    assert (preview.added, preview.removed) == (("public.u",), ("public.gone",))
    assert changed(preview) == (2 + 3 + 2, 1, 49)
    assert preview.snapshot.rows == 0
    by_name = {table.table: table for table in preview.reconciled}
    assert by_name["public.t"].deleted_keys == tuple(f"(id)=({number})" for number in range(1, 6))
    assert by_name["public.t"].updated_keys == ("(id)=(70)",)
    assert by_name["public.t"].inserted_keys == tuple(f"(id)=({key})" for key in (60, 61, 100, 101, 102))
    assert by_name["public.u"].inserted_keys == ("(id)=(1)", "(id)=(2)")
    assert everything(database) == before
    assert database.rows("table t_number_seq") == sequence
    assert database.rows("select count(*) from pg_replication_origin") == [(0,)]
    assert twin.publisher.rows(captured) == carried

    refreshed = refresh(twin.config, "a", reconcile=True)
    assert not refreshed.dry_run
    assert (refreshed.inserted + refreshed.snapshot.rows, refreshed.updated, refreshed.deleted) == changed(
        preview
    )
    again = refresh(twin.config, "a", reconcile=True, dry_run=True)
    assert changed(again) == (0, 0, 0)


def test_dry_run_without_reconcile_names_the_tables(twin: Twin) -> None:
    """R7.12, R7.13: tables that would be copied, and tables that would be removed."""
    twin.publisher.run(f"{PUBLISHED}; create table u (id int primary key); create publication pa for table t")
    twin.subscribe("a", "pa", tables=f"{TABLE}; create table u (id int primary key)", native=False)
    twin.sync_ours()
    twin.publish("alter publication pa set table u")
    before = everything(twin.pairs["a"].ours)
    preview = refresh(twin.config, "a", dry_run=True)
    assert (preview.dry_run, preview.added, preview.removed) == (True, ("public.u",), ("public.t",))
    assert everything(twin.pairs["a"].ours) == before


def test_dry_run_before_the_first_copy_creates_nothing(twin: Twin) -> None:
    """Not even the schema for the state."""
    twin.publisher.run(f"{PUBLISHED}; {ROWS}; create publication pa for table t where (id < 100)")
    twin.subscribe("a", "pa", tables=TABLE, native=False)
    preview = refresh(twin.config, "a", reconcile=True, dry_run=True)
    assert changed(preview) == (99, 0, 0)
    database = twin.pairs["a"].ours
    assert database.rows("select to_regnamespace('cdc_replay'), (select count(*) from t)") == [(None, 0)]


def test_confirmation_is_asked_only_if_rows_would_be_deleted(twin: Twin) -> None:
    """The answer no leaves both sides as they were."""
    database = two_feeds(twin, "where (id < 100)", "where (id >= 100)")
    previews: list[RefreshResult] = []

    def decline(preview: RefreshResult) -> bool:
        previews.append(preview)
        return False

    database.run("delete from t where id = 5")
    assert changed(refresh(twin.config, "a", reconcile=True, confirm=decline)) == (1, 0, 0)
    assert previews == []

    twin.publish("alter publication pa set table t where (id < 50)")
    before = everything(database)
    with pytest.raises(NotConfirmed, match="nothing was changed"):
        refresh(twin.config, "a", reconcile=True, confirm=decline)
    assert [(preview.dry_run, changed(preview)) for preview in previews] == [(True, (0, 0, 50))]
    assert everything(database) == before
    assert changed(refresh(twin.config, "a", reconcile=True, confirm=lambda _: True)) == (0, 0, 50)


def test_terminal_user_confirms_deletions(twin: Twin) -> None:
    """The question gives rows and keys per table; "no" fails and changes nothing."""
    database = two_feeds(twin, "where (id < 100)", "where (id >= 100)")
    twin.publish("alter publication pa set table t where (id < 50)")
    before = everything(database)
    code, shown = run_on_terminal(twin, "refresh", "a", "--reconcile", answer="n\n")
    assert code == 1
    assert "public.t: 50 rows will be deleted, such as (id)=(50), (id)=(51)" in shown
    assert "Delete 50 rows of the subscriber? [y/N]" in shown
    assert "nothing was changed" in shown
    code, shown = run_on_terminal(twin, "refresh", "a", "--reconcile", "--dry-run")
    assert (code, "[y/N]" in shown) == (0, False), shown
    assert "would be deleted" in shown, shown
    assert everything(database) == before

    assert run_on_terminal(twin, "refresh", "a", "--reconcile", answer="y\n")[0] == 0
    assert ids(database) == list(range(1, 50))
    database.run("insert into t values (70, 'extra')")
    code, shown = run_on_terminal(twin, "refresh", "a", "--reconcile", "--yes")
    assert (code, "[y/N]" in shown, len(ids(database))) == (0, False, 49)


def test_no_confirmation_is_asked_without_a_terminal(twin: Twin) -> None:
    """A scheduler cannot answer; standard output has only the result."""
    database = two_feeds(twin, "where (id < 100)", "where (id >= 100)")
    twin.publish("alter publication pa set table t where (id < 50)")
    command = [str(PROGRAM), "refresh", "a", "--reconcile", "--json", "--config", str(twin.file)]
    ran = subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL)
    assert json.loads(ran.stdout)["deleted"] == 50
    assert ids(database) == list(range(1, 50))
