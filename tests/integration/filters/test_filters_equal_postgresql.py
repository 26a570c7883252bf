"""Every filter that PostgreSQL accepts has PostgreSQL's answer, wherever it is evaluated (R5.4, R3.1)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_replay.filters.compile import ServerFilter, SparkFilter, compile_any, compile_filter
from cdc_replay.filters.rules import FUNCTIONS, OPERATORS, RELABELS
from cdc_replay.filters.server import ServerCheck, evaluate_on_server
from cdc_replay.filters.spark import filter_column
from cdc_replay.model.publication import RowFilter, Table
from fixtures.stored_filters import FilteredTable

pytestmark = pytest.mark.spark

IN_SPARK = (
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
    "(a = 1 and b) or (not b and s = 'ABC') or (a is null and not (i8 > 0 or s = 'x'))",
)  # fmt: skip
"""Filters that Spark must answer itself."""

ON_SERVER = (
    "a / 2 + 1 > 2", "a / 3 > 1", "-a::bigint > 2", "abs(i8 / 2) > 5", "a & 1 = 1", "a | 1 > 3", "~a < 0",
    "s < 'b'", "s collate \"C\" < 'b'", "cc > 'A'", "s = v", "c = v", "c < 'b'", "s = 'é'", "v = 'é'",
    "s like 'a%'", "s ilike 'A%'", "s similar to '(a|A)%'", "s ~ '^a'", "s !~ 'b$'", "lower(s) = 'abc'",
    "upper(v) = 'ABC'", "length(s) = 3", "substring(s from 1 for 1) = 'a'", "md5(s) < '8'",
    "hashtext(s) > 0", "regexp_replace(s, 'a', 'b') = 'bbc'", "s || v = 'abcabc'", "s::name = 'abc'",
    "nm = 'abc'", "n = 1.5", "n >= 'NaN'", "n = 0", "n * 2 > 1", "f = 'NaN'", "f = 0", "f > 1",
    "d < '2020-01-01'", "d = 'infinity'", "d = '0044-03-15 BC'", "ts > '2020-01-01'",
    "ts::date = '2020-01-01'", "tz > '2020-01-01 00:00+02'", "tz at time zone 'UTC' < '2020-06-01'",
    "extract(year from ts) = 2020", "date_trunc('month', ts) = '2020-01-01'", "make_date(2020, 1, 1) = d",
    "iv > '12 hours'", "arr @> array[1]", "a = any (arr)", "'a' = any (tarr)", "arr = '{}'",
    "a > any (array[1, 2])", "a = all (array[1, 1])", "a <> any (array[1, null])",
    "c = any (array['abc'::char(5)])", "a = any ('{1,null}'::int[])", "array[a, i2] = array[1, 1]",
    "j @> '{\"k\": \"v\"}'", "j ? 'k'", "j -> 'k' = '\"v\"'", "j ->> 'k' = 'v'", "js ->> 'k' = 'v'",
    "jsonb_path_exists(j, '$.k')", "to_tsvector('simple', s) @@ to_tsquery('simple', 'abc')",
    "row(a, i2) is null", "row(a, i2) is not null", "(a, id) > (1, 2)", "greatest(a, i2) = 10",
    "least(a, 0) < 0", "case a when 1 then true when 10 then b end", "o = 5", "o > 4294967294",
    "bits = B'1010'", "by = '\\x00ff'", "ip << '10.0.0.0/8'", "r @> 3", "pt <@ box '(0,0),(5,5)'",
    "ch = 'n'", "nullif(s, 'abc') < 'b'", "m > '1'", "(a < 5 or s ~ 'b') and b",
)  # fmt: skip
"""Filters that are left to PostgreSQL."""


@dataclass(frozen=True)
class Rows:
    """The rows of `t` as a frame of changes: `route`, `kind`, `number`, `old` and `new` in column order."""

    frame: DataFrame
    names: tuple[str, ...]

    def spark_answers(self, filters: Sequence[SparkFilter]) -> list[tuple[bool | None, ...]]:
        def value_of(name: str) -> Column:
            return F.col("new")[self.names.index(name)]

        columns = [filter_column(each, value_of).alias(f"f{n}") for n, each in enumerate(filters)]
        answers = self.frame.select("number", *columns).collect()
        return [tuple(row)[1:] for row in sorted(answers)]

    def server_answers(self, filters: Sequence[ServerFilter], dsn: str) -> list[tuple[bool | None, ...]]:
        checks = [ServerCheck.of(each, self.names, number=n, routes=[0]) for n, each in enumerate(filters)]
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
        case SparkFilter(_, columns):
            return ServerFilter(row_filter.sql, columns, "asked for", table.name)


def test_filters_with_exact_rules_have_postgresqls_answers_in_spark(
    filtered: FilteredTable, spark: SparkSession
) -> None:
    stored = filtered.store(IN_SPARK)
    compiled = [compile_filter(each, filtered.table()) for each in stored]
    assert {
        text: each.because
        for text, each in zip(IN_SPARK, compiled, strict=True)
        if isinstance(each, ServerFilter)
    } == {}

    ours = rows_of(filtered, spark).spark_answers(
        [each for each in compiled if isinstance(each, SparkFilter)]
    )

    assert_same(IN_SPARK, ours, filtered.answers(stored))


def test_every_accepted_filter_has_postgresqls_answers_on_the_server(
    filtered: FilteredTable, spark: SparkSession
) -> None:
    """R5.4; also those that Spark could answer, so that both ways are equal."""
    texts = (*ON_SERVER, *IN_SPARK)
    stored = filtered.store(texts)
    table = filtered.table()
    kinds = [type(compile_filter(each, table)) for each in stored]
    assert kinds == [ServerFilter] * len(ON_SERVER) + [SparkFilter] * len(IN_SPARK)

    compiled = [as_server_filter(each, table) for each in stored]
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
    compiled = [compile_filter(each, filtered.table()) for each in filtered.store(texts)]

    answers = rows_of(filtered, spark).spark_answers(
        [each for each in compiled if isinstance(each, SparkFilter)]
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
    compiled = [compile_filter(each, table) for each in stored]
    rows = rows_of(filtered, spark)

    in_spark = [each for each in compiled if isinstance(each, SparkFilter)]
    on_server = [each for each in compiled if isinstance(each, ServerFilter)]

    assert (len(in_spark), len(on_server)) == (2, 1)
    assert_same(texts[:2], rows.spark_answers(in_spark), filtered.answers(stored[:2]))
    assert_same(
        texts[2:], rows.server_answers(on_server, filtered.database.dsn), filtered.answers(stored[2:])
    )


INTEGERS = st.sampled_from(["a", "i2", "i8", "id", "0", "1", "-7", "32768", "-2147483648", "3000000000"])
BOOLEANS = st.sampled_from(["b", "true", "false", "null::boolean"])
TEXTS = st.sampled_from(["s", "v", "cc"])
LITERALS = st.sampled_from(["''", "'abc'", "'n'", "'it''s'", "'\\\"'", "' '"])
SYMBOLS = st.sampled_from(["=", "<>", "<", "<=", ">", ">=", "is distinct from", "is not distinct from"])
EQUALITIES = st.sampled_from(["=", "<>", "is distinct from", "is not distinct from"])


def comparisons() -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, INTEGERS, SYMBOLS, INTEGERS),
        st.builds("({} {} {})".format, BOOLEANS, SYMBOLS, BOOLEANS),
        st.builds("({} {} {})".format, TEXTS, EQUALITIES, LITERALS),
        st.builds("(c {} {})".format, EQUALITIES, LITERALS),
        st.builds(
            "(a % {} = {})".format, st.sampled_from(["2", "-3", "7"]), st.sampled_from(["0", "1", "-1", "i2"])
        ),
        st.builds("(s in ({}, {}))".format, LITERALS, LITERALS),
        st.builds(
            "(a not in ({}, {}))".format, st.sampled_from(["1", "null", "-7"]), st.sampled_from(["0", "10"])
        ),
        st.builds("(coalesce(i8, {}) < 5)".format, st.sampled_from(["0", "a", "i2"])),
    )


def conditions() -> st.SearchStrategy[str]:
    return st.recursive(
        comparisons(),
        lambda parts: st.one_of(
            st.builds("({} and {})".format, parts, parts),
            st.builds("({} or {})".format, parts, parts),
            st.builds("(not {})".format, parts),
            st.builds(
                "({} is {})".format, parts, st.sampled_from(["true", "not false", "unknown", "not null"])
            ),
            st.builds("(case when {} then {} else {} end)".format, parts, parts, parts),
        ),
        max_leaves=8,
    )


def test_combined_filters_have_postgresqls_answers_in_spark(
    filtered: FilteredTable, spark: SparkSession
) -> None:
    rows = rows_of(filtered, spark)
    table = filtered.table()

    @settings(max_examples=6, derandomize=True, deadline=None, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.lists(conditions(), min_size=10, max_size=20))
    def check(texts: list[str]) -> None:
        stored = filtered.store(texts)
        compiled = [compile_filter(each, table) for each in stored]
        in_spark = [each for each in compiled if isinstance(each, SparkFilter)]
        assert len(in_spark) == len(texts), [each for each in compiled if isinstance(each, ServerFilter)]
        assert_same(texts, rows.spark_answers(in_spark), filtered.answers(stored))

    check()


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
    assert binary_casts >= RELABELS


def test_an_earlier_publications_filter_hides_the_error_of_a_later_one(
    filtered: FilteredTable, spark: SparkSession
) -> None:
    """R3.8: row 7 has a = 0; the first filter is TRUE there, so the division is never made."""
    first, second = filtered.store(["a = 0", "10 / a > 4"])
    compiled = compile_any([first, second], filtered.table())
    assert isinstance(compiled, ServerFilter)

    answers = rows_of(filtered, spark).server_answers([compiled], filtered.database.dsn)

    #   a = 1      2147483647  -2147483648  null    -7       10       0
    assert answers == [(True,), (False,), (False,), (None,), (False,), (False,), (True,)]
