"""What is asked of PostgreSQL, for which rows, and what happens when it cannot answer."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PythonException

from cdc_replay.filters.compile import ArrowFilter, ServerFilter, compile_filter, compile_or
from cdc_replay.filters.server_eval import ServerCheck
from cdc_replay.model.frames import ChangeKind
from fixtures.postgres import Database
from fixtures.server_filters import evaluate_on_server
from fixtures.stored_filters import FilteredTable

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

pytestmark = pytest.mark.spark

SCHEMA_NAMES = ("route", "kind", "number", "old", "new")
SCHEMA = "route int, kind string, number int, old array<string>, new array<string>"
Change = tuple[object, ...]


def compiled_on_server(filtered: FilteredTable, text: str, *, publication: str = "") -> ServerFilter:
    (stored,) = filtered.store([text])
    compiled = compile_filter(dataclasses.replace(stored, publication=publication), filtered.table())
    assert isinstance(compiled, ServerFilter)
    return compiled


def asked(
    spark: SparkSession, database: Database, changes: Sequence[Change], checks: Sequence[ServerCheck]
) -> list[Row]:
    frame = spark.createDataFrame(list(changes), SCHEMA).coalesce(1)
    answered = evaluate_on_server(
        frame, checks, database.dsn, rows={"old": "old_verdicts", "new": "new_verdicts"}
    )
    return sorted(answered.collect(), key=lambda row: row.number)


def test_check_is_evaluated_only_for_rows_of_its_routes_and_kinds(
    publisher: Database, spark: SparkSession
) -> None:
    """A filter of an insert-only publication is not evaluated for a DELETE, where it would fail."""
    publisher.run("create table t (id int, a int)")
    compiled = compiled_on_server(FilteredTable(publisher), "10 / a > 1")
    inserts = ServerCheck.from_filter(
        compiled, ["id", "a"], check_id=0, routes=[1], kinds=[ChangeKind.INSERT]
    )
    others = ServerCheck.from_filter(compiled, ["a", "id"], check_id=2, routes=[2, 3])

    rows = asked(
        spark,
        publisher,
        [
            (1, "I", 0, None, ["7", "2"]),
            (1, "D", 1, ["7", "0"], None),
            (2, "U", 2, ["20", "0"], ["1", "0"]),
            (3, "I", 3, None, [None, "0"]),
            (4, "I", 4, None, ["0", "0"]),
        ],
        [inserts, others],
    )

    assert [(row.old_verdicts, row.new_verdicts) for row in rows] == [
        ([None, None, None], [True, None, None]),
        ([None, None, None], [None, None, None]),
        ([None, None, False], [None, None, True]),
        ([None, None, None], [None, None, None]),
        ([None, None, None], [None, None, None]),
    ]
    assert rows[1].old == ["7", "0"]


def raised_by(spark: SparkSession, database: Database, changes: Sequence[Change], check: ServerCheck) -> str:
    schema = SCHEMA if len(changes[0]) == len(SCHEMA_NAMES) else f"{SCHEMA}, commit_lsn bigint"
    frame = spark.createDataFrame(list(changes), schema).coalesce(1)
    answered = evaluate_on_server(
        frame, [check], database.dsn, rows={"old": "old_verdicts", "new": "new_verdicts"}
    )
    with pytest.raises(PythonException) as raised:
        answered.collect()
    return str(raised.value)


def test_error_of_a_filter_names_filter_row_and_cause(publisher: Database, spark: SparkSession) -> None:
    """R1.36: of many rows the one that fails, by its key, with the change's transaction."""
    publisher.run('create table t (id int primary key, "a b" int)')
    compiled = compiled_on_server(FilteredTable(publisher), '10 / "a b" > 1', publication="p1")
    check = ServerCheck.from_filter(compiled, ["id", "a b"], check_id=0, routes=[0])
    values = [[str(n), str((n - 777) % 1000)] for n in range(1500)]
    changes = [(0, "U", n, None, row_values, 26_000_000 + n) for n, row_values in enumerate(values)]

    text = raised_by(spark, publisher, changes, check)

    #  n - 777 is 0 for the row 777 alone
    assert (
        'InvalidFilter: cannot evaluate a row filter of table "public.t": division by zero (SQLSTATE 22012)'
        " [R1.36]\n"
        'DETAIL: The filter of publication "p1" is ((10 / "a b") > 1). The row has (id)=(777).'
        " It was changed by the transaction that ends at 0/18CBD89.\n"
        "HINT: "
    ) in text
    assert "--table public.t" in text


def test_error_names_the_publication_whose_filter_fails(publisher: Database, spark: SparkSession) -> None:
    """R3.8: the first filter is not TRUE for the row, so the second is evaluated."""
    publisher.run("create table t (id int, a int)")
    filtered = FilteredTable(publisher)
    first, second = filtered.store(["lower('X') = 'y'", "10 / a > 1"])
    compiled = compile_or(
        [dataclasses.replace(first, publication="p1"), dataclasses.replace(second, publication="p 2")],
        dataclasses.replace(filtered.table(), primary_key=()),
    )
    assert isinstance(compiled, ServerFilter)
    check = ServerCheck.from_filter(compiled, ["id", "a"], check_id=0, routes=[0])

    text = raised_by(spark, publisher, [(0, "D", 0, ["1\n\n2", "0"], None)], check)

    #  without a key the row is named by all its values, on one line
    assert 'The filter of publication "p 2" is ((10 / a) > 1). The row has (id, a)=(1 2, 0).' in text


def test_value_that_the_server_cannot_read_is_an_error_of_its_row(
    publisher: Database, spark: SparkSession
) -> None:
    publisher.run("create table t (id int primary key, a int)")
    compiled = compiled_on_server(FilteredTable(publisher), "a + 1 > 1")
    check = ServerCheck.from_filter(compiled, ["id", "a"], check_id=0, routes=[0])

    text = raised_by(spark, publisher, [(0, "I", n, None, [str(n), "5x"[: n + 1]]) for n in (0, 1)], check)

    assert 'invalid input syntax for type integer: "5x" (SQLSTATE 22P02)' in text
    assert "The row has (id)=(1)." in text


def test_filter_that_fails_without_any_row_names_none(publisher: Database, spark: SparkSession) -> None:
    """R1.36: constants are evaluated when the filter is planned."""
    publisher.run("create table t (id int primary key)")
    compiled = compiled_on_server(FilteredTable(publisher), "id + 1 / 0 > 1")
    check = ServerCheck.from_filter(compiled, ["id"], check_id=0, routes=[0])

    text = raised_by(spark, publisher, [(0, "I", 0, None, ["1"])], check)

    assert "division by zero (SQLSTATE 22012)" in text
    assert "The filter is ((id + (1 / 0)) > 1).\nHINT" in text


def test_equal_values_and_null_and_empty_text_keep_their_rows(
    publisher: Database, spark: SparkSession
) -> None:
    """Each distinct row of values is evaluated once; NULL is not the empty text."""
    publisher.run("create table t (id int, s text, a int)")
    compiled = compiled_on_server(FilteredTable(publisher), "coalesce(length(s), 7) = a")
    check = ServerCheck.from_filter(compiled, ["id", "s", "a"], check_id=0, routes=[0])
    texts, lengths = [None, "", "x", "NULL", '"', "\\N"], [None, "0", "1", "7"]
    rows = list(itertools.product(texts, lengths)) * 3
    changes: list[Change] = [
        (0, "U", n, [str(n), s, a], [str(n), *rows[-n]]) for n, (s, a) in enumerate(rows)
    ]

    answers = asked(spark, publisher, changes, [check])

    def answer(s: str | None, a: str | None) -> bool | None:
        return None if a is None else (7 if s is None else len(s)) == int(a)

    assert [row.old_verdicts for row in answers] == [[answer(*row)] for row in rows]
    assert [row.new_verdicts for row in answers] == [[answer(*rows[-n])] for n in range(len(rows))]


def test_lists_that_are_null_or_empty_stay_so(publisher: Database, spark: SparkSession) -> None:
    publisher.run("create table t (id int)")
    compiled = compiled_on_server(FilteredTable(publisher), "lower('A') = 'a'")
    check = ServerCheck.from_filter(compiled, ["id"], check_id=0, routes=[0])

    rows = asked(spark, publisher, [(0, "U", 0, None, []), (0, "U", 1, [], None)], [check])

    assert [(row.old, row.new) for row in rows] == [(None, []), ([], None)]
    assert [(row.old_verdicts, row.new_verdicts) for row in rows] == [([None], [True]), ([True], [None])]
    assert rows[0].asDict().keys() == {*SCHEMA_NAMES, "old_verdicts", "new_verdicts"}


def test_unreachable_server_is_named_as_the_cause(publisher: Database, spark: SparkSession) -> None:
    publisher.run("create table t (id int, a int)")
    compiled = compiled_on_server(FilteredTable(publisher), "a + 1 > 1")
    check = ServerCheck.from_filter(compiled, ["id", "a"], check_id=0, routes=[0])
    elsewhere = Database(publisher.cluster, "no_such_database")

    with pytest.raises(PythonException, match="ServerUnavailable: cannot connect for row filters"):
        asked(spark, elsewhere, [(0, "I", 0, None, ["1", "0"])], [check])


def test_generated_columns_are_computed_by_the_server(publisher: Database, spark: SparkSession) -> None:
    """R3.13: the wire omits them; a virtual one (18) fails only where it is read."""
    publisher.require(18, "virtual generated columns")
    publisher.run(
        'create table t (id int, "a""b" int, row int,'
        ' g int generated always as ("a""b" * 2) stored, w int generated always as (100 / row) virtual)'
    )
    filtered = FilteredTable(publisher)
    stored = compiled_on_server(filtered, "g > 10")
    virtual = compiled_on_server(filtered, "row <> 0 and w > 10")
    assert "generated" in stored.because
    assert [column.name for column in stored.columns] == ['a"b', "g"]
    columns = ["row", "id", 'a"b']
    checks = [
        ServerCheck.from_filter(compiled_filter, columns, check_id=n, routes=[0])
        for n, compiled_filter in enumerate([stored, virtual])
    ]

    rows = asked(
        spark,
        publisher,
        [
            (0, "I", 0, None, ["0", "1", "5"]),
            (0, "I", 1, None, ["9", "2", "6"]),
            (0, "I", 2, None, [None] * 3),
        ],
        checks,
    )

    assert [row.new_verdicts for row in rows] == [[False, False], [True, True], [None, None]]


def test_generated_column_that_was_sent_is_used_as_sent(publisher: Database, spark: SparkSession) -> None:
    """R6.9: 18 can publish it; then a key that contains it is known without the columns behind it."""
    publisher.run("create table t (id int, a int, g int generated always as (a * 2) stored)")
    compiled = compiled_on_server(FilteredTable(publisher), "g > 10")
    check = ServerCheck.from_filter(compiled, ["id", "a", "g"], check_id=0, routes=[0])

    rows = asked(spark, publisher, [(0, "D", 0, ["1", None, "12"], None)], [check])

    assert rows[0].old_verdicts == [True]


def test_column_that_the_row_does_not_have_is_null(publisher: Database, spark: SparkSession) -> None:
    publisher.run("create table t (id int, a int, added int)")
    compiled = compiled_on_server(FilteredTable(publisher), "a + coalesce(added, 5) > 10")
    check = ServerCheck.from_filter(compiled, ["id", "a"], check_id=0, routes=[0])

    rows = asked(spark, publisher, [(0, "I", 0, None, ["1", "5"]), (0, "I", 1, None, ["1", "6"])], [check])

    assert [row.new_verdicts for row in rows] == [[False], [True]]


def test_filter_without_columns_is_answered(publisher: Database, spark: SparkSession) -> None:
    publisher.run("create table t (id int)")
    compiled = compiled_on_server(FilteredTable(publisher), "lower('A') = 'a'")
    check = ServerCheck.from_filter(compiled, ["id"], check_id=0, routes=[0])

    assert asked(spark, publisher, [(0, "I", 0, None, ["1"])], [check])[0].new_verdicts == [True]


def test_column_keeps_its_collation(publisher: Database, spark: SparkSession) -> None:
    """R3.16: the printed filter does not name a column's own collation. C folds ASCII only."""
    publisher.require(18, "pg_unicode_fast")
    publisher.run('create table t (id int, plain text collate "C", folded text collate pg_unicode_fast)')
    filtered = FilteredTable(publisher)
    compiled = [compiled_on_server(filtered, f"upper({name}) = 'É'") for name in ("plain", "folded")]
    columns = ["id", "plain", "folded"]
    checks = [
        ServerCheck.from_filter(compiled_filter, columns, check_id=n, routes=[0])
        for n, compiled_filter in enumerate(compiled)
    ]

    rows = asked(spark, publisher, [(0, "I", 0, None, ["1", "é", "é"])], checks)

    assert rows[0].new_verdicts == [False, True]


def test_batches_share_a_connection_that_ends_with_the_task(publisher: Database, spark: SparkSession) -> None:
    publisher.run("create table t (id int, s text)")
    compiled = compiled_on_server(FilteredTable(publisher), "length(s) = 2")
    check = ServerCheck.from_filter(compiled, ["id", "s"], check_id=0, routes=[0])
    size = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    try:
        changes: list[Change] = [(0, "I", n, None, [str(n), "x" * (n % 3)]) for n in range(1050)]
        rows = asked(spark, publisher, changes, [check])
    finally:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", size or "50000")

    assert [row.new_verdicts for row in rows] == [[n % 3 == 2] for n in range(1050)]
    deadline = time.monotonic() + 20
    sessions = "select count(*) from pg_stat_activity where application_name = 'cdc_replay row filters'"
    while (open_sessions := publisher.rows(sessions)) != [(0,)]:
        assert time.monotonic() < deadline, f"sessions are still open: {open_sessions}"


def test_text_that_arrow_answers_needs_no_server(publisher: Database) -> None:
    publisher.run("create table t (id int, s text)")
    filtered = FilteredTable(publisher)
    (stored,) = filtered.store(["s = 'x' and id > 5"])

    assert isinstance(compile_filter(stored, filtered.table()), ArrowFilter)
