"""A validation finds whether the subscriber equals the filtered publisher at the fence, and where not."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import unquote

import psycopg
import pytest
from psycopg import sql

from cdc_replay.compare.difference import DifferenceKind
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.table_state import Parked
from cdc_replay.validate import run
from cdc_replay.validate.verdict import CheckKind, TableVerdict, Verdict
from integration.validate.bench import Bench

ORDERS = "create table orders (id int primary key, region text, total numeric(10, 2), note text)"
SOME_ORDERS = (
    "insert into orders select i, case i %% 2 when 0 then 'NSW' else 'VIC' end, i * 1.5, 'note ' || i"
    " from generate_series(1, 1000) as i"
).replace("%%", "%")


@pytest.fixture
def orders(bench: Bench) -> Bench:
    """1000 orders; the 500 of NSW are published and copied."""
    bench.both(ORDERS)
    bench.publisher.run("alter table orders replica identity full")
    bench.publisher.run(SOME_ORDERS)
    bench.publisher.run("create publication p for table orders where (region = 'NSW')")
    bench.copy()
    return bench


def only_table(verdict: Verdict) -> TableVerdict:
    (table,) = verdict.tables
    return table


def failing(table: TableVerdict) -> set[CheckKind]:
    return {check.kind for check in table.checks if not check.passes}


def keys_by_kind(table: TableVerdict) -> dict[DifferenceKind, list[str]]:
    by_kind: dict[DifferenceKind, list[str]] = {}
    for difference in table.differences:
        by_kind.setdefault(difference.kind, []).append(difference.key)
    return {kind: sorted(keys) for kind, keys in by_kind.items()}


def test_equal_sides_are_consistent(orders: Bench) -> None:
    verdict = orders.validate()

    table = only_table(verdict)
    assert verdict.success
    assert (table.publisher_rows, table.subscriber_rows) == (500, 500)
    assert {check.kind for check in table.checks} == set(CheckKind) - {CheckKind.PROOF_AGE}
    assert table.differences == ()
    assert "consistent" in verdict.report.read_text()
    assert (verdict.report.parent / "latest.html").read_text() == verdict.report.read_text()
    assert verdict.data_docs.is_file()


def test_damage_fails_and_the_report_names_the_rows(orders: Bench) -> None:
    orders.subscriber.run("delete from orders where id = 10")
    orders.subscriber.run("update orders set total = total + 0.01 where id = 20")
    orders.subscriber.run("insert into orders values (2001, 'NSW', 1, 'never sold')")

    verdict = orders.validate()

    table = only_table(verdict)
    assert not verdict.success
    # One deleted and one added: the row count alone would not differ.
    assert failing(table) == {CheckKind.CONTENT}
    assert keys_by_kind(table) == {
        DifferenceKind.MISSING: ["id=10"],
        DifferenceKind.DIFFERENT: ["id=20"],
        DifferenceKind.UNEXPECTED: ["id=2001"],
    }
    page = verdict.report.read_text()
    assert all(key in page for key in ("id=10", "id=20", "id=2001"))
    assert str(verdict.lsn) in page
    assert verdict.describe_failures() == (
        (
            "public.orders: content: 1 missing, 1 unexpected, 1 different"
            " (first: missing id=10, unexpected id=2001, different id=20)"
        ),
    )


def test_great_expectations_records_the_same_verdict(orders: Bench) -> None:
    orders.subscriber.run("delete from orders where id = 10")

    verdict = orders.validate()

    (result_file,) = (orders.context_root / "gx" / "uncommitted" / "validations").rglob("*.json")
    recorded = json.loads(result_file.read_text())
    assert recorded["suite_name"] == "nsw"
    assert verdict.lsn.file_name in str(result_file)
    outcomes = {result["expectation_config"]["type"]: result for result in recorded["results"]}
    assert {kind: outcome["success"] for kind, outcome in outcomes.items()} == {
        "expect_row_count_to_equal_publisher": False,
        "expect_content_to_equal_publisher": False,
        "expect_keys_to_be_unique": True,
        "expect_rows_to_satisfy_row_filter": True,
    }
    assert outcomes["expect_content_to_equal_publisher"]["result"]["partial_unexpected_list"] == [
        "missing: id=10"
    ]
    docs = "".join(page.read_text() for page in verdict.data_docs.parent.rglob("validations/**/*.html"))
    assert "missing: id=10" in docs


def test_writes_on_the_publisher_after_the_fence_are_ignored(orders: Bench) -> None:
    """R1.34: the exported snapshot holds exactly what is committed at or below the consistent point."""
    stop = threading.Event()

    def write() -> int:
        writes = 0
        with orders.publisher.connect() as connection:
            while not stop.is_set():
                connection.execute("update orders set total = total + 1 where id <= 100")
                connection.execute("insert into orders select max(id) + 1, 'NSW', 1 from orders")
                writes += 1
        return writes

    with orders.fence() as fence, ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        try:
            verdict = orders.validate_at(fence, orders.tables(fence))
        finally:
            stop.set()

    assert writer.result() > 0
    assert verdict.success
    assert only_table(verdict).publisher_rows == 500


def test_rows_outside_a_changed_filter_are_a_separate_kind(orders: Bench) -> None:
    """R9.12, R11.7: a changed filter neither inserts nor deletes rows; both count as differences."""
    orders.publisher.run("alter publication p set table orders where (region = 'NSW' and id > 4)")
    orders.subscriber.run("insert into orders values (2002, 'NSW', 1, 'never sold')")
    #  subscriber has 2, 4, …, 1000 and 2002; the publisher publishes 6, 8, …, 1000
    #  2, 4    outside the present filter
    #  2002    passes the filter, and is not on the publisher

    verdict = orders.validate()

    table = only_table(verdict)
    assert failing(table) == {CheckKind.ROW_COUNT, CheckKind.CONTENT, CheckKind.ROW_FILTER}
    assert keys_by_kind(table) == {
        DifferenceKind.OUTSIDE_FILTER: ["id=2", "id=4"],
        DifferenceKind.UNEXPECTED: ["id=2002"],
    }
    assert sorted(table.outside_filter) == ["id=2", "id=4"]
    assert "refresh nsw --reconcile" in verdict.report.read_text()


@pytest.mark.parametrize(
    ("published", "value", "target", "row_filter"),
    [
        ("char(5)", "'x'", "text", "v = 'x'"),
        ("int", "3", "numeric", "v / 2 = 1"),
        ("timestamp", "'2020-01-01 11:00'", "date", "v > '2020-01-01 10:00'"),
    ],
    ids=["blanks", "division", "precision"],
)
def test_published_rows_are_not_outside_the_filter_as_the_subscriber_evaluates_it(
    bench: Bench, published: str, value: str, target: str, row_filter: str
) -> None:
    """Its types have other operators: rows that equal published ones are inside the publisher's filter."""
    bench.publisher.run(f"create table t (id int primary key, v {published})")
    bench.publisher.run(f"insert into t select g, {value} from generate_series(1, 500) g")
    bench.publisher.run(f"create publication p for table t where ({row_filter})")
    bench.subscriber.run(f"create table t (id int primary key, v {target})")
    bench.copy()
    assert bench.validate().success

    bench.subscriber.run("delete from t where id = 5; insert into t values (501, null)")
    table = only_table(bench.validate())
    assert keys_by_kind(table) == {
        DifferenceKind.MISSING: ["id=5"],
        DifferenceKind.OUTSIDE_FILTER: ["id=501"],
    }
    assert table.outside_filter == ("id=501",)


def test_filter_with_like_and_percent_is_evaluated_by_both_servers(bench: Bench) -> None:
    bench.both(ORDERS)
    bench.publisher.run(SOME_ORDERS)
    bench.publisher.run("create publication p for table orders where (note like '%9%' and id % 2 = 1)")
    bench.copy()

    verdict = bench.validate()

    (expected,) = bench.publisher.rows("select count(*) from orders where note like '%9%' and id % 2 = 1")
    assert verdict.success
    assert only_table(verdict).publisher_rows == expected[0] > 0
    bench.subscriber.run("insert into orders values (2002, '50% off', 1, '100% %s {} 8')")
    assert keys_by_kind(only_table(bench.validate())) == {DifferenceKind.OUTSIDE_FILTER: ["id=2002"]}


def test_values_are_compared_as_the_text_that_replication_sends(bench: Bench) -> None:
    """R1.11: NULL and '' differ, trailing zeros and float digits count, NaN equals itself."""
    bench.both(
        """
        create table samples (
            id bigint primary key, doc jsonb, raw_doc json, at timestamptz, amount numeric, raw bytea,
            single real, double float8, tags text[], pair point, fixed char(5), flag bool, span interval
        )
        """
    )
    bench.publisher.run(
        """
        insert into samples values
            (1, '{"b": [1, null], "a": "x"}', '{"b":1,  "a":2}', '2013-07-01 12:00:00.123456+10', 1.500,
             '\\x00ff', 0.1, 1e-300, array['a,b', null, '"'], '(1,2)', 'ab', true, '1 mon 2 days'),
            (2, null, null, null, 'NaN', '', 'NaN', '-Infinity', '{}', null, '', false, null),
            (3, '{}', '[]', 'infinity', 1e40, null, -0.0, 0.1, null, null, null, null, '-1 sec');
        create publication p for table samples;
        """
    )
    bench.copy()
    assert bench.validate().success

    bench.subscriber.run("update samples set raw = null where id = 2")
    bench.subscriber.run("update samples set amount = 1.50 where id = 1")
    assert keys_by_kind(only_table(bench.validate())) == {DifferenceKind.DIFFERENT: ["id=1", "id=2"]}


def test_another_type_on_the_subscriber_is_no_difference(bench: Bench) -> None:
    """The publisher's text goes through the subscriber's input function, as in replication."""
    bench.publisher.run(
        """
        create type mood as enum ('sad', 'ok');
        create table t (id int primary key, doc json, amount numeric, code char(4), feeling mood,
            at timestamptz);
        insert into t values (1, '{"b":1,  "a":2}', 1.239, 'x', 'ok', '2013-07-01 12:00+00');
        insert into t values (2);
        create publication p for table t;
        """
    )
    bench.subscriber.run(
        """
        create domain short_text as text;
        create table t (id bigint primary key, doc jsonb, amount numeric(10, 2), code char(8),
            feeling short_text, at timestamp)
        """
    )
    bench.copy()
    assert bench.validate().success

    bench.subscriber.run("update t set amount = 1.25")
    assert keys_by_kind(only_table(bench.validate())) == {DifferenceKind.DIFFERENT: ["id=1", "id=2"]}


def test_a_shorter_text_on_the_subscriber_loses_trailing_blanks_only(bench: Bench) -> None:
    """The input function of varchar(n) cuts blanks, and refuses other characters."""
    bench.publisher.run(
        """
        create table t (id int primary key, value text, notes text[], pair text);
        insert into t values (1, 'abc  ', '{"de   ",f}', '{ a,  b }'), (2, 'ab ', null, null),
            (3, 'abcd', null, null), (4, null, null, null);
        create publication p for table t where (id <> 3)
        """
    )
    bench.subscriber.run(
        "create table t (id int primary key, value varchar(3), notes varchar(3)[], pair text[])"
    )
    bench.copy()
    assert bench.subscriber.rows("select notes[1] || '.' from t where id = 1") == [("de .",)]
    assert bench.validate().success

    bench.publisher.run("alter publication p set table t")
    bench.subscriber.run("insert into t values (3, 'abc')")
    assert keys_by_kind(only_table(bench.validate())) == {DifferenceKind.DIFFERENT: ["id=3"]}


@pytest.mark.parametrize(
    ("published", "subscribed", "accepted", "refused", "cut"),
    [
        ("text", "char(5)", ("ab", "abcde   ", "äöüß€", ""), "abcdefg", "abcde"),
        ("char(8)", "char(3)", ("ab", ""), "abcdefg", "abc"),
        ("char(3)", "char(8)", ("ab", ""), None, None),
        ("text", "short", ("ab", "abc "), "abcd", "abc"),
        ("char(8)", "varchar(3)", ("ab", ""), "abcdefg", "abc"),
        ("text", "bit(4)", ("1010", "xA"), "101010", "1010"),
        ("varbit", "bit(4)", ("1010",), "1", "1000"),
        ("varbit(6)", "varbit(3)", ("101", "1", ""), "1010", "101"),
        ("bit(3)", "varbit(6)", ("101",), None, None),
        ("text[]", "char(3)[]", ('{a,"bc   ",NULL}', "{}", "{{a,b},{c,d}}"), "{a,abcd}", "{a,abc}"),
        ("char(8)[]", "char(3)[]", ("{ab}",), "{abcd}", "{abc}"),
        ("text", "varchar(3)[]", ('{a,"bc   ",NULL}', "[2:3]={a,b}"), "{{a},{abcd}}", "{{a},{abc}}"),
        ("varchar(8)[]", "short_list", ("{ab}",), "{abcd}", "{abc}"),
        ("text[]", "bit(4)[]", ("{1010,xA,NULL}", "{}"), "{1010,11111}", "{1010,1111}"),
        ("varbit[]", "varbit(3)[]", ("{101,1,NULL}", "{}"), "{1,1111}", "{1,111}"),
    ],
)
def test_value_that_a_shorter_type_refuses_is_different(
    bench: Bench,
    published: str,
    subscribed: str,
    accepted: tuple[str, ...],
    refused: str | None,
    cut: str | None,
) -> None:
    """A cast would cut or pad what the input function refuses, and make the sides equal."""
    bench.publisher.run(f"create table t (id int primary key, value {published})")
    bench.subscriber.run(
        "create domain short as char(3); create domain short_list as varchar(3)[];"
        f"create table t (id int primary key, value {subscribed})"
    )
    with bench.publisher.connect() as connection:
        for row in enumerate((*accepted, None)):
            connection.execute(sql.SQL("insert into t values ({}, {})").format(*map(sql.Literal, row)))
    bench.publisher.run("create publication p for table t")
    bench.copy()
    assert bench.validate().success
    if refused is None:
        return

    bench.publisher.run(f"delete from t; insert into t values (90, '{refused}')")
    bench.subscriber.run("delete from t")
    with pytest.raises(psycopg.DataError):
        bench.copy()
    bench.subscriber.run(f"insert into t values (90, '{cut}')")
    assert keys_by_kind(only_table(bench.validate())) == {DifferenceKind.DIFFERENT: ["id=90"]}


def test_quoted_names_and_extra_columns_of_the_subscriber(bench: Bench) -> None:
    bench.publisher.run(
        """
        create schema "Shop's";
        create table "Shop's"."Order ""Lines"" $1 <b>" ("Order" int, "No." text, "a%s{0}" text,
            primary key ("Order", "No."));
        insert into "Shop's"."Order ""Lines"" $1 <b>" values (1, 'a, b', '50%'), (2, 'x', null);
        create publication p for table "Shop's"."Order ""Lines"" $1 <b>"
            where ("No." <> 'zzz' and "Order" < 10) with (publish = 'insert')
        """
    )
    bench.subscriber.run(
        """
        create schema "Shop's";
        create table "Shop's"."Order ""Lines"" $1 <b>" (local int default 7, "a%s{0}" text, "No." text,
            "Order" int, primary key ("Order", "No."))
        """
    )
    bench.copy()
    assert bench.validate().success

    bench.subscriber.run("""delete from "Shop's"."Order ""Lines"" $1 <b>" where "Order" = 1""")
    verdict = bench.validate()
    assert keys_by_kind(only_table(verdict)) == {DifferenceKind.MISSING: ["Order=1, No.=a, b"]}
    assert "Order &quot;Lines&quot; $1 &lt;b&gt;" in verdict.report.read_text()


def test_partitioned_table_is_compared_through_its_root(bench: Bench) -> None:
    """R7.6: the root's rows are those of all leaves; here the subscriber's table is plain."""
    bench.publisher.run(
        """
        create table flights (id int, month int, carrier text, primary key (month, id))
            partition by list (month);
        create table flights_1 partition of flights for values in (1);
        create table flights_2 (carrier text, id int not null, month int not null);
        alter table flights attach partition flights_2 for values in (2);
        insert into flights select i, 1 + i % 2, case when i % 3 = 0 then 'UA' else 'AA' end
            from generate_series(1, 300) as i;
        create publication p for table flights where (carrier = 'UA') with (publish_via_partition_root = true,
            publish = 'insert')
        """
    )
    bench.subscriber.run("create table flights (carrier text, id int, month int, primary key (id, month))")
    bench.copy()

    verdict = bench.validate()
    assert verdict.success
    assert only_table(verdict).publisher_rows == 100

    bench.subscriber.run("update flights set month = 9 where id = 6")
    assert keys_by_kind(only_table(bench.validate())) == {
        DifferenceKind.MISSING: ["month=1, id=6"],
        DifferenceKind.UNEXPECTED: ["month=9, id=6"],
    }


def test_inheritance_children_are_ignored(bench: Bench) -> None:
    """R7.6: a plain table without its inheritance children."""
    bench.both("create table parent (id int primary key); create table child () inherits (parent)")
    bench.publisher.run("insert into parent values (1); insert into child values (2)")
    bench.publisher.run("create publication p for table only parent")
    bench.copy()
    bench.subscriber.run("truncate only parent; insert into parent values (1); insert into child values (3)")

    verdict = bench.validate()

    assert verdict.success
    assert only_table(verdict).publisher_rows == 1


def test_table_without_key_is_a_multiset_of_rows(bench: Bench) -> None:
    bench.both("create table log (word text, n int)")
    bench.publisher.run("alter table log replica identity full")
    bench.publisher.run("insert into log values ('a', 1), ('a', 1), ('a', 1), ('b', null), ('c', 3)")
    bench.publisher.run("create publication p for table log")
    bench.copy()
    assert bench.validate().success

    bench.subscriber.run("delete from log where ctid = (select max(ctid) from log where word = 'a')")
    bench.subscriber.run("insert into log values ('b', null), ('b', null)")
    table = only_table(bench.validate())
    assert dict(table.counts) == {DifferenceKind.MISSING: 1, DifferenceKind.UNEXPECTED: 2}
    assert keys_by_kind(table) == {DifferenceKind.MISSING: ["(a,1)"], DifferenceKind.UNEXPECTED: ["(b,)"]}
    assert CheckKind.UNIQUE_KEY not in {check.kind for check in table.checks}


def test_duplicate_key_is_found_if_no_constraint_prevents_it(bench: Bench) -> None:
    bench.publisher.run(ORDERS + "; " + SOME_ORDERS + "; create publication p for table orders")
    bench.subscriber.run(ORDERS.replace(" primary key", ""))
    bench.copy()
    bench.subscriber.run("insert into orders select * from orders where id in (7, 8)")

    table = only_table(bench.validate())

    assert failing(table) == {CheckKind.ROW_COUNT, CheckKind.CONTENT, CheckKind.UNIQUE_KEY}
    assert sorted(table.duplicate_keys) == ["id=7", "id=8"]
    assert keys_by_kind(table) == {DifferenceKind.UNEXPECTED: ["id=7", "id=8"]}


def test_many_differences_are_all_counted_and_the_first_listed(orders: Bench) -> None:
    orders.subscriber.run("delete from orders where id <= 400")

    table = only_table(orders.validate())

    assert dict(table.counts) == {DifferenceKind.MISSING: 200}
    assert Counter(difference.kind for difference in table.differences) == {DifferenceKind.MISSING: 20}


def test_tables_with_unpublished_actions_are_shown_for_information(orders: Bench) -> None:
    """With publish = 'insert' a native subscriber keeps deleted rows and old values too (R2.1)."""
    orders.publisher.run("alter publication p set (publish = 'insert')")
    orders.publisher.run("delete from orders where id = 2; update orders set total = 0 where id = 4")
    orders.publisher.run("insert into orders values (2002, 'NSW', 1, 'not yet there')")

    verdict = orders.validate(note="UPDATE and DELETE are not published")

    table = only_table(verdict)
    assert verdict.success
    assert keys_by_kind(table) == {DifferenceKind.MISSING: ["id=2002"], DifferenceKind.UNEXPECTED: ["id=2"]}
    assert all(check.informational for check in table.checks)
    assert "for information only: UPDATE and DELETE are not published" in table.notes
    assert "not comparable" in verdict.report.read_text()


def test_filter_over_an_unpublished_column_is_not_evaluated_on_the_subscriber(bench: Bench) -> None:
    """A local column of the same name has other values: it must not be taken for the publisher's."""
    bench.publisher.run(ORDERS + "; " + SOME_ORDERS)
    bench.publisher.run(
        "create publication p for table orders (id, total) where (region = 'NSW') with (publish = 'insert')"
    )
    bench.subscriber.run(
        "create table orders (id int primary key, total numeric, region text default 'local')"
    )
    bench.copy()

    verdict = bench.validate()

    table = only_table(verdict)
    assert verdict.success
    assert CheckKind.ROW_FILTER not in {check.kind for check in table.checks}
    assert any("cannot evaluate the row filter" in note for note in table.notes)


def test_table_that_is_not_at_the_fence_is_an_error_and_not_a_difference(orders: Bench) -> None:
    orders.subscriber.run("delete from orders where id = 10")

    with orders.fence(instead=Parked(Lsn.parse("0/10"), "insert_exists", Lsn.parse("0/18"))) as fence:
        verdict = orders.validate_at(fence, orders.tables(fence))

    table = only_table(verdict)
    assert not verdict.success
    state = "parked at 0/10, before transaction 0/18: insert_exists"
    assert table.error == f"the table is not at the fence {verdict.lsn}: {state}"
    assert table.differences == ()
    assert "parked at 0/10" in verdict.report.read_text()


@pytest.mark.parametrize("change", ["truncate orders", "alter table orders add extra float default random()"])
def test_rows_that_the_fence_does_not_see_any_more_are_an_error_and_no_difference(
    orders: Bench, change: str
) -> None:
    """TRUNCATE and rewrites remove the rows for earlier snapshots, too."""
    with orders.fence() as fence:
        tables = orders.tables(fence)
        orders.publisher.run(change)
        verdict = orders.validate_at(fence, tables)

    table = only_table(verdict)
    assert table.error is not None
    assert "public.orders was truncated, rewritten, attached or detached" in table.error
    assert table.differences == ()


def test_error_of_one_table_does_not_prevent_the_others(orders: Bench) -> None:
    """The filter divides by zero on the publisher: an error of that table, not a difference."""
    orders.both("create table ratios (id int primary key)")
    orders.publisher.run("alter publication p add table ratios where (10 / id > 1)")
    orders.publisher.run("insert into ratios values (0)")

    verdict = orders.validate()

    by_name = {str(table.name): table for table in verdict.tables}
    assert not verdict.success
    assert by_name["public.orders"].success
    assert by_name["public.ratios"].error == "division by zero"
    assert verdict.describe_failures() == ("public.ratios: division by zero",)


def two_tables(bench: Bench) -> None:
    bench.both("create table t (id int primary key, v int, w int); create table u (id int primary key)")
    bench.publisher.run("insert into t values (1, 1, 1); insert into u values (1)")
    bench.publisher.run("create publication p for table t, u")
    bench.copy()


@pytest.mark.parametrize("instead", ["", "create view t as select 1 as id, 1 as v, 1 as w"])
def test_table_missing_on_the_subscriber_fails_alone(bench: Bench, instead: str) -> None:
    """R8.1: nor is a view a target."""
    two_tables(bench)
    bench.subscriber.run(f"drop table t; {instead}")

    verdict = bench.validate()

    by_name = {str(table.name): table for table in verdict.tables}
    assert not verdict.success
    assert by_name["public.u"].success
    (failure,) = verdict.describe_failures()
    assert failure.startswith("public.t: the table is missing on the subscriber")
    assert "missing on the subscriber" in verdict.report.read_text()


@pytest.mark.parametrize("note", ["", "DELETE is not published"])
@pytest.mark.parametrize(
    ("here", "there", "lacks"),
    [
        ("", "alter table t drop column v", 'column "v"'),
        ("", "alter table t drop column v, drop column w, add column x int", 'columns "v", "w"'),
        ("alter table t add column x int default 7", "", 'column "x"'),
    ],
)
def test_published_column_missing_on_the_subscriber_fails_the_table(
    bench: Bench, here: str, there: str, lacks: str, note: str
) -> None:
    """R8.1: also where the other columns are equal, and where only keys would be compared."""
    two_tables(bench)
    bench.publisher.run(here)
    bench.subscriber.run(there)

    verdict = bench.validate(note=note)

    by_name = {str(table.name): table for table in verdict.tables}
    assert not verdict.success
    assert by_name["public.u"].success
    assert by_name["public.t"].error == f"the table on the subscriber lacks the published {lacks} [R8.1]"


def test_unpublished_column_may_be_missing(bench: Bench) -> None:
    two_tables(bench)
    bench.publisher.run("alter publication p set table t (id, v), u")
    bench.subscriber.run("alter table t drop column w")
    assert bench.validate().success


def test_rows_hidden_by_a_policy_are_an_error(bench: Bench) -> None:
    """R7.10: reading under row-level security would compare only what the role may see."""
    bench.both(ORDERS)
    bench.publisher.run("create publication p for table orders")
    bench.publisher.run("insert into orders values (1, 'NSW', 1, 'hidden')")
    bench.publisher.run(
        """
        alter table orders enable row level security;
        alter table orders force row level security;
        drop role if exists restricted_reader;
        create role restricted_reader login replication;
        grant select on orders to restricted_reader;
        """
    )
    try:
        restricted = replace(
            bench, publisher_dsn=bench.publisher.cluster.dsn(bench.publisher.name, "restricted_reader")
        )
        table = only_table(restricted.validate())
    finally:
        bench.publisher.run("drop owned by restricted_reader; drop role restricted_reader")

    assert table.error is not None
    assert "row-level security" in table.error
    assert 'table "public.orders" of the publisher' in table.error


def test_missing_privilege_error_names_the_side_and_the_grant(orders: Bench) -> None:
    assert orders.validate().success
    role = f"poor_{orders.subscriber.name}"
    orders.subscriber.run(f"create role {role} login; grant usage on schema cdc_replay to {role}")
    orders.subscriber.run(f"grant select on all tables in schema cdc_replay to {role}")
    try:
        dsn = orders.subscriber.cluster.dsn(orders.subscriber.name, role)
        table = only_table(replace(orders, subscriber_dsn=dsn).validate())
    finally:
        orders.subscriber.run(f"drop owned by {role}; drop role {role}")

    assert table.error is not None
    assert 'table "public.orders" of the subscriber is owned by "postgres"' in table.error
    assert "cannot SET ROLE to" in table.error
    assert 'Grant "postgres" to the role' in table.error


def test_concurrent_validations_do_not_disturb_each_other(orders: Bench) -> None:
    names = ["a", "b/c", "b%2Fc", "ü"]
    with ThreadPoolExecutor(len(names)) as pool:
        verdicts = list(pool.map(lambda name: orders.validate(subscription=name), names))

    assert all(verdict.success for verdict in verdicts)
    assert len({verdict.report.parent for verdict in verdicts}) == len(names)
    suites = {
        json.loads(file.read_text())["name"] for file in orders.context_root.glob("gx/expectations/*.json")
    }
    assert suites == {"a", "b%2Fc", "b%252Fc", "%C3%BC"}


def test_subscription_whose_name_has_a_dot_is_validated_again(orders: Bench) -> None:
    reports = {orders.validate(subscription="nsw.eu").report for _ in range(2)}

    assert {report.parent.name for report in reports} == {"nsw.eu"}
    assert all(report.exists() for report in reports)


def test_validation_without_tables_is_not_a_success(bench: Bench) -> None:
    bench.publisher.run("create publication p")

    verdict = bench.validate()

    assert not verdict.success
    assert verdict.error == "the subscription has no tables to validate"


def test_configuration_of_the_data_context_never_changes(orders: Bench) -> None:
    orders.validate()
    configuration = orders.context_root / "gx" / "great_expectations.yml"
    seeded = configuration.read_bytes()

    orders.subscriber.run("delete from orders")
    orders.validate(subscription="another")

    assert configuration.read_bytes() == seeded


def test_configuration_of_an_earlier_version_is_replaced_unless_it_was_changed(orders: Bench) -> None:
    orders.validate()
    configuration = orders.context_root / "gx" / "great_expectations.yml"
    installed = configuration.read_text()
    limit = "      # Each run reads all results that the index lists.\n      validation_results_limit: 50\n"
    assert limit in installed
    earlier = installed.replace(limit, "")
    for text, expected in ((earlier, installed), (f"{earlier}# mine\n", f"{earlier}# mine\n")):
        configuration.write_text(text)
        orders.validate()
        assert configuration.read_text() == expected


def test_newest_results_and_pages_of_a_subscription_are_kept(
    orders: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "KEPT_RUNS", 2)
    uncommitted = orders.context_root / "gx" / "uncommitted"
    pages: dict[str, list[str]] = {"nsw": [], "nsw2": []}
    certificate = "certificate-0-1B75C70-20261126T005630595068Z.html"
    for name in (*pages, *pages, *pages, "nsw"):
        folder = uncommitted / "reports" / name
        pages[name].append(orders.validate(subscription=name).report.name)
        (folder / certificate).touch()

    for name, written in pages.items():
        folder = uncommitted / "reports" / name
        assert {page.name for page in folder.iterdir()} == {*written[-2:], "latest.html", certificate}
        for kept in (f"validations/{name}/**/*.json", f"data_docs/*/validations/{name}/**/*.html"):
            assert len(list(uncommitted.glob(kept))) == 2
        for page in written[-2:]:
            links = re.findall(r'href="(\.\./[^"]*)"', (folder / page).read_text())
            assert links
            assert all((folder / unquote(link)).exists() for link in links)


def test_no_file_contains_the_connection_or_values_other_than_keys(orders: Bench) -> None:
    orders.subscriber.run("update orders set note = 'very private' where id = 10")

    orders.validate()

    for file in orders.context_root.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"very private" not in content, file
            assert orders.subscriber.dsn.encode() not in content, file
            assert orders.publisher.dsn.encode() not in content, file


def test_report_shows_values_of_both_sides_where_it_may(orders: Bench) -> None:
    orders.subscriber.run("update orders set note = '<b>private</b>', total = null where id = 10")
    orders.subscriber.run("delete from orders where id = 20")

    verdict = replace(orders, with_values=True).validate()

    differences = {difference.key: difference for difference in only_table(verdict).differences}
    different, missing = differences["id=10"], differences["id=20"]
    assert only_table(verdict).columns == ("id", "region", "total", "note")
    assert different.publisher == (("10", "NSW", "15.00", "note 10"),)
    assert different.subscriber == (("10", "NSW", None, "<b>private</b>"),)
    assert (missing.publisher, missing.subscriber) == ((("20", "NSW", "30.00", "note 20"),), ())
    page = verdict.report.read_text(encoding="utf-8")
    assert "<td>note</td><td>note 10</td><td>&lt;b&gt;private&lt;/b&gt;</td>" in page
    assert '<td>total</td><td>15.00</td><td><span class="soft">NULL</span></td>' in page
    assert "<td>note</td><td>note 20</td><td>&ndash;</td>" in page
    others = set(orders.context_root.rglob("*.*")) - {verdict.report, verdict.report.parent / "latest.html"}
    assert not any(b"private" in file.read_bytes() for file in others if file.is_file())


@pytest.mark.parametrize(
    "folder", ["expectations", "checkpoints", "validation_definitions", "uncommitted/validations"]
)
def test_generated_file_truncated_by_a_crash_does_not_stop_later_runs(orders: Bench, folder: str) -> None:
    assert orders.validate().success
    (generated,) = (orders.context_root / "gx" / folder).rglob("*.json")
    generated.write_bytes(generated.read_bytes()[:20])

    assert orders.validate(subscription="another").success
    assert orders.validate().success
