"""Whether the rows of changes pass the row filters of their routes: who is asked, and about what.

Filters are answered apart from everything else, because some answers come from elsewhere: where a filter is
exact in Spark the worker computes it over its own arrays if Arrow has all that it needs, else Spark SQL does;
where it is not, PostgreSQL. Only the columns that filters read go there, and only the rows that are filtered.
Spark SQL is asked once about a change, for all subscriptions together.

    executor, Python   Inquiry.questions        place, kind, and what the filters read of the old and new row
    executor, JVM      Questionnaire.answers    per subscription: does the old row pass, does the new one
    executor, Python   Asker.verdicts           the same, with what is computed, and PostgreSQL's answers,
                                                which are fetched there

The filter of an INSERT reads the new row, that of a DELETE the old one, that of an UPDATE both; the new row
is filled with what was not sent (R4.4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

import numpy as np
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F

from cdc_replay.arrow.arrays import Bools, Int64s, ascii_bytes, booleans, int_array
from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.arrow_eval import filter_answers, is_computable
from cdc_replay.filters.compile import CompiledFilter, ServerFilter, SparkFilter, compile_or
from cdc_replay.filters.expression import Expression
from cdc_replay.filters.server_eval import ServerCheck, server_answers
from cdc_replay.filters.server_session import FilterSession
from cdc_replay.filters.spark_eval import filter_column
from cdc_replay.model.frames import ChangeKind
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.relation import QualifiedName, Relation
from cdc_replay.replay.route.attribute_map import positions
from cdc_replay.replay.route.router import FilterResults, RouteIndex
from cdc_replay.replay.route.routes import Route, Routes
from cdc_replay.replay.route.spark_case import per_route
from cdc_replay.replay.route.tuples import ColumnProjection, ProjectedRows, Tuples

_ACTIONS: Final = {
    ChangeKind.INSERT: PublishAction.INSERT,
    ChangeKind.UPDATE: PublishAction.UPDATE,
    ChangeKind.DELETE: PublishAction.DELETE,
}
_LETTERS: Final = tuple(ord(kind.value) for kind in _ACTIONS)

_Names: TypeAlias = tuple[str, ...]

_TEXTS: Final = pa.list_(pa.string())
FILTER_INPUT: Final = pa.schema(
    [
        ("number", pa.int32()),
        ("place", pa.int32()),
        ("kind", pa.string()),
        ("asked", pa.list_(pa.bool_())),
        ("old_read", _TEXTS),
        ("new_read", _TEXTS),
    ]
)
"""What Spark is asked: the change's number in its batch, for which subscriptions, and the values that their
filters read."""

QUESTIONS_DDL: Final = (
    "number int, place int, kind string, asked array<boolean>, old_read array<string>, new_read array<string>"
)


class RouteFilters:
    """The effective filters of a subscription's routes: compiled once each; on the driver."""

    def __init__(self, routes: Routes) -> None:
        self.routes = routes.routes
        self._compiled: dict[Hashable, CompiledFilter] = {}
        self._users: dict[Hashable, list[tuple[Route, ChangeKind]]] = {}
        for item in routes.routes:
            for kind, action in _ACTIONS.items():
                filters = item.published.filters[action]
                if filters is None or action not in item.published.actions:
                    continue
                key = self._group(item, action)
                if key not in self._compiled:
                    self._compiled[key] = compile_or(filters, item.published.table)
                self._users.setdefault(key, []).append((item, kind))
        self._computed = {
            key: each
            for key, each in self._compiled.items()
            if isinstance(each, SparkFilter) and is_computable(each.expression)
        }

    def evaluator(self) -> FilterEvaluator:
        """What the executors need to ask."""
        on_server = [key for key, each in self._compiled.items() if isinstance(each, ServerFilter)]
        computed = list(self._computed)
        shape = len(self.routes), len(_ACTIONS)
        spark = np.zeros(shape, dtype=np.bool_)
        server, computation = np.full(shape, -1, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
        kinds = list(_ACTIONS)
        for key, users in self._users.items():
            for item, kind in users:
                where = item.number, kinds.index(kind)
                if key in on_server:
                    server[where] = on_server.index(key)
                elif key in self._computed:
                    computation[where] = computed.index(key)
                else:
                    spark[where] = True
        return FilterEvaluator(
            spark=spark,
            computed=computation,
            computations=tuple(ArrowFilter.of(each, self.routes) for each in self._computed.values()),
            server=server,
            whole=ColumnProjection.of(
                [(positions(item.relation, item.relation.column_names), 0) for item in self.routes]
            ),
            checks=tuple(self._check(number, key) for number, key in enumerate(on_server)),
        )

    def passes(self, kind: ChangeKind, row: str, entries: Sequence[int], held: Sequence[_Names]) -> Column:
        """Over the columns of QUESTIONS: whether the values in the column `row` pass the filter of a change.

        Route `i` entries at place `entries[i]`; by place, `held` are the columns whose values there are.
        """
        action = _ACTIONS[kind]
        return per_route(
            zip(self.routes, entries, strict=True),
            number=lambda each: each[1],
            key=lambda each: (self._group(each[0], action), held[each[1]]),
            build=lambda each: self._answer(each[0], action, F.col(row), held[each[1]]),
        )

    def _answer(self, item: Route, action: PublishAction, row: Column, held: _Names) -> Column:
        compiled = self._asked(self._group(item, action))
        if compiled is None:
            return F.lit(True)

        def value_of(name: str) -> Column:
            return row[held.index(name)] if name in held else F.lit(None).cast("string")

        return F.coalesce(filter_column(compiled, value_of), F.lit(False))

    def _check(self, number: int, key: Hashable) -> ServerCheck:
        compiled, users = self._compiled[key], self._users[key]
        if not isinstance(compiled, ServerFilter):
            raise TypeError(compiled)
        # Only rows that PostgreSQL would ask about: an error of the filter elsewhere is not ours to find.
        return ServerCheck.of(
            compiled,
            users[0][0].relation.column_names,
            number=number,
            routes=[item.number for item, _ in users],
            kinds=[kind for _, kind in users],
        )

    def read(self, item: Route) -> frozenset[str]:
        """The columns that those filters of the route read of which Spark is asked."""
        found = (self._asked(self._group(item, action)) for action in _ACTIONS.values())
        return frozenset(column.name for each in found if each is not None for column in each.columns)

    def _asked(self, key: Hashable) -> SparkFilter | None:
        """The filter of a group, if Spark is asked."""
        compiled = self._compiled.get(key)
        return compiled if isinstance(compiled, SparkFilter) and key not in self._computed else None

    @staticmethod
    def _group(item: Route, action: PublishAction) -> Hashable:
        """What the answer to a row of the route depends on: None without a filter."""
        published = item.published
        filters = published.filters[action]
        if filters is None or action not in published.actions:
            return None
        # The same trees mean the same only for the same table, with the same columns at the same positions.
        trees = tuple(each.node_tree for each in filters)
        return trees, published.table.id, published.table.columns, item.relation.column_names


class SparkFilterPlan:
    """What Spark is asked for several subscriptions, whose routes begin at `places`; on the driver."""

    def __init__(self, lanes: Sequence[RouteFilters], places: RouteIndex) -> None:
        self._lanes = [(lane, places.entries(lane.routes).tolist()) for lane in lanes]
        relations: dict[int, Relation] = {}
        read: dict[int, frozenset[str]] = {}
        for lane, entries in self._lanes:
            for item, place in zip(lane.routes, entries, strict=True):
                relations[place] = item.relation
                read[place] = read.get(place, frozenset()) | lane.read(item)
        # The places of rows are the first ones.
        self._relations = [relations[place] for place in range(len(relations))]
        self._held = [
            tuple(name for name in relation.column_names if name in read[place])
            for place, relation in enumerate(self._relations)
        ]

    def inquiry(self) -> SparkFilterInput:
        """What the executors need to ask."""
        of_places = zip(self._relations, self._held, strict=True)
        return SparkFilterInput(
            ColumnProjection.of([(positions(relation, held), 0) for relation, held in of_places])
        )

    def answers(self) -> tuple[Column, Column]:
        """Over the columns of QUESTIONS: by subscription, whether the old row passes, and the new one.

        Never NULL. For whom it is not asked no filter is evaluated, which might fail.
        """
        lanes = range(len(self._lanes))
        return F.array(*map(self._old_passes, lanes)), F.array(*map(self._new_passes, lanes))

    def _old_passes(self, lane: int) -> Column:
        return self._passes(lane, "old_read", (ChangeKind.UPDATE, ChangeKind.DELETE))

    def _new_passes(self, lane: int) -> Column:
        return self._passes(lane, "new_read", (ChangeKind.INSERT, ChangeKind.UPDATE))

    def _passes(self, lane: int, row: str, kinds: Sequence[ChangeKind]) -> Column:
        filters, entries = self._lanes[lane]
        found = F.lit(True)
        for kind in kinds:
            passes = F.coalesce(filters.passes(kind, row, entries, self._held), F.lit(True))
            found = F.when(F.col("kind") == kind.value, passes).otherwise(found)
        return F.when(F.col("asked")[lane], found).otherwise(F.lit(True))


@dataclass(frozen=True, slots=True)
class SparkFilterInput:
    """What the filters of all subscriptions read, by place; picklable."""

    read: ColumnProjection

    def questions(
        self, changes: pa.RecordBatch, tuples: Tuples, places: Int64s, asked: Sequence[Bools]
    ) -> pa.RecordBatch:
        """What Spark is asked about `changes` (CHANGES), in columns of QUESTIONS.

        `asked` has an array for each subscription, which says of each change whether it asks.
        """
        by_change = np.stack(asked, axis=1)
        rows = np.flatnonzero(by_change.any(axis=1))
        found = places[rows]
        old, new = _both(tuples, rows, found, self.read)
        offsets = np.arange(len(rows) + 1, dtype=np.int32) * len(asked)
        return pa.RecordBatch.from_arrays(
            [
                pa.array(rows, pa.int32()),
                pa.array(found, pa.int32()),
                changes["kind"].take(pa.array(rows)),
                pa.ListArray.from_arrays(pa.array(offsets), pa.array(by_change[rows].ravel())),
                old.lists,
                new.lists,
            ],
            schema=FILTER_INPUT,
        )


@dataclass(frozen=True, slots=True)
class SparkFilterResults:
    """Spark's answers about a batch: the changes asked about, and a row for each, by subscription."""

    numbers: Int64s
    old: Bools
    new: Bools

    @classmethod
    def of(cls, found: pa.Table, lanes: int) -> Self:
        """Of the columns `number`, `old_passes` and `new_passes`."""
        old, new = (
            found[name].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, lanes)
            for name in ("old_passes", "new_passes")
        )
        return cls(int_array(found["number"]), old, new)

    def verdicts(self, lane: int, count: int) -> FilterResults:
        """Those for one subscription, among so many changes: who is not asked about passes."""
        found = FilterResults.all_pass(count)
        found.old[self.numbers], found.new[self.numbers] = self.old[:, lane], self.new[:, lane]
        return found


@dataclass(frozen=True, slots=True)
class ArrowFilter:
    """A filter of `table` that the worker computes; picklable.

    `layout` has its columns, for each route of them all.
    """

    table: QualifiedName
    expression: Expression
    attnums: tuple[int, ...]
    layout: ColumnProjection

    @classmethod
    def of(cls, compiled: SparkFilter, routes: Sequence[Route]) -> Self:
        """Of a filter that is computable, for the routes that have it, among these."""
        names = [column.name for column in compiled.columns]
        return cls(
            routes[0].published.table.name,
            compiled.expression,
            tuple(column.attnum for column in compiled.columns),
            ColumnProjection.of([(positions(item.relation, names), 0) for item in routes]),
        )

    def passing(self, picked: ProjectedRows) -> Bools:
        """Which of the rows pass that were picked with this layout.

        Raises:
            InvalidFilter: if a value is not of the type that its column has in the filter.
        """
        texts = dict(zip(self.attnums, picked.columns(len(self.attnums)), strict=True))
        try:
            return booleans(filter_answers(self.expression, texts, len(picked.wanted)))
        except pa.ArrowInvalid as error:
            raise InvalidFilter(
                f'cannot evaluate a row filter of table "{self.table}"',
                detail="A change from before a column had its present type meets the present filter: without"
                " event triggers, that acts from the beginning of a pull on.",
                hint=f"Copy the table again: `cdc-replay snapshot … --table {self.table}`.",
                rule="R9.10",
            ) from error


@dataclass(frozen=True, slots=True)
class FilterEvaluator:
    """Whom the filters of a subscription ask; picklable.

    `spark[route, kind]` says whether Spark is asked, `computed[route, kind]` which computation is done,
    `server[route, kind]` which check, -1 for none; kinds are INSERT, UPDATE, DELETE.
    """

    spark: Bools
    computed: Int64s
    computations: tuple[ArrowFilter, ...]
    server: Int64s
    whole: ColumnProjection
    checks: tuple[ServerCheck, ...]

    @property
    def uses_spark(self) -> bool:
        """Whether Spark has anything to answer."""
        return bool(self.spark.any())

    def session(self, dsn: str) -> contextlib.AbstractContextManager[FilterSession | None]:
        """The session in which PostgreSQL is asked, if it has to be; it connects when it is used first."""
        return contextlib.closing(FilterSession(dsn)) if self.checks else contextlib.nullcontext()

    def asked(self, changes: pa.RecordBatch, routes: Int64s) -> Bools:
        """Of which `changes` (CHANGES) Spark is asked."""
        kinds = _kind_numbers(changes)
        found: Bools = (routes >= 0) & (kinds >= 0) & self.spark[routes, kinds]
        return found

    def verdicts(
        self,
        changes: pa.RecordBatch,
        tuples: Tuples,
        routes: Int64s,
        answered: FilterResults,
        session: FilterSession | None,
    ) -> FilterResults:
        """All answers: those of Spark, what is computed here, and PostgreSQL's, which are fetched here.

        Raises:
            InvalidFilter: if evaluating a filter fails.
            ServerUnavailable, MissingPrivilege: if the server cannot be asked.
        """
        if self.computations:
            self._compute(_chosen(self.computed, changes, routes), tuples, routes, answered)
        if session is not None:
            self._ask_server(changes, tuples, routes, answered, session)
        return answered

    def _compute(self, chosen: Int64s, tuples: Tuples, routes: Int64s, found: FilterResults) -> None:
        for number in np.unique(chosen[chosen >= 0]).tolist():
            computation = self.computations[number]
            rows = np.flatnonzero(chosen == number)
            old, new = _both(tuples, rows, routes[rows], computation.layout)
            found.old[rows], found.new[rows] = computation.passing(old), computation.passing(new)

    def _ask_server(
        self,
        changes: pa.RecordBatch,
        tuples: Tuples,
        routes: Int64s,
        found: FilterResults,
        session: FilterSession,
    ) -> None:
        checks = _chosen(self.server, changes, routes)
        rows = np.flatnonzero(checks >= 0)
        if not len(rows):
            return
        places = routes[rows]
        old, new = _both(tuples, rows, places, self.whole)
        batch = pa.RecordBatch.from_pydict(
            {
                "route": pa.array(places, pa.int32()),
                "kind": changes["kind"].take(pa.array(rows)),
                "commit_lsn": changes["commit_lsn"].take(pa.array(rows)),
                "old": old.lists,
                "new": new.lists,
            }
        )
        answers = server_answers(batch, self.checks, session, ("old", "new"))
        each = np.arange(len(rows))
        found.old[rows] = answers["old"][each, checks[rows]] == 1
        found.new[rows] = answers["new"][each, checks[rows]] == 1


def _both(
    tuples: Tuples, rows: Int64s, places: Int64s, layout: ColumnProjection
) -> tuple[ProjectedRows, ProjectedRows]:
    """What filters read of the old and of the new rows; these are filled with what was not sent (R4.4)."""
    everything = np.ones(len(rows), dtype=np.bool_)
    old = tuples.rows_before(rows, places, layout, wanted=tuples.has_old[rows])
    return old, tuples.new_rows(rows, places, layout, wanted=everything, fill=everything)


def _chosen(int_array: Int64s, changes: pa.RecordBatch, routes: Int64s) -> Int64s:
    """Of numbers by route and kind those of the changes, -1 for those without a route or kind."""
    kinds = _kind_numbers(changes)
    return np.where((routes >= 0) & (kinds >= 0), int_array[routes, kinds], -1)


def _kind_numbers(changes: pa.RecordBatch) -> Int64s:
    """0, 1, 2 for INSERT, UPDATE, DELETE, -1 for TRUNCATE."""
    letters = ascii_bytes(changes["kind"])
    found = np.full(len(letters), -1, dtype=np.int64)
    for number, letter in enumerate(_LETTERS):
        found[letters == letter] = number
    return found
