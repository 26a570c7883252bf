"""Stored node trees (R3.15): the text of PostgreSQL's outfuncs.c, 15 to 18."""

from __future__ import annotations

import pytest

from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.datum import PrintedFilter
from cdc_replay.filters.expression import (
    Array,
    ArrayComparison,
    Bool,
    BoolOp,
    Case,
    Column,
    Constant,
    Expression,
    NullTest,
    Operator,
    Type,
    Unmodelled,
    attnums_read,
)
from cdc_replay.filters.node_text import Node, read_node
from cdc_replay.filters.node_tree import parse

VAR = "{VAR :varno 1 :varattno %d :vartype 23 :vartypmod -1 :varcollid 0 :varlevelsup 0 :location 8}"


def constant(type_oid: int, datum: str, length: int = -1) -> str:
    return (
        f"{{CONST :consttype {type_oid} :consttypmod -1 :constcollid 0 :constlen {length} :constbyval false"
        f" :constisnull false :location 12 :constvalue {datum}}}"
    )


def decoded(type_oid: int, datum: str) -> Expression:
    return parse(constant(type_oid, datum))


def test_node_has_values_between_its_field_names() -> None:
    node = read_node('{A :x 1 :y <> :z (o 5 6) :w ({B} {C :v 2}) :d 2 [ -1 7 ] :s ("f1" "a\\ \\(b") :last t}')

    assert node.name == "A"
    assert node.integer("x") == 1
    assert node.single("y") == "<>"
    assert node.fields["z"] == [["o", "5", "6"]]
    assert [each.name for each in node.nodes("w")] == ["B", "C"]
    assert node.fields["d"] == ["2", "[", "-1", "7", "]"]
    assert node.fields["s"] == [['"f1"', '"a\\ \\(b"']]
    assert node.token("last") == "t"


@pytest.mark.parametrize(
    "text", ["", "x", "{A", "{A :b (1}", "{A :b {C)}", "{A} {B}", "(1 2)", "}", "{", "{A :b 1}}"]
)
def test_text_other_than_one_complete_node_is_refused(text: str) -> None:
    with pytest.raises(InvalidFilter, match=r"cannot read the stored form.*\[R3.15\]"):
        read_node(text)


def test_missing_field_is_named() -> None:
    with pytest.raises(InvalidFilter, match="node VAR has 0 values for varattno"):
        parse("{VAR :varno 1}")


def test_operator_of_15_reads_as_that_of_18() -> None:
    tree = (
        "{OPEXPR :opno 521 :opfuncid 147 :opresulttype 16 :opretset false :opcollid 0 :inputcollid 0 :args ("
        + VAR % 2
        + " "
        + constant(Type.INT4, "4 [ 10 0 0 0 0 0 0 0 ]", 4)
        + ") :location 44}"
    )

    assert parse(tree) == Operator(521, 0, (Column(2, Type.INT4, 0), Constant(Type.INT4, 10)))


def test_lists_and_cases_are_translated() -> None:
    listed_column = f"{{ARRAYEXPR :array_typeid 1007 :elements ({VAR % 3}) :multidims false}}"
    in_list = (
        "{SCALARARRAYOPEXPR :opno 96 :opfuncid 65 :useOr true :inputcollid 0"
        f" :args ({VAR % 2} {listed_column})}}"
    )
    when = f"{{CASEWHEN :expr {in_list} :result {VAR % 4}}}"
    branches = f"{{CASEEXPR :arg <> :args ({when}) :defresult {VAR % 5}}}"

    listed = ArrayComparison(96, 0, True, Column(2, 23, 0), Array((Column(3, 23, 0),)))
    assert parse(branches) == Case(((listed, Column(4, 23, 0)),), Column(5, 23, 0))


OPERAND = "{CASETESTEXPR :typeId 23 :typeMod -1 :collation 0}"
EQUAL = "{OPEXPR :opno 96 :inputcollid 0 :args (%s %s)}"


def case_of(operand: str, condition: str, result: str) -> str:
    when = f"{{CASEWHEN :expr {condition} :result {result}}}"
    return f"{{CASEEXPR :arg {operand} :args ({when}) :defresult {VAR % 9}}}"


def test_case_operand_is_in_its_conditions_only() -> None:
    outer = case_of(VAR % 2, EQUAL % (OPERAND, VAR % 3), case_of("<>", VAR % 4, OPERAND))

    inner = Case(
        ((Column(4, 23, 0), Unmodelled("expression node CASETESTEXPR", frozenset())),), Column(9, 23, 0)
    )
    condition = Operator(96, 0, (Column(2, 23, 0), Column(3, 23, 0)))
    assert parse(outer) == Case(((condition, inner),), Column(9, 23, 0))


def test_case_of_cases_is_not_multiplied() -> None:
    """Each level would stand in all conditions of the level above: exponentially many nodes."""
    tree = VAR % 2
    for _ in range(50):
        tree = case_of(tree, EQUAL % (OPERAND, VAR % 3), VAR % 4)

    assert parse(tree) == Unmodelled("CASE with an operand that is a CASE", frozenset({2, 3, 4, 9}))


@pytest.mark.parametrize(
    ("operator", "decisive"), [(521, 521), (525, 521), (97, 97), (523, 97)], ids=[">", ">=", "<", "<="]
)
def test_rows_are_compared_by_their_first_fields_that_differ(operator: int, decisive: int) -> None:
    """`(a, b) >= (c, d)`: if a = c, then b >= d, else a > c."""
    fields = [Column(number, 23, 0) for number in range(1, 5)]
    tree = (
        f"{{ROWCOMPAREEXPR :cmptype 5 :opnos (o {operator} {operator}) :opfamilies (o 1976 1976)"
        f" :inputcollids (o 0 0) :largs ({VAR % 1} {VAR % 2}) :rargs ({VAR % 3} {VAR % 4})}}"
    )

    first, last = (fields[0], fields[2]), (fields[1], fields[3])
    assert parse(tree) == Case(
        ((Operator(96, 0, first), Operator(operator, 0, last)),), Operator(decisive, 0, first)
    )


def test_row_is_null_if_all_its_fields_are() -> None:
    row = f"{{ROWEXPR :args ({VAR % 2} {VAR % 3}) :row_typeid 2249 :row_format 2}}"
    tree = f"{{NULLTEST :arg {row} :nulltesttype 1 :argisrow true}}"

    fields = (NullTest(Column(2, 23, 0), negated=True), NullTest(Column(3, 23, 0), negated=True))
    assert parse(tree) == Bool(BoolOp.AND, fields)


def test_unknown_node_keeps_its_columns() -> None:
    found = parse(f"{{NEWNODE :a {VAR % 2} :list ({VAR % 7} ({VAR % 9})) :name (x :y)}}")

    assert found == Unmodelled("expression node NEWNODE", frozenset({2, 7, 9}))


def test_trees_of_any_depth_are_read_with_their_columns() -> None:
    depth = 20_000
    found = parse("{BOOLEXPR :boolop not :args (" * depth + VAR % 3 + ")}" * depth)

    assert attnums_read(found) == {3}
    assert isinstance(read_node("{A :b " * depth + "{C}" + "}" * depth), Node)


@pytest.mark.parametrize(
    ("type_oid", "datum", "value"),
    [
        (Type.INT2, "2 [ -1 -1 -1 -1 -1 -1 -1 -1 ]", -1),
        (Type.INT4, "4 [ 0 0 0 -128 -1 -1 -1 -1 ]", -(2**31)),
        (Type.INT8, "8 [ -1 -1 -1 -1 -1 -1 -1 127 ]", 2**63 - 1),
        (Type.BOOL, "1 [ 1 0 0 0 0 0 0 0 ]", True),
        (Type.BOOL, "1 [ 0 0 0 0 0 0 0 0 ]", False),
        (Type.TEXT, "5 [ 20 0 0 0 120 ]", "x"),
        (Type.TEXT, "4 [ 16 0 0 0 ]", ""),
        (Type.VARCHAR, "2 [ 5 120 ]", "x"),  # one byte of header: 2 << 1 | 1
        (Type.DATE, "4 [ -119 28 0 0 0 0 0 0 ]", "2020-01-01"),
        (Type.DATE, "4 [ -8 -37 -12 -1 -1 -1 -1 -1 ]", "0001-12-31 BC"),
        (Type.DATE, "4 [ -1 -1 -1 127 0 0 0 0 ]", "infinity"),
        (Type.OID, "4 [ -1 -1 -1 -1 0 0 0 0 ]", 4294967295),
        (Type.FLOAT8, "8 [ 0 0 0 0 0 0 -8 63 ]", 1.5),
        (Type.FLOAT4, "4 [ 0 0 -64 63 0 0 0 0 ]", 1.5),
        (Type.TIME, "8 [ 32 9 -52 97 8 0 0 0 ]", "10:00:00.5"),
        (Type.TIMESTAMP, "8 [ 0 0 0 0 0 0 0 -128 ]", "-infinity"),
        (Type.TIMESTAMP, "8 [ -1 -1 -1 -1 -1 -1 -1 -1 ]", "1999-12-31 23:59:59.999999"),
        (Type.TIMESTAMPTZ, "8 [ 0 0 0 0 0 0 0 0 ]", "2000-01-01 00:00:00+00"),
        (Type.BYTEA, "6 [ 24 0 0 0 0 -1 ]", r"\x00ff"),
        (Type.NUMERIC, "10 [ 40 0 0 0 -128 -128 1 0 -120 19 ]", "1.5"),
        (Type.NUMERIC, "6 [ 24 0 0 0 0 -64 ]", "NaN"),
        (Type.NUMERIC, "6 [ 24 0 0 0 0 -128 ]", "0"),
        (Type.NUMERIC, "8 [ 32 0 0 0 0 -96 7 0 ]", "-7"),
        (Type.NUMERIC, "8 [ 32 0 0 0 125 -127 16 39 ]", None),  # a group of more than four digits
        (Type.NUMERIC, "8 [ 32 0 0 0 126 -124 1 0 ]", "0.00000001"),
        (Type.NUMERIC, "8 [ 32 0 0 0 -2 -94 -24 3 ]", "-0.00001"),
        (Type.UUID, f"16 [ {'-1 ' * 15}10 ]", "ffffffff-ffff-ffff-ffff-ffffffffff0a"),
        (Type.TEXT, "6 [ 24 0 0 0 -61 -87 ]", "é"),
        (Type.TEXT, "5 [ 20 0 0 0 -23 ]", None),  # é in LATIN1
        (Type.TEXT, "8 [ 34 0 0 0 1 2 3 4 ]", None),  # compressed
        (Type.INT4, "4 [ 0 0 0 0 0 0 0 10 ]", None),  # big-endian
        (Type.TEXT, "5 [ 0 0 0 5 120 ]", None),  # big-endian
        (1186, "16 [ 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 ]", None),  # interval
    ],
)
def test_constant_is_decoded_or_unmodelled(
    type_oid: int, datum: str, value: bool | int | float | str | None
) -> None:
    expected: type[Unmodelled | Constant] = Unmodelled if value is None else Constant
    found = decoded(type_oid, datum)

    assert isinstance(found, expected)
    if isinstance(found, Constant):
        assert (found.type_oid, found.value, type(found.value)) == (type_oid, value, type(value))


def test_null_is_a_constant_of_any_type() -> None:
    text = constant(1700, "<>").replace("isnull false", "isnull true")

    assert parse(text) == Constant(1700, None)


def test_array_constants_of_one_dimension_are_lists() -> None:
    header = "0 0 0 1 0 0 0 0 0 0 0 23 0 0 0 2 0 0 0 1 0 0 0"
    two = decoded(Type.INT4_ARRAY, f"32 [ -128 {header} 7 0 0 0 -1 -1 -1 -1 ]")
    empty = decoded(Type.INT4_ARRAY, "16 [ 64 0 0 0 0 0 0 0 0 0 0 0 23 0 0 0 ]")

    assert two == Array((Constant(Type.INT4, 7), Constant(Type.INT4, -1)))
    assert empty == Array(())


def test_array_constants_keep_their_nulls() -> None:
    """{7, NULL, -1}: bits 101 say which of three are there; values begin at the offset of the header."""
    header = "1 0 0 0 32 0 0 0 23 0 0 0 3 0 0 0 1 0 0 0"
    values = decoded(Type.INT4_ARRAY, f"40 [ -96 0 0 0 {header} 5 0 0 0 0 0 0 0 7 0 0 0 -1 -1 -1 -1 ]")

    assert values == Array((Constant(Type.INT4, 7), Constant(Type.INT4, None), Constant(Type.INT4, -1)))


@pytest.mark.parametrize(
    ("constant_", "sql", "printed"),
    [
        (Constant(Type.INT8, 10), "(a > 10)", True),
        (Constant(Type.INT8, -10), "(a > '-10'::integer)", True),
        (Constant(Type.INT8, 1), "(a > 10)", False),
        (Constant(Type.TEXT, "it's"), "(s = 'it''s'::text)", True),
        (Constant(Type.TEXT, "é"), "(s = 'Ã©'::text)", False),
        (Constant(Type.TEXT, 'a"b'), '(s = ANY (\'{"a\\"b"}\'::text[]))', True),
        (Constant(Type.FLOAT8, 1e15), "(f = '1e+15'::double precision)", True),
        (Constant(Type.FLOAT8, -0.0), "(f = '0'::double precision)", False),
        (Constant(Type.FLOAT8, float("nan")), "(f = 'NaN'::double precision)", True),
        (Constant(Type.FLOAT4, 0.10000000149011612), "(f = '0.1'::real)", True),
        (Constant(Type.NUMERIC, None), "(n = NULL::numeric)", True),
    ],
)
def test_constant_is_used_only_if_the_server_prints_it(constant_: Constant, sql: str, printed: bool) -> None:
    assert PrintedFilter(sql).holds(constant_) is printed
