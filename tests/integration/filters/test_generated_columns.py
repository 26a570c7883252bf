"""Filters over generated columns, of which the wire brings the value or not (R3.13, R6.9, R6.10)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PythonException

from cdc_replay.filters.compile import ServerFilter, compile_filter
from cdc_replay.filters.server_eval import ServerCheck
from fixtures.postgres import Database
from fixtures.server_filters import evaluate_on_server
from fixtures.stored_filters import FilteredTable
from fixtures.twin import Twin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

CHANGES = """
insert into {table} (id, a) values (1, 1), (2, 6), (3, 20), (4, null);
update {table} set a = 30 where id = 1;
update {table} set a = a + 1 where id = 2;
update {table} set a = 2 where id = 3;
insert into {table} (id, a) values (5, 9), (6, 8);
delete from {table} where id in (2, 3, 5)
"""


@pytest.mark.parametrize("identity", ["full", "using index t_key", "using index t_sources"])
def test_stored_generated_columns_decide_as_on_the_publisher(twin: Twin, identity: str) -> None:
    """18 sends a generated column of the identity, or refuses the UPDATE (R6.10); before, it is computed."""
    is_18 = twin.publisher.version >= 18
    if identity == "using index t_key" and not is_18:
        pytest.skip("before 18 the value is unknown: another test")
    option = " with (publish_generated_columns = stored)" if is_18 else ""
    twin.publish(
        "create table t (id int primary key, a int not null default 0,"
        " g int generated always as (a * 2) stored not null);\n"
        "create unique index t_key on t (id, g);\n"
        "create unique index t_sources on t (id, a, g);\n"
        f"alter table t replica identity {identity};\n"
        f"create publication p for table t where (g > 10){option}"
    )
    twin.subscribe("s", "p", tables="create table t (id int primary key, a int, g int)")
    twin.sync()

    twin.publish(CHANGES.replace("(4, null)", "(4, 0)").format(table="t").strip())
    twin.sync()

    #  ids 1 (1 to 30) and 6 (8) are above 5 and there; 2, 3 and 5 are deleted; 4 is 0
    g = (60, 16) if is_18 else (None, None)
    assert twin.rows("s", "t") == [(1, 30, g[0]), (6, 8, g[1])]


def test_generated_columns_decide_about_inserts_under_any_identity(twin: Twin) -> None:
    """R5.6: a publication of inserts alone may filter by columns outside of the identity."""
    twin.publish(
        "create table t (id int primary key, a int, g int generated always as (a * 2) stored);\n"
        "create publication p for table t where (g > 10) with (publish = 'insert')"
    )
    twin.subscribe("s", "p", tables="create table t (id int primary key, a int)")
    twin.sync()

    twin.publish(CHANGES.format(table="t").strip())
    twin.sync()

    #  inserted with 6, 20, 9 and 8; updates and deletes are not published
    assert twin.rows("s", "t") == [(2, 6), (3, 20), (5, 9), (6, 8)]


def test_stored_value_decides_not_the_present_expression(twin: Twin) -> None:
    """R3.13: a partition may have another expression than its root, and a function another body since."""
    twin.publisher.require(18, "publish_generated_columns")
    twin.publish(
        "create function f(int) returns int immutable language sql return $1 * 2;\n"
        "create table t (id int primary key, a int, g int generated always as (f(a)) stored);\n"
        "create table r (id int primary key, a int, g int generated always as (a * 2) stored)"
        " partition by range (id);\n"
        "create table r1 partition of r for values from (0) to (100);\n"
        "create table r2 (g int generated always as (a * 10) stored, a int, id int primary key);\n"
        "alter table r attach partition r2 for values from (100) to (200);\n"
        "create publication p for table t where (g > 10), r where (g > 50)"
        " with (publish = 'insert', publish_via_partition_root = true)"
    )
    twin.subscribe("s", "p", tables="create table t (id int primary key, a int);create table r (like t)")
    twin.sync()

    twin.publish(
        "insert into t (id, a) values (1, 3), (2, 7);\n"
        "create or replace function f(int) returns int immutable language sql return $1 * 10;\n"
        "insert into t (id, a) values (3, 1), (4, 2);\n"
        "insert into r (id, a) values (1, 20), (2, 30), (101, 3), (102, 6);\n"
        "alter publication p set table r;\nalter table t drop column g;\ndrop function f"
    )
    twin.sync()

    assert [row[0] for row in twin.rows("s", "t")] == [2, 4]
    assert [row[0] for row in twin.rows("s", "r")] == [102, 2]


def test_virtual_generated_columns_decide_as_on_the_publisher(twin: Twin) -> None:
    """R3.13: 18 expands them, so they may be used where the identity has what they are computed from."""
    twin.publisher.require(18, "virtual generated columns")
    virtual = "create table {} (id int primary key, a int, v int generated always as ({}) virtual)"
    twin.publish(
        f"{virtual.format('by_key', 'id * 2')};\n{virtual.format('by_row', 'a * 2')};\n"
        "create publication p for table by_key where (v > 4);\n"
        "create publication q for table by_row where (v > 10) with (publish = 'insert')"
    )
    tables = "create table {} (id int primary key, a int);"
    twin.subscribe("s", "p", "q", tables=tables.format("by_key") + tables.format("by_row"))
    twin.sync()

    for table in ("by_key", "by_row"):
        twin.publish(CHANGES.format(table=table).strip())
    twin.publish("update by_key set id = 7 where id = 1;\nupdate by_key set id = 0 where id = 6")
    twin.sync()

    #  by_key: 1 becomes 7 and comes, 6 becomes 0 and goes, 4 was always there
    assert twin.rows("s", "by_key") == [(4, None), (7, 30)]
    assert twin.rows("s", "by_row") == [(2, 6), (3, 20), (5, 9), (6, 8)]


def test_value_that_is_neither_sent_nor_computable_is_an_error(
    publisher: Database, spark: SparkSession
) -> None:
    """Before 18: an old row has the key, with the generated column in it, but the wire leaves that out."""
    publisher.run("create table t (id int primary key, a int, g int generated always as (a * 2) stored)")
    filtered = FilteredTable(publisher)
    (stored,) = filtered.store(["g > 10"])
    table = dataclasses.replace(filtered.table(), key_columns=("id", "g"))
    compiled = compile_filter(stored, table)
    assert isinstance(compiled, ServerFilter)
    check = ServerCheck.from_filter(compiled, ["id", "a"], check_id=0, routes=[0])
    sent = ServerCheck.from_filter(compiled, ["id", "a", "g"], check_id=0, routes=[0])
    complete = compile_filter(stored, dataclasses.replace(table, key_columns=("id", "a", "g")))
    assert isinstance(complete, ServerFilter)

    assert sent.unknown_if_changed is None
    assert complete.only_in_key == ()
    schema = "route int, kind string, old array<string>, new array<string>"
    rows = {"old": "old_verdicts", "new": "new_verdicts"}
    inserted = spark.createDataFrame([(0, "I", None, ["1", "6"])], schema)
    assert evaluate_on_server(inserted, [check], publisher.dsn, rows=rows).collect()[0].new_verdicts == [True]
    deleted = spark.createDataFrame([(0, "D", ["1", None], None)], schema)
    with pytest.raises(PythonException, match='generated column "g" is not sent') as raised:
        evaluate_on_server(deleted, [check], publisher.dsn, rows=rows).collect()
    assert "The row has (id)=(1)." in str(raised.value)
