"""A row group's changes, with what all routing groups share of their routing: the entry of each change.

An *entry* is a relation version under one catalog version, or a relation under one for TRUNCATEs. Routing
groups have routes of their own, and entries in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from cdc_replay.arrow.arrays import Bytes, Int64s, ascii_bytes, int_array
from cdc_replay.model.frames import ChangeKind
from cdc_replay.replay.route.filter_input import SharedInputs
from cdc_replay.replay.route.routes import Route
from cdc_replay.replay.route.tuples import Tuples

if TYPE_CHECKING:
    import pyarrow as pa

_T: Final = ord(ChangeKind.TRUNCATE.value)
_KIND_IDS: Final = np.zeros(256, dtype=np.int64)
_KIND_IDS[[ord(kind.value) for kind in ChangeKind]] = np.arange(len(ChangeKind))


@dataclass(frozen=True, slots=True)
class DecodedChanges:
    """A row group's changes (CHANGES), and what the routing of each group needs of them, computed once.

    `kinds` are the bytes of `ChangeKind`, `kind_ids` the positions in it. `entries` are those of a
    `RouteIndex`, -1 for none.
    """

    rows: pa.RecordBatch
    tuples: Tuples
    kinds: Bytes
    kind_ids: Int64s
    entries: Int64s
    filter_inputs: SharedInputs

    @classmethod
    def from_batch(cls, rows: pa.RecordBatch, index: RouteIndex) -> Self:
        """Of a batch of CHANGES."""
        kinds, tuples = ascii_bytes(rows["kind"]), Tuples.from_changes(rows)
        entries = index.lookup(rows, kinds)
        return cls(rows, tuples, kinds, _KIND_IDS[kinds], entries, SharedInputs(tuples))


@dataclass(frozen=True, slots=True)
class RouteIndex:
    """The entries of several groups' routes; picklable.

    Any relation version of a relation serves as the route of its TRUNCATEs.
    """

    rows: _PairIndex
    truncates: _PairIndex
    count: int

    @classmethod
    def from_routes(cls, routes: Iterable[Route]) -> Self:
        """Of these routes; there must be one."""
        all_routes = list(routes)
        rows = dict.fromkeys((route.relation.version, route.catalog_version) for route in all_routes)
        truncates = dict.fromkeys(route.truncate for route in all_routes)
        return cls(
            rows=_PairIndex.from_ids({pair: entry for entry, pair in enumerate(rows)}),
            truncates=_PairIndex.from_ids({pair: entry for entry, pair in enumerate(truncates, len(rows))}),
            count=len(rows) + len(truncates),
        )

    def lookup(self, changes: pa.RecordBatch, kinds: Bytes) -> Int64s:
        """The entry of each change, -1 where no route begins."""
        catalogs, is_truncate = int_array(changes["catalog_version"]), kinds == _T
        entries = self.rows.lookup(int_array(changes["relation_version"]), catalogs)
        if is_truncate.any():
            truncates = self.truncates.lookup(int_array(changes["relation_id"]), catalogs)
            entries = np.where(is_truncate, truncates, entries)
        return entries

    def route_by_entry(self, routes: Sequence[Route]) -> Int64s:
        """The route id by entry, -1 where there is none; the last element is for entry -1."""
        route_ids = np.full(self.count + 1, -1, dtype=np.int64)
        rows = _columns((route.relation.version, route.catalog_version) for route in routes)
        truncates = _columns(route.truncate for route in routes)
        for entries in (self.rows.lookup(*rows), self.truncates.lookup(*truncates)):
            route_ids[entries] = [route.route_id for route in routes]
        return route_ids


@dataclass(frozen=True, slots=True)
class _PairIndex:
    """Ids by two keys: `ids[i, j]` for `firsts[i]` and `seconds[j]`, both ascending; -1 for none."""

    firsts: Int64s
    seconds: Int64s
    ids: Int64s

    @classmethod
    def from_ids(cls, id_by_pair: Mapping[tuple[int, int], int]) -> Self:
        """Of a mapping that is not empty."""
        firsts, seconds = map(np.unique, _columns(id_by_pair))
        ids = np.full((len(firsts), len(seconds)), -1, dtype=np.int64)
        for (first, second), pair_id in id_by_pair.items():
            ids[np.searchsorted(firsts, first), np.searchsorted(seconds, second)] = pair_id
        return cls(firsts, seconds, ids)

    def lookup(self, firsts: Int64s, seconds: Int64s) -> Int64s:
        """The ids of the pairs."""
        i, j = (
            np.minimum(np.searchsorted(keys, values), len(keys) - 1)
            for keys, values in ((self.firsts, firsts), (self.seconds, seconds))
        )
        is_known = (self.firsts[i] == firsts) & (self.seconds[j] == seconds)
        return np.where(is_known, self.ids[i, j], -1)


def _columns(pairs: Iterable[tuple[int, int]]) -> tuple[Int64s, Int64s]:
    firsts, seconds = zip(*pairs, strict=True)
    return np.array(firsts, dtype=np.int64), np.array(seconds, dtype=np.int64)
