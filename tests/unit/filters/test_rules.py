"""The rules as data: what is exact in Arrow, and why the rest is not."""

from __future__ import annotations

import math

import pytest

import filters_page
from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.compile import ArrowFilter, ServerFilter, compile_filter
from cdc_replay.filters.constant_folding import fold_constants
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
from cdc_replay.filters.operators import FUNCTIONS, OPERATORS
from cdc_replay.filters.rules import RULES, UNKNOWN, Exact, operator_rule
from cdc_replay.filters.unsupported import unsupported_reason
from cdc_replay.model.publication import RowFilter, Table, TableColumn
from cdc_replay.model.relation import QualifiedName, RelationId, ReplicaIdentity

TEXT = Column(2, Type.TEXT, 100)
DEFAULT, C, UCS_BASIC, FIRST_OF_A_USER = 100, 950, 962, 16384
TEXT_EQUALS, TEXT_LESS, LIKE, INT4_REMAINDER, INT2_OF_INT4 = 98, 664, 1209, 530, 314
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


def test_operation_without_a_rule_is_evaluated_by_the_server() -> None:
    assert operator_rule(4) is UNKNOWN


INT4, INT8, SMALL = Column(1, Type.INT4, 0), Column(2, Type.INT8, 0), Column(3, Type.INT2, 0)
ADD_42, ADD_24, ADD_44, MULTIPLY_88, DIVIDE_44, MINUS_4, INT8_OF_INT4 = 553, 552, 551, 686, 528, 558, 481


def number(value: int | None) -> Constant:
    return Constant(Type.INT4, value)


@pytest.mark.parametrize(
    ("operation", "exact"),
    [
        (Operator(INT4_REMAINDER, 0, (INT4, number(2))), True),
        (Operator(INT4_REMAINDER, 0, (INT4, number(-1))), True),
        (Operator(INT4_REMAINDER, 0, (INT4, number(0))), False),
        (Operator(INT4_REMAINDER, 0, (INT4, number(None))), False),
        (Operator(INT4_REMAINDER, 0, (INT4, INT4)), False),
        (Operator(DIVIDE_44, 0, (INT4, number(-2))), True),
        (Operator(DIVIDE_44, 0, (INT4, number(-1))), False),  # the lowest number by -1 does not fit
        (Operator(DIVIDE_44, 0, (INT4, number(0))), False),
        (Operator(ADD_44, 0, (INT4, number(1))), False),
        (Operator(ADD_44, 0, (Operator(INT4_REMAINDER, 0, (INT4, number(10))), number(1))), True),
        (Operator(ADD_24, 0, (SMALL, number(1_000_000))), True),
        (Operator(ADD_24, 0, (SMALL, number(2**31 - 1))), False),
        (Operator(MINUS_4, 0, (INT4,)), False),
        (Operator(MINUS_4, 0, (Operator(DIVIDE_44, 0, (INT4, number(2))),)), True),
        (Operator(MULTIPLY_88, 0, (Function(INT8_OF_INT4, (INT4,)), Function(INT8_OF_INT4, (INT4,)))), True),
        (Operator(MULTIPLY_88, 0, (INT8, Function(INT8_OF_INT4, (number(2),)))), False),
    ],
)
def test_arithmetic_is_exact_where_it_cannot_fail(operation: Operator, exact: bool) -> None:
    """What fails for some value of the types is an error in PostgreSQL, which Arrow would not raise."""
    assert (unsupported_reason(fold_constants(operation)) is None) is exact


@pytest.mark.parametrize(
    ("operator", "right", "collation", "reason"),
    [
        (TEXT_EQUALS, Constant(Type.TEXT, "x"), DEFAULT, None),
        (TEXT_EQUALS, Constant(Type.TEXT, "é"), DEFAULT, None),
        (TEXT_EQUALS, Collate(Constant(Type.TEXT, "x")), C, None),
        (TEXT_EQUALS, Constant(Type.TEXT, "x"), FIRST_OF_A_USER, "non-deterministic"),
        (TEXT_EQUALS, TEXT, DEFAULT, "encoding"),
        (TEXT_EQUALS, TEXT, UCS_BASIC, None),
        (TEXT_LESS, Constant(Type.TEXT, "x"), DEFAULT, "order"),
        (TEXT_LESS, Constant(Type.TEXT, "x"), C, None),
        (TEXT_LESS, Constant(Type.TEXT, "é"), C, "encoding"),
        (TEXT_LESS, Constant(Type.TEXT, "é"), UCS_BASIC, None),
        (TEXT_LESS, TEXT, C, "encoding"),
        (TEXT_LESS, TEXT, UCS_BASIC, None),
        (LIKE, Constant(Type.TEXT, "a%"), DEFAULT, None),
        (LIKE, Constant(Type.TEXT, r"a\_\\\%%"), DEFAULT, None),
        (LIKE, Constant(Type.TEXT, "a_"), DEFAULT, "_ stands for a character"),
        (LIKE, Constant(Type.TEXT, r"a\\_"), DEFAULT, "_ stands for a character"),
        (LIKE, Constant(Type.TEXT, r"\a"), DEFAULT, "escapes"),
        (LIKE, Constant(Type.TEXT, "a\\"), DEFAULT, "escapes"),
        (LIKE, Constant(Type.TEXT, "a" * 1001), DEFAULT, "too long"),
        (LIKE, TEXT, DEFAULT, "not a constant"),
    ],
)
def test_text_is_exact_where_bytes_in_utf_8_decide(
    operator: int, right: Expression, collation: int, reason: str | None
) -> None:
    """R3.16: under a deterministic collation equal text is equal bytes; C and its like order by bytes."""
    found = unsupported_reason(Operator(operator, collation, (TEXT, right)))

    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(("value", "exact"), [(32767, True), (-32768, True), (32768, False), (None, True)])
def test_narrowing_cast_is_exact_for_a_constant_that_fits(value: int | None, exact: bool) -> None:
    cast = fold_constants(Function(INT2_OF_INT4, (Constant(Type.INT4, value),)))

    assert (unsupported_reason(cast) is None) is exact
    assert unsupported_reason(Function(INT2_OF_INT4, (Column(1, Type.INT4, 0),))) is not None


def test_null_tests_are_exact_for_columns_of_any_type() -> None:
    assert unsupported_reason(NullTest(Column(1, 1700, 0), negated=False)) is None
    assert unsupported_reason(NullTest(Column(1, 600, 0), negated=True)) is None


def test_compiled_filters_are_values() -> None:
    """Routes with equal filters share one expression."""
    columns = table(TableColumn(1, "b", Type.BOOL, -1, "boolean", None))
    row_filter = RowFilter(VAR % (1, Type.BOOL), "b")

    assert isinstance(compile_filter(row_filter, columns), ArrowFilter)
    assert len({compile_filter(row_filter, columns), compile_filter(row_filter, columns)}) == 1


def test_server_filter_names_the_operation_that_is_not_exact() -> None:
    columns = table(TableColumn(1, "n", 1700, -1, "numeric", None))
    tree = f"{{OPEXPR :opno 1758 :inputcollid 0 :args ({VAR % (1, 1700)} {VAR % (1, 1700)})}}"
    compiled = compile_filter(RowFilter(tree, "(n + n)"), columns)

    assert isinstance(compiled, ServerFilter)
    assert compiled.because.startswith("+ (numeric, numeric): the result's precision")
    assert [column.name for column in compiled.columns] == ["n"]


def test_filter_over_a_missing_column_is_refused() -> None:
    with pytest.raises(InvalidFilter, match=r'table "public\.t".*\n.*column: 3'):
        compile_filter(RowFilter(VAR % (3, Type.BOOL), "b"), table())


def test_filters_page_is_up_to_date() -> None:
    assert filters_page.PAGE.read_text(encoding="utf-8") == filters_page.render(), (
        "run `python tools/filters_page.py`"
    )


@pytest.mark.parametrize(
    ("cast", "arguments", "result"),
    [
        (1746, ("0.1",), Constant(Type.FLOAT8, 0.1)),
        (1746, ("-Infinity",), Constant(Type.FLOAT8, -math.inf)),
        (1746, ("1" + "0" * 400,), None),  # out of range
        (1745, ("1.5",), Constant(Type.FLOAT4, 1.5)),
        (1745, ("0.1",), None),  # rounded twice, if by way of a double
        (1703, ("1.005", 655366), Constant(Type.NUMERIC, "1.01")),  # numeric(10, 2)
        (1703, ("-1.005", 655366), Constant(Type.NUMERIC, "-1.01")),
        (1703, ("-0.001", 655366), Constant(Type.NUMERIC, "0.00")),
        (1703, ("123456789", 655366), None),  # nine digits before the point do not fit
        (1703, ("1250", 657410), Constant(Type.NUMERIC, "1300")),  # numeric(10, -2)
        (668, ("abc", 6, True), Constant(Type.BPCHAR, "ab")),
        (668, ("abc", 9, True), Constant(Type.BPCHAR, "abc  ")),
        (668, ("abc", 6, False), None),  # an error
        (669, ("a  ", 5, False), Constant(Type.VARCHAR, "a")),
        (669, ("é", 5, True), None),  # how many characters depends on the encoding
    ],
)
def test_casts_of_constants_are_evaluated(
    cast: int, arguments: tuple[bool | int | str, ...], result: Constant | None
) -> None:
    """Rounded half away from zero, cut to the length; what is an error stays with PostgreSQL."""
    call = Function(cast, tuple(Constant(Type.TEXT, each) for each in arguments))

    assert fold_constants(call) == (result or call)


def test_length_of_a_cast_need_not_be_printed() -> None:
    """The length of char(2) is stored as 6, with the size of a header."""
    text = "{CONST :consttype %d :constisnull false :constvalue %s}"
    parts = (
        text % (Type.BPCHAR, "7 [ 28 0 0 0 97 98 99 ]"),
        text % (Type.INT4, "4 [ 6 0 0 0 0 0 0 0 ]"),
        text % (Type.BOOL, "1 [ 1 0 0 0 0 0 0 0 ]"),
    )
    cut = f"{{FUNCEXPR :funcid 668 :funcresulttype 1042 :args ({' '.join(parts)})}}"
    tree = f"{{OPEXPR :opno 1054 :inputcollid 100 :args ({VAR % (1, Type.BPCHAR)} {cut})}}"
    columns = table(TableColumn(1, "c", Type.BPCHAR, 9, "character(5)", None))

    compiled = compile_filter(RowFilter(tree, "(c = 'abc'::character(2))"), columns)

    assert isinstance(compiled, ArrowFilter)
    assert compiled.expression == Operator(
        1054, 100, (Column(1, Type.BPCHAR, 0), Constant(Type.BPCHAR, "ab"))
    )
