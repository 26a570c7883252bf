"""Whether the rows of changes pass the row filters of their routes.

A filter that is exact in Arrow is computed over the worker's arrays; PostgreSQL evaluates the others
(`filters.compile`). Only rows whose route and kind have a filter are evaluated, and only the columns that it
reads. The filter of an INSERT reads the new row, that of a DELETE the old one, that of an UPDATE both; the
new row is filled with what was not sent (R4.4).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import pyarrow as pa

from cdc_replay.arrow.arrays import Bools, Int64s, booleans, distinct_ids
from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.arrow_eval import evaluate_filter
from cdc_replay.filters.compile import ArrowFilter, ServerFilter, compile_or
from cdc_replay.filters.expression import Expression
from cdc_replay.filters.server_eval import ServerCheck, server_answers
from cdc_replay.filters.server_session import NULL, FilterSession
from cdc_replay.filters.server_session import Answers as Int8s
from cdc_replay.model.frames import ChangeKind
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.relation import QualifiedName
from cdc_replay.replay.route.attribute_map import positions
from cdc_replay.replay.route.filter_input import FilterInput, FilterInputs
from cdc_replay.replay.route.route_index import DecodedChanges
from cdc_replay.replay.route.router import FilterResults
from cdc_replay.replay.route.routes import Route
from cdc_replay.replay.route.tuples import ColumnProjection

_ACTIONS: Final = {
    ChangeKind.INSERT: PublishAction.INSERT,
    ChangeKind.UPDATE: PublishAction.UPDATE,
    ChangeKind.DELETE: PublishAction.DELETE,
}
_KINDS: Final = list(ChangeKind)


@dataclass(frozen=True, slots=True)
class ArrowCheck:
    """A filter of `table` that Arrow computes; picklable.

    `layout` tells which columns the rows have, and where; `positions` are those of the filter's columns, by
    attribute number.
    """

    table: QualifiedName
    expression: Expression
    layout: Hashable
    positions: Mapping[int, int | None]

    @classmethod
    def from_filter(cls, compiled: ArrowFilter, route: Route) -> Self:
        """Of a compiled filter of the route's table, and of others with the same layout."""
        names = [column.name for column in compiled.columns]
        attnums = [column.attnum for column in compiled.columns]
        by_attnum = dict(zip(attnums, positions(route.relation, names), strict=True))
        return cls(route.published.table.name, compiled.expression, _layout(route), by_attnum)

    def passes(self, rows: FilterInput) -> Bools:
        """Which rows pass.

        Raises:
            InvalidFilter: if a value is not of the type that its column has in the filter.
        """
        return booleans(self.answers(rows))

    def answers(self, rows: FilterInput) -> pa.BooleanArray:
        """The filter's values: TRUE, FALSE or NULL.

        Raises:
            InvalidFilter: as `passes`.
        """
        try:
            return evaluate_filter(
                self.expression, rows.columns(self.positions), rows.row_count, rows.computed
            )
        except pa.ArrowInvalid as error:
            raise InvalidFilter(
                f'cannot evaluate a row filter of table "{self.table}"',
                detail="A change from before a column had its present type meets the present filter: without"
                " event triggers, that acts from the beginning of a pull on.",
                hint=f"Copy the table again: `cdc-replay snapshot … --table {self.table.argument}`.",
                rule="R9.10",
            ) from error


@dataclass(frozen=True, slots=True)
class FilterEvaluator:
    """The row filters of one routing group; picklable.

    `arrow_ids[route_id, kind_id]` is the position of the filter in `arrow_checks`, `server_ids` that in
    `server_checks`, -1 for none. `all_columns` are those that PostgreSQL is sent.
    """

    arrow_ids: Int64s
    arrow_checks: tuple[ArrowCheck, ...]
    server_ids: Int64s
    server_checks: tuple[ServerCheck, ...]
    all_columns: ColumnProjection

    @classmethod
    def from_routes(cls, routes: Sequence[Route]) -> Self:
        """The filters of these routes; each distinct one is compiled once."""
        users: dict[Hashable, list[tuple[Route, ChangeKind]]] = {}
        for route in routes:
            for kind, action in _ACTIONS.items():
                if (key := _filter_key(route, action)) is not None:
                    users.setdefault(key, []).append((route, kind))
        arrow_ids, server_ids = (np.full((len(routes), len(_KINDS)), -1, dtype=np.int64) for _ in range(2))
        arrow_checks: list[ArrowCheck] = []
        server_checks: list[ServerCheck] = []
        for filter_users in users.values():
            route, kind = filter_users[0]
            table = route.published.table
            compiled = compile_or(route.published.filters[_ACTIONS[kind]] or (), table)
            if isinstance(compiled, ArrowFilter):
                ids, check_id = arrow_ids, len(arrow_checks)
                arrow_checks.append(ArrowCheck.from_filter(compiled, route))
            else:
                ids, check_id = server_ids, len(server_checks)
                server_checks.append(_server_check(compiled, check_id, filter_users))
            for route, kind in filter_users:
                ids[route.route_id, _KINDS.index(kind)] = check_id
        layouts = [(positions(route.relation, route.relation.column_names), 0) for route in routes]
        all_columns = ColumnProjection.from_positions(layouts)
        return cls(arrow_ids, tuple(arrow_checks), server_ids, tuple(server_checks), all_columns)

    def evaluate(
        self, changes: DecodedChanges, routes: Int64s, session: FilterSession | None
    ) -> FilterResults:
        """The results of all filters; a row without a filter passes.

        Raises:
            InvalidFilter: if evaluating a filter fails.
            ServerUnavailable, MissingPrivilege: if PostgreSQL cannot evaluate filters.
        """
        results = FilterResults.all_pass(len(routes))
        if self.arrow_checks:
            self._evaluate_in_arrow(changes, routes, results)
        if session is not None:
            self._evaluate_on_server(changes, routes, results, session)
        return results

    def answers(
        self, changes: DecodedChanges, routes: Int64s, session: FilterSession | None
    ) -> tuple[Int8s, Int8s]:
        """The values of all filters for the old and the new rows: 1, 0 or `NULL`, also without a filter.

        Raises:
            InvalidFilter, ServerUnavailable, MissingPrivilege: as `evaluate`.
        """
        old, new = (np.full(len(routes), NULL, dtype=np.int8) for _ in range(2))
        for check, inputs in self._inputs_by_arrow_check(changes, routes):
            for values, side in ((old, inputs.old), (new, inputs.new)):
                answers = check.answers(side).cast(pa.int8())
                values[inputs.rows] = answers.fill_null(NULL).to_numpy(zero_copy_only=False)
        if session is not None:
            rows, old_answers, new_answers = self._ask_server(changes, routes, session)
            old[rows], new[rows] = old_answers, new_answers
        return old, new

    def _evaluate_in_arrow(self, changes: DecodedChanges, routes: Int64s, results: FilterResults) -> None:
        for check, inputs in self._inputs_by_arrow_check(changes, routes):
            results.old[inputs.rows] = check.passes(inputs.old)
            results.new[inputs.rows] = check.passes(inputs.new)

    def _inputs_by_arrow_check(
        self, changes: DecodedChanges, routes: Int64s
    ) -> Iterator[tuple[ArrowCheck, FilterInputs]]:
        """Each filter of Arrow, and the changes that it is for."""
        check_ids = _check_ids(self.arrow_ids, changes, routes)
        for check_id in distinct_ids(check_ids[check_ids >= 0]).tolist():
            check = self.arrow_checks[check_id]
            rows = np.flatnonzero(check_ids == check_id)
            yield check, changes.filter_inputs.of(check.layout, rows)

    def _evaluate_on_server(
        self, changes: DecodedChanges, routes: Int64s, results: FilterResults, session: FilterSession
    ) -> None:
        rows, old, new = self._ask_server(changes, routes, session)
        results.old[rows], results.new[rows] = old == 1, new == 1

    def _ask_server(
        self, changes: DecodedChanges, routes: Int64s, session: FilterSession
    ) -> tuple[Int64s, Int8s, Int8s]:
        """The changes whose filters PostgreSQL evaluates, and its answers: 1, 0 or `NULL`."""
        check_ids = _check_ids(self.server_ids, changes, routes)
        rows = np.flatnonzero(check_ids >= 0)
        if not len(rows):
            return rows, np.empty(0, dtype=np.int8), np.empty(0, dtype=np.int8)
        inputs = FilterInputs.of_rows(changes.tuples, rows, routes[rows])
        batch = pa.RecordBatch.from_pydict(
            {
                "route": pa.array(routes[rows], pa.int32()),
                "kind": changes.rows["kind"].take(pa.array(rows)),
                "commit_lsn": changes.rows["commit_lsn"].take(pa.array(rows)),
                "old": inputs.old.project(self.all_columns).lists,
                "new": inputs.new.project(self.all_columns).lists,
            }
        )
        answers = server_answers(batch, self.server_checks, session, ("old", "new"))
        selected = np.arange(len(rows)), check_ids[rows]
        return rows, answers["old"][selected], answers["new"][selected]


def _filter_key(route: Route, action: PublishAction) -> Hashable:
    """What the answer to a row of the route depends on; None without a filter."""
    published = route.published
    filters = published.filters[action]
    if filters is None or action not in published.actions:
        return None
    # The same trees mean the same only for the same table, with the same columns at the same positions.
    trees = tuple(row_filter.node_tree for row_filter in filters)
    return trees, _layout(route)


def _layout(route: Route) -> Hashable:
    """What tells which columns of a table the route's rows have, and where."""
    return route.published.table.id, route.published.table.columns, route.relation.column_names


def _server_check(
    compiled: ServerFilter, check_id: int, users: Sequence[tuple[Route, ChangeKind]]
) -> ServerCheck:
    # Only rows for which PostgreSQL would evaluate the filter: its errors elsewhere must stay hidden.
    return ServerCheck.from_filter(
        compiled,
        users[0][0].relation.column_names,
        check_id=check_id,
        routes=[route.route_id for route, _ in users],
        kinds=[kind for _, kind in users],
    )


def _check_ids(ids: Int64s, changes: DecodedChanges, routes: Int64s) -> Int64s:
    """The check of each change, -1 for a change without a route or filter."""
    return np.where(routes >= 0, ids[routes, changes.kind_ids], -1)
