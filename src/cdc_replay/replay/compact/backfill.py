"""Net changes for a target that may hold other rows than the log says.

| a backfill into      | function    | its target holds                                    |
|----------------------|-------------|-----------------------------------------------------|
| another database     | `as_upsert` | the rows before the window, or none                 |
| the subscriber again | `as_repair` | the rows after the window, except damaged ones      |

An UPDATE that matches no row is skipped (R8.4), although the log may hold the whole row. So an UPDATE that
carries every column becomes an INSERT that overwrites. One that does not (`u`, `-`) stays an UPDATE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_replay.model.frames import NET, NetKind
from cdc_replay.model.subscription import SubscribedTable

_VALUES: Final = ("values", "kinds", "insert_ordinal", "conflicts")
_COUNTS: Final = ("update_missing", "delete_missing", "last_lsn")


def as_upsert(net: DataFrame, tables: Sequence[SubscribedTable]) -> DataFrame:
    """`net` (NET) with complete UPDATEs of `tables` as INSERTs, to be applied with policy `overwrite`.

    If the UPDATE moved the row, the old key is deleted. Changes of targets without a key of their own stay as
    they are.
    """
    keyed = [table for table in tables if table.has_own_key]
    if not keyed:
        return net
    complete = _is_complete_update(keyed)
    key = _key_after(keyed)
    insert = _row(kind=F.lit(NetKind.INSERT.value), base_key=key, update_missing=F.lit(0))
    no_values = dict.fromkeys(_VALUES, F.lit(None))
    delete = _row(kind=F.lit(NetKind.DELETE.value), update_missing=F.lit(0), **no_values)
    rows = (
        F.when(complete & (F.col("base_key") != key), F.array(delete, insert))
        .when(complete, F.array(insert))
        .otherwise(F.array(_row()))
    )
    return net.select(F.inline(rows))


def as_repair(
    net: DataFrame, keys: DataFrame, tables: Sequence[SubscribedTable], whole: Sequence[SubscribedTable]
) -> DataFrame:
    """Net changes that bring a target that has had this window to the state at the window's end (NET).

    `keys` are all keys in the window's changes, in columns `target` and `key`, each once. Each ends with the
    row that the log has for it, or with none: a key that a row only passed through must be empty as well. A
    row of the tables in `whole` is inserted if it is missing. All `tables` must have keys.
    """
    existing = net.where(F.col("kind").isin(NetKind.INSERT.value, NetKind.UPDATE.value))
    is_row = (F.col("kind") == NetKind.INSERT.value) | _is_complete_update(whole)
    kind = F.when(is_row, NetKind.INSERT.value).otherwise(NetKind.UPDATE.value)
    missing = F.when(is_row, 0).otherwise(F.col("update_missing"))
    row = _row(kind=kind, base_key=_key_after(tables), update_missing=missing)
    rows = existing.select(F.inline(F.array(row)))
    occupied = rows.select(F.col("target").alias("filled"), F.col("base_key").alias("filled_key"))
    same = (F.col("target") == F.col("filled")) & (F.col("key") == F.col("filled_key"))
    no_values = dict.fromkeys(_VALUES, F.lit(None)) | dict.fromkeys(_COUNTS, F.lit(0))
    empty = _row(kind=F.lit(NetKind.DELETE.value), base_key=F.col("key"), **no_values)
    return rows.unionByName(keys.join(occupied, same, "left_anti").select(F.inline(F.array(empty))))


def _is_complete_update(tables: Sequence[SubscribedTable]) -> Column:
    kinds, indexes = F.col("kinds"), [table.index for table in tables]
    is_update = (F.col("kind") == NetKind.UPDATE.value) & F.col("target").isin(indexes)
    return is_update & ~kinds.contains("u") & ~kinds.contains("-")


def _row(**changed: Column) -> Column:
    columns = (changed.get(name, F.col(name)).cast(kind).alias(name) for name, kind in NET.columns)
    return F.struct(*columns)


def _key_after(tables: Sequence[SubscribedTable]) -> Column:
    """The identity columns of the row after the change; unsent ones are unchanged."""
    key = F.lit(None).cast("array<string>")
    for table in tables:
        elements = []
        for index, name in enumerate(table.identity):
            position = table.columns.index(name)
            is_sent = F.substring("kinds", position + 1, 1).isin("n", "t")
            elements.append(F.when(is_sent, F.col("values")[position]).otherwise(F.col("base_key")[index]))
        key = F.when(F.col("target") == table.index, F.array(*elements)).otherwise(key)
    return key
