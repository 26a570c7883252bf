"""The publisher's rows of unequal buckets, in temporary tables of the subscriber's session.

A temporary table has the published columns with the target's types, so that the same input functions read the
rows as in the target. It disappears with the session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

from cdc_replay.compare.buckets import Buckets
from cdc_replay.compare.table_pair import TablePair
from cdc_replay.errors import CdcReplayError, InvalidFilter
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.postgres.copy import CopyCounts, CopyTarget, copy_across
from cdc_replay.subscriber.staged_columns import StagedColumns
from cdc_replay.subscriber.target_tables import TargetTable


@dataclass(frozen=True, slots=True)
class StagedRows:
    """A pair whose rows in `buckets` are staged in temporary table `table`; None: the sides are equal."""

    pair: TablePair
    buckets: Buckets
    table: sql.Identifier | None
    rows: int
    bytes: int


def stage(
    pair: TablePair, index: int, buckets: Buckets, publisher: Connection, subscriber: Connection
) -> StagedRows:
    """Copy the publisher's rows of the buckets; `index` makes the temporary table's name unique.

    Raises:
        CdcReplayError: as `copy_across`.
    """
    if not buckets.ids and pair.outside is None:
        return StagedRows(pair, buckets, None, 0, 0)
    table = _create(subscriber, f"reconcile_{index}", pair.target, pair.columns)
    if not buckets.ids:
        return StagedRows(pair, buckets, table, 0, 0)
    copied: CopyCounts = copy_across(
        publisher, [pair.select_rows(buckets)], subscriber, CopyTarget(table, pair.name, pair.columns)
    )
    subscriber.execute(sql.SQL("analyze {}").format(table))
    return StagedRows(pair, buckets, table, copied.rows, copied.bytes)


def stage_unpublished_keys(
    staged: StagedRows, index: int, publisher: Connection, subscriber: Connection
) -> sql.Identifier | None:
    """Copy the keys of the publisher's unpublished rows of the same buckets.

    None if there are no such rows, or no key.

    Raises:
        CdcReplayError: as `copy_across`.
    """
    pair, passes = staged.pair, staged.pair.passes
    if passes is None or not pair.key or not staged.buckets.ids:
        return None
    table = _create(subscriber, f"unpublished_{index}", pair.target, pair.key)
    rows = pair.select_unpublished_keys(staged.buckets, passes)
    copy_across(publisher, [rows], subscriber, CopyTarget(table, pair.name, pair.key))
    return table


def _create(connection: Connection, name: str, target: TargetTable, columns: Sequence[str]) -> sql.Identifier:
    table = temporary(name)
    StagedColumns.from_target(target, columns).create(connection, "temporary", table)
    return table


def temporary(name: str) -> sql.Identifier:
    """The name of a temporary table of the session."""
    return sql.Identifier("pg_temp", name)


@contextlib.contextmanager
def comparison_errors(table: QualifiedName) -> Iterator[None]:
    """Translate errors of both servers while a table is compared.

    Raises:
        InvalidFilter: if a row filter, or the type of the subscriber's column, fails on a value.
        MissingPrivilege, ServerUnavailable: as `translated_errors`.
    """
    action = f'cannot compare table "{table}"'
    try:
        with translated_errors(action):
            yield
    except psycopg.DataError as error:
        raise InvalidFilter(
            f"{action}: {error.diag.message_primary}",
            detail=error.diag.message_detail,
            hint="A row filter fails on a row, or the subscriber's type rejects a value:"
            " correct the row, the filter or the type.",
            rule="R7.6",
        ) from error
    except psycopg.Error as error:
        raise CdcReplayError(
            f"{action}: {error.diag.message_primary or error}", detail=error.diag.message_detail
        ) from error
