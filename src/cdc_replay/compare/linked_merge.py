"""The order in which tables are merged that foreign keys link, as in a window (`replay/apply/linked_tables`).

P is referenced, C refers to it, and the triggers of the foreign key fire in replicating sessions:

| order                | steps                                       | refused if                            |
|----------------------|---------------------------------------------|---------------------------------------|
| add before removing  | P update, insert; C delete, update, insert; | a new row of P needs a value of a row |
|                      | P delete                                    | that is deleted last                  |
| remove before adding | C delete; P delete; P update, insert;       | a row of C leaves one of P that is    |
|                      | C update, insert                            | deleted, without ON DELETE            |

The first is tried within a savepoint. Rows are compared again in each step, so a row that a foreign key has
deleted or changed meanwhile gets its values all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from cdc_replay.compare.merge import Merged, delete_surplus, merge
from cdc_replay.compare.staging import StagedRows
from cdc_replay.errors import ApplyConflict
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.as_owner import TargetSessions
from cdc_replay.subscriber.firing_foreign_keys import referenced_tables


def merge_linked(
    connection: Connection, sessions: TargetSessions, group: Sequence[StagedRows]
) -> dict[QualifiedName, Merged]:
    """Merge a group of `group_tables`; returns what changed, by table.

    Raises:
        ApplyConflict, MissingPrivilege, SubscriberNotReady, ServerUnavailable: as `merge`.
    """
    targets = [staged.pair.target for staged in group]
    if not referenced_tables(targets) & {target.oid for target in targets}:
        return {
            staged.pair.name: merge(connection, sessions.session_for(staged.pair.target), staged)
            for staged in group
        }
    for target in targets:
        sessions.session_for(target)  # what it creates must outlive the savepoint
    with contextlib.suppress(ApplyConflict), connection.transaction():
        return _merge_in_order(connection, sessions, group, removes_first=False)
    sessions.confirm()  # the locks that it took after the savepoint are gone
    return _merge_in_order(connection, sessions, group, removes_first=True)


def _merge_in_order(
    connection: Connection, sessions: TargetSessions, group: Sequence[StagedRows], *, removes_first: bool
) -> dict[QualifiedName, Merged]:
    merged = {staged.pair.name: Merged() for staged in group}
    referenced = referenced_tables(staged.pair.target for staged in group)
    removed = [staged for staged in group if removes_first or staged.pair.target.oid in referenced]

    def remove() -> None:
        for staged in reversed(removed):
            session = sessions.session_for(staged.pair.target)
            merged[staged.pair.name] += delete_surplus(connection, session, staged)

    if removes_first:
        remove()
    for staged in group:
        session = sessions.session_for(staged.pair.target)
        deletes = removes_first or staged not in removed
        merged[staged.pair.name] += merge(connection, session, staged, deletes=deletes)
    if not removes_first:
        remove()
    return merged
