"""What leaf identity does not carry is in the log all the same: truncated roots, and origins of changes.

root ─┬─ north ─── north_1          two more tables: plain, and empty, a partitioned table without partitions
      └─ south
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg import sql

from cdc_replay.capture.change_origins import ORIGIN_OPTION_SINCE
from cdc_replay.capture.publications import ROOT_PUBLICATIONS
from cdc_replay.capture.setup import setup_publisher
from cdc_replay.errors import PublicationMissing
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import RelationId
from cdc_replay.pgoutput.messages import Truncate
from cdc_replay.pgoutput.reader import decode
from cdc_replay.replay.log_window import definitions
from fixtures.captured import Captured
from fixtures.postgres import Database

SetUp = Callable[..., Captured]

TREE = """
    create table root (id int, part text, primary key (id, part)) partition by list (part);
    create table north partition of root for values in ('n') partition by range (id);
    create table north_1 partition of north for values from (0) to (1000);
    create table south partition of root for values in ('s');
    create table empty (id int primary key) partition by range (id);
    create table plain (id int primary key);
"""
VIA_ROOT = "with (publish_via_partition_root = true)"
ROOT = TREE + f"create publication p for table root, empty, plain {VIA_ROOT};"
LEAVES = {"north_1", "south"}

Row = tuple[str, Any]


def content(captured: Captured) -> list[Row]:
    """Every row of the log in order: of a TRUNCATE its tables, of others the first value."""
    names = {
        RelationId(oid): name
        for oid, name in captured.database.rows(
            "select oid::bigint, relname::text from pg_class where relkind in ('r', 'p') and oid >= 16384"
        )
    }
    result: list[Row] = []
    for row, (kind, values) in zip(captured.rows(), captured.changes(), strict=True):
        message = decode(row["message"])
        tables = (
            {names[relation] for relation in message.relations} if isinstance(message, Truncate) else None
        )
        result.append((kind, tables if tables is not None else values[0] if values else None))
    return result


def check_order(captured: Captured) -> None:
    """Rows are numbered without gaps in their transactions, and these are in commit order."""
    rows = captured.rows()
    expected, last = 0, 0
    for row in rows:
        expected = expected + 1 if row["commit_lsn"] == last else 0
        assert row["commit_lsn"] >= last
        assert row["seq"] == expected
        last = row["commit_lsn"]
    everything = Window(Lsn(0), captured.log.end_lsn)
    assert captured.log.summary(everything).messages == len(rows)
    commits = [commit.commit_lsn.value for commit in captured.log.commits(everything)]
    assert commits == sorted({row["commit_lsn"] for row in rows})


@pytest.fixture
def second_peeks(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged of second peeks since the last call."""
    caplog.set_level(logging.INFO, "cdc_replay.capture")

    def messages() -> list[str]:
        result = [record.getMessage() for record in caplog.records if "peeked" in record.getMessage()]
        caplog.clear()
        return result

    return messages


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
    """R9.2: also where no leaf shows it; before the first, between, and behind the last change."""
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
    monkeypatch.setattr("cdc_replay.changelog.row_groups.ROW_GROUP_ROWS", 7)
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
        captured.log.remove(captured.source.change_log)


def test_truncated_root_does_not_restore_dropped_columns(publisher: Database, set_up: SetUp) -> None:
    """R9.10: a root's shape is known from its TRUNCATEs, perhaps from one that is long ago."""
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


@pytest.mark.parametrize("streaming", [False, True])
def test_rolled_back_truncates_are_dropped(streaming: bool, publisher: Database, set_up: SetUp) -> None:
    """R9.2, R9.5: the second peek is never streamed; both leave out what was rolled back."""
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
    """R9.8: kept at PREPARE; out at COMMIT PREPARED, pulls and processes later, and only then."""
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
    assert len(waiting.waiting()) == 2

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
    assert waiting.waiting() == ()


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
    """R1.19: what was truncated before they existed stops the capture, it is not read as something else."""
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


@pytest.fixture
def origin(publisher: Database) -> Iterator[str]:
    """A replication origin, and a publisher that can leave changes out by origin."""
    with publisher.connect() as connection:
        if connection.info.server_version < ORIGIN_OPTION_SINCE:
            pytest.skip("R8.20: PostgreSQL 15 has no option origin")
        name = f"origin_{publisher.name}"
        connection.execute("select pg_replication_origin_create(%s)", (name,))
    yield name
    publisher.run(
        f"select pg_replication_origin_drop(roname) from pg_replication_origin where roname = '{name}'"
    )


def publish(publisher: Database, origin: str, script: str) -> None:
    """Run the statements one by one; `+` stands for: from here on with the origin, `-` for: without."""
    setup = sql.SQL("select pg_replication_origin_session_setup({})").format(origin).as_string(None)
    with publisher.connect() as connection:
        for statement in map(str.strip, script.split(";")):
            words = {"+": setup, "-": "select pg_replication_origin_session_reset()"}
            connection.execute(words.get(statement, statement).encode())


def origins(captured: Captured) -> list[tuple[Any, str | None]]:
    """What each row is, with its origin."""
    return [(what, row["origin"]) for (_, what), row in zip(content(captured), captured.rows(), strict=True)]


# Changes 1 to 8, in four transactions.
MIXED = """
    begin; insert into plain values (1); +; insert into plain values (2), (3); -;
    insert into plain values (4); commit;
    begin; insert into plain values (5); +; insert into plain values (6); commit; -;
    +; insert into plain values (7); -; insert into plain values (8)
"""
MIXED_ORIGINS = {"2": "", "3": "", "5": "named", "6": "named", "7": "named"}


def expected_origins(origin: str, count: int) -> list[tuple[str, str | None]]:
    return [
        (str(number), origin if (result := MIXED_ORIGINS.get(str(number))) == "named" else result)
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_changes_with_origin_in_local_transaction_are_marked(
    streaming: bool, publisher: Database, set_up: SetUp, origin: str
) -> None:
    """R8.19, R8.20: NULL where `origin = none` sends the change; the name where the wire says it."""
    publisher.run(f"{ROOT}; alter database {publisher.name} set logical_decoding_work_mem = '64kB'")
    captured = set_up(streaming=streaming, origin_none=True)
    publish(publisher, origin, MIXED)
    many = "insert into plain select generate_series({}, {})"
    publish(
        publisher,
        origin,
        f"begin; {many.format(9, 1500)}; +; {many.format(1501, 3000)}; -; select pg_logical_emit_message("
        f"true, 'p', 'm'); savepoint s; {many.format(3001, 4000)}; rollback to s; commit",
    )

    captured.capture()

    actual = origins(captured)
    assert actual[:8] == expected_origins(origin, 8)
    large: list[tuple[Any, str | None]] = [(str(number), None) for number in range(9, 1501)]
    large += [(str(number), "") for number in range(1501, 3001)]
    assert actual[8:] == large


def test_rows_of_one_copy_share_origin(publisher: Database, set_up: SetUp, origin: str) -> None:
    """R1.22: a multi-insert is one record."""
    publisher.run(ROOT)
    captured = set_up(origin_none=True)
    with publisher.connect() as writer:
        writer.execute("begin")
        for start in (0, 1000):
            if start:
                writer.execute("select pg_replication_origin_session_setup(%s)", (origin,))
            with writer.cursor().copy("copy plain from stdin") as copy:
                for number in range(start, start + 1000):
                    copy.write_row((number,))
        writer.execute("select pg_replication_origin_session_reset()")
        writer.execute("commit")

    captured.capture()

    actual = [origin for _, origin in origins(captured)]
    assert actual == [None] * 1000 + [""] * 1000
    assert len({row["lsn"] for row in captured.rows()}) < 100


def test_bounded_pulls_read_origins_of_backlog_once(
    publisher: Database, set_up: SetUp, origin: str, second_peeks: Callable[[], list[str]]
) -> None:
    """R1.24: the peek ahead is bounded too; one of remote changes only covers all of the backlog."""
    publisher.run(ROOT)
    captured = set_up(origin_none=True, max_changes_per_pull=5)
    publish(publisher, origin, MIXED)
    remote = "; ".join(f"insert into plain values ({number})" for number in range(9, 30))
    publish(publisher, origin, f"+; {remote}; -")
    for number in range(30, 40):
        publisher.run(f"insert into plain values ({number})")

    outcome = captured.capture()

    actual = origins(captured)
    assert actual[:8] == expected_origins(origin, 8)
    assert actual[8:29] == [(str(number), origin) for number in range(9, 30)]
    assert actual[29:] == [(str(number), None) for number in range(30, 40)]
    assert outcome.pulls > 5
    ahead = [line for line in second_peeks() if "origin = none" in line]
    # Local changes, five and a few at a time; the remote ones in between need no further peek.
    assert 1 < len(ahead) < outcome.pulls / 2


def test_origins_of_prepared_transaction_are_stored_with_it(
    publisher: Database, set_up: SetUp, origin: str
) -> None:
    """R8.19 (b), R9.8: of its changes, known at PREPARE; of COMMIT PREPARED, for all of them."""
    publisher.run(ROOT)
    captured = set_up(two_phase=True, origin_none=True)
    mixed = (
        "begin; insert into plain values ({}); +; insert into plain values ({}); -; {} prepare transaction"
    )
    publish(publisher, origin, mixed.format(1, 2, "truncate empty;") + " 'local'")
    publish(publisher, origin, mixed.format(3, 4, "") + " 'remote'")
    captured.capture()
    publisher.run("insert into plain values (5)")
    captured.capture()
    publisher.run("commit prepared 'local'")
    captured.capture()
    publish(publisher, origin, "+; commit prepared 'remote'; -")
    captured.capture()

    assert origins(captured) == [
        ("5", None), ("1", None), ("2", ""), ({"empty"}, None), ("3", ""), ("4", "")
    ]  # fmt: skip


def test_truncates_of_roots_have_origins(publisher: Database, set_up: SetUp, origin: str) -> None:
    """R8.19: shown by a leaf, and by the second peek alone."""
    publisher.run(ROOT)
    captured = set_up(origin_none=True)
    publish(
        publisher, origin, "begin; truncate root; truncate empty; +; truncate root; truncate empty; -; commit"
    )
    publish(publisher, origin, "+; truncate empty; -")

    captured.capture()

    tree = LEAVES | {"root"}
    assert origins(captured) == [
        (tree, None), ({"empty"}, None), (tree, ""), ({"empty"}, ""), ({"empty"}, origin)
    ]  # fmt: skip


def test_dropped_origin_still_counts(publisher: Database, set_up: SetUp, origin: str) -> None:
    """R8.20: whether there are origins now does not say whether there were any."""
    publisher.run(ROOT)
    captured = set_up(origin_none=True)
    publish(publisher, origin, MIXED)
    publisher.run(f"select pg_replication_origin_drop('{origin}')")

    captured.capture()

    assert origins(captured) == expected_origins(origin, 8)


def test_origins_are_read_only_for_origin_none(
    publisher: Database, set_up: SetUp, origin: str, second_peeks: Callable[[], list[str]]
) -> None:
    publisher.run(ROOT)
    captured = set_up()
    publish(publisher, origin, MIXED)

    captured.capture()

    assert {actual for _, actual in origins(captured)} == {None, origin}
    assert [line for line in second_peeks() if "origin = none" in line] == []


def test_setup_warns_of_origin_none_on_15(publisher: Database, set_up: SetUp) -> None:
    """R8.20: there the origin of single changes cannot be had."""
    publisher.run(ROOT)
    captured = set_up()
    request = dataclasses.replace(captured.request, origin_none=True)
    with publisher.connect() as connection:
        is_old = connection.info.server_version < ORIGIN_OPTION_SINCE
    actual = [warning for warning in setup_publisher(request).warnings if "R8.20" in warning]
    assert len(actual) == int(is_old)
