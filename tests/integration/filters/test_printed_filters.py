"""What is executed of a stored expression means what was stored, whatever is in it (R5.2, R5.4).

The server itself is asked: it makes the printed form of each expression a constraint, and stores the tree
that it has understood.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import psycopg
import pytest

from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.check_table import CheckTable, Question
from cdc_replay.filters.compile import compile_filter
from cdc_replay.filters.names import NotPrintableError
from cdc_replay.filters.printed import print_filters, print_for_subscriber
from cdc_replay.model.publication import RowFilter, Table, TableColumn
from fixtures.postgres import Database
from fixtures.stored_filters import FilteredTable
from integration.filters.generated_values import create_table
from integration.filters.test_differential_filters import generated_filters
from integration.filters.test_filters_equal_postgresql import IN_ARROW, ON_SERVER

OPERATORS: Final = """
    select format('(%s operator(pg_catalog.%s) %s) is null',
        'null::' || nullif(oprleft, 0)::regtype, oprname, 'null::' || oprright::regtype)
    from pg_operator o join pg_proc p on p.oid = o.oprcode
    where oprnamespace = 'pg_catalog'::regnamespace and provolatile = 'i' and not proretset
        and not exists (select from unnest(array[oprleft, oprright]) as a (oid) join pg_type t using (oid)
            where t.typtype = 'p')
    order by o.oid
"""
"""Every operator of PostgreSQL that a row filter may have, of types that are no pseudo-types."""

FUNCTIONS: Final = """
    select format('(%I.%I(%s)) is null', 'pg_catalog', proname,
        (select string_agg('null::' || format_type(a, -1), ', ' order by place)
            from unnest(proargtypes) with ordinality as args (a, place)))
    from pg_proc p join pg_type r on r.oid = prorettype
    where pronamespace = 'pg_catalog'::regnamespace and provolatile = 'i' and prokind = 'f' and not proretset
        and provariadic = 0 and r.typtype <> 'p' and not exists (
            select from unnest(proargtypes) as a (oid) join pg_type t using (oid) where t.typtype = 'p')
    order by p.oid
"""

CASTS: Final = """
    select format('cast(null::%s as %s) is null', format_type(castsource, -1), format_type(casttarget, -1))
    from pg_cast c left join pg_proc p on p.oid = castfunc
    where castmethod in ('b', 'f') and coalesce(provolatile, 'i') = 'i' and castsource <> casttarget
        and (select bool_and(typtype <> 'p') from pg_type where oid in (castsource, casttarget))
    order by c.oid
"""

TYPES: Final[dict[str, Sequence[str]]] = {
    "interval": ("1 mon -3 days 04:05:06.789", "-1 year", "infinity", "-00:00:00.000001", "178000000 years"),
    "timetz": ("04:05:06.789-08", "24:00:00+15:59"),
    "time": ("24:00", "00:00:00.000001"),
    "inet": ("10.0.0.1/8", "::1"),
    "cidr": ("10.0.0.0/8",),
    "macaddr": ("08:00:2b:01:02:03",),
    "macaddr8": ("08:00:2b:01:02:03:04:05",),
    "bit varying": ("", "1", "10101010", "101010101"),
    "json": ('{"a": "\'\\\\"}', "[1,   2]"),
    "jsonb": ('{"a": "\'\\\\\\"", "b": {"x": null}}', "null", '"é\\u0001"'),
    "jsonpath": ('$.a[*] ? (@ > 1 && @ like_regex "x\'y")',),
    "int4range": ("[1,5)", "empty", "(,)"),
    "tstzrange": ('["2020-01-01 00:00:00+00",)',),
    "int4multirange": ("{[1,5),[7,9)}",),
    "point": ("(1,2)", "(1e100,-0)"),
    "box": ("(1,1),(0,0)",),
    "path": ("((0,0),(1,1))", "[(0,0),(1,1)]"),
    "polygon": ("((0,0),(1,1),(2,0))",),
    "circle": ("<(1,2),3>",),
    "lseg": ("[(0,0),(1,1)]",),
    "line": ("{1,2,3}",),
    "money": ("-12.50",),
    "tsvector": ("'it''s':1A 'x\\\\y':2,3B",),
    "tsquery": ("'it''s' & !b:*",),
    "pg_lsn": ("16/B374D848",),
    "xid": ("4294967295",),
    "xid8": ("18446744073709551615",),
    "tid": ("(5,6)",),
    '"char"': ("a", "\\200", ""),
    "name": ("it's", "é" * 31),
    "oid": ("4294967295",),
    "regtype": ("integer",),
    "regclass": ("pg_catalog.pg_class",),
    "uuid": ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",),
    "bytea": ("\\x00ff27", ""),
    "int2vector": ("1 2 3",),
    "oidvector": ("1 2 3",),
    "numeric": ("NaN", "-Infinity", "1e-400", "0.00", "-12345678901234567890.12345"),
    "real": ("NaN", "-0", "1e-45", "3.4028235e38", "0.1"),
    "double precision": ("NaN", "-Infinity", "-0", "5e-324", "0.1"),
    "date": ("infinity", "0044-03-15 BC", "5874897-12-31"),
    "timestamp": ("-infinity", "4713-01-01 BC", "294276-12-31 23:59:59.999999"),
    "timestamptz": ("infinity", "2020-02-29 23:59:59.000001+14"),
    "text": ("", "it's", "\\", "E'\\''", "$$;--", "%s {} %%", "é𝄞", "\n\t\r", "'::text"),
    "text[]": ('{"it\'s","\\\\",NULL,"NULL",""}', "{}", "[0:1]={a,b}", "{{a,b},{c,d}}"),
    "interval[]": ('{"1 day","-1 mon"}',),
    "jsonb[]": ('{"{\\"a\\": 1}",null}',),
    "bpchar": ("ab   ", ""),
    "varchar": ("ab   ",),
}
"""Constants of types, of which the text of an expression has some and the tree others."""

NODES: Final = (
    "row(a, s)::record = row(1, 'x')",
    "row(a, (s, v)::record)::record is distinct from row(1, row('x', 'y'))",
    "(a, s) in ((1, 'x'), (2, 'y'))", "row(a, i2) is not null", "row(a)::record is null",
    "array[[a, 1], [2, 3]] = '{{1,2},{3,4}}'", "array[array[a]] <> array[array[1]]",
    "a = any (array[]::int[])", "num_nulls(variadic array[a, 1]) = 0", "num_nulls('x', a, null) = 1",
    "jsonb_extract_path_text(j, 'a', 'b') = 'c'", "jsonb_extract_path(j, variadic array['a', s]) is null",
    "case a when 1 then s when i2 then v else 'x' end = 'x'", "case c when 'ab' then 1 end = 1",
    "case when a = 1 then 1 when a = 2 then null end is null", "case v when 'x' then b end",
    "case case a when 1 then 2 end when 2 then b else not b end", "nullif(c, 'x') is null",
    "nullif(v, 'x') = s", "greatest(a, i2, i8, 5) > least(1, 2)", "v::varchar = 'x'", "v::varchar(3) = 'x'",
    "c::char(7)::text = 'x'", "c::bpchar = 'x'", "s::char(3) = 'x'", "n::numeric(10, 1) = 1",
    "iv::interval(0) > '1 day'::interval(3)", "ts::timestamp(0) = '2020-01-01'",
    "iv::interval hour to minute > '5 hours'::interval hour", "bits::bit(2) = B'10'",
    "B'1'::varbit(3) = '1'", "'04:05:06-08'::time(1) with time zone = '04:05:06+00'::timetz",
    "bits = B'1010'::bit(4)", "i2::oid = 5", "i2::regproc = 5::regproc", "i8::oid = 5::oid",
    "i8::regclass = 'pg_class'::regclass", "o::regtype = 'int'::regtype",
    "s collate \"C\" < 'x' collate \"C\"", "nm collate \"C\" = 'x'",
    "ts at time zone '01:00'::interval = tz", "tz at time zone interval '1 day' + iv > '2020-01-01'",
    "position(B'1' in bits & B'1000') = 1", "substring(s from 2 for 3) = overlay(s placing 'x' from 2)",
    "substring(s similar 'a#\"b#\"c' escape '#') = 'b'", "trim(both 'x' from s) = 'y'", "s is normalized",
    "normalize(s, nfkc) = s", "s is nfd normalized", "extract(epoch from iv) > 1",
    "(ts, iv) overlaps (ts, interval '1 hour')", "s like 'a%' escape '!'", "s similar to '(a|b)'",
    "not b is true and b is not unknown or b is null", "not (not (not b))", "- a = +1", "@ n > 1",
    "~ a = 1", "a between symmetric 1 and i2", "a <> all (arr)",
    "(a between 1 and i2) and b and i2 in (1, a, 3)",
    "(a not between symmetric 1 and i2 or b) or (s = 'x' or (v = s or c = 'x'))", "a in (1, i2, 5) or b",
    "not (a between 1 and 5) and (b and (a between 1 and i2 and b) or b)", "1 = any (arr || '{7}'::int[])",
    "r @> 3 and not isempty(r)", "jsonb_path_exists(j, '$.a ? (@ > $x)', '{\"x\": 1}')", "j @? '$.k'",
    "j ->> 'k' = any (array['a', s])", "arr = '{}' and tarr <> '{a,b}' and tarr is distinct from '{}'",
    "x is document or xmlcomment('a') is null", "xmlconcat(x, x) is null",
    "xmlparse(content s preserve whitespace) is null", "xmlserialize(content x as text) = s",
    "xmlparse(document s) is null", "xmlroot(x, version '1.0', standalone yes) is null",
    "xmlroot(x, version no value) is null", "xmlserialize(document x as varchar) = s",
    "xmlexists('a' passing x)", "true", "null", "null::boolean is unknown", "coalesce(b, null, a = 1)",
    "row() is null",
)  # fmt: skip

_AT_ONCE: Final = 200
INFINITE_INTERVALS_SINCE: Final = 17


@pytest.fixture
def many(publisher: Database) -> FilteredTable:
    publisher.run(
        "create table t (id int, a int, i2 int2, i8 int8, b bool, s text, v varchar(20), c char(5), d date,"
        " n numeric(20, 2), f float8, ts timestamp, tz timestamptz, iv interval, arr int[], tarr text[],"
        ' j jsonb, o oid, nm name, bits bit(4), r int4range, x xml, u uuid, js json, "by" bytea, ip inet,'
        ' m money, pt point, ch "char", cc text collate "C")'
    )
    return FilteredTable(publisher)


def confirm(filtered: FilteredTable, expressions: Sequence[str]) -> None:
    """The server understands each printed expression as it was stored."""
    table = filtered.table()
    stored = filtered.store(expressions)
    with filtered.database.connect() as connection:
        connection.execute("set search_path = ''")
        for number, (text, row_filter) in enumerate(zip(expressions, stored, strict=True)):
            question = Question(number, (row_filter,), columns_of(row_filter, table), table.name)
            try:
                CheckTable.for_question(question, connection).create(connection)
            except (InvalidFilter, psycopg.Error) as error:
                pytest.fail(f"{text[:500]}\n{row_filter.sql[:500]}\n{error}")


def columns_of(row_filter: RowFilter, table: Table) -> tuple[TableColumn, ...]:
    compiled = compile_filter(row_filter, table)
    return compiled.columns


def together(expressions: Sequence[str]) -> Iterator[str]:
    """Several in one filter, whose trees are compared all the same."""
    for start in range(0, len(expressions), _AT_ONCE):
        yield " and ".join(expressions[start : start + _AT_ONCE])


@pytest.mark.parametrize("query", [OPERATORS, FUNCTIONS, CASTS], ids=["operators", "functions", "casts"])
def test_built_in_objects_are_printed_as_they_were_stored(many: FilteredTable, query: str) -> None:
    expressions = [text for (text,) in many.database.rows(query)]
    assert len(expressions) > 80

    confirm(many, list(together(expressions)))


def test_every_node_is_printed_as_it_was_stored(many: FilteredTable) -> None:
    confirm(many, [text for text in NODES if is_accepted(many, text)])


def test_random_filters_are_printed_as_they_were_stored(publisher: Database) -> None:
    """Whatever is nested in what."""
    create_table(publisher, rows=0, seed=0)

    confirm(FilteredTable(publisher), generated_filters(publisher, seed=30, count=200))


def test_filters_of_other_tests_are_printed_as_they_were_stored(many: FilteredTable) -> None:
    confirm(many, list(together([f"({text})" for text in (*IN_ARROW, *ON_SERVER)])))


def test_constants_of_all_types_keep_their_values(many: FilteredTable) -> None:
    def literal(text: str) -> str:
        return "E'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    unknown = {("interval", "infinity")} if many.database.version < INFINITE_INTERVALS_SINCE else set()
    values = [
        (kind, literal(text))
        for kind, texts in TYPES.items()
        for text in texts
        if (kind, text) not in unknown
    ]
    confirm(many, [f"({text}::{kind}) is null" for kind, text in values])
    # All of them in one: each has to find its own.
    confirm(many, [" or ".join(f"({text}::{kind}) is null" for kind, text in values)])


def is_accepted(filtered: FilteredTable, text: str) -> bool:
    """Some need libxml, without which a server may be built."""
    try:
        filtered.store([text])
    except psycopg.errors.FeatureNotSupported as error:
        if "libxml" not in str(error):
            raise
        return False
    return True


GENERATED: Final = (
    ("text", "a::text || s"), ("text", "upper(s)::varchar(5)"), ("int[]", "arr[1:2]"), ("int", "arr[id]"),
    ("text", "j['k'] #>> '{}'"), ("int8[]", "arr::int8[]"), ("numeric(10, 1)", "n * 2"), ("char(3)", "s"),
    ("int", "case when kind = 'one'::kind then 1 else positive + 1 end"), ("bool", "kind is null"),
    ("int[]", "arr[:2] || arr[2:]"), ("text", "(positive + 1)::text"),
    ("bool", "kind = any (array['one', 'it''s']::kind[])"), ("interval", "iv * 2 + '1 day'"),
    ("int", "date_part('year', ts)"), ("text", "s collate \"C\""), ("int", "positive"),
)  # fmt: skip
"""Generated columns have what row filters have not: conversions by text, subscripts, types of users."""


@pytest.mark.parametrize(("kind", "expression"), GENERATED)
def test_generated_columns_are_printed_as_they_were_stored(
    publisher: Database, kind: str, expression: str
) -> None:
    publisher.run(
        "create type kind as enum ('one', 'it''s'); create domain positive as int check (value > 0);"
        "create table t (id int, a int, s text, arr int[], j jsonb, n numeric(9, 2), kind kind, iv interval,"
        f" positive positive, ts timestamp, g {kind} generated always as ({expression}) stored)"
    )
    confirm(FilteredTable(publisher), ["g is null"])


def test_filter_has_the_same_answers_on_the_publisher_and_a_subscriber(many: FilteredTable) -> None:
    """R7.3, R7.4: as the initial copy and the validation evaluate it."""
    many.database.run(
        "insert into t (id, a, i2, i8, b, s, v, c, n, f, ts, tz, iv, arr, j, bits, r, cc)"
        " select i, i % 5, i % 7, i, i % 2 = 0, 'x' || i, i, 'ab', i / 3.0, i, '2020-01-01', '2020-01-01',"
        " make_interval(0, i), array[i], jsonb_build_object('k', i), B'1010', int4range(i, i + 5), 'B'"
        " from generate_series(1, 20) as i"
    )
    expressions = [text for text in NODES if is_accepted(many, text)]
    expressions = [text for text in expressions if "xml" not in text and "x is document" not in text]
    # Their text has another meaning than their tree: it compares field by field.
    expressions = [text for text in expressions if "::record" not in text]
    stored, table = many.store(expressions), many.table()
    with many.database.connect() as connection:
        connection.execute("set search_path = ''")
        for text, row_filter in zip(expressions, stored, strict=True):
            printed = print_filters(connection, table, [row_filter])
            there = print_for_subscriber(connection, connection, table, [row_filter])
            expected = answers(connection, f"({row_filter.sql})")
            assert printed is not None
            for each in (printed, there):
                assert answers(connection, each.as_string(connection)) == expected, text


def answers(connection: psycopg.Connection[tuple[object, ...]], condition: str) -> Sequence[object]:
    try:
        with connection.transaction():
            return connection.execute(f"select {condition} from public.t order by id".encode()).fetchall()
    except (psycopg.DataError, psycopg.ProgrammingError) as error:
        return [error.sqlstate]


def test_objects_that_may_differ_on_a_subscriber_are_not_printed_for_it(many: FilteredTable) -> None:
    """Oids of most collations, and of a table's own types, mean something else on another server."""
    (stored,) = many.store(["information_schema._pg_char_max_length(id, a) = 1"])
    table: Table = many.table()
    with many.database.connect() as connection:
        assert print_filters(connection, table, [stored]) is not None
        with pytest.raises(NotPrintableError, match="is not built-in"):
            print_for_subscriber(connection, connection, table, [stored])
