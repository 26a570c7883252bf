"""Routes row groups for one routing group: routes, filters and column maps in one call per row group."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cdc_replay.arrow.arrays import Bytes, Int64s
from cdc_replay.filters.server_session import FilterSession
from cdc_replay.model.subscription import OriginPolicy
from cdc_replay.replay.route.filter_evaluation import FilterEvaluator
from cdc_replay.replay.route.route_index import DecodedChanges, RouteIndex
from cdc_replay.replay.route.router import Router
from cdc_replay.replay.route.routes import Routes

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class GroupRouter:
    """The routing of one routing group; picklable."""

    router: Router
    evaluator: FilterEvaluator

    @classmethod
    def from_routes(cls, routes: Routes, origin: OriginPolicy, index: RouteIndex) -> Self:
        """For the routes of `plan_routes`, which must be among those of `index`; there must be one."""
        return cls(Router.from_routes(routes, origin, index), FilterEvaluator.from_routes(routes.routes))

    def open_session(self, publisher_dsn: str) -> contextlib.AbstractContextManager[FilterSession | None]:
        """A session for the filters that PostgreSQL evaluates, if any; it connects at its first use."""
        if not self.evaluator.server_checks:
            return contextlib.nullcontext()
        return contextlib.closing(FilterSession(publisher_dsn))

    def route(
        self, changes: DecodedChanges, session: FilterSession | None
    ) -> tuple[pa.RecordBatch, Counter[str]]:
        """What the subscriptions must see of `changes` (ROUTED), and the counts of `Router.emit`.

        Raises:
            InvalidFilter: if evaluating a filter fails.
            ServerUnavailable, MissingPrivilege: if PostgreSQL cannot evaluate filters.
            SubscriberNotReady: if the publisher does not send what a row must be found by (R8.6, R8.7).
        """
        routes = self.router.find_routes(changes)
        results = self.evaluator.evaluate(changes, routes, session)
        return self.router.emit(changes, routes, results)

    def outcomes(self, changes: DecodedChanges, session: FilterSession | None) -> tuple[Int64s, Bytes]:
        """Route id and outcome of each change as for `route`, without what is sent: -1 and 0 for nothing.

        Raises:
            InvalidFilter, ServerUnavailable, MissingPrivilege: as `route`.
        """
        routes = self.router.find_routes(changes)
        results = self.evaluator.evaluate(changes, routes, session)
        return routes, self.router.outcomes(changes, routes, results)
