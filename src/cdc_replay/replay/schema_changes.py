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
| other types of the columns that rows are found by  | the same key may be written in another way          |
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping

from cdc_replay.changelog.queries import SentChanges
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.replay.route.routes import Route, Routes
from cdc_replay.replay.window_end import EndReason, Limit
from cdc_replay.subscriber.target_tables import TargetTable


def schema_limits(
    window: Window, routes: Routes, targets: Mapping[QualifiedName, TargetTable]
) -> Iterator[Limit]:
    """What has columns that a target lacks, and the relation versions that cannot be folded together.

    A table that was copied in the meantime is ahead of the others: only its later changes count.
    """
    by_table: dict[int, list[Route]] = {}
    for route in routes.routes:
        by_table.setdefault(route.target.index, []).append(route)
    for table_routes in by_table.values():
        since = Window(max(table_routes[0].target.applied_lsn, window.after), window.upto)
        unfit = {route.route_id: route for route in table_routes if _lacks_columns(route, targets)}
        if unfit:
            fitting = (route for route in table_routes if route.route_id not in unfit)
            versions = frozenset(route.relation.version for route in unfit.values())
            yield Limit(EndReason.MISSING_COLUMN, since, versions, _unfit_truncates(unfit.values(), fitting))
        for versions in _foldable_versions(table_routes):
            yield Limit(EndReason.UNFOLDABLE, since, versions)


def already_applied(limits: Iterable[Limit], ends: Mapping[Limit, Lsn]) -> frozenset[int]:
    """The relation versions that do not fit their tables, whose changes the tables have already."""
    versions: set[int] = set()
    for limit in limits:
        if limit.reason is EndReason.MISSING_COLUMN and ends[limit] == limit.window.upto:
            versions |= limit.versions
    return frozenset(versions)


def _unfit_truncates(unfit: Iterable[Route], fitting: Iterable[Route]) -> SentChanges | None:
    """The TRUNCATEs that no fitting route takes: a native worker opens the table, and stops (R8.1)."""
    truncated = {route.truncate for route in unfit if route.publishes_truncate}
    truncated.difference_update(route.truncate for route in fitting)
    return SentChanges(truncated=frozenset(truncated)) if truncated else None


def _foldable_versions(routes: Iterable[Route]) -> Iterator[frozenset[int]]:
    """Relation versions of a target that can be folded together, where there are several such groups.

    Those of a leaf agree on whether rows can be found, and on the columns, where rows are found by all of
    them. Those of all leaves, and of tables that took their place, agree on the types of these columns.
    """
    groups: dict[RelationId | None, dict[Hashable, set[int]]] = {}
    for route in routes:
        columns = None if route.target.is_keyed else route.columns
        for leaf, kind in (
            (route.relation.id, (columns, route.refusal is None)),
            (None, _identity_types(route)),
        ):
            groups.setdefault(leaf, {}).setdefault(kind, set()).add(route.relation.version)
    for by_kind in groups.values():
        if len(by_kind) > 1:
            yield from map(frozenset, by_kind.values())


def _identity_types(route: Route) -> frozenset[tuple[str, int, int]]:
    columns = (column for column in route.relation.columns if column.name in route.target.identity)
    return frozenset((column.name, column.type_oid, column.typmod) for column in columns)


def _lacks_columns(route: Route, targets: Mapping[QualifiedName, TargetTable]) -> bool:
    target = targets.get(route.target.name)
    return target is not None and not set(route.columns) <= {column.name for column in target.columns}
