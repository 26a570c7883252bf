"""Filters that read the same texts share what they compute of columns and constants alone."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from cdc_replay.filters.arrow_eval import evaluate_filter
from cdc_replay.filters.compile import ArrowFilter, compile_or
from cdc_replay.filters.expression import Expression
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
