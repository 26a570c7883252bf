"""Driver: merge the staged net changes of one target into its rows, set-based, in the window's transaction.

The order makes conflicts visible and key collisions impossible; `replay.apply.linked_tables` has another one:

    1. delete     rows that the window deletes
    2. check      a subscriber's row blocks a key at which the window inserted and deleted a row, or to which
                  it moved a row and away again; transient keys that were not staged are, before all steps,
                  if the target can have them (`replay.apply.transient_keys`)
    3. update     rows in place, only the columns sent (R8.3), keys included, so that row triggers see an
                  UPDATE, as in a native worker (R8.13)
    4. detach     where rows exchange keys or values of a unique constraint, the updated rows leave the table
                  instead, whole, with the values that were sent
    5. reinsert   detached rows; a row with their new key blocks them
    6. insert     new rows; columns not sent get their default (R8.2); a row with their key blocks them

A row that still exists in steps 5 and 6 is not the window's own, so swaps and chains of keys never collide.
In step 2 the window's own rows are told apart by their keys, before they move: on the publisher they had left
such a key, though they may have returned. Rows in which UPDATE would set a column GENERATED ALWAYS AS
IDENTITY, which it cannot (R8.14), are detached, not updated in place.

Under the policy `error` only step 2 looks for blocking rows: in steps 5 and 6 the unique index finds the
conflict, and the blocking rows are read afterwards, for the message.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import psycopg
import pyarrow as pa
from psycopg import errors as pg
from psycopg import sql

from cdc_replay.model.frames import ConflictKind, NetKind
from cdc_replay.model.subscription import ConflictPolicy
from cdc_replay.postgres.connection import Connection
from cdc_replay.replay.apply.conflicts import (
    KEYS_SHOWN,
    ambiguous_key,
    conflicting_changes,
    duplicate_key,
    key_text,
    unique_violation,
)
from cdc_replay.replay.apply.contingent import pair_rows, settle_contingent, statements_for
from cdc_replay.replay.apply.encoding import KEY_CHANGED, TRANSIENT_MAY_MISS, UPDATE_MAY_MISS, to_copy_csv
from cdc_replay.replay.apply.merge_sql import KEY_CHANGES, KEY_STAYS, Statements
from cdc_replay.replay.apply.staging import StagedTable
from cdc_replay.replay.apply.target_sql import ANY
from cdc_replay.replay.contingent_changes import Refold
from cdc_replay.subscriber.as_owner import TargetSession
from cdc_replay.subscriber.firing_foreign_keys import deletion_acts
from cdc_replay.subscriber.target_tables import TargetTable

_DUPLICATE: Final = (pg.UniqueViolation, pg.ExclusionViolation)

MIN_ROWS_TO_SAMPLE: Final = 100_000
"""From this number of joined rows on, the physical order of `SAMPLED_ROWS` of them is measured.

Without that, a million changes of distinct keys take 13 % longer.
"""
SAMPLED_ROWS: Final = 250
MIN_CORRELATION: Final = 0.4
"""Rows are in key order if `Statements.physical_order` is at least this; in random order it is about 0."""


@dataclass(slots=True)
class MergeResult:
    """Rows changed in a target, and conflicts, by `ConflictKind` value."""

    insert: int = 0
    update: int = 0
    delete: int = 0
    conflicts: collections.Counter[str] = field(default_factory=collections.Counter)
    conflict_keys: dict[str, list[str]] = field(default_factory=dict)
    """The keys of the first `KEYS_SHOWN` rows of each kind; never another value."""


def begin_merge(
    connection: Connection,
    session: TargetSession,
    target: TargetTable,
    staged: StagedTable,
    policy: ConflictPolicy,
    refold: Refold | None = None,
) -> TableMerge:
    """The merge of the staged net changes into `target`, in the caller's transaction; nothing is changed yet.

    `refold` is required if contingent changes are staged (`replay.apply.contingent`).

    Raises:
        ApplyConflict: if changes of the window conflict, and the policy is `error`.
    """
    statements = statements_for(connection, session, target, staged)
    settlement = settle_contingent(connection, session, statements, policy, refold)
    # Rows of two leaves may have equal keys: they do not conflict, and none is overwritten.
    effective = policy if staged.table.has_own_key else ConflictPolicy.ERROR
    statements = replace(statements, staged=settlement.staged)
    merging = TableMerge(connection, session, settlement.staged, effective, statements)
    merging.add_conflict_keys(settlement.missing_keys)
    merging.prepare()
    return merging


@dataclass(slots=True)
class TableMerge:
    """The merge into one target, step by step; statements run by the target's `session`.

    Every step raises `ApplyConflict` if a row blocks a change and the policy is `error`, and psycopg's errors
    if the target refuses a row.
    """

    connection: Connection
    session: TargetSession
    staged: StagedTable
    policy: ConflictPolicy
    statements: Statements
    merged: MergeResult = field(default_factory=MergeResult)
    _has_transient: bool = False
    _detached: list[sql.Identifier] = field(default_factory=list)

    def prepare(self) -> None:
        """Before the first step: stage the rest, and find the rows to change."""
        self._add_window_conflicts()
        self._has_transient = self.staged.count(NetKind.TRANSIENT) + self._stage_transient_keys() > 0
        self.connection.execute(self.statements.analyze())
        has_own_key = self.staged.table.has_own_key
        if not has_own_key and (self.staged.count(NetKind.UPDATE) or self.staged.count(NetKind.DELETE)):
            self._locate_rows()

    def delete_unstaged(self) -> None:
        """Before step 1, for a table that was truncated: delete the rows that are not inserted."""
        self.merged.delete += self.session.execute(self.statements.delete_unstaged())

    def delete(self) -> None:
        """Step 1."""
        if self.staged.count(NetKind.DELETE):
            self._delete()

    def check(self) -> None:
        """Step 2; before the window has inserted or moved a row."""
        if not self.staged.table.has_own_key:
            return
        if self._has_transient:
            self._check_transient_keys()
        if self.staged.count(NetKind.TRANSIT):
            self._check_transit_keys()

    def update(self) -> None:
        """Steps 3 to 5."""
        updates, moves = self.staged.count(NetKind.UPDATE), self.staged.count(KEY_CHANGED)
        condition = ANY
        if updates and self.statements.cannot_update_in_place:
            self._detach(ANY)
            updates = 0
        elif moves and self.statements.cannot_move_in_place:
            self._detach(KEY_CHANGES)
            condition, updates = KEY_STAYS, updates - moves
        if updates:
            self._update_in_place(condition, updates)
        for detached in self._detached:
            self._reinsert(detached)

    def insert(self) -> None:
        """Step 6."""
        if self.staged.count(NetKind.INSERT):
            self._insert()

    def end(self) -> None:
        """After the last step: remove what its session was given."""
        if self.session.runs_as_owner:
            self.connection.execute(sql.SQL("drop view {}").format(self.staged.table.view))

    def takes_freed_keys(self) -> bool:
        """Whether a row takes the key of a row that is deleted or moves: then the steps need their order."""
        frees = self.staged.count(NetKind.DELETE) or self.staged.count(KEY_CHANGED)
        if not frees or not self.staged.table.is_keyed:
            return False
        [(takes,)] = self.session.query(self.statements.takes_freed_keys())
        return bool(takes)

    def add_conflict_keys(self, keys: Mapping[str, Sequence[str]]) -> None:
        """Keys of changes that are known to match no row, by conflict kind."""
        if self.staged.table.is_keyed:
            self.merged.conflict_keys |= {kind: [*texts][:KEYS_SHOWN] for kind, texts in keys.items()}

    # --- steps

    def _stage_transient_keys(self) -> int:
        """Stage the unstaged transient keys that the target may have; return their number."""
        if not len(keys := self.staged.transient_keys):
            return 0
        (max_key,) = self._row(self.statements.max_key())
        within_range = keys[keys <= max_key] if max_key is not None else keys[:0]
        if len(within_range):
            columns = [
                pa.repeat(pa.scalar(self.staged.attempts[0], pa.int64()), len(within_range)),
                pa.repeat(pa.scalar(NetKind.TRANSIENT.value), len(within_range)),
                pa.array(within_range),
            ]
            with (
                self.connection.cursor() as cursor,
                cursor.copy(self.statements.copy_transient_keys()) as copy,
            ):
                copy.write(to_copy_csv(columns))
        return len(within_range)

    def _locate_rows(self) -> None:
        if not self.staged.table.is_keyed:
            pair_rows(self.connection, self.session, self.statements)
            return
        if rows := self.session.query(self.statements.ambiguous_rows()):
            columns, target = self.staged.table.keys, self.statements.target
            raise ambiguous_key(target.name, rows[0][0], [key_text(columns, key) for _, *key in rows])

    def _delete(self) -> None:
        staged = self.staged.count(NetKind.DELETE)
        with self.connection.transaction() as savepoint:
            deleted = self._execute_joined(NetKind.DELETE, self.statements.delete())
            if deleted < staged:
                # Only DELETE RETURNING shows which rows are missing: a join that is rarely needed.
                raise psycopg.Rollback(savepoint)
        if deleted < staged:
            deleted = self._delete_and_report(NetKind.DELETE, self.statements.delete())
        self.merged.delete += deleted

    def _delete_and_report(self, kind: NetKind, delete: sql.Composed) -> int:
        report = self.statements.report_missing_after(delete, kind)
        [(deleted, *missing)] = self.session.query(report, changes=True)
        self._count_missing(missing)
        return int(deleted)

    def _count_missing(self, missing: Sequence[Any]) -> None:
        self._count(ConflictKind.UPDATE_MISSING, *missing[:2])
        self._count(ConflictKind.DELETE_MISSING, *missing[2:])

    def _check_transient_keys(self) -> None:
        blocking = self._blocking_passed_keys(NetKind.TRANSIENT)
        if self.policy is ConflictPolicy.ERROR:
            self._raise_on_blocking(ConflictKind.INSERT_EXISTS, blocking)
        elif self._count_blocking(ConflictKind.INSERT_EXISTS, blocking):
            delete = self.statements.delete_at_passed_keys(NetKind.TRANSIENT)
            self._delete_and_report(NetKind.TRANSIENT, delete)
            return
        if self.staged.count(TRANSIENT_MAY_MISS):
            self._count_missing(self._row(self.statements.missing_changes(NetKind.TRANSIENT)))

    def _check_transit_keys(self) -> None:
        """Changes meant for the row at such a key were applied to the row that moved there."""
        blocking = self._blocking_passed_keys(NetKind.TRANSIT)
        if self.policy is ConflictPolicy.ERROR:
            self._raise_on_blocking(ConflictKind.UPDATE_EXISTS, blocking)
        elif self._count_blocking(ConflictKind.UPDATE_EXISTS, blocking):
            self._execute(self.statements.delete_at_passed_keys(NetKind.TRANSIT))

    def _blocking_passed_keys(self, kind: NetKind) -> sql.Composed:
        rows = sql.SQL("{} as staged").format(self.statements.stage)
        return self.statements.blocking_rows(rows, self.statements.occupies_passed_key(kind))

    def _detach(self, condition: sql.SQL) -> None:
        if self.statements.target.acts_on_delete:
            why = "The merge has to delete rows and insert them again, such as rows that exchange values."
            raise deletion_acts(self.statements.target.name, why)
        detached = sql.Identifier("pg_temp", f"detached_{self.staged.table.index}_{len(self._detached)}")
        keep = self.policy is ConflictPolicy.SKIP
        into = self.session.into_temporary(detached, self.statements.detached_columns(keep_originals=keep))
        self.merged.update += self._execute(
            *self.statements.detach_rows(into, condition, keep_originals=keep)
        )
        missing = self.statements.undetached(detached, condition)
        self._count(ConflictKind.UPDATE_MISSING, *self._row(missing))
        self._detached.append(detached)

    def _update_in_place(self, condition: sql.SQL, staged: int) -> None:
        update = self.statements.update(condition)
        has_moves = condition is ANY and self.staged.count(KEY_CHANGED) > 0
        try:
            with self.connection.transaction() as savepoint:
                updated = self._execute_joined(NetKind.UPDATE, update)
                if updated < staged and has_moves:
                    # Missing rows can be told only before other rows have moved away from their keys.
                    raise psycopg.Rollback(savepoint)
            if updated < staged:
                unmatched = self.statements.unmatched_updates(condition)
                self._count(ConflictKind.UPDATE_MISSING, *self._row(unmatched))
            if updated < staged and has_moves:
                updated = self._execute_joined(NetKind.UPDATE, update)
        except _DUPLICATE:
            # Rows may exchange keys, or values of another unique constraint: detach all at once.
            self._detach(condition)
            return
        self.merged.update += updated

    def _reinsert(self, detached: sql.Identifier) -> None:
        rows = sql.SQL("{} as detached").format(detached)
        blocking = self.statements.blocking_rows(rows, self.statements.occupies_detached_key)
        if self.policy is ConflictPolicy.OVERWRITE:
            self._count_blocking(ConflictKind.UPDATE_EXISTS, blocking)
            self._execute(self.statements.delete_blocking(detached))
        elif self.policy is ConflictPolicy.SKIP:
            # A row that returns to its old key may block the next one.
            while self._count_blocking(ConflictKind.UPDATE_EXISTS, blocking):
                self.merged.update -= self._execute(self.statements.restore_blocked(detached))
        self._execute_or_raise(
            ConflictKind.UPDATE_EXISTS, blocking, [self.statements.reinsert_rows(detached)]
        )

    def _insert(self) -> None:
        statements = self.statements
        if self.staged.count(UPDATE_MAY_MISS):
            self._count(ConflictKind.UPDATE_MISSING, *self._row(statements.may_miss_updates()))
        rows = sql.SQL("{} as staged").format(self.statements.stage)
        same = sql.SQL("{} and {}").format(
            statements.staged_rows(NetKind.INSERT), statements.occupies_inserted_key
        )
        blocking = statements.blocking_rows(rows, same)
        blocked = 0
        if self.policy is not ConflictPolicy.ERROR:
            blocked = self._count_blocking(ConflictKind.INSERT_EXISTS, blocking)
        if blocked and self.policy is ConflictPolicy.OVERWRITE and not statements.cannot_update_in_place:
            self.merged.update += self._execute(statements.overwrite_blocking())
        inserts = [statements.insert(omitted, only_free=blocked > 0) for omitted in self.staged.omitted]
        self.merged.insert += self._execute_or_raise(ConflictKind.INSERT_EXISTS, blocking, inserts)

    # --- execution

    def _execute(self, *statements: sql.Composed) -> int:
        count = 0
        for statement in statements:
            count = self.session.execute(statement)
        return count

    def _execute_joined(self, kind: NetKind, statement: sql.Composed) -> int:
        """Run a statement that joins staged changes of `kind` with their rows; return its row count.

        If the rows lie in key order, as in a growing table, a merge join reads and writes the table and its
        index sequentially. The planner prefers a hash join, which is a quarter slower here: its cost model
        leaves out the index. In random order the hash join is faster, as it finds rows in the order of the
        table.
        """
        if not self._are_in_key_order(kind):
            return self._execute(statement)
        self.connection.execute("set local enable_hashjoin = off")
        rows = self._execute(self.statements.skip_to_first_key(statement, kind))
        # After an error the caller's savepoint, or the end of the transaction, does this.
        self.connection.execute("set local enable_hashjoin to default")
        return rows

    def _are_in_key_order(self, kind: NetKind) -> bool:
        if self.staged.count(kind) < MIN_ROWS_TO_SAMPLE or not self.statements.has_index_order:
            return False
        return abs(float(*self._row(self.statements.physical_order(kind, SAMPLED_ROWS)))) >= MIN_CORRELATION

    def _row(self, statement: sql.Composed) -> tuple[Any, ...]:
        return next(iter(self.session.query(statement)), (0,))

    def _execute_or_raise(
        self, kind: ConflictKind, blocking: sql.Composed, statements: Iterable[sql.Composed]
    ) -> int:
        """Row count of all statements; if an index refuses a row, name the rows that block it."""
        try:
            with self.connection.transaction():
                return sum(self._execute(statement) for statement in statements)
        except _DUPLICATE as error:
            if self.staged.table.has_own_key:
                self._raise_on_blocking(kind, blocking)
            if isinstance(error, pg.UniqueViolation):
                raise unique_violation(kind, self.statements.target.name, error) from error
            raise

    def _raise_on_blocking(self, kind: ConflictKind, blocking: sql.Composed) -> None:
        rows = self.session.query(blocking)
        if not rows:
            return
        target, columns = self.statements.target, self.staged.table.keys
        keys = [key_text(columns, key) for _, *key in rows]
        raise duplicate_key(kind, target.name, target.identity_index, rows[0][0], keys)

    def _add_window_conflicts(self) -> None:
        conflicts = self.staged.conflicts
        self.merged.conflicts.update(conflicts)
        if self.policy is not ConflictPolicy.ERROR:
            return
        for kind in (ConflictKind.INSERT_EXISTS, ConflictKind.UPDATE_EXISTS):
            if conflicts[kind.value]:
                raise conflicting_changes(kind, self.statements.target.name, conflicts[kind.value])

    def _count_blocking(self, kind: ConflictKind, blocking: sql.Composed) -> int:
        rows = self.session.query(blocking)
        count = int(rows[0][0]) if rows else 0
        self._count(kind, count, [key for _, *key in rows])
        return count

    def _count(self, kind: ConflictKind, count: int, keys: Iterable[Sequence[object]] = ()) -> None:
        if not count:
            return
        self.merged.conflicts[kind.value] += int(count)
        shown = self.merged.conflict_keys.setdefault(kind.value, [])
        if self.staged.table.is_keyed:
            shown += [key_text(self.staged.table.keys, key) for key in keys]
            del shown[KEYS_SHOWN:]
