"""What a subscription makes of single changes: replay's own routes, row filters and UPDATE transformation.

A change is one row of CHANGES, and goes through `GroupRouter` as in a window, so the outcome is replay's by
construction. Each publication's row filter is evaluated alone beside it, by the same evaluator, for the three
values that a window does not keep apart.

| outcome         | with                                                                                  |
|-----------------|---------------------------------------------------------------------------------------|
| I, U, D, T      | what the subscriber gets                                                              |
| nothing         | the first reason for it, in the order in which the publisher checks                   |
| refused         | replay stops there: a filter fails, or PostgreSQL refuses the publications            |
| unknown         | PostgreSQL has to evaluate a filter, and the publisher does not answer                |
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from cdc_replay.arrow.frame_schema import arrow_schema
from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import (
    InvalidFilter,
    MissingPrivilege,
    PublicationRefused,
    ServerUnavailable,
    SubscriberNotReady,
)
from cdc_replay.explain_row.clauses import PublicationPart, copy_parts, publication_parts, why_published_as
from cdc_replay.explain_row.log_search import LoggedChange
from cdc_replay.filters.server_session import FilterSession
from cdc_replay.model.explained_row import Answer, Clause, ClauseRole
from cdc_replay.model.frames import CHANGES, ChangeKind
from cdc_replay.model.lsn import ZERO, Window
from cdc_replay.model.publication import Generated, PublishAction, PublisherCatalog, Table
from cdc_replay.model.relation import QualifiedName, Relation, RelationColumn, RelationId
from cdc_replay.model.subscription import OriginPolicy, Subscription
from cdc_replay.publication.partition_root import PartitionRoot, partition_root
from cdc_replay.publication.resolve import resolve
from cdc_replay.replay.log_window import versioned_relations
from cdc_replay.replay.route.filter_evaluation import FilterEvaluator
from cdc_replay.replay.route.group_router import GroupRouter
from cdc_replay.replay.route.route_index import DecodedChanges, RouteIndex
from cdc_replay.replay.route.routes import Route, Target, VersionedRelation, plan_routes
from cdc_replay.replay.route.update_transformation import UPDATE_OUTCOME

NOTHING: Final = "nothing"
REFUSED: Final = "refused"
UNKNOWN: Final = "unknown"

_ACTIONS: Final = {
    ChangeKind.INSERT: PublishAction.INSERT,
    ChangeKind.UPDATE: PublishAction.UPDATE,
    ChangeKind.DELETE: PublishAction.DELETE,
    ChangeKind.TRUNCATE: PublishAction.TRUNCATE,
}
_ANSWERS: Final = {1: Answer.TRUE, 0: Answer.FALSE, -1: Answer.NULL}
_NO_SERVER: Final = (ServerUnavailable, MissingPrivilege)


_Shape: TypeAlias = tuple[RelationId, int | None, int]
"""Relation, its version (None: a TRUNCATE, for which any serves), catalog version."""


def _shapes(relation: Relation, catalog_version: int) -> tuple[_Shape, _Shape]:
    return (relation.id, relation.version, catalog_version), (relation.id, None, catalog_version)


@dataclass(frozen=True, slots=True)
class RoutedChange:
    """What the subscription makes of a change; see `model.explained_row.ExplainedChange`."""

    outcome: str
    reason: str
    rule: str | None
    clauses: tuple[Clause, ...]
    published_as: QualifiedName | None = None
    why_published_as: str = ""
    case: str | None = None
    target: QualifiedName | None = None

    @property
    def is_seen(self) -> bool:
        """Whether the subscriber gets something."""
        return self.outcome in {kind.name for kind in ChangeKind}


@dataclass(slots=True)
class RowRouter:
    """Routes single changes of one subscription; `close` ends its sessions on the publisher.

    `targets` are the subscription's tables on the subscriber, `renamed` those of the publisher that reach
    another name.
    """

    subscription: Subscription
    publisher_dsn: str
    targets: Mapping[QualifiedName, Target]
    renamed: Mapping[RelationId, QualifiedName]
    _versions: dict[_Shape, VersionedRelation] = field(default_factory=dict)
    _refused: dict[_Shape, PublicationRefused] = field(default_factory=dict)
    _routes: dict[_Shape, Route] = field(default_factory=dict)
    _group: tuple[GroupRouter, RouteIndex] | None = None
    _sessions: dict[object, FilterSession] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def define(
        self, change_log: ChangeLog, history: CatalogHistory, window: Window, changes: Iterable[LoggedChange]
    ) -> None:
        """Plan the routes of these changes."""
        listed = tuple(changes)
        rows = {(change.version, change.catalog_version) for change in listed if change.version is not None}
        truncates = {(change.relation, change.catalog_version) for change in listed if change.version is None}
        publications = self.subscription.publications
        accepted: list[VersionedRelation] = []
        for versioned in versioned_relations(change_log, history, window, rows, truncates):
            relation, catalog_version, catalog = versioned
            shapes = _shapes(relation, catalog_version)
            self._versions |= dict.fromkeys(shapes, versioned)
            try:
                if relation.id in catalog.tables:
                    resolve(catalog, publications, relation.id)
                accepted.append(versioned)
            except PublicationRefused as refusal:
                self._refused |= dict.fromkeys(shapes, refusal)
        routes = plan_routes(accepted, publications, self.targets, self.renamed)
        for route in routes.routes:
            self._routes |= dict.fromkeys(_shapes(route.relation, route.catalog_version), route)
        if routes.routes:
            index = RouteIndex.from_routes(routes.routes)
            self._group = GroupRouter.from_routes(routes, self.subscription.origin, index), index

    def close(self) -> None:
        """Close the sessions on the publisher."""
        self._stack.close()

    def route(self, change: LoggedChange) -> RoutedChange:
        """What the subscription makes of the change."""
        shape = (change.relation, change.version, change.catalog_version)
        versioned = self._versions.get(shape)
        if versioned is None or change.relation not in versioned.catalog.tables:
            reason = "the publisher's catalog in the log does not have the table"
            return RoutedChange(NOTHING, reason, "R9.10", ())
        catalog, publications = versioned.catalog, self.subscription.publications
        parts = publication_parts(catalog, publications, change.relation, _ACTIONS[change.kind])
        bare = tuple(part.to_clause() for part in parts)
        if (refusal := self._refused.get(shape)) is not None:
            return RoutedChange(REFUSED, refusal.message, refusal.rule, bare)
        root = partition_root(catalog, catalog.existing(publications), change.relation)
        if root is None:
            if not catalog.tables[change.relation].is_publishable:
                return RoutedChange(NOTHING, "PostgreSQL does not publish unlogged tables", "R2.1", bare)
            return RoutedChange(
                NOTHING, "no publication of the subscription publishes the table", "R2.2", bare
            )
        why_named = why_published_as(root, catalog.tables[change.relation].name)
        route = self._routes.get(shape)
        if route is None:
            name = self.renamed.get(root.table.id, root.table.name)
            reason = f"table {name} of the subscriber is not in the subscription"
            return RoutedChange(NOTHING, reason, "R7.12", bare, root.table.name, why_named)
        routed = self._through(change, route, root, parts)
        return dataclasses.replace(
            routed,
            published_as=root.table.name,
            why_published_as=why_named,
            target=route.target.name,
        )

    def _through(
        self, change: LoggedChange, route: Route, root: PartitionRoot, parts: Sequence[PublicationPart]
    ) -> RoutedChange:
        early = _stopped_before_filters(change, route, root, self.subscription.origin)
        clauses = tuple(self._clause(change, route, part) for part in parts)
        if early is not None:
            return RoutedChange(NOTHING, *early, clauses)
        try:
            outcome = self._outcome(change)
        except _NO_SERVER as error:
            reason = f"its row filters could not be evaluated: {error.message}"
            return RoutedChange(UNKNOWN, reason, error.rule, clauses)
        except (InvalidFilter, SubscriberNotReady) as error:
            return RoutedChange(REFUSED, error.message, error.rule, clauses)
        case = None
        if change.kind is ChangeKind.UPDATE:
            case = describe_case(outcome, has_old=change.has_old)
        return RoutedChange(_word(outcome), *_why(change.kind, outcome, clauses), clauses, case=case)

    def _outcome(self, change: LoggedChange) -> ChangeKind | None:
        """What `GroupRouter` makes of the change."""
        if self._group is None:
            return None
        router, index = self._group
        session = self._session("group") if router.evaluator.server_checks else None
        decoded = DecodedChanges.from_batch(change.change, index)
        batch, _ = router.route(decoded, session)
        return ChangeKind(batch["kind"][0].as_py()) if batch.num_rows else None

    def present_row(
        self, catalog: PublisherCatalog, leaf: RelationId, values: Mapping[str, str | None]
    ) -> tuple[Clause, ...]:
        """What each publication makes of a row of `leaf` under a catalog of any time, as a copy does (R7.3).

        Nothing of the catalog is executed but as row filters are in a window.
        """
        parts = copy_parts(catalog, self.subscription.publications, leaf)
        change, relation = _as_insert(catalog.tables[leaf], values)
        versioned = VersionedRelation(relation, 0, catalog)
        root = partition_root(catalog, catalog.existing(self.subscription.publications), leaf)
        targets = {} if root is None else {root.table.name: Target((), ZERO)}
        try:
            routes = plan_routes([versioned], self.subscription.publications, targets).routes
        except PublicationRefused as refusal:
            return tuple(part.to_clause(error=refusal.message) for part in parts)
        return tuple(
            self._evaluate(change, routes[0], PublishAction.INSERT, part, (Answer.NO_ROW, None))
            if routes
            else part.to_clause()
            for part in parts
        )

    def _clause(self, change: LoggedChange, route: Route, part: PublicationPart) -> Clause:
        """The part with the values of its row filter for the old and the new row."""
        return self._evaluate(change.change, route, _ACTIONS[change.kind], part, _rows_of(change))

    def _evaluate(
        self,
        change: pa.RecordBatch,
        route: Route,
        action: PublishAction,
        part: PublicationPart,
        rows: tuple[Answer | None, Answer | None],
    ) -> Clause:
        if part.role is not ClauseRole.FILTER or part.row_filter is None:
            return part.to_clause()
        published = dataclasses.replace(
            route.published,
            actions=route.published.actions | {action},
            filters={**route.published.filters, action: (part.row_filter,)},
        )
        alone = dataclasses.replace(route, route_id=0, published=published)
        evaluator = FilterEvaluator.from_routes([alone])
        decoded = DecodedChanges.from_batch(change, RouteIndex.from_routes([alone]))
        session = None
        if evaluator.server_checks:
            session = self._session((published.table, alone.relation, action, part.row_filter))
        old, new = rows
        try:
            values = evaluator.answers(decoded, np.zeros(1, dtype=np.int64), session)
        except _NO_SERVER as error:
            return part.to_clause(old or Answer.UNKNOWN, new or Answer.UNKNOWN, error.message)
        except InvalidFilter as error:
            return part.to_clause(old or Answer.ERROR, new or Answer.ERROR, error.message)
        old_answer, new_answer = (_ANSWERS[int(answers[0])] for answers in values)
        return part.to_clause(old or old_answer, new or new_answer)

    def _session(self, key: object) -> FilterSession:
        # A session keeps the table of each check by its number, which every evaluator counts from 0.
        if key not in self._sessions:
            session = self._stack.enter_context(contextlib.closing(FilterSession(self.publisher_dsn)))
            self._sessions[key] = session
        return self._sessions[key]


def _as_insert(table: Table, values: Mapping[str, str | None]) -> tuple[pa.RecordBatch, Relation]:
    """The INSERT (CHANGES) by which a row with these values would be sent, and its relation."""
    columns = [column for column in table.columns if column.generated is Generated.NO]
    relation = Relation(
        table.id,
        0,
        table.name,
        table.replica_identity,
        tuple(
            RelationColumn(column.name, column.type_oid, column.typmod, column.name in table.key_columns)
            for column in columns
        ),
    )
    new = [values.get(column.name) for column in columns]
    row: dict[str, object] = dict.fromkeys(CHANGES.names)
    row |= {"commit_lsn": 0, "seq": 0, "lsn": 0, "kind": ChangeKind.INSERT.value, "relation_id": table.id}
    row |= {"relation_version": 0, "catalog_version": 0, "new": new}
    row |= {"new_kinds": "".join("n" if value is None else "t" for value in new)}
    return pa.RecordBatch.from_pylist([row], schema=arrow_schema(CHANGES)), relation


def _rows_of(change: LoggedChange) -> tuple[Answer | None, Answer | None]:
    """`Answer.NO_ROW` for the old and the new row if the change does not have it, else None."""
    has_old = change.has_old and change.kind is not ChangeKind.INSERT
    has_new = change.kind is not ChangeKind.DELETE
    return None if has_old else Answer.NO_ROW, None if has_new else Answer.NO_ROW


def _stopped_before_filters(
    change: LoggedChange, route: Route, root: PartitionRoot, origin: OriginPolicy
) -> tuple[str, str] | None:
    """Why the change does not reach the row filters, and the rule; None if it does."""
    if origin is OriginPolicy.NONE and change.origin is not None:
        name = f'origin "{change.origin}"' if change.origin else "an origin"
        return f"the change has {name}, and the subscription has `origin: none`", "R8.19"
    action = _ACTIONS[change.kind]
    if action not in root.actions:
        return f"the publications of the subscription do not publish {action.value} of the table", "R2.7"
    if change.kind is ChangeKind.TRUNCATE and route.published.table.id != change.relation:
        return f"TRUNCATE of a partition is not sent under the name of {root.table.name}", "R2.13"
    if change.kind is ChangeKind.DELETE and not change.has_old:
        return "a DELETE without an old row is not sent", "R3.10"
    return None


def describe_case(outcome: ChangeKind | None, *, has_old: bool) -> str:
    """The row of the table of UPDATEs (R4.4) that led to the outcome."""
    ((old, new),) = (passes for passes, kind in UPDATE_OUTCOME.items() if kind is outcome)
    words = {True: "passes", False: "does not pass"}
    if not has_old:
        return f"no old row was sent; the new one {words[new]}, and its answer holds for both (R4.3)"
    return f"the old row {words[old]}, the new one {words[new]}: {_word(outcome)} (R4.4)"


def _why(kind: ChangeKind, outcome: ChangeKind | None, clauses: Sequence[Clause]) -> tuple[str, str]:
    """Why the row filters led to the outcome, and the rule."""
    if kind is ChangeKind.TRUNCATE:
        return "row filters do not matter for TRUNCATE", "R3.12"
    everything = [clause for clause in clauses if clause.role is ClauseRole.EVERY_ROW]
    if everything and outcome is not None:
        return f'publication "{everything[0].publication}" publishes every row', "R3.4"
    counted = [clause for clause in clauses if clause.role is ClauseRole.FILTER]
    if not counted:
        return "no row filter applies", "R3.6"
    if outcome is None:
        return "no publication's row filter passes the row", "R3.5"
    passing = [f'"{clause.publication}"' for clause in counted if Answer.TRUE in {clause.old, clause.new}]
    row = "row"
    if kind is ChangeKind.UPDATE:
        row = {ChangeKind.INSERT: "new row", ChangeKind.DELETE: "old row"}.get(
            outcome, "row before and after"
        )
    return f"the row filter of {', '.join(passing)} passes the {row}", "R3.5"


def _word(outcome: ChangeKind | None) -> str:
    return NOTHING if outcome is None else outcome.name
