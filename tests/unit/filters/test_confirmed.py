"""Which differences between a stored tree and a rebuilt one do not matter."""

from __future__ import annotations

from cdc_replay.filters.confirmed import mean_the_same
from cdc_replay.filters.names import BUILT_IN, Names
from cdc_replay.filters.node_text import read_node

NO_NAMES = Names(BUILT_IN, {})
VAR = "{VAR :varno 1 :varattno %d :vartype 16 :vartypmod -1 :varcollid 0 :varlevelsup 0 :location 8}"
A, B, C, D = (VAR % attnum for attnum in (1, 2, 3, 4))
SAME = {attnum: attnum for attnum in (1, 2, 3, 4)}


def all_of(*operands: str, boolop: str = "and") -> str:
    return f"{{BOOLEXPR :boolop {boolop} :args ({' '.join(operands)}) :location -1}}"


def any_of(*operands: str) -> str:
    return all_of(*operands, boolop="or")


def test_trees_mean_the_same_whatever_their_positions_and_attribute_numbers() -> None:
    stored = read_node(f"{{NULLTEST :arg {VAR % 2} :nulltesttype 0 :argisrow false :location 7}}")
    made = f"{{NULLTEST :arg {VAR % 9} :nulltesttype 0 :argisrow false :location -1}}"

    assert mean_the_same(stored, read_node(made), {9: 2}, NO_NAMES)
    for other in (
        made.replace(":nulltesttype 0", ":nulltesttype 1"),
        made.replace(":varattno 9", ":varattno 8"),
        made.replace(":varcollid 0", ":varcollid 100"),
        made.replace("NULLTEST", "OTHER"),
        VAR % 2,
    ):
        assert not mean_the_same(stored, read_node(other), {9: 2}, NO_NAMES), other


def test_nested_conditions_of_one_kind_mean_the_same_as_joined_ones() -> None:
    """PostgreSQL nests those of BETWEEN and IN, and joins what is printed for them."""
    joined = all_of(A, B, C, D)
    for nested in (
        all_of(all_of(A, B), C, D),
        all_of(all_of(all_of(A, B), C), D),
        all_of(A, all_of(B, C), D),
    ):
        assert mean_the_same(read_node(nested), read_node(joined), SAME, NO_NAMES)
        assert mean_the_same(read_node(joined), read_node(nested), SAME, NO_NAMES)
    either = any_of(any_of(A, B), all_of(C, D))
    assert mean_the_same(read_node(either), read_node(any_of(A, B, all_of(C, D))), SAME, NO_NAMES)


def test_conditions_of_two_kinds_or_in_another_order_do_not_mean_the_same() -> None:
    joined = read_node(all_of(A, B, C))
    for other in (
        all_of(any_of(A, B), C),
        all_of(A, C, B),
        all_of(A, B),
        all_of(A, B, C, D),
        any_of(A, B, C),
        all_of(all_of(all_of(A, B, C), boolop="not"), boolop="not"),
    ):
        assert not mean_the_same(read_node(other), joined, SAME, NO_NAMES), other
