"""The order in which tables are merged that foreign keys link.

Only those matter whose triggers are ENABLE ALWAYS or REPLICA. A native worker applies change by change,
in an order that the publisher allowed. A window has net changes by table, and a foreign key is checked, or
acts, at the end of each statement. So linked tables are merged step by step; P is referenced, C refers to it:

| order                | steps                                       | wrong if                             |
|----------------------|---------------------------------------------|--------------------------------------|
| add before removing  | P insert, update; C delete, update, insert; | a new row of P needs a value that a  |
|                      | P delete                                    | row has which is deleted last        |
| remove before adding | C delete; P delete, update, insert;         | a row of C leaves one of P that is   |
|                      | C update, insert                            | deleted                              |

The first is tried within a savepoint, the second decides; it is refused if a foreign key may have deleted
rows that were to leave. The first is not tried if a row of P takes the key of another one: if the subscriber
lacked the old row, its DELETE would find the new one.

In both orders, keys that rows of the window have passed are checked before a row is inserted or updated.

A table that refers to itself is a P. Tables without such foreign keys are merged one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import psycopg

from cdc_replay.errors import ApplyConflict
from cdc_replay.model.frames import ConflictKind
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.replay.apply.conflicts import apply_errors
from cdc_replay.replay.apply.merge import MergeResult, TableMerge
from cdc_replay.subscriber.as_owner import TargetSession, TargetSessions
from cdc_replay.subscriber.firing_foreign_keys import deletion_acts, referenced_tables
from cdc_replay.subscriber.target_tables import TargetTable

Begin: TypeAlias = Callable[[TargetTable, TargetSession], TableMerge]
"""Begins the merge of a target."""

_DELETE: Final = (TableMerge.delete,)
_USUAL: Final = (TableMerge.delete, TableMerge.check, TableMerge.update, TableMerge.insert)


def merge_group(
    connection: Connection, sessions: TargetSessions, group: Sequence[TargetTable], begin: Begin
) -> dict[QualifiedName, MergeResult]:
    """Merge a group of `group_tables`; returns the results by name.

    Raises:
        ApplyConflict: if a change is refused, in either order.
    """
    steps = _Steps(sessions, group, begin)
    if not steps.referenced:
        return steps.merge_each()
    for target in group:
        sessions.session_for(target)  # what it creates must outlive the savepoint
    with contextlib.suppress(ApplyConflict), connection.transaction() as savepoint:
        if steps.add_before_removing():
            return steps.end()
        raise psycopg.Rollback(savepoint)
    sessions.confirm()  # the locks that it took after the savepoint are gone
    steps = _Steps(sessions, group, begin)
    steps.remove_before_adding()
    return steps.end()


@dataclass(slots=True)
class _Steps:
    sessions: TargetSessions
    group: Sequence[TargetTable]
    begin: Begin
    _begun: dict[int, TableMerge] = field(default_factory=dict)

    @property
    def referenced(self) -> frozenset[int]:
        """The oids of the tables that others of the group, or they themselves, refer to."""
        return referenced_tables(self.group) & {target.oid for target in self.group}

    @property
    def results(self) -> dict[QualifiedName, MergeResult]:
        """What was merged, by table."""
        return {target.name: self._begun[target.oid].merged for target in self.group}

    def end(self) -> dict[QualifiedName, MergeResult]:
        """The results, after the last step."""
        for merging in self._begun.values():
            merging.end()
        return self.results

    def merge_each(self) -> dict[QualifiedName, MergeResult]:
        """Table by table."""
        for target in self.group:
            self._run(target, _USUAL)
        return self.end()

    def add_before_removing(self) -> bool:
        """The first order; False if keys do not allow it."""
        referenced = self.referenced
        for target in self.group:
            if target.oid not in referenced:
                self._run(target, _USUAL)
            elif self._takes_freed_keys(target):
                return False
            else:
                self._run(target, (TableMerge.check, TableMerge.insert, TableMerge.update))
        for target in reversed(self.group):
            if target.oid in referenced:
                self._run(target, _DELETE)
        return True

    def remove_before_adding(self) -> None:
        """The second order."""
        for target in reversed(self.group):
            self._run(target, _DELETE)
        for target in self.group:
            self._run(target, (TableMerge.check, TableMerge.update, TableMerge.insert))
        self._refuse_lost_rows()

    def _refuse_lost_rows(self) -> None:
        """Rows that are missing may have been deleted with those that they were about to leave."""
        results = self.results
        if not any(merged.conflicts[ConflictKind.UPDATE_MISSING.value] for merged in results.values()):
            return
        for target in self.group:
            if target.acts_on_delete and results[target.name].delete:
                why = (
                    "Rows to update are missing, and rows that they may have referred to are deleted before."
                )
                raise deletion_acts(target.name, why)

    def _takes_freed_keys(self, target: TargetTable) -> bool:
        with apply_errors(target.name):
            return self._merge_of(target).takes_freed_keys()

    def _run(self, target: TargetTable, steps: Iterable[Callable[[TableMerge], None]]) -> None:
        with apply_errors(target.name):
            merging = self._merge_of(target)
            for step in steps:
                step(merging)

    def _merge_of(self, target: TargetTable) -> TableMerge:
        # Code of other tables' owners may have run since the last step.
        session = self.sessions.session_for(target)
        if target.oid not in self._begun:
            self._begun[target.oid] = self.begin(target, session)
        self._begun[target.oid].session = session
        return self._begun[target.oid]
