"""The changes of a row group → what a subscription must see of them, in ROUTED columns; no loop per row.

For each change, as pgoutput does for each subscription:

1. find its route (published relation, actions, target); without one, or at or before the target's applied
   LSN: nothing;
2. is the action published (R2.7)? For an UPDATE only that action counts, whatever it becomes (R4.1);
3. the row filter of the action: the old row for a DELETE, the new one for an INSERT, both for an UPDATE
   (`replay.route.filter_evaluation`);
4. leaf columns to the published relation's columns, restricted by the column list.

pgoutput does step 4 before step 3: `pgoutput_change` maps the tuples (attrmap), then evaluates the filter.
Here filters read the leaf's tuple by column name, and only changes that pass are mapped. The result is equal,
because the map reorders values by name and computes none: a filter reads the same values either way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import pyarrow as pa

from cdc_replay.arrow.arrays import Bools, Bytes, Int64s, distinct_ids, int_array, is_valid, letters
from cdc_replay.arrow.frame_schema import arrow_schema
from cdc_replay.arrow.take import take_rows
from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.frames import ROUTED, ChangeKind
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.subscription import OriginPolicy
from cdc_replay.replay.route.attribute_map import Positions, positions
from cdc_replay.replay.route.route_index import DecodedChanges, RouteIndex
from cdc_replay.replay.route.routes import Route, Routes
from cdc_replay.replay.route.tuples import LEAF, ColumnProjection
from cdc_replay.replay.route.update_transformation import update_outcomes

ROUTED_SCHEMA: Final = arrow_schema(ROUTED)
"""The columns of ROUTED in Arrow's types."""

_ACTIONS: Final = (
    PublishAction.INSERT,
    PublishAction.UPDATE,
    PublishAction.DELETE,
    PublishAction.TRUNCATE,
)
_I, _U, _D = (ord(kind.value) for kind in (ChangeKind.INSERT, ChangeKind.UPDATE, ChangeKind.DELETE))
_NOTHING: Final = 0
"""The outcome of a change that the subscription does not see."""

FILTERED_OUT: Final = "filtered_out"
TO_INSERT: Final = "updates_to_insert"
TO_DELETE: Final = "updates_to_delete"


@dataclass(frozen=True, slots=True)
class FilterResults:
    """Whether the old and the new row of each change pass the filter of its action; NULL does not (R3.1)."""

    old: Bools
    new: Bools

    @classmethod
    def all_pass(cls, count: int) -> Self:
        """Where no route has a filter."""
        return cls(np.ones(count, dtype=np.bool_), np.ones(count, dtype=np.bool_))


@dataclass(frozen=True, slots=True)
class Router:
    """The routes of one routing group, as arrays by route id; picklable.

    `route_ids` are by entry, as `RouteIndex.route_by_entry` gives them. `published` has a row per route and a
    column per kind of change, in the order of `ChangeKind`.
    """

    origin: OriginPolicy
    route_ids: Int64s
    targets: Int64s
    applied_lsns: Int64s
    published: Bools
    refusals: tuple[str | None, ...]
    finds_by_new_row: Bools
    columns: ColumnProjection
    identity: ColumnProjection
    leaves: tuple[str, ...]

    @classmethod
    def from_routes(cls, routes: Routes, origin: OriginPolicy, index: RouteIndex) -> Self:
        """For the routes of `plan_routes`, which must be among those of `index`; there must be one."""
        group_routes = routes.routes
        return cls(
            origin=origin,
            route_ids=index.route_by_entry(group_routes),
            targets=np.array([route.target.index for route in group_routes], dtype=np.int64),
            applied_lsns=np.array([route.target.applied_lsn.value for route in group_routes], dtype=np.int64),
            published=np.array([_published_kinds(route) for route in group_routes], dtype=np.bool_),
            refusals=tuple(route.refusal for route in group_routes),
            finds_by_new_row=np.array([route.finds_by_new_row for route in group_routes], dtype=np.bool_),
            columns=ColumnProjection.from_positions([_columns(route) for route in group_routes]),
            identity=ColumnProjection.from_positions([_identity(route) for route in group_routes]),
            leaves=tuple(str(route.relation.id) for route in group_routes),
        )

    def find_routes(self, changes: DecodedChanges) -> Int64s:
        """The route id of each change, -1 where it has none or must not be seen."""
        route_ids = self.route_ids[changes.entries]
        is_new = int_array(changes.rows["commit_lsn"]) > self.applied_lsns[route_ids]
        is_seen = (route_ids >= 0) & is_new
        if self.origin is OriginPolicy.NONE:
            # Only changes without an origin are sent (R8.18, R8.19). The column is set if the change's own
            # record or its commit has an origin: capture has compared the two (R8.20).
            is_seen &= ~is_valid(changes.rows["origin"])
        return np.where(is_seen, route_ids, -1)

    def emit(
        self, changes: DecodedChanges, routes: Int64s, results: FilterResults
    ) -> tuple[pa.RecordBatch, Counter[str]]:
        """What is seen of `changes` (ROUTED), and how many changes are not seen, or became something else.

        `routes` are those of `find_routes`, `results` those of their filters.

        Raises:
            SubscriberNotReady: if a row must be found by what the publisher does not send (R8.6, R8.7).
        """
        outcomes = self.outcomes(changes, routes, results)
        is_update = changes.kinds == _U
        counts = Counter(
            {
                FILTERED_OUT: int(((routes >= 0) & (outcomes == _NOTHING)).sum()),
                TO_INSERT: int((is_update & (outcomes == _I)).sum()),
                TO_DELETE: int((is_update & (outcomes == _D)).sum()),
            }
        )
        rows = np.flatnonzero(outcomes)
        return self._map_columns(changes, rows, routes[rows], outcomes[rows]), counts

    def outcomes(self, changes: DecodedChanges, routes: Int64s, results: FilterResults) -> Bytes:
        """The kind of change that the subscription sees, per change: a byte of `ChangeKind`, 0 for nothing.

        `routes` are those of `find_routes`, `results` those of their filters.
        """
        kinds, has_old = changes.kinds, changes.tuples.has_old
        passes = np.ones(len(kinds), dtype=np.bool_)
        is_insert, is_update, is_delete = (kinds == kind for kind in (_I, _U, _D))
        passes[is_insert] = results.new[is_insert]
        # R3.10: without an old tuple a DELETE is never sent.
        passes[is_delete] = (results.old & has_old)[is_delete]
        outcomes = np.where(passes, kinds, np.uint8(_NOTHING))
        old_passes = np.where(has_old, results.old, results.new)
        outcomes[is_update] = update_outcomes(old_passes[is_update], results.new[is_update])
        is_published = (routes >= 0) & self.published[routes, changes.kind_ids]
        return np.where(is_published, outcomes, np.uint8(_NOTHING))

    def _map_columns(
        self, changes: DecodedChanges, rows: Int64s, routes: Int64s, outcomes: Bytes
    ) -> pa.RecordBatch:
        tuples = changes.tuples
        finds, has_row = np.isin(outcomes, (_U, _D)), np.isin(outcomes, (_I, _U))
        self._check_sent(routes[finds & (tuples.has_old[rows] | ~self.finds_by_new_row[routes])])
        was_update, stays_update = changes.kinds[rows] == _U, outcomes == _U
        if not tuples.has_unsent and self.columns.is_whole[routes].all() and has_row[was_update].all():
            sent = changes.rows.select(["new", "new_kinds"])
            values, kinds = (sent if len(rows) == len(changes.kinds) else take_rows(sent, rows)).columns
        else:
            projected = tuples.new_rows(rows, routes, self.columns, included=has_row, fill=~stays_update)
            values, kinds = projected.lists, projected.kind_texts
        if self.identity.has_leaf:
            tuples = tuples.with_leaves(self.leaves)
        arrays = {
            "target": pa.array(self.targets[routes], pa.int32()),
            "kind": letters(outcomes),
            "transformed": pa.array(was_update & ~stays_update),
            "search_key": tuples.rows_before(rows, routes, self.identity, included=finds).lists,
            "new_key": tuples.new_rows(rows, routes, self.identity, included=has_row, fill=has_row).lists,
            "values": values,
            "kinds": kinds,
        }
        kept = changes.rows.select([name for name in ROUTED.names if name not in arrays]).take(pa.array(rows))
        arrays |= {name: kept[name] for name in kept.schema.names}
        return pa.RecordBatch.from_arrays([arrays[name] for name in ROUTED.names], schema=ROUTED_SCHEMA)

    def _check_sent(self, routes: Int64s) -> None:
        for route_id in distinct_ids(routes):
            if (refusal := self.refusals[route_id]) is not None:
                raise SubscriberNotReady(refusal, rule="R8.7")


def _published_kinds(route: Route) -> tuple[bool, ...]:
    """By kind of change, whether the route publishes it."""
    insert, update, delete, _ = (action in route.published.actions for action in _ACTIONS)
    return insert, update, delete, route.publishes_truncate


def _columns(route: Route) -> tuple[Positions, int]:
    """Where the leaf's tuple has the target's columns that these changes bring."""
    sent = [name if name in route.columns else None for name in route.target.columns]
    return positions(route.relation, sent), len(route.relation.columns)


def _identity(route: Route) -> tuple[Positions, int]:
    key = positions(route.relation, route.target.identity)
    return (*key, LEAF) if route.target.is_per_leaf else key, len(route.relation.columns)
