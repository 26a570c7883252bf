"""Windows in which a table changes its columns: how far the subscriber's tables can follow.

A native worker applies one transaction after the other, and stops at the first one that sends a column which
its table does not have (R8.1). Somebody alters the table, and it goes on. A window that has both shapes would
fit neither the old table nor the new one:

    publisher     … id, a     ALTER TABLE t RENAME a TO b     … id, b
    subscriber    t (id, a)  ─────────────────▶ stops here; with t (id, b) then, it goes on

So where a shape does not fit, the window ends before the first transaction that has it. What is before is
applied as ever, and the error says what is missing for the rest.

A window also ends, and another one follows, where changes of one table cannot be folded together:

| before and after the change of the table           | because                                             |
|----------------------------------------------------|-----------------------------------------------------|
| no key on the subscriber, and other columns        | rows are found by all that is sent of them (R8.10)  |
| rows can be found, and cannot (R8.6, R8.7)         | what can be applied is applied, as natively         |
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.replay.route.routes import Route, Routes
from cdc_replay.subscriber.target_tables import TargetTable


@dataclass(frozen=True, slots=True)
class SchemaFit:
    """How far a window's shapes fit its tables, and each other.

    The window must end at `upto`: before a column that a target lacks where `is_obstructed`, else before a
    change that cannot be folded with those before it. `stale` are relation versions that do not fit, but
    whose changes the tables have had already: one that was copied in the meantime is ahead of the others.
    """

    upto: Lsn
    is_obstructed: bool
    stale: frozenset[int]


def fit(
    change_log: ChangeLog, window: Window, routes: Routes, targets: Mapping[QualifiedName, TargetTable]
) -> SchemaFit:
    """Where the window must end.

    That is `window.after` where its first transaction sends a column that a target does not have.
    """
    lacking, folded, stale = window.upto, window.upto, set()
    by_table: dict[int, list[Route]] = {}
    for route in routes.routes:
        by_table.setdefault(route.target.index, []).append(route)
    for of_table in by_table.values():
        since = Window(max(of_table[0].target.applied_lsn, window.after), window.upto)
        if unfit := {route.relation.version for route in of_table if _lacks_columns(route, targets)}:
            end = change_log.last_lsn_without(since, unfit)
            lacking = min(lacking, end)
            if end == window.upto:
                stale |= unfit
        for kinds in _kinds_by_leaf(of_table):
            folded = min(folded, _end_of_first(change_log, since, kinds))
    return SchemaFit(min(lacking, folded), lacking <= folded, frozenset(stale))


def _kinds_by_leaf(routes: Iterable[Route]) -> Iterator[Sequence[Set[int]]]:
    """The relation versions of each leaf that has several kinds of them, by kind.

    Changes must have the columns in common, where rows are found by all of them, and whether their rows can
    be found.
    """
    kinds: dict[RelationId, dict[Hashable, set[int]]] = {}
    for route in routes:
        columns = None if route.target.is_keyed else route.columns
        of_leaf = kinds.setdefault(route.relation.id, {})
        of_leaf.setdefault((columns, route.refusal is None), set()).add(route.relation.version)
    return (tuple(of_leaf.values()) for of_leaf in kinds.values() if len(of_leaf) > 1)


def _end_of_first(change_log: ChangeLog, window: Window, kinds: Iterable[Set[int]]) -> Lsn:
    """Up to where all changes are of the kind of the first; a transaction that has several stays whole."""
    ends = [change_log.last_lsn_without(window, versions) for versions in kinds]
    return min((end for end in ends if end > window.after), default=window.upto)


def _lacks_columns(route: Route, targets: Mapping[QualifiedName, TargetTable]) -> bool:
    target = targets.get(route.target.name)
    return target is not None and not set(route.columns) <= {column.name for column in target.columns}
