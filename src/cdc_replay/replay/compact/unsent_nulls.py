"""Net changes that would insert rows without unsent values (R4.6), and NULL in their place.

| kind in an INSERT            | becomes                                                              |
|------------------------------|----------------------------------------------------------------------|
| `GIVEN_UP`                   | NULL: row or value does not exist any more                           |
| `u`, entered where NULL is   | NULL, as a native worker stores it                                   |
| accepted                     |                                                                      |
| `u` otherwise                | stays; staging refuses it                                            |

In an UPDATE both keep the subscriber's value, as in the fold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Final

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_replay.model.frames import GIVEN_UP, NET, NetKind
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.replay.compact.key_lineage import ordinal_seq_bits

KEYS_SHOWN: Final = 5
"""Maximum number of keys of a table in a log line."""


@dataclass(frozen=True, slots=True)
class EnteredRow:
    """A row that enters without values: its key, and the kinds of its values."""

    target: int
    commit_lsn: Lsn
    key: tuple[str | None, ...]
    kinds: str


@dataclass(frozen=True, slots=True)
class UnsentNulls:
    """The values that became NULL, and the first of these rows, by target.

    `unknown` is the first row, in commit order, with a value that is neither given up nor accepted, `more`
    the number of others.
    """

    values: Mapping[int, int]
    rows: Mapping[int, tuple[EnteredRow, ...]]
    unknown: EnteredRow | None
    more: int

    @property
    def count(self) -> int:
        """Values of all targets."""
        return sum(self.values.values())


def has_missing_values(net: DataFrame) -> bool:
    """Whether `net` (NET) would insert a row with an unsent value; folds the window."""
    return not net.where(_lacks_values()).isEmpty()


def without_marks(net: DataFrame) -> DataFrame:
    """`net` with `u` for values that are given up."""
    return _with_kinds(net, F.translate("kinds", GIVEN_UP, "u"))


def with_nulls(net: DataFrame, window: Window, accepted: Mapping[int, Lsn]) -> DataFrame:
    """`net` with NULL for values that are given up or accepted.

    `accepted` is, by target, the commit up to which a row may have entered.
    """
    null = F.translate("kinds", f"{GIVEN_UP}u", "nn")
    given_up = F.translate("kinds", GIVEN_UP, "n")
    is_insert = F.col("kind") == NetKind.INSERT.value
    inserted = F.when(_is_accepted(window, accepted), null).otherwise(given_up)
    return _with_kinds(net, F.when(is_insert, inserted).otherwise(F.translate("kinds", GIVEN_UP, "u")))


def unsent_nulls(net: DataFrame, window: Window, accepted: Mapping[int, Lsn]) -> UnsentNulls:
    """The NULLs that `with_nulls` stores; folds the window once."""
    columns = ("target", "base_key", "kinds", "entered", "nulls", "unknown")
    accepts = _is_accepted(window, accepted)
    unsent, given_up = _count_kind("u"), _count_kind(GIVEN_UP)
    lacking = (
        net.where(_lacks_values())
        .withColumn("entered", _entry_lsn(window))
        .withColumn("nulls", F.when(accepts, unsent + given_up).otherwise(given_up))
        .withColumn("unknown", F.when(accepts, 0).otherwise(unsent))
        .select(*columns)
        .persist(StorageLevel.MEMORY_AND_DISK)
    )
    try:
        totals = lacking.groupBy("target").agg(
            F.sum("nulls").alias("nulls"), F.count(F.when(F.col("unknown") > 0, 1)).alias("unknown")
        )
        counts = {row["target"]: (row["nulls"], row["unknown"]) for row in totals.collect()}
        values = {target: int(nulls) for target, (nulls, _) in sorted(counts.items()) if nulls}
        rows = {
            target: _first(lacking.where((F.col("target") == target) & (F.col("nulls") > 0)), KEYS_SHOWN)
            for target in values
        }
        unknown = _first(lacking.where(F.col("unknown") > 0), 1)
    finally:
        lacking.unpersist()
    more = sum(int(unknown) for _, unknown in counts.values()) - 1
    return UnsentNulls(values, rows, unknown[0] if unknown else None, more)


def _first(rows: DataFrame, count: int) -> tuple[EnteredRow, ...]:
    first_rows = rows.orderBy("entered", "target", "base_key").limit(count).collect()
    return tuple(
        EnteredRow(row["target"], Lsn(row["entered"]), tuple(row["base_key"]), row["kinds"])
        for row in first_rows
    )


def _lacks_values() -> Column:
    kinds = F.col("kinds")
    return (F.col("kind") == NetKind.INSERT.value) & (kinds.contains("u") | kinds.contains(GIVEN_UP))


def _count_kind(kind: str) -> Column:
    return F.length("kinds") - F.length(F.translate("kinds", kind, ""))


def _entry_lsn(window: Window) -> Column:
    commit = F.shiftright("insert_ordinal", ordinal_seq_bits(window)) + F.lit(window.after.value)
    return F.coalesce(commit, F.col("last_lsn"))


def _is_accepted(window: Window, accepted: Mapping[int, Lsn]) -> Column:
    entered = _entry_lsn(window)
    conditions = (
        (F.col("target") == target) & (entered <= F.lit(upto.value)) for target, upto in accepted.items()
    )
    return reduce(Column.__or__, conditions, F.lit(False))


def _with_kinds(net: DataFrame, kinds: Column) -> DataFrame:
    return net.withColumn("kinds", kinds).select(*NET.names)
