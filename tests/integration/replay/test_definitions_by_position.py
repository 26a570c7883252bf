"""Definitions that change between the changes of one window take effect where native applies them (R9.10).

Every case is a table, or a few, with publications of their own, changed and altered repeatedly; all cases are
captured and replayed at once, beside native subscriptions that ran meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from cdc_replay.capture.ddl.event_triggers import EVENT_TRIGGERS
from cdc_replay.capture.pull import CaptureSource
from cdc_replay.capture.setup import SetupRequest
from cdc_replay.catalog.ddl_change import CATALOG_PREFIX, REWRITE_PREFIX
from cdc_replay.commands.capture import capture
from cdc_replay.commands.setup import setup
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.verify_log import verify_log
from cdc_replay.failpoints import FAILPOINTS
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from fixtures.captured import Captured
from fixtures.native import wait_for
from fixtures.postgres import Database
from fixtures.twin import Twin

pytestmark = pytest.mark.spark


@dataclass(frozen=True)
class Case:
    """Both sides' tables, the publications, and a script that runs within one window.

    `expected` are rows by table, derived from the rules. `subscriber`: other tables than the publisher's.
    """

    tables: str
    publications: str
    script: str
    expected: Mapping[str, Sequence[tuple[object, ...]]]
    subscriber: str = ""


# R9.12: what a filter no longer lets pass stays; R4.4 with the filter of the moment.
FILTER = Case(
    "create table filtered (id int primary key, a int)",
    "create publication filtered for table filtered where (a > 10);"
    "alter table filtered replica identity full",
    """
    insert into filtered values (1, 5), (2, 50);
    alter publication filtered set table filtered where (a > 100);
    insert into filtered values (3, 50), (4, 500);
    update filtered set a = a + 1 where id in (2, 4);
    alter publication filtered set table filtered;
    insert into filtered values (5, 0);
    update filtered set a = a + 1 where id in (2, 4);
    alter publication filtered set table filtered where (a < 0);
    delete from filtered where id = 4;
    insert into filtered values (6, 6)
    """,
    # (2, 50): its first UPDATE does not pass a > 100 on either side; its second one is sent.
    {"filtered": [(2, 52), (4, 502), (5, 0)]},
)
INSIDE = Case(
    "create table inside (id int primary key, a int)",
    "create publication inside for table inside where (a > 10)",
    """
    begin;
    insert into inside values (1, 1), (2, 20);
    alter publication inside set table inside where (a < 10);
    insert into inside values (3, 3), (4, 40);
    savepoint s;
    alter publication inside set table inside where (a > 1000);
    insert into inside values (5, 5000);
    rollback to s;
    insert into inside values (6, 6), (7, 7000);
    savepoint s2;
    alter publication inside set table inside where (a > 50);
    release s2;
    insert into inside values (8, 8), (9, 90);
    commit;
    insert into inside values (10, 10), (11, 110);
    begin;
    alter publication inside set table inside;
    rollback;
    insert into inside values (12, 12)
    """,
    {"inside": [(11, 110), (2, 20), (3, 3), (6, 6), (9, 90)]},
)
LISTS = Case(
    "create table lists (id int primary key, a int default -1, b int default -1)",
    "create publication lists for table lists (id, a)",
    """
    insert into lists values (1, 1, 1);
    alter publication lists set table lists (id, b);
    insert into lists values (2, 2, 2);
    alter publication lists set table lists;
    insert into lists values (3, 3, 3);
    alter publication lists set table lists (id, a);
    update lists set a = a * 10, b = b * 10;
    begin;
    insert into lists values (4, 4, 4);
    alter publication lists set table lists (id, b);
    insert into lists values (5, 5, 5);
    commit
    """,
    {"lists": [(1, 10, -1), (2, 20, 2), (3, 30, 3), (4, 4, -1), (5, -1, 5)]},
)
ACTIONS = Case(
    "create table actions (id int primary key, a int)",
    "create publication actions for table actions with (publish = 'insert')",
    """
    insert into actions values (1, 1), (2, 2), (3, 3);
    update actions set a = 10 where id = 1;
    alter publication actions set (publish = 'insert, update, delete');
    update actions set a = 20 where id = 2;
    delete from actions where id = 3;
    alter publication actions set (publish = 'update');
    insert into actions values (4, 4);
    delete from actions where id = 2;
    update actions set a = 100 where id = 1
    """,
    {"actions": [(1, 100), (2, 20)]},
)
IDENTITY = Case(
    "create table identity (id int primary key, a int not null, b int);"
    "create unique index identity_a on identity (a)",
    "create publication identity for table identity",
    """
    insert into identity values (1, 1, 1), (2, 2, 2), (3, 3, 3);
    update identity set b = 10 where id = 1;
    alter table identity replica identity full;
    update identity set id = 20, b = 20 where id = 2;
    delete from identity where id = 1;
    alter table identity replica identity default;
    update identity set id = 30 where id = 3;
    delete from identity where id = 20
    """,
    {"identity": [(30, 3, 3)]},
)
MANY_LISTS = Case(
    "create table agree (id int primary key, a int default -1)",
    "create publication agree1 for table agree (id); create publication agree2 for table agree (id)",
    # R6.4: between the two commands the lists disagree, which matters to no change.
    """
    insert into agree values (1, 1);
    begin;
    alter publication agree1 set table agree;
    alter publication agree2 set table agree;
    insert into agree values (2, 2);
    commit;
    insert into agree values (3, 3)
    """,
    {"agree": [(1, -1), (2, 2), (3, 3)]},
)
ROOT = """
    create table tree (id int, k int, primary key (id, k)) partition by list (k);
    create table tree_1 partition of tree for values in (1);
    create table tree_2 partition of tree for values in (2)
"""
VIA_ROOT = Case(
    ROOT,
    "create publication tree for table tree with (publish_via_partition_root = true)",
    """
    insert into tree values (1, 1), (2, 2);
    alter publication tree set (publish_via_partition_root = false);
    insert into tree values (3, 1), (4, 2);
    alter publication tree set (publish_via_partition_root = true);
    insert into tree values (5, 1)
    """,
    # R7.12: the leaves are no tables of the subscription; what is published as them is ignored.
    {"tree": [(1, 1), (2, 2), (5, 1)]},
)
ATTACHED = Case(
    """
    create table grown (id int, k int, primary key (id, k)) partition by list (k);
    create table grown_1 partition of grown for values in (1)
    """,
    """
    create publication grown for table grown with (publish_via_partition_root = true);
    create table grown_2 (k int, id int, primary key (id, k))
    """,
    """
    insert into grown values (1, 1);
    insert into grown_2 (id, k) values (2, 2);
    alter table grown attach partition grown_2 for values in (2);
    insert into grown values (3, 2);
    update grown set id = 4 where id = 3;
    create table grown_3 partition of grown for values in (3);
    insert into grown values (5, 3), (6, 1);
    alter table grown detach partition grown_1;
    insert into grown_1 values (7, 1);
    delete from grown_1 where id = 1;
    begin;
    create table grown_4 (like grown_3 including all);
    insert into grown_4 values (8, 4);
    alter table grown attach partition grown_4 for values in (4);
    insert into grown values (9, 4);
    commit
    """,
    # R11.6: neither ATTACH nor DETACH sends rows.
    {"grown": [(1, 1), (4, 2), (5, 3), (6, 1), (9, 4)]},
    "create table grown (id int, k int, primary key (id, k))",
)
RENAMED = Case(
    "create table named (id int primary key); create table other (id int primary key);"
    "create schema elsewhere; create table elsewhere.named (id int primary key)",
    "create publication named for table named, other",
    # R7.12: elsewhere.named is there, and no table of the subscription.
    """
    insert into named values (1);
    insert into other values (10);
    begin;
    alter table named rename to tmp;
    alter table other rename to named;
    alter table tmp rename to other;
    insert into named values (11);
    insert into other values (2);
    commit;
    insert into named values (12);
    drop table elsewhere.named;
    alter table named set schema elsewhere;
    insert into elsewhere.named values (13);
    alter schema elsewhere rename to far;
    alter table far.named set schema public;
    insert into named values (14)
    """,
    {"named": [(1,), (11,), (12,), (14,)], "other": [(10,), (2,)], "elsewhere.named": []},
)
LIFE = Case(
    "create table life (id int primary key)",
    "create publication life for table life",
    """
    insert into life values (1);
    alter publication life rename to death;
    insert into life values (2);
    alter publication death rename to life;
    insert into life values (3);
    drop publication life;
    insert into life values (4);
    create publication life for table life where (id < 100);
    insert into life values (5), (500);
    alter publication life drop table life;
    insert into life values (6);
    alter publication life add table life;
    insert into life values (7)
    """,
    # R1.19: 18 decodes without the publication that is not there.
    {"life": [(1,), (3,), (5,), (7,)]},
)
AGAIN = Case(
    "create table again (id int primary key, a int); create table anew (id int primary key, a int)",
    "create publication again for table again; create schema inside; create publication anew for all tables"
    " with (publish = 'insert, update, delete')",
    """
    insert into again values (1, 1);
    insert into anew values (1, 1);
    drop table again, anew;
    create table again (a int, id int primary key);
    create table anew (a int, id int primary key);
    insert into again values (20, 2);
    insert into anew values (20, 2);
    alter publication again add table again;
    insert into again values (30, 3);
    update anew set a = 21
    """,
    {"again": [(1, 1), (3, 30)], "anew": [(1, 1), (2, 21)]},
)
TOGETHER = {
    "filtered": FILTER,
    "inside": INSIDE,
    "lists": LISTS,
    "actions": ACTIONS,
    "identity": IDENTITY,
    "agree": MANY_LISTS,
    "tree": VIA_ROOT,
    "grown": ATTACHED,
    "named": RENAMED,
    "life": LIFE,
}
PUBLICATIONS = {"agree": ("agree1", "agree2")}


def test_alterations_take_effect_at_the_native_position(twin: Twin) -> None:
    """R9.10, R9.11: every case at once, in one window."""
    # R1.19: a native slot stands still while a publication is missing, before 18 for good.
    cases = {
        name: case for name, case in TOGETHER.items() if case is not LIFE or twin.publisher.version >= 18
    }
    for case in cases.values():
        twin.publisher.run(f"{case.tables}; {case.publications}")
    everything = ";".join(case.subscriber or case.tables for case in cases.values())
    names = [name for case in cases for name in PUBLICATIONS.get(case, (case,))]
    twin.subscribe("s", *names, tables=everything)
    twin.sync()

    for case in cases.values():
        twin.publish(case.script)
    twin.sync()

    for case in cases.values():
        for table, rows in case.expected.items():
            assert twin.rows("s", table) == rows, table


def test_table_recreated_under_its_name_is_another_one(twin: Twin) -> None:
    """R9.10: columns in another order, as a member and for all tables; old rows stay."""
    twin.publisher.run(f"{AGAIN.tables}; {AGAIN.publications}")
    twin.subscribe("member", "again", tables=AGAIN.tables)
    twin.subscribe("all", "anew", tables=AGAIN.tables)
    twin.sync()

    twin.publish(AGAIN.script)
    twin.sync()

    assert twin.rows("member", "again") == AGAIN.expected["again"]
    assert twin.rows("all", "anew") == AGAIN.expected["anew"]
    assert twin.rows("all", "again") == [(1, 1), (2, 20), (3, 30)]


CONCURRENT = """
    create table mine (id int primary key, a int);
    create table yours (id int primary key, a int);
    create table ours (id int primary key, a int)
"""
MINE, YOURS = (
    "alter publication {0} set table {0} where (a > {1})".format(name, "{}") for name in ("mine", "yours")
)
MANY = "insert into {} select g, g from generate_series({}, {}) g"


def run(connection: Connection, *statements: str) -> None:
    for statement in statements:
        connection.execute(statement.encode())


@pytest.mark.parametrize(
    "options", [{}, {"streaming": True}, {"two_phase": True}, {"streaming": True, "two_phase": True}], ids=str
)
def test_transactions_see_their_own_and_committed_definitions(
    twin: Twin, options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """R9.10, R9.8, R1.9: open transactions with DDL, prepared and large ones, ending in any order."""
    twin.publisher.run(
        CONCURRENT + "; create publication mine for table mine; create publication yours for"
        " table yours; create publication ours for table ours where (a > 10);"
        f" alter database {twin.publisher.name} set logical_decoding_work_mem = '64kB'"
    )
    twin.options |= options
    twin.subscribe("s", "mine", "yours", "ours", tables=CONCURRENT)
    twin.sync()
    with two_transactions(twin.publisher) as (first, second):
        interleaved(first, second)
        large(first)
        # Prepared: in force for the others from COMMIT PREPARED on.
        run(first, "insert into ours values (5, 5)", "alter publication ours set table ours where (a < 10)")
        run(
            first, "insert into ours values (6, 6), (7, 7000)", f"prepare transaction '{twin.publisher.name}'"
        )
        run(second, "insert into ours values (8, 8), (9, 9000)", "commit")
        twin.sync()
        assert "without streaming" not in caplog.text
        with twin.publisher.connect() as third:
            run(third, f"commit prepared '{twin.publisher.name}'")
        run(second, "insert into ours values (10, 1), (11, 9000)", "commit")
        large_with_savepoint(first)
    with caplog.at_level(logging.WARNING):
        twin.sync()

    assert ("without streaming" in caplog.text) == options.get("streaming", False)
    assert twin.rows("s", "mine") == [(1, 1), (3, 20), (4, 4), (7, 70)]
    assert twin.rows("s", "yours") == [(2, 20), (3, 3), (5, 50)]
    small = "select array_agg(id order by id) from ours where id < 1000"
    assert twin.pairs["s"].ours.rows(small) == [([2, 4, 6, 9, 10],)]
    assert len(twin.rows("s", "ours")) == 5 + 600 + 100 + 300


def interleaved(first: Connection, second: Connection) -> None:
    # R9.10's run: the first one inserts, the second one alters and commits, the first one inserts again.
    run(first, "insert into ours values (1, 9), (2, 50)")
    run(second, "alter publication ours set table ours where (a > 55)", "commit")
    run(first, "insert into ours values (3, 50), (4, 60)", "commit")
    # Both have open DDL, and change each other's table; the second one ends first.
    run(first, "insert into mine values (1, 1)", MINE.format(10), "insert into mine values (2, 2), (3, 20)")
    run(second, YOURS.format(10), "insert into yours values (1, 1), (2, 20)")
    run(second, "insert into mine values (4, 4)")
    run(first, "insert into yours values (3, 3)")
    run(second, "commit")
    run(first, "insert into yours values (4, 4), (5, 50)", "insert into mine values (5, 5)", "commit")
    run(second, "insert into mine values (6, 6), (7, 70)", "insert into yours values (6, 6)", "commit")


def large(writer: Connection) -> None:
    """More than the decoding work memory, so it is streamed if that is asked for."""
    run(writer, MANY.format("ours", 1001, 1600), "alter publication ours set table ours where (a > 2500)")
    run(writer, MANY.format("ours", 2001, 2600), "commit")


def large_with_savepoint(writer: Connection) -> None:
    """R1.9: streamed messages do not say that they are of the savepoint."""
    run(writer, "alter publication ours set table ours where (a > 5000)", MANY.format("ours", 3001, 3600))
    run(writer, "savepoint s", "alter publication ours set table ours", MANY.format("ours", 3601, 4200))
    run(writer, "rollback to s", MANY.format("ours", 4701, 5300), "commit")


def test_open_transactions_that_change_one_publication_do_not_undo_each_other(twin: Twin) -> None:
    """R9.11: PostgreSQL lets neither wait for the other, and the first message commits last."""
    tables = "create table one (id int primary key, a int); create table gone (id int primary key)"
    twin.publisher.run(f"create type mood as enum ('sad'); {tables}")
    twin.publisher.run("alter table one add m mood; create publication p for table one (id, a), gone")
    twin.subscribe("s", "p", tables=tables)
    twin.sync()
    with two_transactions(twin.publisher) as (first, second):
        run(first, "drop table gone")
        run(second, "alter publication p set (publish = 'insert, delete')", "commit")
        run(first, "commit")
        run(second, "insert into one values (1, 1), (2, 2), (3, 3)", "update one set a = a + 10", "commit")
        run(first, "alter type mood rename to feeling")
        run(second, "alter publication p set table one (id, a) where (id > 2)", "commit")
        run(first, "commit")
        run(second, "delete from one", "insert into one values (4, 4)", "commit")
    twin.sync()

    assert twin.rows("s", "one") == [(1, 1), (2, 2), (4, 4)]


@contextlib.contextmanager
def two_transactions(publisher: Database) -> Iterator[tuple[Connection, Connection]]:
    with publisher.connect() as first, publisher.connect() as second:
        first.autocommit = second.autocommit = False
        yield first, second


def test_pulls_may_end_between_a_command_and_its_effect(twin: Twin) -> None:
    """R1.23: the bound of a pull is reached anywhere between two transactions."""
    case = dataclasses.replace(FILTER, script=f"{FILTER.script};\n{INSIDE.script}")
    twin.publisher.run(f"{FILTER.tables}; {FILTER.publications}; {INSIDE.tables}; {INSIDE.publications}")
    twin.subscribe("s", "filtered", "inside", tables=f"{FILTER.tables}; {INSIDE.tables}")
    twin.sync()
    twin.publish(case.script)

    twin.options["max_changes_per_pull"] = 1
    assert capture(twin.config, "pub").pulls > 10
    twin.sync()

    assert twin.rows("s", "filtered") == FILTER.expected["filtered"]
    assert twin.rows("s", "inside") == INSIDE.expected["inside"]


@pytest.mark.parametrize("point", [name for name in FAILPOINTS if name.startswith("capture.")])
def test_killed_capture_leaves_the_definitions_unchanged(twin: Twin, point: str) -> None:
    twin.publisher.run(f"{INSIDE.tables}; {INSIDE.publications}")
    twin.subscribe("s", "inside", tables=INSIDE.tables)
    twin.sync()
    twin.publish(INSIDE.script)

    captured = Captured(twin.publisher, source_of(twin), SetupRequest("pub", "", "", "", ()))
    captured.capture_killed_at(point)
    if point not in {"capture.after_commit", "capture.after_advance"}:
        captured.capture_killed_at(point)
    twin.sync()

    assert twin.rows("s", "inside") == INSIDE.expected["inside"]
    versions = captured.log.catalogs()
    assert len({(version.owner, version.from_lsn) for version in versions}) == len(versions)
    verify_log(twin.config, "pub")


def source_of(twin: Twin) -> CaptureSource:
    return CaptureSource("pub", twin.publisher.dsn, twin.slot, str(twin.change_log))


ONE = "create table t (id int primary key, a int)"
P = "create publication p for table t where (a > 10)"
NARROW = "alter publication p set table t where (a > {})"


def set_up_one(twin: Twin, **options: object) -> None:
    twin.options |= options
    twin.publisher.run(f"{ONE}; {P}")
    twin.subscribe("s", "p", tables=ONE, native=False)
    twin.sync_ours()


def ours(twin: Twin) -> list[tuple[object, ...]]:
    [result] = twin.sync_ours()
    assert result.replay.error is None
    return twin.pairs["s"].ours.rows("select id from t order by id")


def test_definition_is_in_force_for_the_whole_pull_without_event_triggers(twin: Twin) -> None:
    """R9.11: a catalog is in force from the end of the pull before the one that reads it."""
    set_up_one(twin, event_trigger=False)
    twin.publisher.run("insert into t values (1, 11)")
    twin.publisher.run(NARROW.format(100))
    twin.publisher.run("insert into t values (2, 101)")

    assert ours(twin) == [(2,)]


def test_value_of_the_previous_type_is_reported_without_event_triggers(twin: Twin) -> None:
    """R9.10: the present filter compares numbers, the value is a name: an error, not a traceback."""
    tables = "create table x (id int primary key, a text)"
    twin.options["event_trigger"] = False
    twin.publisher.run(f"{tables}; create publication p for table x with (publish = 'insert, delete')")
    twin.subscribe("s", "p", tables=tables)
    twin.sync()
    twin.publish(
        "insert into x values (1, 'abc');\ndelete from x;\nalter table x alter a type int using a::int;\n"
        "alter table x replica identity full;\nalter publication p set table x where (a > 5);\n"
        "insert into x values (2, 7), (3, 2)"
    )

    [result] = twin.sync_ours("s")

    assert 'cannot evaluate a row filter of table "public.x"' in (result.replay.error or "")
    assert "--table public.x" in (result.replay.error or "")
    assert "Traceback" not in (result.replay.error or "")
    snapshot(twin.config, "s", tables=[QualifiedName("public", "x")])
    twin.sync()
    assert twin.rows("s", "x") == [(2, "7")]


def test_event_triggers_created_later_are_exact_from_then_on(
    twin: Twin, caplog: pytest.LogCaptureFixture
) -> None:
    """R9.11: the setup that installs them records the publisher's position."""
    set_up_one(twin, event_trigger=False)
    twin.publisher.run(NARROW.format(20))
    twin.options["event_trigger"] = True
    setup(twin.config, "pub")
    twin.publisher.run("insert into t values (1, 11), (2, 21)")
    twin.publisher.run(NARROW.format(100))
    twin.publisher.run("insert into t values (3, 50), (4, 101)")

    with caplog.at_level(logging.WARNING):
        assert ours(twin) == [(2,), (4,)]
    assert "event triggers" not in caplog.text


def test_ddl_that_event_triggers_missed_is_detected_and_named(
    twin: Twin, caplog: pytest.LogCaptureFixture
) -> None:
    """R9.11: disabled for a while; the catalog is in force from where it was read."""
    set_up_one(twin)
    with disabled(twin.publisher):
        twin.publisher.run(NARROW.format(100))
        twin.publisher.run("create publication q for table t")
    twin.publisher.run("insert into t values (1, 11)")
    with caplog.at_level(logging.WARNING):
        assert ours(twin) == [(1,)]
    assert 'did not report all changes: publication "p", publication "q"; ' in caplog.text
    caplog.clear()
    twin.publisher.run("insert into t values (2, 11), (3, 101)")
    with caplog.at_level(logging.WARNING):
        assert ours(twin) == [(1,), (3,)]
    assert "not told" not in caplog.text


def test_rows_of_a_table_that_event_triggers_missed_are_kept(
    twin: Twin, caplog: pytest.LogCaptureFixture
) -> None:
    """R9.11: a partition of a published table, made while they were disabled, and filled at once."""
    tables = "create table t (id int primary key) partition by list (id)"
    twin.publisher.run(f"{tables}; create publication p for table t with (publish_via_partition_root = true)")
    twin.subscribe("s", "p", tables="create table t (id int primary key)", native=False)
    twin.sync_ours()
    with disabled(twin.publisher):
        twin.publisher.run("create table t_1 partition of t for values in (1)")
    twin.publisher.run("insert into t values (1)")

    with caplog.at_level(logging.WARNING):
        assert ours(twin) == [(1,)]
    assert "no DDL message was received for public.t_1" in caplog.text


def test_rows_of_create_table_as_belong_to_the_new_table(twin: Twin) -> None:
    """R9.10: they are written before the message about the table."""
    tables = "create table made (id int primary key)"
    twin.publisher.run(f"{tables}; create publication p for all tables with (publish = 'insert')")
    twin.subscribe("s", "p", tables=tables)
    twin.sync()
    twin.publisher.run("drop table made")
    twin.publisher.run("create table made as select 1 as id")
    twin.publisher.run("insert into made values (2)")
    twin.sync()

    assert twin.rows("s", "made") == [(1,), (2,)]


def test_message_of_another_writer_under_our_prefix_is_ignored(
    twin: Twin, caplog: pytest.LogCaptureFixture
) -> None:
    """R9.13: also one that is not transactional."""
    set_up_one(twin)
    for prefix in (CATALOG_PREFIX, REWRITE_PREFIX):
        for transactional in ("true", "false"):
            twin.publisher.run(f"select pg_logical_emit_message({transactional}, '{prefix}', 'nothing')")
    twin.publisher.run("insert into t values (1, 11)")

    with caplog.at_level(logging.WARNING):
        assert ours(twin) == [(1,)]
    assert "ignored 4 logical messages with the prefix of the event triggers" in caplog.text


def test_conflicting_column_lists_stop_their_changes_and_no_earlier_ones(twin: Twin) -> None:
    """R6.4, R1.36: native applies earlier commits, and stops for good."""
    tables = "create table t (id int primary key, a int); create table u (id int primary key, a int)"
    twin.publisher.run(f"{tables}; create publication p for table t, u; create publication q for table t")
    twin.subscribe("s", "p", "q", tables=tables)
    twin.sync()
    twin.publish(
        "insert into t values (1, 1);\ninsert into u values (1, 1);\nalter publication q set table t (id);\n"
        "insert into u values (2, 2);\ninsert into t values (2, 2);\ninsert into u values (3, 3)"
    )

    [result] = twin.sync_ours("s")

    assert "cannot use different column lists" in (result.replay.error or "")
    wait_for(lambda: twin.pairs["s"].native.rows("select from u where id = 2") != [], "native")
    assert twin.rows("s", "t") == [(1, 1)]
    assert twin.rows("s", "u") == [(1, 1), (2, 2)]


@contextlib.contextmanager
def disabled(publisher: Database) -> Iterator[None]:
    """Without event triggers, as in a session of a superuser who has switched them off."""
    for name in EVENT_TRIGGERS:
        publisher.run(f"alter event trigger {name} disable")
    try:
        yield
    finally:
        for name in EVENT_TRIGGERS:
            publisher.run(f"alter event trigger {name} enable always")
