"""Whether the rows of changes pass the row filters of their routes: who is asked, and about what.

Filters are answered apart from everything else, because the answers come from elsewhere: from Spark SQL where
that is exact, else from PostgreSQL. Only the columns that a filter reads go there, and only the rows that are
filtered.

    executor, Python   Asker.questions         route, kind, and what the filters read of the old and new row
    executor, JVM      RouteFilters.answers    two boolean columns: does the old row pass, does the new one
    executor, Python   Asker.verdicts          the same, with PostgreSQL's answers, which are fetched there

The filter of an INSERT reads the new row, that of a DELETE the old one, that of an UPDATE both; the new row
is filled with what was not sent (R4.4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F

from cdc_replay.arrays import Bools, Int64s, characters
from cdc_replay.filters.compile import CompiledFilter, ServerFilter, SparkFilter, compile_any
from cdc_replay.filters.server import ServerCheck, server_answers
from cdc_replay.filters.session import FilterSession
from cdc_replay.filters.spark import filter_column
from cdc_replay.model.change import ChangeKind
from cdc_replay.model.publication import PublishAction
from cdc_replay.route.attribute_map import positions
from cdc_replay.route.batches import Verdicts
from cdc_replay.route.per_route import per_route
from cdc_replay.route.routes import Route, Routes
from cdc_replay.route.tuples import Layout, Tuples

_ACTIONS: Final = {
    ChangeKind.INSERT: PublishAction.INSERT,
    ChangeKind.UPDATE: PublishAction.UPDATE,
    ChangeKind.DELETE: PublishAction.DELETE,
}
_LETTERS: Final = tuple(ord(kind.value) for kind in _ACTIONS)

_TEXTS: Final = pa.list_(pa.string())
QUESTIONS: Final = pa.schema(
    [
        ("number", pa.int32()),
        ("route", pa.int32()),
        ("kind", pa.string()),
        ("old_read", _TEXTS),
        ("new_read", _TEXTS),
    ]
)
"""What Spark is asked: the change's number in its batch, and the values that its filter reads."""

QUESTIONS_DDL: Final = "number int, route int, kind string, old_read array<string>, new_read array<string>"


class RouteFilters:
    """The effective filters of the routes: compiled once each; on the driver."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes.routes
        self._compiled: dict[Hashable, CompiledFilter] = {}
        self._users: dict[Hashable, list[tuple[Route, ChangeKind]]] = {}
        for item in routes.routes:
            for kind, action in _ACTIONS.items():
                filters = item.published.filters[action]
                if filters is None or action not in item.published.actions:
                    continue
                key = self._group(item, action)
                if key not in self._compiled:
                    self._compiled[key] = compile_any(filters, item.published.table)
                self._users.setdefault(key, []).append((item, kind))

    def asker(self) -> Asker:
        """What the executors need to ask."""
        on_server = [key for key, each in self._compiled.items() if isinstance(each, ServerFilter)]
        count = len(self._routes)
        spark = np.zeros((count, len(_ACTIONS)), dtype=np.bool_)
        server = np.full((count, len(_ACTIONS)), -1, dtype=np.int64)
        kinds = list(_ACTIONS)
        for key, users in self._users.items():
            for item, kind in users:
                where = item.number, kinds.index(kind)
                if key in on_server:
                    server[where] = on_server.index(key)
                else:
                    spark[where] = True
        return Asker(
            spark=spark,
            server=server,
            read=Layout.of([(positions(item.relation, self._read(item)), 0) for item in self._routes]),
            whole=Layout.of(
                [(positions(item.relation, item.relation.column_names), 0) for item in self._routes]
            ),
            checks=tuple(self._check(number, key) for number, key in enumerate(on_server)),
        )

    def answers(self) -> tuple[Column, Column]:
        """Over the columns of QUESTIONS: whether the old row passes, and the new one; never NULL."""
        kind = F.col("kind")
        old = new = F.lit(True)
        for each, action in _ACTIONS.items():
            if each is not ChangeKind.INSERT:
                old = F.when(kind == each.value, self._passes(action, "old_read")).otherwise(old)
            if each is not ChangeKind.DELETE:
                new = F.when(kind == each.value, self._passes(action, "new_read")).otherwise(new)
        return old, new

    def _passes(self, action: PublishAction, row: str) -> Column:
        return per_route(
            self._routes,
            number=lambda item: item.number,
            key=lambda item: self._group(item, action),
            build=lambda item: self._answer(item, action, row),
        )

    def _answer(self, item: Route, action: PublishAction, row: str) -> Column:
        compiled = self._compiled.get(self._group(item, action))
        if not isinstance(compiled, SparkFilter):
            return F.lit(True)
        held = self._read(item)

        def value_of(name: str) -> Column:
            return F.col(row)[held.index(name)] if name in held else F.lit(None).cast("string")

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

    def _read(self, item: Route) -> tuple[str, ...]:
        """The columns of the relation version that Spark's filters of the route read, in its order."""
        wanted = set()
        for action in _ACTIONS.values():
            compiled = self._compiled.get(self._group(item, action))
            if isinstance(compiled, SparkFilter):
                wanted |= {column.name for column in compiled.columns}
        return tuple(name for name in item.relation.column_names if name in wanted)

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


@dataclass(frozen=True, slots=True)
class Asker:
    """The questions of a subscription's filters; picklable.

    `spark[route, kind]` says whether Spark is asked, `server[route, kind]` which check, -1 for
    none; kinds are INSERT, UPDATE, DELETE.
    """

    spark: Bools
    server: Int64s
    read: Layout
    whole: Layout
    checks: tuple[ServerCheck, ...]

    @property
    def asks_spark(self) -> bool:
        """Whether Spark has anything to answer."""
        return bool(self.spark.any())

    def session(self, dsn: str) -> contextlib.AbstractContextManager[FilterSession | None]:
        """The session in which PostgreSQL is asked, if it has to be; it connects when it is used first."""
        return contextlib.closing(FilterSession(dsn)) if self.checks else contextlib.nullcontext()

    def questions(self, changes: pa.RecordBatch, routes: Int64s) -> pa.RecordBatch:
        """What Spark is asked about `changes` (CHANGES), in columns of QUESTIONS."""
        kinds = _kind_numbers(changes)
        asked = (routes >= 0) & (kinds >= 0) & self.spark[routes, kinds]
        rows = np.flatnonzero(asked)
        tuples, places = Tuples.of(changes), routes[rows]
        old = tuples.rows_before(rows, places, self.read, wanted=tuples.has_old[rows]).lists
        everything = np.ones(len(rows), dtype=np.bool_)
        new = tuples.new_rows(rows, places, self.read, wanted=everything, fill=everything).lists
        return pa.RecordBatch.from_arrays(
            [
                pa.array(rows, pa.int32()),
                pa.array(places, pa.int32()),
                changes["kind"].take(pa.array(rows)),
                old,
                new,
            ],
            schema=QUESTIONS,
        )

    def verdicts(
        self,
        changes: pa.RecordBatch,
        routes: Int64s,
        answers: pa.Table | None,
        session: FilterSession | None,
    ) -> Verdicts:
        """All answers: Spark's (`number`, `old_passes`, `new_passes`), and PostgreSQL's, fetched here.

        Raises:
            InvalidFilter: if evaluating a filter fails.
            ServerUnavailable, MissingPrivilege: if the server cannot be asked.
        """
        found = Verdicts.all_pass(changes.num_rows)
        if answers is not None:
            rows = answers["number"].to_numpy()
            found.old[rows] = answers["old_passes"].to_numpy()
            found.new[rows] = answers["new_passes"].to_numpy()
        if session is not None:
            self._ask_server(changes, routes, found, session)
        return found

    def _ask_server(
        self, changes: pa.RecordBatch, routes: Int64s, found: Verdicts, session: FilterSession
    ) -> None:
        kinds = _kind_numbers(changes)
        checks = np.where((routes >= 0) & (kinds >= 0), self.server[routes, kinds], -1)
        rows = np.flatnonzero(checks >= 0)
        if not len(rows):
            return
        tuples, places = Tuples.of(changes), routes[rows]
        everything = np.ones(len(rows), dtype=np.bool_)
        old = tuples.rows_before(rows, places, self.whole, wanted=tuples.has_old[rows]).lists
        new = tuples.new_rows(rows, places, self.whole, wanted=everything, fill=everything).lists
        batch = pa.RecordBatch.from_pydict(
            {
                "route": pa.array(places, pa.int32()),
                "kind": changes["kind"].take(pa.array(rows)),
                "commit_lsn": changes["commit_lsn"].take(pa.array(rows)),
                "old": old,
                "new": new,
            }
        )
        answers = server_answers(batch, self.checks, session, ("old", "new"))
        numbers = np.arange(len(rows))
        found.old[rows] = answers["old"][numbers, checks[rows]] == 1
        found.new[rows] = answers["new"][numbers, checks[rows]] == 1


def _kind_numbers(changes: pa.RecordBatch) -> Int64s:
    """0, 1, 2 for INSERT, UPDATE, DELETE, -1 for TRUNCATE."""
    letters = characters(changes["kind"])
    found = np.full(len(letters), -1, dtype=np.int64)
    for number, letter in enumerate(_LETTERS):
        found[letters == letter] = number
    return found
