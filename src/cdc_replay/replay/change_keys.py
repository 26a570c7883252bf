"""The keys of the rows that changes (CHANGES) are about, as Spark columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F


def key_column(
    versions: Mapping[tuple[int, ...], Sequence[int]], value_of: Callable[[int], Column]
) -> Column:
    """The key's values; `versions` has the relation versions by the positions of the key's columns."""
    key = F.lit(None).cast("array<string>")
    for positions, version_ids in versions.items():
        values = F.array(*(value_of(position) for position in positions))
        key = F.when(F.col("relation_version").isin([*version_ids]), values).otherwise(key)
    return key


def old_value(position: int) -> Column:
    """The value in the old tuple."""
    return F.col("old")[position]


def new_value(position: int) -> Column:
    """The value in the new tuple; an unchanged TOAST value of a key column is in the old one (R1.6)."""
    is_unsent = F.substring("new_kinds", position + 1, 1) == "u"
    return F.when(is_unsent, old_value(position)).otherwise(F.col("new")[position])
