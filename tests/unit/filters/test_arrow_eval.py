"""Filters that read the same texts share what they compute of columns and constants alone."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from cdc_replay.filters.arrow_eval import MAX_SHARED, evaluate_filter
from cdc_replay.filters.compile import ArrowFilter, compile_or
from cdc_replay.filters.expression import Coalesce, Column, Constant, Expression, NullTest, Type
from fixtures.catalogs import table
from unit.replay.route.changes import greater

T = table(1, "s.t")
TEXTS = {1: pa.array(["5", "30", None], pa.string())}


def filter_of(*bounds: int) -> Expression:
    """`id > bound`, or one of them."""
    compiled = compile_or([greater(T, "id", bound) for bound in bounds], T)
    assert isinstance(compiled, ArrowFilter)
    return compiled.expression


def test_a_part_that_is_known_is_not_computed_again() -> None:
    computed: dict[Expression, Any] = {}
    assert evaluate_filter(filter_of(10), TEXTS, 3, computed).to_pylist() == [False, True, None]
    assert evaluate_filter(filter_of(10), {}, 3, computed).to_pylist() == [False, True, None]


def test_filters_with_common_parts_have_their_own_answers() -> None:
    computed: dict[Expression, Any] = {}
    for bounds in ((10,), (10, 4), (40,), (4,)):
        answers = evaluate_filter(filter_of(*bounds), TEXTS, 3, computed)
        assert answers == evaluate_filter(filter_of(*bounds), TEXTS, 3)


def test_a_filter_of_many_parts_keeps_few_results() -> None:
    """Whoever owns a publication writes as many parts as he likes; each result has the size of a column."""
    computed: dict[Expression, Any] = {}
    evaluate_filter(filter_of(*range(MAX_SHARED + 10)), TEXTS, 3, computed)
    assert len(computed) == MAX_SHARED


def test_texts_that_are_computed_are_not_kept() -> None:
    """They can be as wide as the widest value of a table."""
    column = Column(1, Type.TEXT, 100)
    filled = Coalesce((column, Constant(Type.TEXT, "x")))
    computed: dict[Expression, Any] = {}
    answers = evaluate_filter(NullTest(filled, True), TEXTS, 3, computed)
    assert answers.to_pylist() == [True, True, True]
    assert computed.keys() == {column}
