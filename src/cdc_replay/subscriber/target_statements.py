"""Statements on a target that windows, copies and reconciliation share."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from cdc_replay.postgres.identifiers import column_list, table_reference
from cdc_replay.subscriber.target_tables import Operator, TargetTable


def target_reference(target: TargetTable) -> sql.Composed:
    """The target in a statement: with partitions, without plain inheritance children (R8.15)."""
    return table_reference(target.name, is_partitioned=target.is_partitioned)


def lock_out_writers(target: TargetTable) -> sql.Composed:
    """Lock the target against other writers until the commit, as for rows that are located by ctid."""
    return sql.SQL("lock table {} in share row exclusive mode").format(target_reference(target))


def insert_rows(target: TargetTable, columns: Sequence[str], rows: sql.Composable) -> sql.Composed:
    """Insert the result of a query; identity columns get the publisher's value, as by COPY (R8.14)."""
    return sql.SQL("insert into {}{} overriding system value {}").format(
        sql.Identifier(target.name.schema, target.name.name), column_list(columns), rows
    )


def equal(equality: Operator, left: sql.Composable, right: sql.Composable) -> sql.Composed:
    """`left` and `right` compared with the given equality operator."""
    operator = sql.SQL("operator({}.{})").format(sql.Identifier(equality.schema), sql.SQL(equality.name))
    return sql.SQL("{} {} {}").format(left, operator, right)
