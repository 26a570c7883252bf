"""Net changes for a target that may lack rows: whole rows are inserted or overwritten, whichever fits.

A backfill repairs a subscriber that lost rows, or fills an empty database from a range of the log. An UPDATE
that finds no row says nothing there (R8.4), although the log holds the whole row. So an UPDATE that carries
every column becomes an INSERT that overwrites, and a DELETE of the old key where it moved the row. One that
does not (`u`, `-`) stays what it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_replay.model.change import NET, NetKind
from cdc_replay.model.subscription import SubscribedTable


def upserted(net: DataFrame, tables: Sequence[SubscribedTable]) -> DataFrame:
    """`net` (NET) with complete UPDATEs as INSERTs, for a window that is applied with policy `overwrite`.

    Targets without a key are left as they are: their rows cannot be told apart.
    """
    keyed = [table for table in tables if table.is_keyed]
    if not keyed:
        return net
    complete = (
        (F.col("kind") == NetKind.UPDATE.value)
        & F.col("target").isin([table.index for table in keyed])
        & ~F.col("kinds").contains("u")
        & ~F.col("kinds").contains("-")
    )
    key = _key_after(keyed)
    nothing = dict.fromkeys(("values", "kinds", "conflicts"), F.lit(None)) | {"update_missing": F.lit(0)}
    unchanged = _row()
    insert = _row(kind=F.lit(NetKind.INSERT.value), base_key=key, update_missing=F.lit(0))
    delete = _row(kind=F.lit(NetKind.DELETE.value), **nothing)
    rows = (
        F.when(complete & (F.col("base_key") != key), F.array(delete, insert))
        .when(complete, F.array(insert))
        .otherwise(F.array(unchanged))
    )
    return net.select(F.inline(rows))


def _row(**changed: Column) -> Column:
    columns = (changed.get(name, F.col(name)).cast(kind).alias(name) for name, kind in NET.columns)
    return F.struct(*columns)


def _key_after(tables: Sequence[SubscribedTable]) -> Column:
    """The identity columns of the row as it is after the change."""
    key = F.lit(None).cast("array<string>")
    for table in tables:
        elements = [F.col("values")[table.columns.index(name)] for name in table.identity]
        key = F.when(F.col("target") == table.index, F.array(*elements)).otherwise(key)
    return key
