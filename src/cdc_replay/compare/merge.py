"""Make the target's rows of some buckets the staged ones, in the caller's transaction.

Rows are compared one by one under the lock (`row_comparison`). Equal rows are not touched. A surplus and a
missing row of one key become an update, all others are deleted and inserted.

    deletes, then updates in place, then inserts    a unique constraint sees the final rows as far as possible
    rows that exchange unique values, or columns    are deleted and inserted again with all columns: the
    that UPDATE must not set                        subscriber's own columns keep their values; refused if a
                                                    foreign key would act on the DELETE
    surplus rows claimed by another feed            stay: it may have inserted them

`merge_values` only updates rows of both sides, and counts the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from psycopg import errors as pg
from psycopg import sql

from cdc_replay.compare.digest import hash_of
from cdc_replay.compare.row_comparison import RowComparison, open_comparison
from cdc_replay.compare.staging import StagedRows, temporary
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.copy import subscriber_write_errors
from cdc_replay.postgres.identifiers import commas, names
from cdc_replay.subscriber.apply_connection import pinned_text_formats
from cdc_replay.subscriber.as_owner import TargetSession
from cdc_replay.subscriber.firing_foreign_keys import deletion_acts
from cdc_replay.subscriber.staged_columns import column_definition
from cdc_replay.subscriber.target_statements import insert_rows
from cdc_replay.subscriber.target_tables import TargetColumn

_DELETE: Final = """
    delete from {target} as target using {surplus} as surplus
    where target.tableoid = surplus.relation and target.ctid = surplus.row_id and {is_deleted}
"""

_UPDATE: Final = """
    update {target} as target set {assignments}
    from {pairs} as pairs join {staged} as staged on staged.ctid = pairs.staged_row_id
    where target.tableoid = pairs.relation and target.ctid = pairs.row_id
"""

_SELECT_DETACHED: Final = """
    {into}
    select {values}
    from {target} as target, {pairs} as pairs join {staged} as staged on staged.ctid = pairs.staged_row_id
    where target.tableoid = pairs.relation and target.ctid = pairs.row_id
"""

_DETACH: Final = """
    delete from {target} as target using {pairs} as pairs
    where target.tableoid = pairs.relation and target.ctid = pairs.row_id
"""

_MISSING_ROWS: Final = """
    select {values}
    from {missing} as missing join {staged} as staged on staged.ctid = missing.row_id
    where {is_inserted}
"""

_COUNT_MISSING: Final = """
    select count(*) from {missing} as missing
    where not exists (select from {surplus} as surplus where surplus.key_hash = missing.key_hash)
"""

_COUNT_SURPLUS: Final = """
    select count(*) from {surplus} as surplus
    where not exists (select from {missing} as missing where missing.key_hash = surplus.key_hash)
"""

_COUNT_UNPUBLISHED: Final = """
    select count(*)
    from {surplus} as surplus
    join (select {key_hash}::uuid as key_hash from {unpublished} as staged group by 1) as unpublished
        using (key_hash)
    join (
        select target.tableoid as relation, target.ctid as row_id from {target} as target
        where not ({outside})
    ) as inside using (relation, row_id)
    where not exists (select from {missing} as missing where missing.key_hash = surplus.key_hash)
"""
"""A row that is outside the filter by its values here was not replicated by this subscription."""


@dataclass(frozen=True, slots=True)
class Merged:
    """Numbers of changed rows of the target."""

    insert: int = 0
    update: int = 0
    delete: int = 0

    def __add__(self, other: Merged) -> Merged:
        return Merged(self.insert + other.insert, self.update + other.update, self.delete + other.delete)


@dataclass(frozen=True, slots=True)
class MergedValues:
    """Rows compared by key.

    `different` rows are on both sides with different values; `update` of them got the publisher's. `missing`
    rows are published, but not on the subscriber. `unpublished_rows` are on both sides, but not published.
    `subscriber_only` rows are not on the publisher.
    """

    update: int = 0
    different: int = 0
    missing: int = 0
    unpublished_rows: int = 0
    subscriber_only: int = 0

    @property
    def may_have_other_keys(self) -> bool:
        """Whether the rewrite may have changed keys: then equal keys need not mean the same row."""
        return bool(self.missing and self.subscriber_only)


def merge(
    connection: Connection, session: TargetSession, staged: StagedRows, *, deletes: bool = True
) -> Merged:
    """Make the target's rows of the buckets equal the staged ones; the caller has locked out other writers.

    Without `deletes`, rows that are only here stay, for `delete_surplus`.

    Raises:
        ApplyConflict: if a constraint of the target does not allow a row.
        MissingPrivilege, SubscriberNotReady, ServerUnavailable: as `subscriber_write_errors`.
    """
    if staged.table is None:
        return Merged()
    with _compared(connection, session, staged, staged.table) as comparison:
        deleted = comparison.execute(_DELETE) if deletes else 0
        updated = _update(comparison)
        inserted = _insert(comparison)
    return Merged(inserted, updated, deleted)


def delete_surplus(connection: Connection, session: TargetSession, staged: StagedRows) -> Merged:
    """The deletions of `merge` alone.

    Raises:
        ApplyConflict, MissingPrivilege, SubscriberNotReady, ServerUnavailable: as `merge`.
    """
    if staged.table is None:
        return Merged()
    with _compared(connection, session, staged, staged.table) as comparison:
        deleted = comparison.execute(_DELETE)
    return Merged(delete=deleted)


@contextlib.contextmanager
def _compared(
    connection: Connection, session: TargetSession, staged: StagedRows, table: sql.Identifier
) -> Iterator[RowComparison]:
    """The rows of both sides compared in a temporary table, which is dropped at the end."""
    with (
        subscriber_write_errors(staged.pair.name),
        open_comparison(connection, session, staged, table) as comparison,
    ):
        comparison.compare()
        yield comparison
        comparison.drop()


def merge_values(
    connection: Connection,
    session: TargetSession,
    staged: StagedRows,
    unpublished: sql.Identifier | None,
    *,
    update_rows: bool,
) -> MergedValues:
    """Update rows of both sides to the staged values, if `update_rows`; insert and delete none.

    `unpublished` has the keys of the publisher's unpublished rows in the same buckets.

    Raises:
        ApplyConflict, MissingPrivilege, SubscriberNotReady, ServerUnavailable: as `merge`.
    """
    if staged.table is None or not staged.buckets.ids:
        return MergedValues()
    with (
        subscriber_write_errors(staged.pair.name),
        open_comparison(connection, session, staged, staged.table) as comparison,
    ):
        comparison.compare_by_key()
        merged = _count_values(comparison, unpublished)
        if update_rows and merged.different and not merged.may_have_other_keys:
            merged = dataclasses.replace(merged, update=_update(comparison))
        comparison.drop()
        return merged


def _count_values(comparison: RowComparison, unpublished: sql.Identifier | None) -> MergedValues:
    with pinned_text_formats(comparison.connection):
        surplus = comparison.count(_COUNT_SURPLUS)
        unpublished_rows = 0 if unpublished is None else _count_unpublished(comparison, unpublished)
    return MergedValues(
        different=comparison.count("select count(*) from {pairs}"),
        missing=comparison.count(_COUNT_MISSING),
        unpublished_rows=unpublished_rows,
        subscriber_only=surplus - unpublished_rows,
    )


def _count_unpublished(comparison: RowComparison, unpublished: sql.Identifier) -> int:
    key = hash_of(names(comparison.pair.hashed_key, "staged"))
    comparison.session.share(unpublished)
    return comparison.count(
        _COUNT_UNPUBLISHED, key_hash=key, unpublished=unpublished, outside=comparison.outside
    )


def _update(comparison: RowComparison) -> int:
    keeps = frozenset[str]() if comparison.has_renamed else frozenset(comparison.pair.key)
    settable = [column for column in _published(comparison) if column.name not in keeps]
    if settable and all(column.is_settable for column in settable):
        assignments = (
            sql.SQL("{} = {}").format(sql.Identifier(column.name), sql.Identifier("staged", column.name))
            for column in settable
        )
        try:
            with comparison.connection.transaction():
                return comparison.execute(_UPDATE, assignments=commas(assignments))
        except (pg.UniqueViolation, pg.ExclusionViolation):
            pass  # rows may exchange unique values: delete all of them first
    return _detach_and_reinsert(comparison)


def _detach_and_reinsert(comparison: RowComparison) -> int:
    target, detached = comparison.pair.target, temporary("detached")
    if target.acts_on_delete:
        why = "The merge has to delete rows and insert them again, such as rows that exchange values."
        raise deletion_acts(target.name, why)
    written = [column.name for column in target.writable]
    published = {column.name for column in _published(comparison)}
    values = (sql.Identifier("staged" if name in published else "target", name) for name in written)
    definitions = [column_definition(column.name, column) for column in target.writable]
    into = comparison.session.into_temporary(detached, definitions)
    comparison.execute(_SELECT_DETACHED, into=into, values=commas(values))
    comparison.execute(_DETACH)
    rows = sql.SQL("select {} from {}").format(names(written), detached)
    return comparison.session.execute(insert_rows(target, written, rows)) if written else 0


def _insert(comparison: RowComparison) -> int:
    columns = comparison.pair.columns
    rows = comparison.format(_MISSING_ROWS, values=names(columns, "staged"))
    return comparison.session.execute(insert_rows(comparison.pair.target, columns, rows))


def _published(comparison: RowComparison) -> list[TargetColumn]:
    return [comparison.pair.target.column(name) for name in comparison.pair.columns]
