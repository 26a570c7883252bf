"""SQL written from node trees, as far as no server has to name anything (R5.2)."""

from __future__ import annotations

import pytest

from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.confirmed import mean_the_same
from cdc_replay.filters.names import BUILT_IN, Names, NotPrintableError
from cdc_replay.filters.node_text import read_node
from cdc_replay.filters.printed import print_expression
from fixtures.catalogs import column

NO_NAMES = Names(BUILT_IN, {})
COLUMNS = (column(1, "id"), column(2, 'a"; drop table t; --'), column(4, "x"))
VAR = "{VAR :varno 1 :varattno %d :vartype 23 :vartypmod -1 :varcollid 0 :varlevelsup 0 :location 8}"
A, X = VAR % 2, VAR % 4
A_SQL = '"a""; drop table t; --"'
NULL = (
    "{CONST :consttype 705 :consttypmod -1 :constcollid 0 :constlen -2 :constbyval false :constisnull true"
    " :location -1 :constvalue <>}"
)


def unknown(text: str) -> str:
    """A literal without a type."""
    data = [*text.encode(), 0]
    numbers = " ".join(str(byte - 256 if byte > 127 else byte) for byte in data)
    return NULL.replace(":constisnull true", ":constisnull false").replace(
        ":constvalue <>", f":constvalue {len(data)} [ {numbers} ]"
    )


def sql_of(tree: str, text: str = "") -> str:
    return print_expression(read_node(tree), text, COLUMNS, NO_NAMES).as_string(None)


def xml(op: int, args: str = "<>", **fields: str) -> str:
    given = {"name": "<>", "named_args": "<>", "arg_names": "<>", "xmloption": "0"} | fields
    written = " ".join(f":{name} {value}" for name, value in given.items())
    return f"{{XMLEXPR :op {op} {written} :args {args} :type 142}}"


PRINTED = {
    A: A_SQL,
    f"{{NULLTEST :arg {A} :nulltesttype 1 :argisrow false}}": f"({A_SQL} is not null)",
    f"{{BOOLEANTEST :arg {A} :booltesttype 5}}": f"({A_SQL} is not unknown)",
    f"{{BOOLEXPR :boolop or :args ({A} {X} {NULL})}}": f'({A_SQL} or "x" or null)',
    f"{{BOOLEXPR :boolop not :args ({X})}}": '(not "x")',
    f"{{COALESCEEXPR :coalescetype 23 :args ({A} {X})}}": f'coalesce({A_SQL}, "x")',
    f"{{MINMAXEXPR :minmaxtype 23 :op 1 :args ({A} {X})}}": f'least({A_SQL}, "x")',
    f"{{CASEEXPR :casetype 16 :arg <> :args ({{CASEWHEN :expr {X} :result {A}}}) :defresult {NULL}}}": (
        f'(case when "x" then {A_SQL} else null end)'
    ),
    unknown("it's"): "'it''s'",
    unknown("'); create table pwned (); --"): "'''); create table pwned (); --'",
    xml(0, f"({A} {X})"): f'xmlconcat({A_SQL}, "x")',
    xml(1, f"({X})", name="a_x0020_b", named_args=f"({A} {X})", arg_names=r'("q_x0022_\)" "r")'): (
        f'xmlelement(name "a b", xmlattributes({A_SQL} as "q"")", "x" as "r"), "x")'
    ),
    xml(1, name="e"): 'xmlelement(name "e")',
    xml(2, named_args=f"({X})", arg_names='("f")'): 'xmlforest("x" as "f")',
    xml(4, f"({X})", name="php"): 'xmlpi(name "php", "x")',
    xml(4, name="php"): 'xmlpi(name "php")',
    xml(7, f"({X})"): '("x" is document)',
}


@pytest.mark.parametrize(("tree", "expected"), PRINTED.items())
def test_tree_is_printed_with_quoted_names_and_values(tree: str, expected: str) -> None:
    assert sql_of(tree) == expected


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ("{SUBLINK :subLinkType 4}", "node SUBLINK is not known"),
        ("{PARAM :paramkind 0}", "node PARAM is not known"),
        (VAR % 3, "no column with number 3"),
        (VAR % -1, "no column with number -1"),
        (VAR % 0, "no column with number 0"),
        (A.replace(":varno 1", ":varno 2"), "of another table"),
        (A.replace(":varlevelsup 0", ":varlevelsup 1"), "of another table"),
        (f"{{OPEXPR :opno 96 :inputcollid 0 :args ({A} {X})}}", "there is no operator with oid 96"),
        ("{FUNCEXPR :funcid 870 :funcformat 0 :funcvariadic false :args <>}", "no function with oid 870"),
        (f"{{RELABELTYPE :arg {A} :resulttype 25}}", "there is no type with oid 25"),
        (f"{{COLLATEEXPR :arg {A} :collOid 950}}", "there is no collation with oid 950"),
        (f"{{BOOLEXPR :boolop xor :args ({A})}}", "xor is no operation"),
        (f"{{BOOLEANTEST :arg {A} :booltesttype 6}}", "6 is no test"),
        (f"{{DISTINCTEXPR :opno 96 :args ({A})}}", "no operator with oid 96"),
        (unknown("a").replace("97", "-1"), "constant of no type is not known"),
        (xml(8), "XML expression 8 is not known"),
        (xml(2, named_args=f"({X})"), "has no name"),
    ],
)
def test_unprintable_part_is_named(tree: str, reason: str) -> None:
    with pytest.raises(NotPrintableError, match=reason):
        sql_of(tree)


@pytest.mark.parametrize(
    "tree",
    [
        "{NULLTEST}",
        "{NULLTEST :arg x :nulltesttype 1}",
        f"{{NULLTEST :arg {A} :nulltesttype 1e9}}",
        "{CONST :consttype 705 :constisnull false :constvalue <>}",
        f"{{COLLATEEXPR :arg {A} :collOid 99999999999}}",
    ],
)
def test_malformed_tree_is_refused(tree: str) -> None:
    with pytest.raises(InvalidFilter, match="cannot read the stored form"):
        sql_of(tree)


def test_tree_deeper_than_any_stack_is_printed() -> None:
    deep = 50_000
    tree = "{BOOLEXPR :boolop not :args (" * deep + X + ")}" * deep

    assert sql_of(tree).count("not") == deep
    assert mean_the_same(read_node(tree), read_node(tree), {4: 4}, NO_NAMES)
