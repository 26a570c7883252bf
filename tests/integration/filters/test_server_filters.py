"""What is asked of PostgreSQL, for which rows, and what happens when it cannot answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PythonException

from cdc_replay.filters.compile import ServerFilter, SparkFilter, compile_filter
from cdc_replay.filters.server import ServerCheck, evaluate_on_server
from cdc_replay.model.change import ChangeKind
from fixtures.postgres import Database
from fixtures.stored_filters import FilteredTable

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

pytestmark = pytest.mark.spark

SCHEMA = "route int, kind string, number int, old array<string>, new array<string>"
Values = list[str | None] | None
Change = tuple[int, str, int, Values, Values]


def compiled_on_server(filtered: FilteredTable, text: str) -> ServerFilter:
    (stored,) = filtered.store([text])
    compiled = compile_filter(stored, filtered.table())
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


def test_a_check_is_asked_only_about_the_rows_of_its_routes_and_kinds(
    publisher: Database, spark: SparkSession
) -> None:
    """A filter of an insert-only publication is not evaluated for a DELETE, where it would fail."""
    publisher.run("create table t (id int, a int)")
    compiled = compiled_on_server(FilteredTable(publisher), "10 / a > 1")
    inserts = ServerCheck.of(compiled, ["id", "a"], number=0, routes=[1], kinds=[ChangeKind.INSERT])
    others = ServerCheck.of(compiled, ["a", "id"], number=2, routes=[2, 3])

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


def test_the_error_of_a_filter_names_table_filter_and_cause(publisher: Database, spark: SparkSession) -> None:
    publisher.run('create table t (id int, "a b" int)')
    compiled = compiled_on_server(FilteredTable(publisher), '10 / "a b" > 1')
    check = ServerCheck.of(compiled, ["id", "a b"], number=0, routes=[0])

    with pytest.raises(PythonException) as raised:
        asked(spark, publisher, [(0, "I", 0, None, ["1", "0"])], [check])

    text = str(raised.value)
    assert 'InvalidFilter: cannot evaluate a row filter of table "public.t": division by zero' in text
    assert 'The filter is (((10 / "a b") > 1)).' in text


def test_a_server_that_is_not_there_is_named_as_the_cause(publisher: Database, spark: SparkSession) -> None:
    publisher.run("create table t (id int, a int)")
    compiled = compiled_on_server(FilteredTable(publisher), "a + 1 > 1")
    check = ServerCheck.of(compiled, ["id", "a"], number=0, routes=[0])
    elsewhere = Database(publisher.cluster, "no_such_database")

    with pytest.raises(PythonException, match="ServerUnavailable: cannot connect for row filters"):
        asked(spark, elsewhere, [(0, "I", 0, None, ["1", "0"])], [check])


def test_generated_columns_are_generated_again(publisher: Database, spark: SparkSession) -> None:
    """R3.13: the wire omits them; a virtual one (18) fails only where it is read."""
    publisher.run(
        'create table t (id int, "a""b" int, row int,'
        ' g int generated always as ("a""b" * 2) stored, w int generated always as (100 / row) virtual)'
    )
    filtered = FilteredTable(publisher)
    stored = compiled_on_server(filtered, "g > 10")
    virtual = compiled_on_server(filtered, "row <> 0 and w > 10")
    assert "generated" in stored.because
    assert [column.name for column in stored.columns] == ['a"b', "g"]
    held = ["row", "id", 'a"b']
    checks = [ServerCheck.of(each, held, number=n, routes=[0]) for n, each in enumerate([stored, virtual])]

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


def test_a_generated_column_that_was_sent_is_taken_as_sent(publisher: Database, spark: SparkSession) -> None:
    """R6.9: 18 can publish it; then a key that contains it is known without the columns behind it."""
    publisher.run("create table t (id int, a int, g int generated always as (a * 2) stored)")
    compiled = compiled_on_server(FilteredTable(publisher), "g > 10")
    check = ServerCheck.of(compiled, ["id", "a", "g"], number=0, routes=[0])

    rows = asked(spark, publisher, [(0, "D", 0, ["1", None, "12"], None)], [check])

    assert rows[0].old_verdicts == [True]


def test_a_column_that_the_row_does_not_have_is_null(publisher: Database, spark: SparkSession) -> None:
    publisher.run("create table t (id int, a int, added int)")
    compiled = compiled_on_server(FilteredTable(publisher), "a + coalesce(added, 5) > 10")
    check = ServerCheck.of(compiled, ["id", "a"], number=0, routes=[0])

    rows = asked(spark, publisher, [(0, "I", 0, None, ["1", "5"]), (0, "I", 1, None, ["1", "6"])], [check])

    assert [row.new_verdicts for row in rows] == [[False], [True]]


def test_a_filter_without_columns_is_answered(publisher: Database, spark: SparkSession) -> None:
    publisher.run("create table t (id int)")
    compiled = compiled_on_server(FilteredTable(publisher), "1.0 = 1.00")
    check = ServerCheck.of(compiled, ["id"], number=0, routes=[0])

    assert asked(spark, publisher, [(0, "I", 0, None, ["1"])], [check])[0].new_verdicts == [True]


def test_a_column_keeps_its_collation(publisher: Database, spark: SparkSession) -> None:
    """R3.16: the printed filter does not name a column's own collation. C folds ASCII only."""
    publisher.run('create table t (id int, plain text collate "C", folded text collate pg_unicode_fast)')
    filtered = FilteredTable(publisher)
    compiled = [compiled_on_server(filtered, f"upper({name}) = 'É'") for name in ("plain", "folded")]
    held = ["id", "plain", "folded"]
    checks = [ServerCheck.of(each, held, number=n, routes=[0]) for n, each in enumerate(compiled)]

    rows = asked(spark, publisher, [(0, "I", 0, None, ["1", "é", "é"])], checks)

    assert rows[0].new_verdicts == [False, True]


def test_batches_share_a_connection_that_ends_with_the_task(publisher: Database, spark: SparkSession) -> None:
    publisher.run("create table t (id int, s text)")
    compiled = compiled_on_server(FilteredTable(publisher), "length(s) = 2")
    check = ServerCheck.of(compiled, ["id", "s"], number=0, routes=[0])
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


def test_text_that_spark_answers_needs_no_server(publisher: Database) -> None:
    publisher.run("create table t (id int, s text)")
    filtered = FilteredTable(publisher)
    (stored,) = filtered.store(["s = 'x' and id > 5"])

    assert isinstance(compile_filter(stored, filtered.table()), SparkFilter)
