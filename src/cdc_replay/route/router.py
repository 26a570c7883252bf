"""CHANGES → ROUTED: filters, transformation, mapping and lists in PostgreSQL's order.

For each change, as pgoutput does for each subscription:

1. find its route (published relation, actions, target); without one, or at or before the target's applied
   LSN: nothing;
2. is the action published (R2.7)? For an UPDATE only that action counts, whatever it becomes (R4.1);
3. the row filter of the action: the old row for a DELETE, the new one for an INSERT, both for an UPDATE;
4. leaf columns to the published relation's columns, restricted by the column list.

Everything is a Spark SQL expression, but for filters that only PostgreSQL can evaluate exactly: their answers
are brought as arrays of booleans before step 3.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F

from cdc_replay.filters.compile import CompiledFilter, ServerFilter, compile_any
from cdc_replay.filters.server import ServerCheck, evaluate_on_server
from cdc_replay.filters.spark import filter_column
from cdc_replay.model.change import ROUTED, ChangeKind
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.subscription import OriginPolicy
from cdc_replay.route.attribute_map import Positions, kinds_at, positions, values_at
from cdc_replay.route.origin import origin_is_wanted
from cdc_replay.route.per_route import per_route
from cdc_replay.route.routes import Route, Routes
from cdc_replay.route.truncate import truncate_is_sent
from cdc_replay.route.update_transformation import filled_kinds, filled_values, update_outcome

_LOOKUP = (
    "route_relation_id bigint, route_relation_version bigint, route_catalog_version bigint, route int,"
    " target int, applied_lsn bigint, inserts boolean, updates boolean, deletes boolean, truncates boolean"
)
_KIND_OF = {
    PublishAction.INSERT: ChangeKind.INSERT,
    PublishAction.UPDATE: ChangeKind.UPDATE,
    PublishAction.DELETE: ChangeKind.DELETE,
}
_TRUNCATE_VERSION = 0
"""TRUNCATE does not depend on the relation's version; its rows look up this one."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The frame, and its counts, which are there once an action has run on it.

    `counts` holds `filtered_out`, `updates_to_insert` and `updates_to_delete`.
    """

    changes: DataFrame
    counts: Observation


def route(changes: DataFrame, routes: Routes, *, origin: OriginPolicy, publisher_dsn: str) -> Routed:
    """What of `changes` (CHANGES) the subscription must see (ROUTED), in the published relations' columns.

    Args:
        changes: decoded changes of the window.
        routes: from `plan_routes`; must not be empty.
        origin: the subscription's option.
        publisher_dsn: where filters are evaluated that Spark cannot answer exactly.
    """
    filters = _Filters(routes)
    found = _with_route(changes, routes).where(origin_is_wanted(origin))
    found = found.withColumn("new_filled", filled_values(F.col("old"), F.col("new"), F.col("new_kinds")))
    if filters.checks:
        found = evaluate_on_server(
            found,
            filters.checks,
            publisher_dsn,
            rows={"old": "old_verdicts", "new_filled": "new_verdicts"},
        )
    counts = Observation()
    decided = found.withColumn("outcome", _outcome(routes, filters)).observe(
        counts,
        F.count_if(F.col("outcome").isNull()).alias("filtered_out"),
        F.count_if(_became(ChangeKind.INSERT)).alias("updates_to_insert"),
        F.count_if(_became(ChangeKind.DELETE)).alias("updates_to_delete"),
    )
    sent = decided.where(F.col("outcome").isNotNull())
    return Routed(_published_columns(sent, routes), counts)


def _with_route(changes: DataFrame, routes: Routes) -> DataFrame:
    rows = []
    for item in routes.routes:
        actions = item.published.actions
        published = [PublishAction.INSERT in actions, PublishAction.UPDATE in actions]
        published += [PublishAction.DELETE in actions, truncate_is_sent(item.published)]
        common = (item.number, item.target.index, item.target.applied_lsn.value, *published)
        rows.append((item.relation.id, item.relation.version, item.catalog_version, *common))
    # One row per leaf and catalog version is enough for TRUNCATE; any relation version serves.
    of_leaf = {(row[0], row[2]): (row[0], _TRUNCATE_VERSION, *row[2:]) for row in rows}
    lookup = changes.sparkSession.createDataFrame([*rows, *of_leaf.values()], _LOOKUP)
    version = F.when(F.col("kind") == "T", F.lit(_TRUNCATE_VERSION)).otherwise(F.col("relation_version"))
    return changes.join(
        F.broadcast(lookup),
        (F.col("relation_id") == F.col("route_relation_id"))
        & (version == F.col("route_relation_version"))
        & (F.col("catalog_version") == F.col("route_catalog_version")),
    ).where(F.col("commit_lsn") > F.col("applied_lsn"))


class _Filters:
    """The effective filters of the routes: compiled once each, those for the server numbered."""

    def __init__(self, routes: Routes) -> None:
        self._compiled: dict[Hashable, CompiledFilter] = {}
        users: dict[Hashable, list[tuple[Route, PublishAction]]] = {}
        for item in routes.routes:
            for action, filters in item.published.filters.items():
                if filters is None or action not in item.published.actions:
                    continue
                key = self.group(item, action)
                if key not in self._compiled:
                    self._compiled[key] = compile_any(filters, item.published.table)
                users.setdefault(key, []).append((item, action))
        on_server = {
            key: compiled for key, compiled in self._compiled.items() if isinstance(compiled, ServerFilter)
        }
        self._numbers = {key: number for number, key in enumerate(on_server)}
        self.checks = tuple(
            # Only rows that PostgreSQL would ask about: an error of the filter elsewhere is not ours to find.
            ServerCheck.of(
                compiled,
                users[key][0][0].relation.column_names,
                number=self._numbers[key],
                routes=[item.number for item, _ in users[key]],
                kinds=[_KIND_OF[action] for _, action in users[key]],
            )
            for key, compiled in on_server.items()
        )

    def passes(self, item: Route, action: PublishAction, row: str, verdicts: str) -> Column:
        """Whether the row in the array column `row` passes the route's filter for `action`; never NULL."""
        key = self.group(item, action)
        if key is None or action not in item.published.actions:
            return F.lit(key is None)
        compiled = self._compiled[key]
        if isinstance(compiled, ServerFilter):
            return F.coalesce(F.col(verdicts)[self._numbers[key]], F.lit(False))
        held = item.relation.column_names

        def value_of(name: str) -> Column:
            return F.col(row)[held.index(name)] if name in held else F.lit(None).cast("string")

        return F.coalesce(filter_column(compiled, value_of), F.lit(False))

    @staticmethod
    def group(item: Route, action: PublishAction) -> Hashable:
        """What the expression for `action` depends on: None without a filter."""
        filters = item.published.filters[action]
        if filters is None:
            return None
        # The same trees mean the same only for the same table, with the same columns at the same positions.
        trees = tuple(each.node_tree for each in filters)
        is_asked = action in item.published.actions
        return (
            trees,
            is_asked,
            item.published.table.id,
            item.published.table.columns,
            item.relation.column_names,
        )


def _outcome(routes: Routes, filters: _Filters) -> Column:
    """The kind of change that the subscription sees; NULL for nothing."""

    def passes(action: PublishAction, row: str, verdicts: str) -> Column:
        return per_route(
            routes.routes,
            number=lambda item: item.number,
            key=lambda item: filters.group(item, action),
            build=lambda item: filters.passes(item, action, row, verdicts),
        )

    kind = F.col("kind")
    new_passes = passes(PublishAction.UPDATE, "new_filled", "new_verdicts")
    old_passes = F.when(F.col("old").isNull(), new_passes).otherwise(
        passes(PublishAction.UPDATE, "old", "old_verdicts")
    )
    inserted = F.col("inserts") & passes(PublishAction.INSERT, "new_filled", "new_verdicts")
    # R3.10: without an old tuple a DELETE is never sent.
    deleted = (
        F.col("deletes") & F.col("old").isNotNull() & passes(PublishAction.DELETE, "old", "old_verdicts")
    )
    return (
        F.when((kind == "I") & inserted, F.lit("I"))
        .when((kind == "D") & deleted, F.lit("D"))
        .when((kind == "U") & F.col("updates"), update_outcome(old_passes, new_passes))
        .when((kind == "T") & F.col("truncates"), F.lit("T"))
    )


def _became(kind: ChangeKind) -> Column:
    return (F.col("kind") == ChangeKind.UPDATE.value) & (F.col("outcome") == kind.value)


def _published_columns(sent: DataFrame, routes: Routes) -> DataFrame:
    stays_update = F.col("outcome") == "U"
    has_new, has_old = F.col("outcome").isin("I", "U"), F.col("outcome").isin("U", "D")
    filled = filled_kinds(F.col("old"), F.col("old_kinds"), F.col("new_kinds"))
    row = F.when(stays_update, F.col("new")).otherwise(F.col("new_filled"))
    row_kinds = F.when(stays_update, F.col("new_kinds")).otherwise(filled)
    search_row = F.coalesce(F.col("old"), F.col("new_filled"))
    no_array = F.lit(None).cast("array<string>")

    def published(item: Route) -> tuple[str | None, ...]:
        return tuple(name if name in item.columns else None for name in item.target.columns)

    columns = {
        "kind": F.col("outcome"),
        "transformed": (F.col("kind") == "U") & ~stays_update,
        "search_key": F.when(has_old, _search_key(routes, search_row)).otherwise(no_array),
        "new_key": F.when(has_new, _identity(routes, F.col("new_filled"))).otherwise(no_array),
        "values": F.when(has_new, _mapped(routes, values_at, row, published)).otherwise(no_array),
        "kinds": F.when(has_new, _mapped(routes, kinds_at, row_kinds, published)),
    }
    return sent.select(*(columns.get(name, F.col(name)).alias(name) for name in ROUTED.names))


def _mapped(
    routes: Routes,
    build: Callable[..., Column],
    source: Column,
    columns_of: Callable[[Route], Sequence[str | None]],
) -> Column:
    """The leaf's array or kinds string, in the order of the columns of `columns_of`; None: not sent."""

    def shape(item: Route) -> tuple[Positions, int]:
        return positions(item.relation, columns_of(item)), len(item.relation.columns)

    return per_route(
        routes.routes,
        number=lambda item: item.number,
        key=shape,
        build=lambda item: build(source, *shape(item)),
    )


def _identity(routes: Routes, source: Column) -> Column:
    key = _mapped(routes, values_at, source, lambda item: item.target.identity)
    per_leaf = [table.index for table in routes.tables if table.is_per_leaf]
    if not per_leaf:
        return key
    with_leaf = F.concat(key, F.array(F.col("relation_id").cast("string")))
    return F.when(F.col("target").isin(per_leaf), with_leaf).otherwise(key)


def _search_key(routes: Routes, source: Column) -> Column:
    """The identity columns of the row to find, or an error where the publisher does not send them (R8.7)."""
    refused = [item for item in routes.routes if item.refusal is not None]
    key = _identity(routes, source)
    if not refused:
        return key
    refusal = per_route(
        refused,
        number=lambda item: item.number,
        key=lambda item: item.refusal,
        build=lambda item: F.raise_error(F.lit(item.refusal)).cast("array<string>"),
    )
    return F.when(F.col("route").isin([item.number for item in refused]), refusal).otherwise(key)
