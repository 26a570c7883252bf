"""Routes a range of the log under two definitions, and counts what the subscription would get of each.

Changes go through replay's own routes, row filters and UPDATE transformation (`replay.route`), under the
definitions of now and of then, not those of their time: the range is a sample of what the publisher does. One
row group is in memory at a time, and only the messages of tables that either definition publishes are
decoded.

The bytes of a change are those of the pgoutput message that a native subscription would get: a header, and
per column a kind, and a length and the text of a value that is sent (R1.4).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import Bytes, Int64s, int_array
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.segment import RowGroup, read_columns
from cdc_replay.filters.server_session import FilterSession
from cdc_replay.model.frames import LOG, ChangeKind
from cdc_replay.model.lsn import ZERO, Window
from cdc_replay.model.progress import Progress, Report, unreported
from cdc_replay.model.proposed_change import SentChanges, Transition
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName, Relation, RelationId
from cdc_replay.model.subscription import OriginPolicy
from cdc_replay.publication.partition_root import partition_root
from cdc_replay.replay.route.group_router import GroupRouter
from cdc_replay.replay.route.route_index import DecodedChanges, RouteIndex
from cdc_replay.replay.route.routes import Routes, Target, VersionedRelation, plan_routes
from cdc_replay.replay.route.tuples import ProjectedRows

if TYPE_CHECKING:
    from cdc_replay.pgoutput.columnar import ChangeDecoder

_ONE_CATALOG: Final = 0
_KINDS: Final = {ord(kind.value): kind for kind in ChangeKind}
_KINDS_WITH_NEW: Final = (ord("I"), ord("U"))
_KINDS_WITH_OLD: Final = (ord("U"), ord("D"))
_TEXT: Final = ord("t")
_NOT_SENT: Final = ord("-")
_HEADER: Final = 5
"""Message byte and relation."""
_TRUNCATE: Final = ord("T")
_TRUNCATE_MESSAGE: Final = 10
"""Of one relation: message byte, number of relations, flags, relation."""
_TUPLE_HEADER: Final = 3
"""N, K or O, and the number of columns."""
_LENGTH: Final = 4


@dataclass(frozen=True, slots=True)
class ChangesOfTable:
    """The counts of a published table; a transition counts for the table of then, if it is sent then."""

    now: SentChanges = field(default_factory=SentChanges)
    then: SentChanges = field(default_factory=SentChanges)
    transitions: tuple[Transition, ...] = ()


@dataclass(frozen=True, slots=True)
class CountedChanges:
    """Counts by published table, and UPDATEs and DELETEs of leaves that lack old values.

    `without_old_values`: by leaf, changes whose old row is not whole, and not sent or only its key.
    """

    tables: Mapping[QualifiedName, ChangesOfTable]
    without_old_values: Mapping[RelationId, int]


@dataclass(frozen=True, slots=True)
class CountRequest:
    """What is counted: the publications of a subscription under two catalogs, over a window of the log."""

    change_log: ChangeLog
    window: Window
    publications: Sequence[str]
    origin: OriginPolicy
    now: PublisherCatalog
    then: PublisherCatalog
    publisher_dsn: str = field(repr=False)
    report: Report = unreported


def count_changes(request: CountRequest) -> CountedChanges:
    """The counts.

    Raises:
        PublicationRefused: if PostgreSQL refuses to decode for one of the definitions.
        InvalidFilter: if a filter fails for a change.
        ServerUnavailable, MissingPrivilege: if PostgreSQL has to evaluate a filter and cannot.
        ChangeLogDamaged, InvalidMessage: if the log cannot be read.
    """
    relations = request.change_log.relations()
    sides = [_plan(request, catalog, relations) for catalog in (request.now, request.then)]
    routes = [route for side in sides for route in side.routes]
    if not routes:
        return CountedChanges({}, {})
    index = RouteIndex.from_routes(routes)
    leaves = pa.array(sorted({route.relation.id for route in routes}), pa.int64())
    counts = _Counts()
    with contextlib.ExitStack() as stack:
        now, then = (_Side.open(side, request, index, stack) for side in sides)
        for changes in _changes(request, relations, leaves):
            counts.add(DecodedChanges.from_batch(changes, index), now, then)
    return counts.result()


def _plan(request: CountRequest, catalog: PublisherCatalog, relations: Mapping[int, Relation]) -> Routes:
    """The routes of all versions of published relations, to tables of any kind."""
    versions = [
        VersionedRelation(relation, _ONE_CATALOG, catalog)
        for relation in relations.values()
        if relation.id in catalog.tables
    ]
    existing = catalog.existing(request.publications)
    roots = (partition_root(catalog, existing, relation.id) for relation, _, _ in versions)
    targets = {root.table.name: Target((), ZERO) for root in roots if root is not None}
    return plan_routes(versions, request.publications, targets)


def _changes(
    request: CountRequest, relations: Mapping[int, Relation], leaves: pa.Array
) -> Iterator[pa.RecordBatch]:
    """The changes (CHANGES) of the leaves, a batch per row group that has some."""
    from cdc_replay.pgoutput.columnar import ChangeDecoder  # noqa: PLC0415 - compiles kernels

    decoder = ChangeDecoder.from_relations(request.window, relations, ((0, _ONE_CATALOG),))
    groups = request.change_log.segments(request.window)
    total, done = sum(group.size_bytes for group in groups), 0
    for group in groups:
        request.report(Progress("read", "the change log", done, total))
        done += group.size_bytes
        if (changes := _read(group, request.window, leaves, decoder)) is not None:
            yield changes


def _read(group: RowGroup, window: Window, leaves: pa.Array, decoder: ChangeDecoder) -> pa.RecordBatch | None:
    kinds = read_columns(group, ("kind", "relation_id"), window)
    is_truncate = pc.equal(kinds["kind"], ChangeKind.TRUNCATE.value)
    wanted = pc.or_(is_truncate, pc.is_in(kinds["relation_id"], value_set=leaves))
    if not pc.any(wanted).as_py():
        return None
    log = read_columns(group, LOG.names, window).filter(wanted).select(LOG.names)
    (batch,) = log.combine_chunks().to_batches()
    return decoder.decode(batch)


@dataclass(frozen=True, slots=True)
class _Side:
    """The routing under one definition; without a route nothing is sent."""

    router: GroupRouter | None
    tables: tuple[QualifiedName, ...]
    session: FilterSession | None

    @classmethod
    def open(
        cls, routes: Routes, request: CountRequest, index: RouteIndex, stack: contextlib.ExitStack
    ) -> _Side:
        if not routes.routes:
            return cls(None, (), None)
        router = GroupRouter.from_routes(routes, request.origin, index)
        session = stack.enter_context(router.open_session(request.publisher_dsn))
        return cls(router, tuple(route.target.name for route in routes.routes), session)

    def outcomes(self, changes: DecodedChanges) -> tuple[Int64s, Bytes]:
        """Route ids and outcomes."""
        if self.router is None:
            count = len(changes.kinds)
            return np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.uint8)
        return self.router.outcomes(changes, self.session)

    def sizes(self, changes: DecodedChanges, routes: Int64s, outcomes: Bytes) -> Int64s:
        """The bytes of the messages of all changes, 0 for nothing."""
        sizes = np.zeros(len(outcomes), dtype=np.int64)
        rows = np.flatnonzero(outcomes)
        if self.router is None or not len(rows):
            return sizes
        tuples, columns = changes.tuples, self.router.router.columns
        kinds = outcomes[rows]
        has_new = np.isin(kinds, _KINDS_WITH_NEW)
        has_old = np.isin(kinds, _KINDS_WITH_OLD) & tuples.has_old[rows]
        fill = has_new & (changes.kinds[rows] != kinds)
        new = tuples.new_rows(rows, routes[rows], columns, included=has_new, fill=fill)
        old = tuples.rows_before(rows, routes[rows], columns, included=has_old)
        sizes[rows] = _HEADER + _tuple_sizes(new) + _tuple_sizes(old)
        sizes[rows[kinds == _TRUNCATE]] = _TRUNCATE_MESSAGE
        return sizes


def _tuple_sizes(projected: ProjectedRows) -> Int64s:
    """The bytes of tuples; 0 where there is none."""
    lengths = int_array(pc.binary_length(projected.values).fill_null(0))
    is_text = projected.kinds == _TEXT
    sizes = (projected.kinds != _NOT_SENT).astype(np.int64)
    sizes[is_text] += _LENGTH + lengths[projected.indexes[is_text]]
    per_row = np.bincount(projected.rows, weights=sizes, minlength=len(projected.included))
    return per_row.astype(np.int64) + _TUPLE_HEADER * projected.included


@dataclass(slots=True)
class _Counts:
    sent: Counter[tuple[str, QualifiedName, int, int]] = field(default_factory=Counter)
    """By side, table, kind and outcome."""
    bytes: Counter[tuple[str, QualifiedName]] = field(default_factory=Counter)
    transitions: Counter[tuple[QualifiedName, int, int, int]] = field(default_factory=Counter)
    without_old: Counter[RelationId] = field(default_factory=Counter)

    def add(self, changes: DecodedChanges, now: _Side, then: _Side) -> None:
        """Count a batch."""
        routes_now, outcomes_now = now.outcomes(changes)
        routes_then, outcomes_then = then.outcomes(changes)
        self._add_side("now", now, changes, routes_now, outcomes_now)
        self._add_side("then", then, changes, routes_then, outcomes_then)
        differs = np.flatnonzero(outcomes_now != outcomes_then)
        is_sent_then = outcomes_then[differs] != 0
        routes = np.where(is_sent_then, routes_then[differs], routes_now[differs])
        columns = (
            is_sent_then,
            routes,
            changes.kinds[differs],
            outcomes_now[differs],
            outcomes_then[differs],
        )
        for (in_then, route, *kinds), count in _distinct(columns):
            tables = then.tables if in_then else now.tables
            self.transitions[tables[route], kinds[0], kinds[1], kinds[2]] += count
        self._add_without_old(changes)

    def _add_side(
        self, name: str, side: _Side, changes: DecodedChanges, routes: Int64s, outcomes: Bytes
    ) -> None:
        rows = np.flatnonzero(outcomes)
        for (route, kind, outcome), count in _distinct((routes[rows], changes.kinds[rows], outcomes[rows])):
            self.sent[name, side.tables[route], kind, outcome] += count
        sizes = side.sizes(changes, routes, outcomes)
        totals = np.bincount(routes[rows], weights=sizes[rows], minlength=0)
        for route in np.flatnonzero(totals).tolist():
            self.bytes[name, side.tables[route]] += int(totals[route])

    def _add_without_old(self, changes: DecodedChanges) -> None:
        """UPDATEs and DELETEs that have a key for an old row, or nothing (R1.5, R1.6)."""
        is_whole = pc.equal(changes.rows["old_kind"], "O").fill_null(False)
        rows = np.isin(changes.kinds, _KINDS_WITH_OLD) & ~is_whole.to_numpy(zero_copy_only=False)
        relations = int_array(changes.rows["relation_id"])[rows]
        for relation, count in zip(*np.unique(relations, return_counts=True), strict=True):
            self.without_old[RelationId(int(relation))] += int(count)

    def result(self) -> CountedChanges:
        """The counts of all batches."""
        names = {table for _, table, _, _ in self.sent} | {table for table, *_ in self.transitions}
        tables = {
            name: ChangesOfTable(self._sent("now", name), self._sent("then", name), self._transitions(name))
            for name in sorted(names)
        }
        return CountedChanges(tables, self.without_old)

    def _sent(self, side: str, table: QualifiedName) -> SentChanges:
        by_pair = {
            (_KINDS[kind], _KINDS[outcome]): count
            for (of_side, of_table, kind, outcome), count in self.sent.items()
            if (of_side, of_table) == (side, table)
        }
        by_outcome: Counter[ChangeKind] = Counter()
        for (_, outcome), count in by_pair.items():
            by_outcome[outcome] += count
        return SentChanges(
            changes=by_outcome.total(),
            bytes=self.bytes[side, table],
            insert=by_outcome[ChangeKind.INSERT],
            update=by_outcome[ChangeKind.UPDATE],
            delete=by_outcome[ChangeKind.DELETE],
            truncate=by_outcome[ChangeKind.TRUNCATE],
            updates_to_insert=by_pair.get((ChangeKind.UPDATE, ChangeKind.INSERT), 0),
            updates_to_delete=by_pair.get((ChangeKind.UPDATE, ChangeKind.DELETE), 0),
        )

    def _transitions(self, table: QualifiedName) -> tuple[Transition, ...]:
        return tuple(
            Transition(_KINDS[kind].name, _name(now), _name(then), count)
            for (name, kind, now, then), count in sorted(self.transitions.items())
            if name == table
        )


def _name(outcome: int) -> str | None:
    return _KINDS[outcome].name if outcome else None


def _distinct(columns: Sequence[np.ndarray]) -> Iterator[tuple[tuple[int, ...], int]]:
    """The distinct rows of the columns, and how often there is one."""
    rows = np.stack([column.astype(np.int64) for column in columns], axis=1)
    if not len(rows):
        return
    distinct, counts = np.unique(rows, axis=0, return_counts=True)
    for row, count in zip(distinct.tolist(), counts.tolist(), strict=True):
        yield tuple(row), count
