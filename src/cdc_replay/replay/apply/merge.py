"""Driver: the staged net changes of one target into its rows, set-based, inside the window's transaction.

The order makes conflicts visible and collisions impossible:

    1. remove     rows that the window deletes
    2. update     rows in place, only the columns sent (R8.3), keys included, so that row triggers see an
                  UPDATE, as in a native worker (R8.13)
    3. take out   where rows exchange keys or values of a unique constraint among themselves, the updated
                  rows leave the table instead, whole, overlaid with what was sent
    4. clear      what stands where the window inserted and deleted a row is in the way, and what stands where
                  it moved a row to and away again; keys that were not staged are, before all steps, where the
                  target can have them (`replay.apply.transient_keys`)
    5. put back   rows that were taken out; a row with their new key is in the way
    6. insert     new rows; columns not sent get their default (R8.2); a row with their key is in the way

A row that is still there in steps 4, 5 and 6 is not the window's own, so that swaps and chains of keys never
collide. Where inserted and deleted rows are to be cleared, rows whose key changes are taken out before, not
updated in place; so is whatever would set a column GENERATED ALWAYS AS IDENTITY, which UPDATE cannot (R8.14).
Where rows have only passed through, the window's own are told apart by their keys, before they move.

Under the policy `error` nothing is looked up before step 5 and 6 but what is to be cleared: the unique index
itself finds the conflict, and only then the rows are named.
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
from cdc_replay.replay.apply.contingent import pair_rows, settled, statements_for
from cdc_replay.replay.apply.encoding import KEY_CHANGED, TRANSIENT_MAY_MISS, UPDATE_MAY_MISS, csv_of
from cdc_replay.replay.apply.merge_sql import MOVED as MOVING
from cdc_replay.replay.apply.merge_sql import STAYING, Statements
from cdc_replay.replay.apply.staging import StagedTable
from cdc_replay.replay.apply.target_sql import ANY
from cdc_replay.replay.contingent_changes import Refold
from cdc_replay.subscriber.as_owner import TargetSession
from cdc_replay.subscriber.tables import TargetTable

_ALREADY_THERE: Final = (pg.UniqueViolation, pg.ExclusionViolation)

WORTH_A_LOOK: Final = 100_000
"""So many rows to be found are worth a look at how `LOOKED_AT` of them lie."""
LOOKED_AT: Final = 250
IN_ORDER: Final = 0.4
"""From there on rows count as lying in the order of their keys (`Statements.order`); without any, it is 0."""


@dataclass(slots=True)
class Merged:
    """What was done to a target's rows, and the conflicts on the way, by `ConflictKind` value."""

    insert: int = 0
    update: int = 0
    delete: int = 0
    conflicts: collections.Counter[str] = field(default_factory=collections.Counter)
    conflict_keys: dict[str, list[str]] = field(default_factory=dict)
    """The keys of the first `KEYS_SHOWN` rows of each kind; never another value."""


def merge(
    connection: Connection,
    session: TargetSession,
    target: TargetTable,
    staged: StagedTable,
    policy: ConflictPolicy,
    refold: Refold | None = None,
) -> Merged:
    """Apply the staged net changes to `target`, in the caller's transaction, by the target's `session`.

    `refold` is needed where contingent ones are staged (`replay.apply.contingent`).

    Raises:
        ApplyConflict: if a row is in the way and the policy is `error`.
        psycopg.Error: if the target refuses a row.
    """
    statements = statements_for(connection, session, target, staged)
    found = settled(connection, session, statements, policy, refold)
    # Rows of two leaves may have equal keys: neither is in the other's way, and none is overwritten.
    effective = policy if staged.table.has_own_key else ConflictPolicy.ERROR
    statements = replace(statements, staged=found.staged)
    merging = _Merge(connection, session, found.staged, effective, statements)
    merging.show(found.missing_keys)
    merging.run()
    if session.is_of_owner:
        connection.execute(sql.SQL("drop view {}").format(staged.table.view))
    return merging.merged


@dataclass(slots=True)
class _Merge:
    connection: Connection
    session: TargetSession
    staged: StagedTable
    policy: ConflictPolicy
    statements: Statements
    merged: Merged = field(default_factory=Merged)
    _taken: list[sql.Identifier] = field(default_factory=list)

    def run(self) -> None:
        """All steps in order; those that nothing is staged for do nothing."""
        self._take_over_known_conflicts()
        gone = self.staged.count(NetKind.NOTHING) + self._stage_gone()
        self.connection.execute(self.statements.analyze())
        has_own_key = self.staged.table.has_own_key
        if not has_own_key and (self.staged.count(NetKind.UPDATE) or self.staged.count(NetKind.DELETE)):
            self._find_rows()
        if self.staged.count(NetKind.DELETE):
            self._delete()
        self._update(clear=has_own_key and gone > 0)
        if self.staged.count(NetKind.INSERT):
            self._insert()

    def show(self, keys: Mapping[str, Sequence[str]]) -> None:
        """Show these keys of changes that are known to have found nothing."""
        if self.staged.table.is_keyed:
            self.merged.conflict_keys |= {kind: [*texts][:KEYS_SHOWN] for kind, texts in keys.items()}

    # --- steps

    def _stage_gone(self) -> int:
        """Stage, of what came and went and is not staged yet, the keys that the target may have; how many."""
        if not len(gone := self.staged.gone):
            return 0
        (greatest,) = self._row(self.statements.greatest())
        reached = gone[gone <= greatest] if greatest is not None else gone[:0]
        if len(reached):
            columns = [
                pa.repeat(pa.scalar(self.staged.attempts[0], pa.int64()), len(reached)),
                pa.repeat(pa.scalar(NetKind.NOTHING.value), len(reached)),
                pa.array(reached),
            ]
            with self.connection.cursor() as cursor, cursor.copy(self.statements.copy_gone()) as copy:
                copy.write(csv_of(columns))
        return len(reached)

    def _find_rows(self) -> None:
        """Where no index of the target leads to them: by whole rows, or by the key of their leaf."""
        if not self.staged.table.is_keyed:
            pair_rows(self.connection, self.session, self.statements)
            return
        if rows := self.session.query(self.statements.ambiguous(KEYS_SHOWN)):
            columns, target = self.staged.table.keys, self.statements.target
            raise ambiguous_key(target.name, rows[0][0], [key_text(columns, key) for _, *key in rows])

    def _delete(self) -> None:
        staged = self.staged.count(NetKind.DELETE)
        with self.connection.transaction() as savepoint:
            deleted = self._execute_joined(NetKind.DELETE, self.statements.delete(NetKind.DELETE))
            if deleted < staged:
                # Which ones are missing is known by those that are deleted: a join that is rarely needed.
                raise psycopg.Rollback(savepoint)
        self.merged.delete += deleted if deleted == staged else self._remove(NetKind.DELETE)

    def _remove(self, kind: NetKind) -> int:
        [(gone, *missing)] = self.session.query(self.statements.remove(kind, KEYS_SHOWN), changes=True)
        self._count_missing(missing)
        return int(gone)

    def _count_missing(self, missing: Sequence[Any]) -> None:
        self._count(ConflictKind.UPDATE_MISSING, *missing[:2])
        self._count(ConflictKind.DELETE_MISSING, *missing[2:])

    def _update(self, *, clear: bool) -> None:
        updates, moves = self.staged.count(NetKind.UPDATE), self.staged.count(KEY_CHANGED)
        which = ANY
        if updates and self.statements.cannot_update_in_place:
            self._take_out(ANY)
            updates = 0
        elif moves and (clear or self.statements.cannot_move_in_place):
            # A row that leaves or reaches a key must not be mistaken for one that stands in the way there.
            self._take_out(MOVING)
            which, updates = STAYING, updates - moves
        if clear:
            self._clear()
        if self.staged.table.has_own_key and self.staged.count(NetKind.PASSED):
            self._clear_passed()
        if updates:
            self._update_in_place(which, updates)
        for taken in self._taken:
            self._put_back(taken)

    def _clear(self) -> None:
        rows = sql.SQL("{} as s").format(self.statements.stage)
        same = sql.SQL("{} and {}").format(self.statements.mine(NetKind.NOTHING), self.statements.match)
        standing = self.statements.standing(rows, same, KEYS_SHOWN)
        if self.policy is ConflictPolicy.ERROR:
            self._refuse_standing(ConflictKind.INSERT_EXISTS, standing)
        elif self._count_standing(ConflictKind.INSERT_EXISTS, standing):
            self._remove(NetKind.NOTHING)
            return
        if self.staged.count(TRANSIENT_MAY_MISS):
            self._count_missing(self._row(self.statements.not_found(NetKind.NOTHING, KEYS_SHOWN)))

    def _clear_passed(self) -> None:
        """Changes meant for the row at such a key were applied to the row that moved there."""
        rows = sql.SQL("{} as s").format(self.statements.stage)
        standing = self.statements.standing(rows, self.statements.same_as_passed, KEYS_SHOWN)
        if self.policy is ConflictPolicy.ERROR:
            self._refuse_standing(ConflictKind.UPDATE_EXISTS, standing)
        elif self._count_standing(ConflictKind.UPDATE_EXISTS, standing):
            self._execute(self.statements.delete_passed())

    def _take_out(self, which: sql.SQL) -> None:
        """Move rows to a temporary table, as they will be put back."""
        taken = sql.Identifier("pg_temp", f"taken_{self.staged.table.index}_{len(self._taken)}")
        keep = self.policy is ConflictPolicy.SKIP
        if self.session.is_of_owner:
            self.connection.execute(self.statements.take_table(taken, keep_originals=keep))
            self.session.share(taken)
        self.merged.update += self._execute(*self.statements.take(taken, which, keep_originals=keep))
        not_taken = self.statements.not_taken(taken, which, KEYS_SHOWN)
        self._count(ConflictKind.UPDATE_MISSING, *self._row(not_taken))
        self._taken.append(taken)

    def _update_in_place(self, which: sql.SQL, staged: int) -> None:
        update = self.statements.update(which)
        has_moves = which is ANY and self.staged.count(KEY_CHANGED) > 0
        try:
            with self.connection.transaction() as savepoint:
                updated = self._execute_joined(NetKind.UPDATE, update)
                if updated < staged and has_moves:
                    # Which rows are missing shows before others have moved away from their keys.
                    raise psycopg.Rollback(savepoint)
            if updated < staged:
                unmatched = self.statements.unmatched_updates(which, KEYS_SHOWN)
                self._count(ConflictKind.UPDATE_MISSING, *self._row(unmatched))
            if updated < staged and has_moves:
                updated = self._execute_joined(NetKind.UPDATE, update)
        except _ALREADY_THERE:
            # Rows may exchange keys, or values of another unique constraint: then all must be out at once.
            self._take_out(which)
            return
        self.merged.update += updated

    def _put_back(self, taken: sql.Identifier) -> None:
        rows = sql.SQL("{} as m").format(taken)
        standing = self.statements.standing(rows, self.statements.same_as_taken, KEYS_SHOWN)
        if self.policy is ConflictPolicy.OVERWRITE:
            self._count_standing(ConflictKind.UPDATE_EXISTS, standing)
            self._execute(self.statements.delete_standing(taken))
        elif self.policy is ConflictPolicy.SKIP:
            # A row that returns to its old key may stand in the way of the next.
            while self._count_standing(ConflictKind.UPDATE_EXISTS, standing):
                self.merged.update -= self._execute(self.statements.return_blocked(taken))
        self._execute_or_refuse(ConflictKind.UPDATE_EXISTS, standing, [self.statements.put_back(taken)])

    def _insert(self) -> None:
        statements = self.statements
        if self.staged.count(UPDATE_MAY_MISS):
            self._count(ConflictKind.UPDATE_MISSING, *self._row(statements.unsure(KEYS_SHOWN)))
        rows = sql.SQL("{} as s").format(self.statements.stage)
        same = sql.SQL("{} and {}").format(statements.mine(NetKind.INSERT), statements.same_as_inserted)
        standing = statements.standing(rows, same, KEYS_SHOWN)
        blocked = 0
        if self.policy is not ConflictPolicy.ERROR:
            blocked = self._count_standing(ConflictKind.INSERT_EXISTS, standing)
        if blocked and self.policy is ConflictPolicy.OVERWRITE and not statements.cannot_update_in_place:
            self.merged.update += self._execute(statements.overwrite_standing())
        inserts = [statements.insert(omitted, only_free=blocked > 0) for omitted in self.staged.omitted]
        self.merged.insert += self._execute_or_refuse(ConflictKind.INSERT_EXISTS, standing, inserts)

    # --- execution

    def _execute(self, *statements: sql.Composed) -> int:
        """Run the statements; the number of rows of the last one."""
        count = 0
        for statement in statements:
            count = self.session.execute(statement)
        return count

    def _execute_joined(self, kind: NetKind, statement: sql.Composed) -> int:
        """Run a statement that joins staged changes of `kind` with their rows; the number of rows.

        Where the rows lie in the order of their keys, as those of a growing table, a merge join reads and
        writes both the table and its index from one end to the other. The planner prefers a hash join there,
        which is a quarter slower: it does not count what the index costs. Where they lie in no order, the
        hash join is the better one, as it finds them in the order of the table.
        """
        if not self._lie_in_order(kind):
            return self._execute(statement)
        self.connection.execute("set local enable_hashjoin = off")
        rows = self._execute(self.statements.from_first(statement, kind))
        # After an error the caller's savepoint, or the end of the transaction, does this.
        self.connection.execute("set local enable_hashjoin to default")
        return rows

    def _lie_in_order(self, kind: NetKind) -> bool:
        if self.staged.count(kind) < WORTH_A_LOOK or not self.statements.can_tell_order:
            return False
        return abs(float(*self._row(self.statements.order(kind, LOOKED_AT)))) >= IN_ORDER

    def _row(self, statement: sql.Composed) -> tuple[Any, ...]:
        return next(iter(self.session.query(statement)), (0,))

    def _execute_or_refuse(
        self, kind: ConflictKind, standing: sql.Composed, statements: Iterable[sql.Composed]
    ) -> int:
        """Rows of all statements; if an index refuses one, name the rows of `standing` in the way."""
        try:
            with self.connection.transaction():
                return sum(self._execute(statement) for statement in statements)
        except _ALREADY_THERE as error:
            if self.staged.table.has_own_key:
                self._refuse_standing(kind, standing)
            if isinstance(error, pg.UniqueViolation):
                raise unique_violation(kind, self.statements.target.name, error) from error
            raise

    def _refuse_standing(self, kind: ConflictKind, standing: sql.Composed) -> None:
        rows = self.session.query(standing)
        if not rows:
            return
        target, columns = self.statements.target, self.staged.table.keys
        keys = [key_text(columns, key) for _, *key in rows]
        raise duplicate_key(kind, target.name, target.identity_index, rows[0][0], keys)

    def _take_over_known_conflicts(self) -> None:
        conflicts = self.staged.conflicts
        self.merged.conflicts.update(conflicts)
        if self.policy is not ConflictPolicy.ERROR:
            return
        for kind in (ConflictKind.INSERT_EXISTS, ConflictKind.UPDATE_EXISTS):
            if conflicts[kind.value]:
                raise conflicting_changes(kind, self.statements.target.name, conflicts[kind.value])

    def _count_standing(self, kind: ConflictKind, standing: sql.Composed) -> int:
        """Count rows of the target that are in the way; how many there are."""
        rows = self.session.query(standing)
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
