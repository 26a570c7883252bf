"""No text of the change stream or the change log is executed (R5.2, R3.13).

Row filters, types, collations and generation expressions come from the publisher's catalog through messages
and the log. Who can forge one, or write the log's files, must not become the capturing role: what PostgreSQL
evaluates is written anew from the stored trees, of built-in objects only.

The forged definitions here carry the code of the event triggers: a log with these texts looks the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import pyarrow as pa
import pytest
from psycopg import sql

from cdc_replay.catalog.ddl_change import CATALOG_PREFIX
from cdc_replay.catalog.reader import COLUMNS, MEMBERSHIPS, PUBLICATIONS, TABLES, CatalogRows
from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.compile import ServerFilter, compile_filter
from cdc_replay.filters.server_eval import ServerCheck
from cdc_replay.filters.server_session import FilterFailed, FilterSession
from cdc_replay.model.publication import Generated, RowFilter, Table
from fixtures.postgres import Database
from fixtures.stored_filters import FilteredTable
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLE: Final = """
create table t (id int primary key, tenant text collate "C", a int,
    g text generated always as (upper(tenant)) {})
"""
SUBSCRIBED: Final = "create table t (id int primary key, tenant text, a int)"
FILTER: Final = "lower(tenant) = 'ours' and g = 'OURS'"
EVIL: Final = """
create function public.evil(text) returns text language plpgsql immutable as
    $$ begin perform pg_catalog.lo_from_bytea(0, ''); return $1; end $$
"""
"""Its owner says that it is immutable, and may change it at any time."""

_TYPE_SQL, _COLLATION_SQL, _GENERATION_SQL, _GENERATION_TREE = 5, 6, 8, 9
_TREE, _FILTER_SQL = 2, 3

LOWER: Final = 870
TRACES: Final = (
    "select 'table', oid from pg_class where relname = 'pwned' union all"
    " select 'large object', oid from pg_largeobject_metadata"
)

HOSTILE_TEXTS: Final = {
    "filter": (
        "memberships",
        _FILTER_SQL,
        (
            "true)) when true then 't' end, '') from (select 1 as row) as x; create table public.pwned ();"
            " select string_agg(case ((true"
        ),
    ),
    "filter in one statement": (
        "memberships",
        _FILTER_SQL,
        "(select pg_catalog.lo_from_bytea(4242, '') = 4242)",
    ),
    "type": ("columns", _TYPE_SQL, "text); create table public.pwned (x text"),
    "collation": ("columns", _COLLATION_SQL, '"C"); create table public.pwned (x text'),
    "generation": (
        "columns",
        _GENERATION_SQL,
        "tenant) stored); create table public.pwned (x int generated always as (1",
    ),
}


def subscribe(twin: Twin) -> None:
    # From 18 on, the values of stored ones are captured.
    table = TABLE.format("virtual" if twin.publisher.version >= 18 else "stored")
    twin.publisher.run(
        f"{table}; create publication p for table t where ({FILTER}); alter table t replica identity full"
    )
    twin.subscribe("s", "p", tables=SUBSCRIBED, native=False)
    twin.sync_ours()


def definitions(twin: Twin) -> dict[str, list[list[Any]]]:
    """What the event triggers would tell of the table and the publication."""
    rows_by_kind = {}
    kinds: dict[str, tuple[CatalogRows, LiteralString]] = {
        "tables": (TABLES, "c.oid = 't'::regclass"),
        "columns": (COLUMNS, "a.attrelid = 't'::regclass"),
        "publications": (PUBLICATIONS, "p.pubname = 'p'"),
        "memberships": (MEMBERSHIPS, "m.prrelid = 't'::regclass"),
    }
    with twin.publisher.connect() as connection:
        for kind, (rows, only) in kinds.items():
            ((rows_by_kind[kind],),) = connection.execute(rows.select_json(sql.SQL(only))).fetchall()
    return rows_by_kind


def forge(twin: Twin, rows_by_kind: dict[str, list[list[Any]]]) -> None:
    table, publication = rows_by_kind["tables"][0][0], rows_by_kind["publications"][0][0]
    written = [[table, row[1]] for row in rows_by_kind["columns"]]
    content = {
        "format": 1,
        "touched_tables": [table],
        "written_columns": written,
        "touched_publications": [publication],
        **rows_by_kind,
    }
    with twin.publisher.connect() as connection:
        connection.execute(
            "select cdc_replay_capture.emit(%s, %s::json)", (CATALOG_PREFIX, json.dumps(content))
        )


def replay(twin: Twin) -> str | None:
    """Insert a row that passes, and one that does not, and replay them."""
    twin.publisher.run("insert into t (id, tenant) values (1, 'ours'), (2, 'theirs')")
    [synced] = twin.sync_ours()
    return synced.replay.error


def traces(twin: Twin) -> list[tuple[Any, ...]]:
    """The traces of hostile texts that were executed."""
    return twin.publisher.rows(TRACES)


@pytest.mark.parametrize(("kind", "position", "text"), HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_hostile_text_in_a_definition_is_not_executed(
    twin: Twin, kind: str, position: int, text: str
) -> None:
    subscribe(twin)
    content = definitions(twin)
    for row in content[kind]:
        if row[position] is not None or position == _COLLATION_SQL:
            row[position] = text
    forge(twin, content)

    assert replay(twin) is None

    assert traces(twin) == []
    assert twin.pairs["s"].ours.rows("select id from t") == [(1,)]


def test_nothing_of_a_hostile_tree_is_executed(twin: Twin) -> None:
    """End to end: the row of a forged definition parks the subscription, as a filter does that fails."""
    twin.publisher.run(EVIL)
    subscribe(twin)
    content = definitions(twin)
    [(evil,)] = twin.publisher.rows("select 'public.evil'::regproc::oid::bigint")
    for row in content["memberships"]:
        row[_TREE] = row[_TREE] and row[_TREE].replace(f":funcid {LOWER} ", f":funcid {evil} ")
    forge(twin, content)

    error = replay(twin)

    assert error is not None
    assert "function public.evil is not built-in" in error
    assert traces(twin) == []


# ---- what a session executes of a definition


@dataclass(frozen=True)
class FilterQuestion:
    """The table `t` of a database, a filter of it, and the columns whose values are available."""

    database: Database
    table: Table
    row_filter: RowFilter
    available_columns: tuple[str, ...]
    """Columns whose values are there; the others are computed."""

    def answer(self) -> bool | None:
        compiled = compile_filter(self.row_filter, self.table)
        columns = [column for column in self.table.columns if column.name in self.available_columns]
        if not isinstance(compiled, ServerFilter):
            compiled = ServerFilter((self.row_filter,), tuple(columns), "asked for", self.table.name)
        check = ServerCheck.from_filter(compiled, self.available_columns, check_id=0, routes=[0])
        values = [pa.nulls(1, pa.int64())]
        values += [pa.array(["ours"]) for column, _ in check.columns if column.generated is Generated.NO]
        with contextlib.closing(FilterSession(self.database.dsn)) as session:
            (answer,) = session.answers(
                check.question, pa.Table.from_arrays(values, names=[str(n) for n in range(len(values))])
            )
        return {1: True, 0: False}.get(int(answer))

    def traces(self) -> list[tuple[Any, ...]]:
        return self.database.rows(TRACES)


def ask_about(
    database: Database,
    filter_sql: str,
    columns: str = "tenant text",
    available_columns: tuple[str, ...] = ("tenant",),
) -> FilterQuestion:
    database.run(f"create table t ({columns})")
    stored = FilteredTable(database)
    (row_filter,) = stored.store([filter_sql])
    table = dataclasses.replace(stored.table(), primary_key=())
    return FilterQuestion(database, table, row_filter, available_columns)


def oid(database: Database, expression: str) -> int:
    [(oid,)] = database.rows(f"select {expression}::oid::bigint")
    return int(oid)


HOSTILE_FUNCTIONS: Final = {
    "user": ("'public.evil(text)'::regprocedure", "function public.evil is not built-in"),
    "file": ("'pg_read_file(text)'::regprocedure", "function pg_catalog.pg_read_file is not immutable"),
    "import": ("'lo_import(text)'::regprocedure", "function pg_catalog.lo_import is not immutable"),
    "set": ("'pg_ls_dir(text)'::regprocedure", "function pg_catalog.pg_ls_dir is not immutable"),
    "key": (
        "'satisfies_hash_partition'::regproc",
        "function pg_catalog.satisfies_hash_partition evaluates the partition key of another table",
    ),
    "none": ("4294967295", "there is no function with oid 4294967295"),
}


@pytest.mark.parametrize(("function", "reason"), HOSTILE_FUNCTIONS.values(), ids=HOSTILE_FUNCTIONS)
def test_only_built_in_immutable_functions_are_called(
    publisher: Database, function: str, reason: str
) -> None:
    publisher.run(EVIL)
    hostile = ask_about(publisher, "lower(tenant) = 'ours'")
    tree = hostile.row_filter.node_tree.replace(f":funcid {LOWER} ", f":funcid {oid(publisher, function)} ")
    hostile = dataclasses.replace(hostile, row_filter=RowFilter(tree, hostile.row_filter.sql))

    with pytest.raises(InvalidFilter, match=re.escape(reason)):
        hostile.answer()

    assert hostile.traces() == []


def test_only_built_in_operators_are_called(publisher: Database) -> None:
    publisher.run(
        "create function public.evil(text, text) returns boolean language plpgsql immutable as"
        " $$ begin perform pg_catalog.lo_from_bytea(0, ''); return true; end $$;"
        "create operator public.=== (function = evil, leftarg = text, rightarg = text)"
    )
    hostile = ask_about(publisher, "lower(tenant) = 'ours'")
    user = oid(publisher, "'public.===(text,text)'::regoperator")
    tree = hostile.row_filter.node_tree.replace(":opno 98 ", f":opno {user} ")
    hostile = dataclasses.replace(hostile, row_filter=RowFilter(tree, hostile.row_filter.sql))

    with pytest.raises(InvalidFilter, match=r"operator public\.=== is not built-in"):
        hostile.answer()

    assert hostile.traces() == []


def test_the_tree_decides_and_not_the_text(publisher: Database) -> None:
    """Where a value can only come from the text, the server says whether it is that of the tree."""
    honest = ask_about(publisher, "lower(tenant) = 'ours' and '[1]'::jsonb <> '2'")
    assert honest.answer() is True
    stored = honest.row_filter
    for text in (
        stored.sql.replace("'2'::jsonb", "'[1]'::jsonb"),
        stored.sql.replace("'2'::jsonb", "'2''); create table public.pwned (); --'::jsonb"),
        stored.sql + " and '3'::jsonb is null",
        stored.sql.replace("jsonb", "json"),
    ):
        forged = dataclasses.replace(honest, row_filter=RowFilter(stored.node_tree, text))
        with pytest.raises((InvalidFilter, FilterFailed)):
            forged.answer()
        assert forged.traces() == []


def test_a_function_of_the_tables_owner_does_not_run_with_our_rights(publisher: Database) -> None:
    """The owner of a table may write anything into a generation expression, without forging anything."""
    publisher.run(EVIL)
    own = ask_about(publisher, "g = 'ours'", "tenant text, g text generated always as (evil(tenant)) stored")

    with pytest.raises(InvalidFilter) as refused:
        own.answer()

    assert own.traces() == []
    assert 'column "g" of table "public.t": function public.evil is not built-in' in str(refused.value)
    assert "publish_generated_columns = stored" in str(refused.value)
    assert dataclasses.replace(own, available_columns=("tenant", "g")).answer() is True, (
        "a value that was sent is taken"
    )


def test_the_checks_of_a_domain_do_not_run_with_our_rights(publisher: Database) -> None:
    publisher.run(f"{EVIL}; create domain named as text check (evil(value) is not null)")
    own = ask_about(
        publisher, "g = 'OURS'", "tenant named, g text generated always as (upper(tenant)) stored"
    )

    assert own.answer() is True

    assert own.traces() == []


def test_a_composite_type_of_a_user_is_not_read(publisher: Database) -> None:
    """Its fields can have checks."""
    publisher.run(
        f"{EVIL}; create domain named as text check (evil(value) is not null); create type two as (a named)"
    )
    own = ask_about(publisher, "g", "tenant two, g boolean generated always as (tenant is not null) stored")

    with pytest.raises(InvalidFilter, match=r"type public\.two is not built-in"):
        own.answer()

    assert own.traces() == []


def test_no_cast_of_a_user_takes_the_place_of_another(publisher: Database) -> None:
    """The owner of a type may make casts of it; planning computes those of constants."""
    publisher.run("create type kind as enum ('one')")
    generated = "tenant text, g bool generated always as ('one'::kind = 'one'::kind) stored"
    own = ask_about(publisher, "g", generated)
    assert own.answer() is True
    publisher.run(
        "create function public.evil(kind) returns text language plpgsql immutable as"
        " $$ begin perform pg_catalog.lo_from_bytea(0, ''); return 'one'; end $$;"
        "create cast (kind as text) with function public.evil(kind)"
    )
    tree = own.table.column("g").generation_tree
    assert tree is not None
    constant = tree[tree.index("{CONST") : tree.index("}") + 1]
    forged = f"{{COERCEVIAIO :arg {constant} :resulttype 25 :resultcollid 100 :coerceformat 1 :location -1}}"
    tests = f"{{NULLTEST :arg {forged} :nulltesttype 1 :argisrow false :location -1}}"
    text = "'one'::public.kind"
    columns = tuple(
        column
        if column.generation_tree is None
        else dataclasses.replace(column, generation_tree=tests, generation_sql=text)
        for column in own.table.columns
    )
    hostile = dataclasses.replace(own, table=dataclasses.replace(own.table, columns=columns))

    with pytest.raises(InvalidFilter, match="its text and its tree are not the same"):
        hostile.answer()

    assert hostile.traces() == []


def test_an_expression_that_an_older_log_lacks_comes_from_the_server_itself(publisher: Database) -> None:
    """Only if the server prints the same; the text is compared, and nothing else."""
    generated = "tenant text, g text generated always as (upper(tenant)) stored"
    older = without_trees(ask_about(publisher, "g = 'OURS'", generated))

    assert older.answer() is True

    text = "upper(tenant)) stored); create table public.pwned (x int generated always as (1"
    columns = tuple(
        dataclasses.replace(column, generation_sql=column.generation_sql and text)
        for column in older.table.columns
    )
    forged = dataclasses.replace(older, table=dataclasses.replace(older.table, columns=columns))
    with pytest.raises(InvalidFilter, match="does not have its expression"):
        forged.answer()
    assert forged.traces() == []


def without_trees(question: FilterQuestion) -> FilterQuestion:
    columns = tuple(dataclasses.replace(column, generation_tree=None) for column in question.table.columns)
    return dataclasses.replace(question, table=dataclasses.replace(question.table, columns=columns))


@pytest.mark.parametrize(
    "tree",
    [
        "{NOT " * 100_000 + "}" * 100_000,
        "(" * 100_000 + ")" * 100_000,
        "{BOOLEXPR :boolop not :args (" * 50_000 + ")}" * 50_000,
        "{FUNCEXPR :funcid 870 :args (((((870)))))}",
        "{FUNCEXPR :funcid 99999999999 :funcresulttype 25 :funcvariadic false :args <>}",
        "{VAR :varno 1 :varattno -1 :varlevelsup 0 :vartype 27 :varcollid 0}",
        "{SUBLINK :subLinkType 4}",
    ],
    ids=["nodes", "lists", "booleans", "words", "oid", "system column", "subquery"],
)
def test_a_tree_that_no_server_has_stored_is_refused(publisher: Database, tree: str) -> None:
    hostile = ask_about(publisher, "tenant = 'ours'")
    hostile = dataclasses.replace(hostile, row_filter=RowFilter(tree, "true"))

    with pytest.raises(InvalidFilter):
        hostile.answer()
