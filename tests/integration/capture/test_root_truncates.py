"""Truncated partitioned tables, which leaf identity does not send, are in the log (R2.13, R2.14)."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from cdc_replay.capture.ddl.event_triggers import EVENT_TRIGGERS
from cdc_replay.capture.publications import ROOT_PUBLICATIONS
from cdc_replay.capture.setup import setup_publisher
from cdc_replay.errors import PublicationMissing
from cdc_replay.model.lsn import Window
from cdc_replay.pgoutput.messages import Truncate
from cdc_replay.pgoutput.reader import decode
from cdc_replay.replay.log_window import definitions
from fixtures.captured import Captured
from fixtures.postgres import Database
from integration.capture.partition_tree import LEAVES, ROOT, TREE, VIA_ROOT, Row, check_order, content

SetUp = Callable[..., Captured]


def test_truncate_row_has_root_only_if_root_was_truncated(publisher: Database, set_up: SetUp) -> None:
    """R2.13, R2.14: of a leaf alone, of all leaves, of a middle table that is not published, of the root."""
    publisher.run(ROOT)
    captured = set_up()
    for tables in ("north_1", "north_1, south", "north", "root", "root, plain restart identity", "plain"):
        publisher.run(f"truncate {tables}")

    outcome = captured.capture()

    assert content(captured) == [
        ("T", {"north_1"}),
        ("T", LEAVES),
        ("T", {"north_1"}),
        ("T", LEAVES | {"root"}),
        ("T", LEAVES | {"root", "plain"}),
        ("T", {"plain"}),
    ]
    check_order(captured)
    assert (outcome.transactions, outcome.messages) == (6, 6)
    flags = [
        message.flags for row in captured.rows() if isinstance(message := decode(row["message"]), Truncate)
    ]
    assert [int(flag) for flag in flags] == [0, 0, 0, 0, 2, 0]


def test_truncate_row_has_ancestors_of_several_depths(publisher: Database, set_up: SetUp) -> None:
    """R2.5, R2.13: root and middle are the published relations of two subscriptions."""
    publisher.run(ROOT + f"create publication q for table north {VIA_ROOT}")
    captured = set_up("p", "q")
    publisher.run("truncate north")
    publisher.run("truncate root")
    publisher.run("truncate north_1")

    captured.capture()

    assert content(captured) == [
        ("T", {"north", "north_1"}),
        ("T", {"root", "north", *LEAVES}),
        ("T", {"north_1"}),
    ]
    names = {relation.name.name for relation in captured.log.relations().values()}
    assert {"root", "north"} <= names


def test_truncate_keeps_its_position_in_transaction(publisher: Database, set_up: SetUp) -> None:
    """R9.2: also if no leaf shows it; before the first, between, and after the last change."""
    publisher.run(ROOT)
    captured = set_up()
    publisher.run("insert into plain values (1)")
    publisher.run(
        "begin; truncate empty; insert into plain values (2), (3); truncate empty; truncate root;"
        "insert into root values (4, 'n'); truncate empty; commit"
    )
    publisher.run("truncate empty")
    publisher.run("insert into plain values (5)")
    publisher.run("truncate empty, plain")

    outcome = captured.capture()

    assert content(captured) == [
        ("I", "1"),
        ("T", {"empty"}), ("I", "2"), ("I", "3"), ("T", {"empty"}), ("T", LEAVES | {"root"}), ("I", "4"),
        ("T", {"empty"}),
        ("T", {"empty"}),
        ("I", "5"),
        ("T", {"empty", "plain"}),
    ]  # fmt: skip
    check_order(captured)
    assert (outcome.transactions, outcome.messages) == (5, 11)


def test_segment_of_many_row_groups_keeps_order(
    publisher: Database, set_up: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction over several row groups, with TRUNCATEs in the first, in middle ones and in the last."""
    monkeypatch.setattr("cdc_replay.postgres.peek.BATCH_ROWS", 7)
    monkeypatch.setattr("cdc_replay.changelog.segment.ROW_GROUP_ROWS", 7)
    publisher.run(ROOT)
    captured = set_up()
    parts = [f"insert into plain select generate_series({start}, {start + 9})" for start in range(0, 50, 10)]
    publisher.run("begin; truncate empty;" + "; truncate root; truncate empty;".join(parts) + "; commit")
    publisher.run("insert into plain values (50)")
    publisher.run("truncate empty")

    captured.capture()

    ten = [[("I", str(start + number)) for number in range(10)] for start in range(0, 50, 10)]
    between: list[Row] = [("T", LEAVES | {"root"}), ("T", {"empty"})]
    empty: Row = ("T", {"empty"})
    expected = [empty, *ten[0], *(row for rows in ten[1:] for row in (*between, *rows)), ("I", "50"), empty]
    assert content(captured) == expected
    check_order(captured)


def test_no_root_peek_without_truncate_of_partition(
    publisher: Database, set_up: SetUp, second_peeks: Callable[[], list[str]]
) -> None:
    """Changes of partitions, and TRUNCATE of other tables, are complete in leaf identity."""
    publisher.run(TREE + f"create publication p for table root, plain {VIA_ROOT}")
    captured = set_up()
    # Until a catalog is known that is older than the range, a member could have been without a leaf.
    captured.capture()
    publisher.run("insert into plain values (0)")
    captured.capture()
    second_peeks()
    publisher.run("insert into root values (1, 'n'), (1, 's')")
    publisher.run("truncate plain")

    captured.capture()
    assert second_peeks() == []
    publisher.run("truncate south")
    captured.capture()
    assert len(second_peeks()) == 1
    captured.capture()
    assert second_peeks() == []


def test_no_root_peek_if_a_leaf_was_not_truncated(
    publisher: Database, set_up: SetUp, second_peeks: Callable[[], list[str]]
) -> None:
    """R2.13: TRUNCATE of a partitioned table truncates each of its leaves. `north` has one leaf only."""
    publisher.run(TREE + f"create publication p for table root {VIA_ROOT}")
    captured = set_up()
    captured.install_event_triggers()
    for _ in range(2):
        publisher.run("insert into root values (1, 'n'), (1, 's'); delete from root")
        captured.capture()
    second_peeks()
    for statement, has_peek in (
        ("truncate south", False),
        ("truncate north", False),
        ("truncate south; truncate north", True),
        ("truncate root", True),
        ("create table east partition of root for values in ('e')", False),
        ("truncate north, south", False),
    ):
        publisher.run(statement)
        captured.capture()
        assert len(second_peeks()) == has_peek, statement
    north: Row = ("T", {"north_1"})
    assert [row for row in content(captured) if row[0] == "T"] == [
        ("T", {"south"}), north, ("T", {"south"}), north, ("T", {"root", *LEAVES}), ("T", LEAVES)
    ]  # fmt: skip


def test_truncated_root_without_one_of_its_leaves_is_captured(publisher: Database, set_up: SetUp) -> None:
    """The catalogs of before and after the range have the same leaves, but the root had fewer in between."""
    publisher.run(TREE + f"create publication p for table root {VIA_ROOT}")
    captured = set_up()
    captured.install_event_triggers()
    detach, attach = (
        "alter table root detach partition south",
        "alter table root attach partition south for values in ('s')",
    )
    for statements in (
        "insert into root values (1, 'n')",
        f"begin; {detach}; truncate root; {attach}; commit",
        f"{detach}; truncate root; {attach}",
        f"begin; savepoint a; {detach}; release a; truncate root; {attach}; commit",
    ):
        publisher.run(statements)
        captured.capture()
    assert [row for row in content(captured) if row[0] == "T"] == [("T", {"root", "north_1"})] * 3


def test_a_leaf_of_a_truncated_root_suffices_if_event_triggers_were_disabled(
    publisher: Database, set_up: SetUp
) -> None:
    """The root has a leaf that was not truncated both before and after the range, but had none in between."""
    publisher.run(TREE + f"create publication p for table root {VIA_ROOT}")
    captured = set_up()
    captured.install_event_triggers()
    publisher.run("insert into root values (1, 'n')")
    captured.capture()
    publisher.run(";".join(f"alter event trigger {name} disable" for name in EVENT_TRIGGERS))
    publisher.run("drop table south; truncate root")
    publisher.run("create table east partition of root for values in ('e')")
    publisher.run(";".join(f"alter event trigger {name} enable always" for name in EVENT_TRIGGERS))
    captured.capture()
    assert content(captured)[-1] == ("T", {"root", "north_1"})


def test_no_root_peek_without_publication_via_root(
    publisher: Database, set_up: SetUp, second_peeks: Callable[[], list[str]]
) -> None:
    """R2.11; R2.10: via root, but without TRUNCATE, beside another one that is not via root."""
    publisher.run(
        TREE + "create publication p for table root, plain;"
        f"create publication q for table root {VIA_ROOT[:-1]}, publish = 'insert')"
    )
    captured = set_up("p", "q")
    publisher.run("truncate root")
    publisher.run("truncate empty")

    captured.capture()

    assert content(captured) == [("T", LEAVES)]
    assert second_peeks() == []


def test_truncate_of_root_without_partitions_is_captured(publisher: Database, set_up: SetUp) -> None:
    """The catalogs of before and after the range both have a leaf, but not the same."""
    publisher.run(TREE + f"create publication p for table empty {VIA_ROOT}")
    publisher.run("create table first partition of empty for values from (0) to (10)")
    captured = set_up()
    for _ in range(2):
        publisher.run("insert into empty values (1)")
        captured.capture()
        publisher.run("delete from empty")
    publisher.run("drop table first")
    publisher.run("truncate empty")
    publisher.run("create table second partition of empty for values from (0) to (10)")
    captured.capture()
    assert content(captured)[-1] == ("T", {"empty"})


def test_new_tables_of_all_tables_publication_are_captured(publisher: Database, set_up: SetUp) -> None:
    """R2.4: FOR ALL TABLES and TABLES IN SCHEMA via root mean roots that do not exist yet."""
    publisher.run("create schema s; create publication p for all tables " + VIA_ROOT)
    publisher.run(f"create publication q for tables in schema s {VIA_ROOT}")
    for publication, schema in (("p", "public"), ("q", "s")):
        captured = set_up(publication)
        publisher.run(f"set search_path = {schema};" + TREE)
        publisher.run(f"set search_path = {schema}; truncate root; truncate empty; truncate south")
        captured.capture()
        assert content(captured) == [("T", LEAVES | {"root"}), ("T", {"empty"}), ("T", {"south"})]
        publisher.run(f"select pg_drop_replication_slot('{captured.source.slot}')")
        shutil.rmtree(captured.source.change_log)


def test_truncated_root_does_not_restore_dropped_columns(publisher: Database, set_up: SetUp) -> None:
    """R9.10: a root is described at its TRUNCATEs only, perhaps long ago."""
    publisher.run(
        "create table shrinks (id int, gone int) partition by range (id);"
        "create table grows (id int) partition by range (id);"
        f"create publication p for table shrinks, grows {VIA_ROOT}"
    )
    captured = set_up()
    for change in (
        "alter table grows add gone int",
        "alter table grows drop gone; alter table shrinks drop gone",
        "select",
    ):
        publisher.run("truncate shrinks, grows")
        publisher.run(change)
        captured.capture()
    after = captured.log.end_lsn
    publisher.run("truncate shrinks, grows")
    captured.capture()

    actual = [
        definition.relation for definition in definitions(captured.log, Window(after, captured.log.end_lsn))
    ]

    assert {relation.name.name: relation.column_names for relation in actual} == {
        "shrinks": ("id",),
        "grows": ("id",),
    }


@pytest.mark.parametrize("streaming", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rolled_back_truncates_are_dropped(streaming: bool, publisher: Database, set_up: SetUp) -> None:
    """R9.2, R9.5: the root peek is never streamed; both peeks drop rolled-back changes."""
    publisher.run(f"{ROOT}; alter database {publisher.name} set logical_decoding_work_mem = '64kB'")
    captured = set_up(streaming=streaming)
    many = "insert into plain select generate_series({}, {})"
    with publisher.connect() as writer:
        writer.autocommit = False
        writer.execute(many.format(1, 2000).encode())
        writer.execute("savepoint s; truncate root; truncate empty; rollback to s")
        writer.execute(many.format(2001, 4000).encode())
        writer.execute("truncate root")
        writer.execute(many.format(4001, 6000).encode())
        captured.capture()
        assert content(captured) == []
        writer.commit()
        writer.execute("truncate root")
        writer.rollback()

    captured.capture()

    rows: list[Row] = [("I", str(number)) for number in range(1, 6001)]
    assert content(captured) == [*rows[:4000], ("T", LEAVES | {"root"}), *rows[4000:]]
    check_order(captured)


@pytest.mark.parametrize("streaming", [False, True])
def test_truncates_of_prepared_transaction_are_stored_with_it(
    streaming: bool, publisher: Database, set_up: SetUp
) -> None:
    """R9.8: stored at PREPARE, logged at COMMIT PREPARED only, even many pulls and processes later."""
    publisher.run(f"{ROOT}; alter database {publisher.name} set logical_decoding_work_mem = '64kB'")
    publisher.run("create table other (id int primary key); alter publication p add table other")
    captured = set_up(two_phase=True, streaming=streaming)
    many = "insert into plain select generate_series(1, 2000)"
    publisher.run(f"begin; {many}; truncate root; prepare transaction 'both'")
    publisher.run("begin; truncate empty; prepare transaction 'never'")
    captured.capture()
    publisher.run("insert into other values (1)")
    captured.capture()
    assert content(captured) == [("I", "1")]
    waiting = captured.log.prepared_roots(ROOT_PUBLICATIONS[0])
    assert len(waiting.list_keys()) == 2

    publisher.run("rollback prepared 'never'")
    publisher.run("begin; truncate empty; prepare transaction 'roots only'")
    captured.capture()
    publisher.run("commit prepared 'both'")
    publisher.run("commit prepared 'roots only'")
    captured.capture_killed_at("capture.after_roots")
    captured.capture()

    numbers: list[Row] = [("I", str(number)) for number in range(1, 2001)]
    assert content(captured) == [("I", "1"), *numbers, ("T", LEAVES | {"root"}), ("T", {"empty"})]
    check_order(captured)
    assert waiting.list_keys() == ()


def test_truncate_is_stored_if_its_prepared_transaction_changed_the_tree(
    publisher: Database, set_up: SetUp
) -> None:
    """R9.8: no catalog has the tree of a transaction that has not committed."""
    publisher.run(f"{TREE}; drop table empty; create publication p for all tables {VIA_ROOT}")
    captured = set_up(two_phase=True)
    captured.install_event_triggers()
    for _ in range(2):
        publisher.run("insert into root values (1, 'n'); delete from root")
        captured.capture()
    north = "alter table north detach partition north_1"
    south = "alter table root detach partition south"
    south_again = "alter table root attach partition south for values in ('s')"
    for name, statements in {
        "without a leaf": f"{north}; {south}; truncate root",
        "with one leaf fewer": f"{south}; truncate root; {south_again}",
        "a new one": "create table fresh (id int) partition by range (id); truncate fresh",
    }.items():
        publisher.run(f"begin; {statements}; prepare transaction '{name}'")
        captured.capture()
        publisher.run(f"rollback prepared '{name}'")
        publisher.run(f"begin; {statements}; prepare transaction '{name}'")
        captured.capture()
        publisher.run(f"commit prepared '{name}'")
        captured.capture()
        if name == "without a leaf":
            north_again = "alter table north attach partition north_1 for values from (0) to (1000)"
            publisher.run(f"{north_again}; {south_again}")
            captured.capture()

    truncated = [tables for kind, tables in content(captured) if kind == "T"]
    assert truncated == [{"root"}, {"root", "north_1"}, {"fresh"}]


@pytest.mark.parametrize(
    "failpoint",
    [f"capture.after_{step}" for step in ("peek", "segment", "roots", "commit", "advance")],
)
def test_capture_killed_between_peeks_gives_same_log(
    failpoint: str, publisher: Database, set_up: SetUp
) -> None:
    """The rows of the second peeks are in the log together with those of the first, or none is."""
    publisher.run(ROOT)
    captured = set_up(max_changes_per_pull=4)
    expected: list[Row] = []
    for number in range(4):
        publisher.run(f"insert into plain values ({number})")
        publisher.run("truncate root")
        publisher.run("truncate empty")
        expected += [("I", str(number)), ("T", LEAVES | {"root"}), ("T", {"empty"})]

    captured.capture_killed_at(failpoint)
    captured.capture_killed_at(f"{failpoint}@2")
    captured.capture()

    assert content(captured) == expected
    check_order(captured)


def test_setup_adds_missing_root_publications(publisher: Database, set_up: SetUp) -> None:
    """R1.19: a TRUNCATE before they existed stops the capture; it is not captured as something else."""
    publisher.run(ROOT)
    captured = set_up()
    publisher.run("insert into plain values (1)")
    captured.capture()
    for name in ROOT_PUBLICATIONS:
        publisher.run(f"drop publication {name}")
    with pytest.raises(PublicationMissing, match="cdc_replay_capture_t0") as refused:
        captured.capture()
    assert "cdc-replay setup" in str(refused.value.hint)

    assert "younger than replication slot" in setup_publisher(captured.request).warnings[-1]
    publisher.run("insert into plain values (2)")
    captured.capture()
    publisher.run("truncate root")
    captured.capture()

    assert content(captured) == [("I", "1"), ("I", "2"), ("T", LEAVES | {"root"})]
