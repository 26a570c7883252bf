"""Stored node trees (R3.15): the text of PostgreSQL's outfuncs.c, 15 to 18."""

from __future__ import annotations

import pytest

from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.expression import (
    Array,
    ArrayComparison,
    Case,
    Coalesce,
    Column,
    Constant,
    Expression,
    Operator,
    Type,
    Unmodelled,
    attnums_read,
)
from cdc_replay.filters.node_tree import Node, parse, read_node

VAR = "{VAR :varno 1 :varattno %d :vartype 23 :vartypmod -1 :varcollid 0 :varlevelsup 0 :location 8}"


def constant(type_oid: int, datum: str, length: int = -1) -> str:
    return (
        f"{{CONST :consttype {type_oid} :consttypmod -1 :constcollid 0 :constlen {length} :constbyval false"
        f" :constisnull false :location 12 :constvalue {datum}}}"
    )


def decoded(type_oid: int, datum: str) -> Expression:
    return parse(constant(type_oid, datum))


def test_a_node_has_the_values_between_its_field_names() -> None:
    node = read_node('{A :x 1 :y <> :z (o 5 6) :w ({B} {C :v 2}) :d 2 [ -1 7 ] :s ("f1" "a\\ \\(b") :last t}')

    assert node.name == "A"
    assert node.number("x") == 1
    assert node.one("y") == "<>"
    assert node.fields["z"] == [["o", "5", "6"]]
    assert [each.name for each in node.nodes("w")] == ["B", "C"]
    assert node.fields["d"] == ["2", "[", "-1", "7", "]"]
    assert node.fields["s"] == [['"f1"', '"a\\ \\(b"']]
    assert node.token("last") == "t"


@pytest.mark.parametrize(
    "text", ["", "x", "{A", "{A :b (1}", "{A :b {C)}", "{A} {B}", "(1 2)", "}", "{", "{A :b 1}}"]
)
def test_what_is_not_one_complete_node_is_refused(text: str) -> None:
    with pytest.raises(InvalidFilter, match=r"cannot read the stored form.*\[R3.15\]"):
        read_node(text)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidFilter, match="node VAR has 0 values for varattno"):
        parse("{VAR :varno 1}")


def test_an_operator_of_15_reads_as_that_of_18() -> None:
    tree = (
        "{OPEXPR :opno 521 :opfuncid 147 :opresulttype 16 :opretset false :opcollid 0 :inputcollid 0 :args ("
        + VAR % 2
        + " "
        + constant(Type.INT4, "4 [ 10 0 0 0 0 0 0 0 ]", 4)
        + ") :location 44}"
    )

    assert parse(tree) == Operator(521, 0, (Column(2, Type.INT4, 0), Constant(Type.INT4, 10)))


@pytest.mark.parametrize("name", ["COALESCE", "COALESCEEXPR"])
def test_nodes_keep_their_meaning_under_the_names_of_15_and_later(name: str) -> None:
    tree = f"{{{name} :coalescetype 23 :coalescecollid 0 :args ({VAR % 2} {VAR % 3}) :location 1}}"

    assert parse(tree) == Coalesce((Column(2, Type.INT4, 0), Column(3, Type.INT4, 0)))


@pytest.mark.parametrize(
    ("array", "case", "when"), [("ARRAY", "CASE", "WHEN"), ("ARRAYEXPR", "CASEEXPR", "CASEWHEN")]
)
def test_lists_and_cases_of_15_and_later(array: str, case: str, when: str) -> None:
    listed_column = f"{{{array} :array_typeid 1007 :elements ({VAR % 3}) :multidims false}}"
    in_list = (
        "{SCALARARRAYOPEXPR :opno 96 :opfuncid 65 :useOr true :inputcollid 0"
        f" :args ({VAR % 2} {listed_column})}}"
    )
    branches = f"{{{case} :arg <> :args ({{{when} :expr {in_list} :result {VAR % 4}}}) :defresult {VAR % 5}}}"

    listed = ArrayComparison(96, 0, True, Column(2, 23, 0), Array((Column(3, 23, 0),)))
    assert parse(branches) == Case(((listed, Column(4, 23, 0)),), Column(5, 23, 0))


def test_an_unknown_node_keeps_the_columns_in_it() -> None:
    found = parse(f"{{NEWNODE :a {VAR % 2} :list ({VAR % 7} ({VAR % 9})) :name (x :y)}}")

    assert found == Unmodelled("expression node NEWNODE", frozenset({2, 7, 9}))


def test_any_depth_can_be_read_and_its_columns_are_known() -> None:
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
        (Type.DATE, "4 [ -8 -37 -12 -1 -1 -1 -1 -1 ]", None),  # 1 BC
        (Type.DATE, "4 [ -1 -1 -1 127 0 0 0 0 ]", None),  # infinity
        (Type.UUID, f"16 [ {'-1 ' * 15}10 ]", "ffffffff-ffff-ffff-ffff-ffffffffff0a"),
        (Type.TEXT, "6 [ 24 0 0 0 -61 -87 ]", None),  # é: depends on the encoding
        (Type.TEXT, "8 [ 34 0 0 0 1 2 3 4 ]", None),  # compressed
        (Type.INT4, "4 [ 0 0 0 0 0 0 0 10 ]", None),  # big-endian
        (Type.TEXT, "5 [ 0 0 0 5 120 ]", None),  # big-endian
        (1700, "10 [ 40 0 0 0 -128 -128 1 0 -120 19 ]", None),  # numeric
    ],
)
def test_a_constant_is_its_value_or_is_not_understood(
    type_oid: int, datum: str, value: bool | int | str | None
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
