"""One expression for all routes that share it.

Two hundred tables without a filter need one `true`, and the hundred partitions of a table need one filter
expression per column order. So an expression over `place` is a CASE with one branch per distinct key, not per
route.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from pyspark.sql import Column
from pyspark.sql import functions as F

Item = TypeVar("Item")


def per_route(
    items: Iterable[Item],
    *,
    number: Callable[[Item], int],
    key: Callable[[Item], Hashable],
    build: Callable[[Item], Column],
) -> Column:
    """The Column that `build` gives for the items whose number is in the column `place`.

    Items with equal keys must build equal expressions; NULL where `place` is none of them.
    """
    numbers: dict[Hashable, list[int]] = {}
    sample: dict[Hashable, Item] = {}
    for item in items:
        numbers.setdefault(key(item), []).append(number(item))
        sample.setdefault(key(item), item)
    if not sample:
        return F.lit(None)
    if len(sample) == 1:
        (only,) = sample.values()
        return build(only)
    branches = [(F.col("place").isin(numbers[group]), build(item)) for group, item in sample.items()]
    expression = F.when(*branches[0])
    for condition, value in branches[1:]:
        expression = expression.when(condition, value)
    return expression
