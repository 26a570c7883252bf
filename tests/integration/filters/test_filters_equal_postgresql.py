"""Every filter that PostgreSQL accepts has PostgreSQL's answer, wherever it is evaluated (R5.4, R3.1)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from cdc_replay.filters.arrow_eval import evaluate_filter
from cdc_replay.filters.compile import ArrowFilter, ServerFilter, compile_filter, compile_or
from cdc_replay.filters.operators import FUNCTIONS, OPERATORS
from cdc_replay.filters.printed import print_for_subscriber
from cdc_replay.filters.rules import RELABELS
from cdc_replay.filters.server_eval import ServerCheck
from cdc_replay.model.publication import RowFilter, Table
from fixtures.server_filters import evaluate_on_server
from fixtures.stored_filters import FilteredTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

IN_ARROW = (
    "true", "null::boolean", "b", "not b", "b = true", "b <> false", "b < true", "b = null", "b is true",
    "b is not true", "b is false", "b is not false", "b is unknown", "b is not unknown", "b is null",
    "a > 1 is not false", "a = 1", "a <> 1", "1 < a", "a between -7 and 10",
    "a not between symmetric 10 and -7", "a = i2", "i2 >= i8", "i8 = a", "i2 < 40000", "a < 3000000000",
    "i8 = 9223372036854775807", "i8 <= -9223372036854775808", "a in (1, 2, 10)", "a in (1, null)",
    "a not in (1, 10)", "a not in (1, null)", "i8 in (1, 9223372036854775807)", "i8 in (1, 2::bigint)",
    "i2 in (1, 40000)", "a = any ('{1,10,-7}'::int[])", "a = any ('{}'::int[])", "a <> all ('{}'::int[])",
    "a <> all (array[1, 10])", "a = any (array[i2, 1])", "s = any ('{abc,\"a b\",n}'::text[])",
    "v = any (array['abc', ''])", "a is distinct from 1", "a is not distinct from i2",
    "not (a is distinct from null)", "s is distinct from ''", "a % 2 = 0", "a % -7 <> 0",
    "i8 % (-1)::bigint = 0", "i2 % 2::int2 = 1::int2", "a % 3 = -1", "s = 'abc'", "s <> 'abc'", "'n' = s",
    "s = ''", "s collate \"C\" = 'abc'", "cc = 'B'", "v = 'abc'", "v = 'abc '", "v::text <> 'abc'",
    "s::varchar = 'abc'", "s in ('abc', 'n', '')", "s not in ('abc', 'n')", "c = 'abc'", "c = 'abc  '",
    "c <> ''", "c = 'ab' or c is null", "d = '2020-01-01'", "d <> '0001-01-01'", "d = '9999-12-31'",
    "u = 'A0EEBC999C0B4EF8BB6D6BB9BD380A11'", "u > '00000000-0000-0000-0000-00000000000a'",
    "u <> '00000000-0000-0000-0000-000000000000'", "coalesce(a, 0) > 0", "coalesce(b, i8 = 1, false)",
    "coalesce(s, 'none') = 'none'", "case when a = 1 then b when a > 5 then not b else false end",
    "case when b then a end = 1", "nullif(a, 1) is null", "nullif(a, 1) = 10", "a::bigint = 10",
    "i2 = 10::int2", "i2::int = i8", "n is null", "(a, s) = (1, 'abc')", "arr is not null",
    "pt is null and j is null", "(a > 1) = b", "(a > 1) is distinct from b",
    "(a = 1 and b) or (not b and s = 'ABC') or (a is null and not (i8 > 0 or s = 'x'))", "a / 2 + 1 > 2",
    "a / 3 > 1", "-a::bigint > 2", "a & 1 = 1", "a | 1 > 3", "~a < 0", "mod(a, 2) = 0",
    "a::bigint * 3 + 1 > 2", "s collate \"C\" < 'b'", "cc > 'A'", "s = 'é'", "v <> 'é'", "s in ('é', '€')",
    "s || v = 'abcabc'", "s like 'a%'", "s not like '%b%'", "s like 'a%c'", "s like '%\\%%'",
    "s like any (array['a%', '%n'])", "c::text like 'ab%'", "s ^@ 'a'", "starts_with(v, 'a')", "n = 1.5",
    "n >= 'NaN'", "n = 0", "n = 10::numeric(5, 2)", "n in (1, 1.5, 10)", "n > i2", "n > 1e100",
    "n between -0.01 and 1.50", "f = 'NaN'", "f = 0", "f = '-0'", "f > 1", "f in (1, 'NaN', 0)", "f >= i8",
    "f in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)", "d < '2020-01-01'", "d = 'infinity'",
    "d = '0044-03-15 BC'", "d > '0044-03-15 BC'", "ts > '2020-01-01'", "ts::date = '2020-01-01'",
    "tz > '2020-01-01 00:00+02'", "tz < 'infinity'", "d < ts", "ts >= d",
    "ts in ('2020-01-01 10:00', 'infinity')", "by = '\\x00ff'", "by > '\\x00'", "by in ('\\x00ff', '')",
    "o = 5", "o > 4294967294", "o <> 10::oid", "a > any (array[1, 2])", "a = all (array[1, 1])",
    "a <> any (array[1, null])", "c = any (array['abc'::char(5)])", "c in ('abc', 'f')",
    "a = any ('{1,null}'::int[])", "a = any (array[1, i2, null])", "n = any ('{1.5,NaN,null}'::numeric[])",
    "ts = any ('{infinity,2000-01-01}'::timestamp[])", "row(a, i2) is null", "row(a, i2) is not null",
    "(a, id) > (1, 2)", "(a, n) <= (1, 1.5)", "(cc, a) < ('b', 1)",
    "row(a, s) is distinct from row(1, 'abc')", "greatest(a, i2) = 10", "least(a, 0) < 0",
    "greatest(n, 1, null) > 1", "greatest(cc, 'b') = 'b'", "least(d, '2020-01-01') = '2020-01-01'",
    "case a when 1 then true when 10 then b end", "case s when 'abc' then true when 'n' then b end",
    "case when a > 0 then n end > 1", "nullif(n, 1.5) is null", "coalesce(s, v) = 'abc'",
    "c = 'abcdef'::char(3)", "s = 'abcdef'::varchar(3)",
)  # fmt: skip
"""Filters that Arrow must answer."""

ON_SERVER = (
    "case when a < 100 then a + 1 > 2 end", "abs(i8 / 2) > 5", "abs(a / 2) = 3", "a << 1 = 2",
    "i2 = 0 or a % i2 = 0", "s < 'b'", "s = v", "c = v", "c < 'b'", "s is distinct from v",
    "(s, a) < ('b', 1)", "greatest(s, 'b') = 'b'", "s ilike 'A%'", "s not ilike 'A%'",
    "s similar to '(a|A)%'", "s not similar to 'a_'", "s ~ '^a'", "s !~ 'b$'", "s ~* '^A'", "s !~* '^A'",
    "s like 'a_c'", "s like 'a!%' escape '!'", "s like v", "c like 'ab%'", "regexp_like(s, '^a')",
    "regexp_replace(s, 'a', 'b') = 'bbc'", "lower(s) = 'abc'", "upper(v) = 'ABC'", "length(s) = 3",
    "substring(s from 1 for 1) = 'a'", "substr(s, 2) = 'bc'", "position('b' in s) = 2", "trim(s) = 'abc'",
    "replace(s, 'a', 'b') = 'bbc'", "md5(s) < '8'", "hashtext(s) > 0", "nullif(s, 'abc') < 'b'",
    "s::name = 'abc'", "nm = 'abc'", "ch = 'n'", "n * 2 > 1", "n % 2 = 0", "n::numeric(5, 1) = 1.5",
    "round(n) = 2", "div(n, 2) = 0", "f * 2 > 1", "sqrt(abs(f)) > 1", "f::float4 = 1.5::float4",
    "tz at time zone 'UTC' < '2020-06-01'", "extract(year from ts) = 2020", "extract(month from d) = 1",
    "date_trunc('month', ts) = '2020-01-01'", "date_trunc('day', ts) = ts", "date_part('year', ts) = 2020",
    "make_date(2020, 1, 1) = d", "case when isfinite(ts) then age(ts, '2000-01-01') > '1 year' end",
    "ts + interval '1 day' > '2020-01-01'", "d + 1 = '2020-01-02'",
    "case when isfinite(d) then d - '2020-01-01'::date > 0 end", "isfinite(ts)",
    "(ts, ts) overlaps ('2019-01-01'::timestamp, '2021-01-01'::timestamp)", "iv > '12 hours'",
    "iv = '30 days'", "arr @> array[1]", "arr && array[1]", "arr || 7 = '{1,2,7}'",
    "array_length(arr, 1) = 2", "a = any (arr)", "'a' = any (tarr)", "arr = '{}'",
    "array[a, i2] = array[1, 1]", "j @> '{\"k\": \"v\"}'", "j ? 'k'", "j ?| array['k', 'x']",
    "j -> 'k' = '\"v\"'", "j ->> 'k' = 'v'", "j #>> '{k}' = 'v'", "j = '{\"k\": \"v\"}'", "j @? '$.k'",
    "jsonb_path_exists(j, '$.k')", "jsonb_typeof(j) = 'object'", "js ->> 'k' = 'v'",
    "json_typeof(js) = 'object'", "to_tsvector('simple', s) @@ to_tsquery('simple', 'abc')",
    "to_tsvector('english', s) @@ plainto_tsquery('english', 'abc')", "bits = B'1010'",
    "bits & B'1000' = B'1000'", "encode(by, 'hex') = '00ff'", "octet_length(by) = 2", "ip << '10.0.0.0/8'",
    "ip = '10.0.0.1'", "host(ip) = '10.0.0.1'", "r @> 3", "lower(r) = 1", "isempty(r)",
    "i2::oid = o", "i2::oid > 5", "o = (-1)::smallint::oid",
    "pt <@ box '(0,0),(5,5)'", "m > '1'", "num_nulls(a, i2) = 0", "(a < 5 or s ~ 'b') and b",
)  # fmt: skip
"""Filters that are left to PostgreSQL."""


@dataclass(frozen=True)
class Rows:
    """The rows of `t` as a frame of changes: `route`, `kind`, `number`, `old` and `new` in column order."""

    frame: DataFrame
    names: tuple[str, ...]

    def arrow_answers(self, filters: Sequence[ArrowFilter]) -> list[tuple[bool | None, ...]]:
        rows = [row["new"] for row in sorted(self.frame.collect(), key=lambda row: row["number"])]
        columns = zip(*rows, strict=True)
        texts = {
            name: pa.array(column, pa.string()) for name, column in zip(self.names, columns, strict=True)
        }
        answers = [
            evaluate_filter(
                compiled.expression,
                {column.attnum: texts[column.name] for column in compiled.columns},
                len(rows),
            ).to_pylist()
            for compiled in filters
        ]
        return list(zip(*answers, strict=True))

    def server_answers(self, filters: Sequence[ServerFilter], dsn: str) -> list[tuple[bool | None, ...]]:
        checks = [
            ServerCheck.from_filter(compiled, self.names, check_id=n, routes=[0])
            for n, compiled in enumerate(filters)
        ]
        answered = evaluate_on_server(self.frame, checks, dsn, rows={"new": "verdicts"})
        return [tuple(row.verdicts) for row in sorted(answered.select("number", "verdicts").collect())]


def rows_of(filtered: FilteredTable, spark: SparkSession) -> Rows:
    names = tuple(column.name for column in filtered.table().columns)
    rows = [(0, "I", number, None, values) for number, values in enumerate(filtered.rows(names))]
    schema = "route int, kind string, number int, old array<string>, new array<string>"
    return Rows(spark.createDataFrame(rows, schema).coalesce(1), names)


def as_server_filter(row_filter: RowFilter, table: Table) -> ServerFilter:
    match compile_filter(row_filter, table):
        case ServerFilter() as compiled:
            return compiled
        case ArrowFilter(_, columns):
            return ServerFilter((row_filter,), columns, "asked for", table.name)


def test_filters_with_exact_rules_have_postgresqls_answers_in_arrow(
    filtered: FilteredTable, spark: SparkSession
) -> None:
    stored = filtered.store(IN_ARROW)
    compiled = [compile_filter(row_filter, filtered.table()) for row_filter in stored]
    assert {
        text: result.because
        for text, result in zip(IN_ARROW, compiled, strict=True)
        if isinstance(result, ServerFilter)
    } == {}

    ours = rows_of(filtered, spark).arrow_answers(
        [result for result in compiled if isinstance(result, ArrowFilter)]
    )

    assert_same(IN_ARROW, ours, filtered.answers(stored))


def test_exact_filters_printed_for_a_subscriber_have_postgresqls_answers(filtered: FilteredTable) -> None:
    """R3.1: written from the tree, by names of the system's own objects alone."""
    table, stored = filtered.table(), filtered.store(IN_ARROW)
    with filtered.database.connect() as connection:
        connection.execute("set search_path = ''")
        printed = [print_for_subscriber(connection, None, table, [row_filter]) for row_filter in stored]
        answers = connection.execute(
            sql.SQL("select {} from public.t order by id").format(sql.SQL(", ").join(printed))
        ).fetchall()
    assert_same(IN_ARROW, answers, filtered.answers(stored))


def test_every_accepted_filter_has_postgresqls_answers_on_the_server(
    filtered: FilteredTable, spark: SparkSession
) -> None:
    """R5.4; also those that Arrow answers, so that both ways are equal."""
    texts = (*ON_SERVER, *IN_ARROW)
    stored = filtered.store(texts)
    table = filtered.table()
    kinds = [type(compile_filter(row_filter, table)) for row_filter in stored]
    assert kinds == [ServerFilter] * len(ON_SERVER) + [ArrowFilter] * len(IN_ARROW)

    compiled = [as_server_filter(row_filter, table) for row_filter in stored]
    ours = rows_of(filtered, spark).server_answers(compiled, filtered.database.dsn)

    assert_same(texts, ours, filtered.answers(stored))


def assert_same(
    texts: Sequence[str], ours: list[tuple[bool | None, ...]], theirs: list[tuple[bool | None, ...]]
) -> None:
    different = {
        text: (tuple(row[n] for row in ours), tuple(row[n] for row in theirs))
        for n, text in enumerate(texts)
        if [row[n] for row in ours] != [row[n] for row in theirs]
    }
    assert len(ours) == len(theirs)
    assert different == {}, "filter: (ours per row, PostgreSQL's per row)"


def test_and_or_not_follow_three_valued_logic(filtered: FilteredTable, spark: SparkSession) -> None:
    """R3.8. The tables of SQL: AND is the least and OR the greatest of FALSE < NULL < TRUE."""
    rank = {False: 0, None: 1, True: 2}
    literals = {True: "b", False: "not b", None: "(b and null)"}  # over a row where b is true
    pairs = list(itertools.product(rank, rank))
    texts = [f"{literals[left]} and {literals[right]}" for left, right in pairs]
    texts += [f"{literals[left]} or {literals[right]}" for left, right in pairs]
    texts += [f"not {literals[value]}" for value in rank]
    compiled = [compile_filter(row_filter, filtered.table()) for row_filter in filtered.store(texts)]

    answers = rows_of(filtered, spark).arrow_answers(
        [result for result in compiled if isinstance(result, ArrowFilter)]
    )

    assert answers[0] == (
        *(min(pair, key=rank.__getitem__) for pair in pairs),
        *(max(pair, key=rank.__getitem__) for pair in pairs),
        *({True: False, False: True, None: None}[value] for value in rank),
    )


def test_wide_and_deep_filters_are_answered(filtered: FilteredTable, spark: SparkSession) -> None:
    numbers = ", ".join(map(str, range(1000)))
    wide = " or ".join(f"(a = {number} and b)" for number in range(60))
    deep = "not (a > 5 and " * 50 + "b" + ")" * 50
    texts = [f"a in ({numbers})", wide, deep]
    stored = filtered.store(texts)
    table = filtered.table()
    compiled = [compile_filter(row_filter, table) for row_filter in stored]
    rows = rows_of(filtered, spark)

    in_arrow = [result for result in compiled if isinstance(result, ArrowFilter)]
    on_server = [result for result in compiled if isinstance(result, ServerFilter)]

    assert (len(in_arrow), len(on_server)) == (2, 1)
    assert_same(texts[:2], rows.arrow_answers(in_arrow), filtered.answers(stored[:2]))
    assert_same(
        texts[2:], rows.server_answers(on_server, filtered.database.dsn), filtered.answers(stored[2:])
    )


REFUSED = (
    "now() > '2020-01-01'", "random() > 0.5", "to_char(ts, 'YYYY') = '2020'", "to_date(s, 'YYYY') = d",
    "concat(s, v) = 'ab'", "format('%s', s) = 'a'", "tz::date = '2020-01-01'",
    "pg_typeof(a) = 'int4'::regtype", "extract(hour from tz) = 1", "date_trunc('day', tz) = tz",
    "tz + interval '1 day' > tz", "arr[1] = 1", "a::text = '1'", "s::int = 1", "current_date = d",
    "current_user = s", "localtime > '10:00'", "js is json", "xmin = '1'", "t is null", "exists (select 1)",
    "sum(a) > 1", "a", "v in ('a', 'b')",
)  # fmt: skip
"""R5.1-R5.4: what PostgreSQL itself refuses; nothing of ours has a say."""


def test_server_refuses_what_its_rules_forbid(filtered: FilteredTable) -> None:
    accepted = []
    for text in REFUSED:
        with contextlib.suppress(psycopg.Error):
            filtered.store([text])
            accepted.append(text)

    assert accepted == []


def test_xml_expressions_are_answered_where_the_server_has_xml(
    filtered: FilteredTable, spark: SparkSession
) -> None:
    """R5.2."""
    try:
        filtered.database.rows("select xmlparse(content '<a/>')")
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("this server is built without libxml")
    filtered.database.run(
        "alter table t add x xml; update t set x = xmlparse(content '<a>1</a>') where id < 3"
    )
    texts = ["xmlexists('//a' passing x)", "x is document", "xmlconcat(x, x) is not null"]
    stored = filtered.store(texts)
    compiled = [as_server_filter(row_filter, filtered.table()) for row_filter in stored]

    ours = rows_of(filtered, spark).server_answers(compiled, filtered.database.dsn)

    assert_same(texts, ours, filtered.answers(stored))


def test_rules_name_the_servers_own_operators_functions_and_casts(filtered: FilteredTable) -> None:
    database = filtered.database
    operators = {
        oid: tuple(part for part in signature if part is not None)
        for oid, *signature in database.rows(
            "select o.oid::int, oprname, l.typname, r.typname from pg_operator o"
            " left join pg_type l on l.oid = oprleft join pg_type r on r.oid = oprright"
        )
    }
    functions = {
        oid: (name, *types)
        for oid, name, types in database.rows(
            "select p.oid::int, proname, array(select typname::text from unnest(proargtypes::oid[])"
            " with ordinality as a (type, n) join pg_type t on t.oid = a.type order by n) from pg_proc p"
        )
    }
    binary_casts = set(
        database.rows("select castsource::int, casttarget::int from pg_cast where castmethod = 'b'")
    )

    assert {oid: operators[oid] for oid in OPERATORS} == dict(OPERATORS)
    assert {oid: functions[oid] for oid in FUNCTIONS} == dict(FUNCTIONS)
    assert binary_casts >= RELABELS.keys()


def test_filter_that_is_true_hides_the_error_of_a_later_publications(
    filtered: FilteredTable, spark: SparkSession
) -> None:
    """R3.8: row 7 has a = 0; the first filter is TRUE there, so the division is never made."""
    first, second = filtered.store(["a = 0", "10 / a > 4"])
    compiled = compile_or([first, second], filtered.table())
    assert isinstance(compiled, ServerFilter)

    answers = rows_of(filtered, spark).server_answers([compiled], filtered.database.dsn)

    #   a = 1      2147483647  -2147483648  null    -7       10       0
    assert answers == [(True,), (False,), (False,), (None,), (False,), (False,), (True,)]
