"""A batch of CHANGES → what a subscription must see of it, in ROUTED columns; no Python loop per row.

For each change, as pgoutput does for each subscription:

1. find its route (published relation, actions, target); without one, or at or before the target's applied
   LSN: nothing;
2. is the action published (R2.7)? For an UPDATE only that action counts, whatever it becomes (R4.1);
3. the row filter of the action: the old row for a DELETE, the new one for an INSERT, both for an UPDATE;
4. leaf columns to the published relation's columns, restricted by the column list.

The answers of step 3 are given: Spark or PostgreSQL evaluates the filters (`replay.route.filter_evaluation`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import pyarrow as pa

from cdc_replay.arrow.arrays import Bools, Bytes, Int64s, ascii_bytes, int_array, is_valid
from cdc_replay.arrow.take import take_rows
from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.frames import ROUTED, ChangeKind
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.subscription import OriginPolicy
from cdc_replay.replay.route.attribute_map import Positions, positions
from cdc_replay.replay.route.routes import Route, Routes
from cdc_replay.replay.route.truncate import truncate_is_sent
from cdc_replay.replay.route.tuples import LEAF, ColumnProjection, Tuples
from cdc_replay.replay.route.update_transformation import update_outcomes

_ARROW_TYPES: Final = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "array<string>": pa.list_(pa.string()),
}
ROUTED_SCHEMA: Final = pa.schema([(name, _ARROW_TYPES[kind]) for name, kind in ROUTED.columns])
"""The columns of ROUTED in Arrow's types."""

_I, _U, _D, _T = (ord(kind.value) for kind in ChangeKind)
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
class RouteIndex:
    """Where routes begin: a number for each relation version under each catalog version; picklable.

    Subscriptions have routes of their own, and these numbers in common. For TRUNCATE a relation has one more
    for each catalog version: any of its relation versions serves.
    """

    rows: _PairIndex
    truncates: _PairIndex
    count: int

    @classmethod
    def of(cls, routes: Iterable[Route]) -> Self:
        """Where these routes begin; there must be one."""
        items = list(routes)
        rows = dict.fromkeys((each.relation.version, each.catalog_version) for each in items)
        truncates = dict.fromkeys((each.relation.id, each.catalog_version) for each in items)
        return cls(
            rows=_PairIndex.of({pair: number for number, pair in enumerate(rows)}),
            truncates=_PairIndex.of({pair: number for number, pair in enumerate(truncates, len(rows))}),
            count=len(rows) + len(truncates),
        )

    def found(self, changes: pa.RecordBatch) -> Int64s:
        """The number of each change's place, -1 where no route begins."""
        catalogs, is_truncate = int_array(changes["catalog_version"]), ascii_bytes(changes["kind"]) == _T
        found = self.rows.find(int_array(changes["relation_version"]), catalogs)
        if is_truncate.any():
            truncates = self.truncates.find(int_array(changes["relation_id"]), catalogs)
            found = np.where(is_truncate, truncates, found)
        return found

    def entries(self, routes: Sequence[Route]) -> Int64s:
        """The number of each route's place, but for TRUNCATEs."""
        return self.rows.find(*_pairs((each.relation.version, each.catalog_version) for each in routes))

    def route_by_entry(self, routes: Sequence[Route]) -> Int64s:
        """By place, and at last for none: the number of the route, -1 where there is none."""
        found = np.full(self.count + 1, -1, dtype=np.int64)
        route_numbers = [each.number for each in routes]
        found[self.entries(routes)] = route_numbers
        pairs = _pairs((each.relation.id, each.catalog_version) for each in routes)
        found[self.truncates.find(*pairs)] = route_numbers
        return found


@dataclass(frozen=True, slots=True)
class Router:
    """The routes of one subscription, as arrays; picklable.

    `routes` are their numbers by place, as `RouteIndex.leads_to` gives them. `published` has a row per route
    and a column per kind of change, in the order of `ChangeKind`.
    """

    origin: OriginPolicy
    routes: Int64s
    targets: Int64s
    applied_lsns: Int64s
    published: Bools
    refusals: tuple[str | None, ...]
    columns: ColumnProjection
    identity: ColumnProjection
    leaves: tuple[str, ...]

    @classmethod
    def of(cls, routes: Routes, origin: OriginPolicy, places: RouteIndex) -> Self:
        """For the routes of `plan_routes`, which begin at `places`; there must be one."""
        items = routes.routes
        return cls(
            origin=origin,
            routes=places.route_by_entry(items),
            targets=np.array([each.target.index for each in items], dtype=np.int64),
            applied_lsns=np.array([each.target.applied_lsn.value for each in items], dtype=np.int64),
            published=np.array([_published(each) for each in items], dtype=np.bool_),
            refusals=tuple(each.refusal for each in items),
            columns=ColumnProjection.of([_columns(each) for each in items]),
            identity=ColumnProjection.of([_identity(each) for each in items]),
            leaves=tuple(str(each.relation.id) for each in items),
        )

    def routes_of(self, changes: pa.RecordBatch, places: Int64s) -> Int64s:
        """The number of each change's route, -1 where it has none or must not be seen."""
        routes = self.routes[places]
        is_new = int_array(changes["commit_lsn"]) > self.applied_lsns[routes]
        seen = (routes >= 0) & is_new
        if self.origin is OriginPolicy.NONE:
            # Only what has no origin is sent (R8.18, R8.19). The column tells of the change's own record and
            # of the commit's: capture has compared the two (R8.20).
            seen &= ~is_valid(changes["origin"])
        return np.where(seen, routes, -1)

    def routed(
        self, changes: pa.RecordBatch, tuples: Tuples, routes: Int64s, verdicts: FilterResults
    ) -> tuple[pa.RecordBatch, Counter[str]]:
        """What is seen of `changes` (ROUTED), and how many changes were not, or became something else.

        Args:
            changes: CHANGES.
            tuples: theirs.
            routes: what `routes_of` says of them.
            verdicts: of their filters.

        Raises:
            SubscriberNotReady: if a row must be found by what the publisher does not send (R8.6, R8.7).
        """
        kinds = ascii_bytes(changes["kind"])
        outcomes = self._outcomes(kinds, routes, tuples, verdicts)
        is_update = kinds == _U
        counts = Counter(
            {
                FILTERED_OUT: int(((routes >= 0) & (outcomes == _NOTHING)).sum()),
                TO_INSERT: int((is_update & (outcomes == _I)).sum()),
                TO_DELETE: int((is_update & (outcomes == _D)).sum()),
            }
        )
        rows = np.flatnonzero(outcomes)
        return self._columns(changes, tuples, rows, routes[rows], outcomes[rows]), counts

    def _outcomes(self, kinds: Bytes, routes: Int64s, tuples: Tuples, verdicts: FilterResults) -> Bytes:
        """The kind of change that the subscription sees, per change."""
        outcomes = np.full(len(kinds), _NOTHING, dtype=np.uint8)
        # R3.10: without an old tuple a DELETE is never sent.
        passes = {
            _I: verdicts.new,
            _D: verdicts.old & tuples.has_old,
            _T: np.ones(len(kinds), dtype=np.bool_),
        }
        for number, kind in enumerate((_I, _U, _D, _T)):
            asked = (kinds == kind) & (routes >= 0)
            asked &= self.published[routes, number]
            if kind == _U:
                old = np.where(tuples.has_old, verdicts.old, verdicts.new)
                outcomes[asked] = update_outcomes(old[asked], verdicts.new[asked])
            else:
                outcomes[asked & passes[kind]] = kind
        return outcomes

    def _columns(
        self, changes: pa.RecordBatch, tuples: Tuples, rows: Int64s, routes: Int64s, outcomes: Bytes
    ) -> pa.RecordBatch:
        finds, has_row = np.isin(outcomes, (_U, _D)), np.isin(outcomes, (_I, _U))
        self._check_sent(routes[finds])
        kept = changes.select(["commit_lsn", "commit_time", "seq", "truncate_flags", "kind"])
        kept = kept.take(pa.array(rows))
        was_update = ascii_bytes(kept["kind"]) == _U
        stays_update = outcomes == _U
        if not tuples.has_unsent and self.columns.is_whole[routes].all() and has_row[was_update].all():
            seen = changes.select(["new", "new_kinds"])
            values, kinds = (seen if len(rows) == len(changes) else take_rows(seen, rows)).columns
        else:
            picked = tuples.new_rows(rows, routes, self.columns, wanted=has_row, fill=~stays_update)
            values, kinds = picked.lists, picked.kind_texts
        if self.identity.has_leaf:
            tuples = tuples.with_leaves(self.leaves)
        search_key = tuples.rows_before(rows, routes, self.identity, wanted=finds).lists
        new_key = tuples.new_rows(rows, routes, self.identity, wanted=has_row, fill=has_row).lists
        columns = {
            "target": pa.array(self.targets[routes], pa.int32()),
            "kind": _letters(outcomes),
            "transformed": pa.array(was_update & ~stays_update),
            "search_key": search_key,
            "new_key": new_key,
            "values": values,
            "kinds": kinds,
        }
        arrays = [
            columns.get(name, kept[name] if name in kept.schema.names else None) for name in ROUTED.names
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=ROUTED_SCHEMA)

    def _check_sent(self, routes: Int64s) -> None:
        for route in np.unique(routes):
            if (refusal := self.refusals[route]) is not None:
                raise SubscriberNotReady(refusal, rule="R8.7")


@dataclass(frozen=True, slots=True)
class _PairIndex:
    """Numbers by two keys: `numbers[i, j]` for `firsts[i]` and `seconds[j]`, both ascending; -1 for none."""

    firsts: Int64s
    seconds: Int64s
    numbers: Int64s

    @classmethod
    def of(cls, entries: Mapping[tuple[int, int], int]) -> Self:
        """Of a mapping that is not empty."""
        firsts = np.unique(np.array([first for first, _ in entries], dtype=np.int64))
        seconds = np.unique(np.array([second for _, second in entries], dtype=np.int64))
        found = np.full((len(firsts), len(seconds)), -1, dtype=np.int64)
        for (first, second), number in entries.items():
            found[np.searchsorted(firsts, first), np.searchsorted(seconds, second)] = number
        return cls(firsts, seconds, found)

    def find(self, firsts: Int64s, seconds: Int64s) -> Int64s:
        """The numbers of the pairs."""
        at = [
            np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            for known, wanted in ((self.firsts, firsts), (self.seconds, seconds))
        ]
        is_known = (self.firsts[at[0]] == firsts) & (self.seconds[at[1]] == seconds)
        return np.where(is_known, self.numbers[at[0], at[1]], -1)


def _pairs(pairs: Iterable[tuple[int, int]]) -> tuple[Int64s, Int64s]:
    firsts, seconds = zip(*pairs, strict=True)
    return np.array(firsts, dtype=np.int64), np.array(seconds, dtype=np.int64)


def _published(item: Route) -> tuple[bool, ...]:
    actions = item.published.actions
    rows = (PublishAction.INSERT, PublishAction.UPDATE, PublishAction.DELETE)
    return (*(action in actions for action in rows), truncate_is_sent(item.published))


def _columns(item: Route) -> tuple[Positions, int]:
    """Where the leaf's tuple has the target's columns that these changes bring."""
    wanted = [name if name in item.columns else None for name in item.target.columns]
    return positions(item.relation, wanted), len(item.relation.columns)


def _identity(item: Route) -> tuple[Positions, int]:
    key = positions(item.relation, item.target.identity)
    return (*key, LEAF) if item.target.is_per_leaf else key, len(item.relation.columns)


def _letters(kinds: Bytes) -> pa.StringArray:
    offsets = np.arange(len(kinds) + 1, dtype=np.int32)
    return pa.StringArray.from_buffers(
        len(kinds), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(kinds))
    )
