"""Windows in which a table changes its columns: how far the subscriber's tables can follow.

A native worker applies transactions in order, and stops at the first one that sends a column which its table
does not have (R8.1), until somebody alters the table. A window with both shapes would fit neither the old
table nor the new one:

    publisher     … id, a     ALTER TABLE t RENAME a TO b     … id, b
    subscriber    t (id, a)  ─────────────────▶ stops here; continues once it has t (id, b)

So where a shape does not fit, the window ends before the first transaction that has it. Earlier changes are
applied, and the error names what is missing for the rest.

A window also ends, and another one follows, where changes of one table cannot be folded together:

| before and after the change of the table           | because                                             |
|----------------------------------------------------|-----------------------------------------------------|
| no key on the subscriber, and other columns        | rows are found by all columns sent (R8.10)          |
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

    The window must end at `last_lsn`: before a column that a target lacks if `has_missing_column`, else
    before a change that cannot be folded with the earlier ones. `already_applied` are relation versions that
    do not fit, but whose changes the tables have already: a table that was copied in the meantime is ahead of
    the others.
    """

    last_lsn: Lsn
    has_missing_column: bool
    already_applied: frozenset[int]


def fit_schema(
    change_log: ChangeLog, window: Window, routes: Routes, targets: Mapping[QualifiedName, TargetTable]
) -> SchemaFit:
    """Where the window must end.

    That is `window.after` if its first transaction sends a column that a target does not have.
    """
    last_fitting, last_foldable, already_applied = window.upto, window.upto, set[int]()
    by_table: dict[int, list[Route]] = {}
    for route in routes.routes:
        by_table.setdefault(route.target.index, []).append(route)
    for table_routes in by_table.values():
        since = Window(max(table_routes[0].target.applied_lsn, window.after), window.upto)
        if unfit_versions := {
            route.relation.version for route in table_routes if _lacks_columns(route, targets)
        }:
            end = change_log.last_lsn_without(since, unfit_versions)
            last_fitting = min(last_fitting, end)
            if end == window.upto:
                already_applied |= unfit_versions
        for kinds in _kinds_by_leaf(table_routes):
            last_foldable = min(last_foldable, _end_of_first(change_log, since, kinds))
    return SchemaFit(
        min(last_fitting, last_foldable), last_fitting <= last_foldable, frozenset(already_applied)
    )


def _kinds_by_leaf(routes: Iterable[Route]) -> Iterator[Sequence[Set[int]]]:
    """Relation versions that can be folded together, for each leaf with several such groups.

    They agree on whether rows can be found, and on the columns, where rows are found by all of them.
    """
    kinds: dict[RelationId, dict[Hashable, set[int]]] = {}
    for route in routes:
        columns = None if route.target.is_keyed else route.columns
        leaf_kinds = kinds.setdefault(route.relation.id, {})
        leaf_kinds.setdefault((columns, route.refusal is None), set()).add(route.relation.version)
    return (tuple(leaf_kinds.values()) for leaf_kinds in kinds.values() if len(leaf_kinds) > 1)


def _end_of_first(change_log: ChangeLog, window: Window, kinds: Iterable[Set[int]]) -> Lsn:
    """The end of the changes that are of the first kind; a transaction with several kinds stays whole."""
    ends = [change_log.last_lsn_without(window, versions) for versions in kinds]
    return min((end for end in ends if end > window.after), default=window.upto)


def _lacks_columns(route: Route, targets: Mapping[QualifiedName, TargetTable]) -> bool:
    target = targets.get(route.target.name)
    return target is not None and not set(route.columns) <= {column.name for column in target.columns}
