"""The rules as data: what is exact in Spark, and why the rest is not."""

from __future__ import annotations

import pytest

import filters_page
from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.compile import ServerFilter, SparkFilter, compile_filter
from cdc_replay.filters.expression import (
    Collate,
    Column,
    Constant,
    Expression,
    Function,
    NullTest,
    Operator,
    Type,
)
from cdc_replay.filters.rules import (
    FUNCTIONS,
    OPERATORS,
    RULES,
    UNKNOWN,
    Exact,
    operator_rule,
    reason_for_server,
)
from cdc_replay.model.publication import RowFilter, Table, TableColumn
from cdc_replay.model.relation import QualifiedName, RelationId, ReplicaIdentity

TEXT = Column(2, Type.TEXT, 100)
DEFAULT, C, FIRST_OF_A_USER = 100, 950, 16384
TEXT_EQUALS, INT4_REMAINDER, INT2_OF_INT4 = 98, 530, 314
VAR = "{VAR :varno 1 :varattno %d :vartype %d :vartypmod -1 :varcollid 0}"


def table(*columns: TableColumn) -> Table:
    name = QualifiedName("public", "t")
    return Table(RelationId(1), name, False, None, ReplicaIdentity.FULL, (), (), columns)


def test_integers_of_all_widths_compare_exactly() -> None:
    kinds = ("int2", "int4", "int8")
    signatures = {
        (symbol, left, right)
        for symbol in ("=", "<>", "<", "<=", ">", ">=")
        for left in kinds
        for right in kinds
    }

    assert signatures <= set(OPERATORS.values())
    assert all(isinstance(RULES[signature], Exact) for signature in signatures)


def test_every_known_operator_and_function_has_a_rule() -> None:
    assert set(OPERATORS.values()) | set(FUNCTIONS.values()) == set(RULES)


def test_what_has_no_rule_is_left_to_the_server() -> None:
    assert operator_rule(4) is UNKNOWN


@pytest.mark.parametrize(("divisor", "exact"), [(2, True), (-1, True), (0, False), (None, False)])
def test_a_remainder_is_exact_for_a_constant_divisor_that_is_not_zero(
    divisor: int | None, exact: bool
) -> None:
    remainder = Operator(INT4_REMAINDER, 0, (Column(1, Type.INT4, 0), Constant(Type.INT4, divisor)))

    assert (reason_for_server(remainder) is None) is exact


@pytest.mark.parametrize(
    ("right", "collation", "reason"),
    [
        (Constant(Type.TEXT, "x"), DEFAULT, None),
        (Collate(Constant(Type.TEXT, "x")), C, None),
        (Constant(Type.TEXT, "x"), FIRST_OF_A_USER, "non-deterministic"),
        (TEXT, DEFAULT, "encoding"),
    ],
)
def test_text_equality_needs_a_built_in_collation_and_a_constant(
    right: Expression, collation: int, reason: str | None
) -> None:
    """R3.16: under a deterministic collation equal text is equal bytes, in one encoding."""
    found = reason_for_server(Operator(TEXT_EQUALS, collation, (TEXT, right)))

    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(("value", "exact"), [(32767, True), (-32768, True), (32768, False), (None, False)])
def test_a_narrowing_cast_is_exact_for_a_constant_that_fits(value: int | None, exact: bool) -> None:
    cast = Function(INT2_OF_INT4, (Constant(Type.INT4, value),))

    assert (reason_for_server(cast) is None) is exact
    assert reason_for_server(Function(INT2_OF_INT4, (Column(1, Type.INT4, 0),))) is not None


def test_null_tests_are_exact_for_columns_of_any_type() -> None:
    assert reason_for_server(NullTest(Column(1, 1700, 0), negated=False)) is None
    assert reason_for_server(NullTest(Column(1, 600, 0), negated=True)) is None


def test_compiled_filters_are_values() -> None:
    """Routes with equal filters share one expression."""
    columns = table(TableColumn(1, "b", Type.BOOL, -1, "boolean", None))
    row_filter = RowFilter(VAR % (1, Type.BOOL), "b")

    assert isinstance(compile_filter(row_filter, columns), SparkFilter)
    assert len({compile_filter(row_filter, columns), compile_filter(row_filter, columns)}) == 1


def test_the_reason_of_a_server_filter_names_what_is_not_exact() -> None:
    columns = table(TableColumn(1, "n", 1700, -1, "numeric", None))
    tree = f"{{OPEXPR :opno 1752 :inputcollid 0 :args ({VAR % (1, 1700)} {VAR % (1, 1700)})}}"
    compiled = compile_filter(RowFilter(tree, "(n = n)"), columns)

    assert isinstance(compiled, ServerFilter)
    assert compiled.because.startswith("= (numeric, numeric): equal numbers have different texts")
    assert [column.name for column in compiled.columns] == ["n"]


def test_a_filter_over_a_column_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidFilter, match=r'table "public\.t".*\n.*column: 3'):
        compile_filter(RowFilter(VAR % (3, Type.BOOL), "b"), table())


def test_the_page_about_filters_is_up_to_date() -> None:
    assert filters_page.PAGE.read_text(encoding="utf-8") == filters_page.render(), (
        "run `python tools/filters_page.py`"
    )
