"""`why`: reads the log and both servers, and puts together what they say of one row."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psycopg

from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.compare.other_feeds import LogState
from cdc_replay.compare.table_pair import conversions
from cdc_replay.errors import CdcReplayError, InvalidConfiguration, PublicationRefused
from cdc_replay.explain_row.cause import find_cause
from cdc_replay.explain_row.facts import Facts
from cdc_replay.explain_row.log_search import (
    FoundChanges,
    LoggedChange,
    SearchedTable,
    find_row,
    is_newer_than_log,
)
from cdc_replay.explain_row.other_owners import OtherOwners, SharedTable
from cdc_replay.explain_row.present_rows import (
    NO_ROWS,
    HeldRows,
    canonical_key,
    error_text,
    open_publisher,
    open_subscriber,
    read_published,
    read_target,
)
from cdc_replay.explain_row.progress import Progress, read_progress, read_windows
from cdc_replay.explain_row.routed import RoutedChange, RowRouter
from cdc_replay.explain_row.row_key import RowKey, parse_key
from cdc_replay.explain_row.row_table import RowTable, find_table
from cdc_replay.explain_row.table_events import copy_event, definition_events, rewrite_events
from cdc_replay.model.explained_row import (
    Answer,
    Cause,
    Clause,
    ClauseRole,
    ExplainedChange,
    PresentRow,
    TableEvent,
    WhyResult,
    WindowOfChange,
)
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.publication import Generated, PublisherCatalog
from cdc_replay.model.relation import QualifiedName, Relation, RelationId
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.timestamp import timestamp_text
from cdc_replay.postgres.connection import Connection
from cdc_replay.publication.capture_coverage import uncaptured_leaves
from cdc_replay.publication.resolve import PublishedRelation, resolve, synced_tables
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.route.routes import Target
from cdc_replay.replay.unsubscribed_tables import tables_renamed_alike
from cdc_replay.subscriber import subscription_tables
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables

DEFINITIONS_EVALUATED = 20
"""Earlier definitions that are evaluated for the present row."""

_SERVER_ERRORS = (CdcReplayError, psycopg.Error)


@dataclass(frozen=True, slots=True)
class WhyRequest:
    """Which row of which subscription, and where its log and servers are.

    `configured` are all subscriptions by name, `key` arguments as a person gives them (`row_key`). At most
    `last` changes are explained.
    """

    subscription: Subscription
    configured: Mapping[str, Subscription] = field(repr=False)
    publisher_dsn: str = field(repr=False)
    subscriber_dsn: str = field(repr=False)
    change_log: str
    table: QualifiedName
    key: tuple[str, ...]
    last: int
    with_values: bool


def explain_row(request: WhyRequest) -> WhyResult:
    """The history of the row, and why both sides differ.

    Raises:
        InvalidConfiguration: if there is no such table, or the key is not one of it.
        CdcReplayError: if the log or the subscriber cannot be read; without the publisher, what needs it is
            unknown.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        sides = _Sides.open(request, stack)
        log = _Log.open(request, sides)
        table = find_table(request.table, log.catalogs, request.subscription.publications, log.renamed)
        targets = _read_targets(request, sides.subscriber, table)
        target = targets.get(table.target)
        key = _key(request, table, target, sides)
        row_changes = find_row(log.searched(table), key, log.window, request.last)
        explanation = _Explanation(request, sides, log, table, targets, key, row_changes)
        result = explanation.result()
    return dataclasses.replace(result, seconds=time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class _Sides:
    """Both servers; without the publisher, `publisher_error` says why."""

    subscriber: Connection
    publisher: Connection | None
    catalog: PublisherCatalog | None
    publisher_error: str | None

    @classmethod
    def open(cls, request: WhyRequest, stack: contextlib.ExitStack) -> _Sides:
        purpose = f"why {request.subscription.name}"
        subscriber = stack.enter_context(open_subscriber(request.subscriber_dsn, purpose))
        try:
            publisher, catalog = stack.enter_context(open_publisher(request.publisher_dsn, purpose))
        except _SERVER_ERRORS as error:
            return cls(subscriber, None, None, error_text(error))
        return cls(subscriber, publisher, catalog, None)


@dataclass(frozen=True, slots=True)
class _Log:
    """The log, and the publisher's catalogs in it and now."""

    change_log: ChangeLog
    history: CatalogHistory
    window: Window
    relations: Mapping[int, Relation]
    logged_catalogs: Mapping[int, PublisherCatalog]
    catalogs: tuple[PublisherCatalog, ...]
    renamed: Mapping[RelationId, QualifiedName]

    @classmethod
    def open(cls, request: WhyRequest, sides: _Sides) -> _Log:
        change_log = ChangeLog.open(request.change_log)
        history = catalog_history(change_log)
        window = Window(change_log.start_lsn, change_log.end_lsn)
        logged = history.within(window)
        known = subscription_tables.known_tables(sides.subscriber, request.subscription.name)
        present = () if sides.catalog is None else (sides.catalog,)
        renamed = tables_renamed_alike(change_log, window.after, known)
        return cls(
            change_log, history, window, change_log.relations(), logged, (*logged.values(), *present), renamed
        )

    def searched(self, table: RowTable) -> SearchedTable:
        """Where the log is searched for a row of the table."""
        return SearchedTable(
            *(self.change_log, table.leaves, table.truncated, self.relations, self.history.positions)
        )


def _read_targets(
    request: WhyRequest, subscriber: Connection, table: RowTable
) -> dict[QualifiedName, TargetTable]:
    names = {table.target, *table.names}
    return read_target_tables(subscriber, names, run_as_owner=request.subscription.run_as_owner)


def _key(request: WhyRequest, table: RowTable, target: TargetTable | None, sides: _Sides) -> RowKey:
    """The key of the arguments, as its types print it."""
    columns = table.key or (target.identity if target is not None else ())
    key = parse_key(request.key, columns, table.columns, str(request.table))
    if sides.publisher is not None:
        described = read_target_tables(sides.publisher, [table.table.name])
        if table.table.name in described:
            return canonical_key(sides.publisher, described[table.table.name], key)
    return key if target is None else canonical_key(sides.subscriber, target, key)


@dataclass(frozen=True, slots=True)
class _Explanation:
    request: WhyRequest
    sides: _Sides
    log: _Log
    table: RowTable
    targets: Mapping[QualifiedName, TargetTable]
    key: RowKey
    row_changes: FoundChanges

    @property
    def target(self) -> TargetTable | None:
        return self.targets.get(self.table.target)

    def result(self) -> WhyResult:
        """Everything but the time that it took."""
        with contextlib.closing(self._router()) as router:
            facts = self._facts(router)
        return self._to_result(facts, *find_cause(facts))

    def _facts(self, router: RowRouter) -> Facts:
        subscription, subscriber = self.request.subscription, self.sides.subscriber
        progress = read_progress(subscriber, subscription, self.table.target, self._keys())
        commits = {change.commit_lsn for change in self.row_changes.changes}
        windows = read_windows(subscriber, subscription.name, commits, progress)
        changes = tuple(self._changes(router, progress, windows))
        converted = self._converted()
        held_rows, subscriber_row = self._read_subscriber(progress)
        published_rows, publisher_row = self._read_publisher(router, converted)
        events, passed_before = self._events(router, progress, published_rows)
        return Facts(
            subscription=subscription,
            table=str(self.table.target),
            key=self.key.by_column,
            log_start=self.log.window.after,
            log_end=self.log.window.upto,
            changes=changes,
            events=events,
            progress=progress,
            publisher=publisher_row,
            subscriber=subscriber_row,
            published_values=published_rows.values,
            converted_values=published_rows.converted,
            held_values=held_rows.values,
            columns=frozenset(() if self.published is None else self.published.columns),
            actions=frozenset(() if self.published is None else self.published.actions),
            comparable=frozenset(self.table.columns) - converted.keys(),
            is_newer_than_log=is_newer_than_log(self.log.change_log, self.log.window, published_rows.xid),
            passed_before=passed_before,
            others=self._others(publisher_row, subscriber_row),
            uncaptured=self._uncaptured(),
            is_published=self.table.is_published,
            is_cut=self.row_changes.count > len(changes),
        )

    def _to_result(self, facts: Facts, cause: Cause, explanation: str) -> WhyResult:
        return WhyResult(
            subscription=self.request.subscription.name,
            from_lsn=self.log.window.after,
            to_lsn=self.log.window.upto,
            seconds=0.0,
            table=str(self.request.table),
            key=self.key.by_column,
            changes_found=self.row_changes.count,
            changes=facts.changes if self.request.with_values else _without_values(facts.changes),
            events=facts.events,
            publisher=facts.publisher,
            subscriber=facts.subscriber,
            differs=facts.differs,
            differing=facts.differing,
            cause=cause,
            explanation=explanation,
        )

    def _keys(self) -> set[RowKey]:
        """The keys that the row has had."""
        texts = {
            key
            for change in self.row_changes.changes
            for key in (change.old_key, change.key)
            if key is not None and None not in key
        }
        return {self.key} | {RowKey(self.key.columns, tuple(map(str, key))) for key in texts}

    def _changes(
        self, router: RowRouter, progress: Progress, windows: Mapping[Lsn, WindowOfChange]
    ) -> Iterator[ExplainedChange]:
        router.define(self.log.change_log, self.log.history, self.log.window, self.row_changes.changes)
        for change in self.row_changes.changes:
            yield self._explain(change, router.route(change), progress, windows)

    def _router(self) -> RowRouter:
        subscription = self.request.subscription
        known = {
            table.name for table in subscription_tables.known_tables(self.sides.subscriber, subscription.name)
        }
        targets = {
            name: Target.from_table(table, ZERO) for name, table in self.targets.items() if name in known
        }
        return RowRouter(subscription, self.request.publisher_dsn, targets, self.log.renamed)

    def _explain(
        self,
        change: LoggedChange,
        routed: RoutedChange,
        progress: Progress,
        windows: Mapping[Lsn, WindowOfChange],
    ) -> ExplainedChange:
        fate = progress.fate(change.commit_lsn, is_seen=routed.outcome != "nothing")
        columns = self.key.columns
        return ExplainedChange(
            commit_lsn=change.commit_lsn,
            lsn=change.lsn,
            seq=change.seq,
            xid=change.xid,
            committed=timestamp_text(change.commit_time),
            origin=change.origin,
            kind=change.kind.name,
            leaf=str(self._leaf_name(change)),
            published_as=None if routed.published_as is None else str(routed.published_as),
            why_published_as=routed.why_published_as,
            clauses=routed.clauses,
            outcome=routed.outcome,
            case=routed.case,
            reason=routed.reason,
            rule=routed.rule,
            fate=fate,
            target=None if routed.target is None else str(routed.target),
            key=None if change.key is None else dict(zip(columns, change.key, strict=True)),
            old_key=dict(zip(columns, change.old_key or (), strict=True)) if change.moves else None,
            unsent=change.unsent,
            values=dict(change.new) or None,
            old_values=dict(change.old) or None,
            window=windows.get(change.commit_lsn) if fate.value == "applied" else None,
        )

    def _leaf_name(self, change: LoggedChange) -> QualifiedName | RelationId:
        """The name of the changed table then, or its oid."""
        if change.version is not None:
            return self.log.relations[change.version].name
        table = self.table.catalog.tables.get(change.relation)
        return change.relation if table is None else table.name

    def _events(
        self, router: RowRouter, progress: Progress, rows: HeldRows
    ) -> tuple[tuple[TableEvent, ...], Mapping[Lsn, bool | None]]:
        """In order, and whether the publisher's present row passes the definition before each."""
        publications, leaf = self.request.subscription.publications, self.table.leaf
        definitions = list(definition_events(self.log.history, self.log.logged_catalogs, publications, leaf))
        copied = copy_event(progress, self.table.target)
        events = [
            *(event for event, _ in definitions),
            *rewrite_events(self.log.change_log, self.log.window, self.table.truncated),
            *(() if copied is None else (copied,)),
        ]
        passed_before = {
            event.lsn: passes(router.present_row(catalog, leaf, rows.values))
            for event, catalog in definitions[-DEFINITIONS_EVALUATED:]
            if rows.count and leaf in catalog.tables
        }
        return tuple(sorted(events, key=lambda event: event.lsn)), passed_before

    def _converted(self) -> dict[str, psycopg.sql.Composed]:
        """Expressions for the publisher's values of columns that have another type on the subscriber."""
        publisher = self.sides.publisher
        if self.target is None or publisher is None:
            return {}
        shared = {column.name for column in self.target.columns}
        columns = [name for name in self.table.columns if name in shared]
        return conversions(publisher, self.sides.subscriber, self.table.table, self.target, columns)

    @property
    def published(self) -> PublishedRelation | None:
        try:
            return resolve(self.table.catalog, self.request.subscription.publications, self.table.leaf)
        except PublicationRefused:
            return None

    def _uncaptured(self) -> tuple[str, ...]:
        catalog, subscription = self.table.catalog, self.request.subscription
        try:
            tables = [
                synced
                for synced in synced_tables(catalog, subscription.publications)
                if synced.table.id == self.table.table.id
            ]
        except PublicationRefused:
            return ()
        return tuple(uncaptured_leaves(catalog, subscription, tables))

    def _read_subscriber(self, progress: Progress) -> tuple[HeldRows, PresentRow]:
        name = str(self.table.target)
        if self.target is None:
            return NO_ROWS, PresentRow(
                name, progress.applied_lsn, None, error="the subscriber has no such table"
            )
        try:
            held_rows = read_target(self.sides.subscriber, self.target, self.key)
        except InvalidConfiguration as error:
            return NO_ROWS, PresentRow(name, progress.applied_lsn, None, error=error.message)
        except _SERVER_ERRORS as error:
            return NO_ROWS, PresentRow(name, progress.applied_lsn, None, error=error_text(error))
        values = self._shown(held_rows, {column.name for column in self.target.columns})
        return held_rows, PresentRow(name, progress.applied_lsn, held_rows.count, values=values)

    def _read_publisher(
        self, router: RowRouter, converted: Mapping[str, psycopg.sql.Composed]
    ) -> tuple[HeldRows, PresentRow]:
        connection, catalog, table = self.sides.publisher, self.sides.catalog, self.table.table
        name = str(table.name)
        if connection is None or catalog is None:
            return NO_ROWS, PresentRow(name, None, None, error=self.sides.publisher_error)
        if table.id not in catalog.tables:
            return NO_ROWS, PresentRow(name, catalog.lsn, 0)
        try:
            rows = read_published(connection, catalog.tables[table.id], self.key, converted)
        except _SERVER_ERRORS as error:
            return NO_ROWS, PresentRow(name, catalog.lsn, None, error=error_text(error))
        leaf = self.table.leaf if rows.leaf is None else RelationId(rows.leaf)
        clauses: tuple[Clause, ...] = ()
        if rows.count and leaf in catalog.tables:
            clauses = router.present_row(catalog, leaf, rows.values)
        return rows, PresentRow(
            name,
            catalog.lsn,
            rows.count,
            is_published=passes(clauses) if rows.count else None,
            clauses=clauses,
            values=self._shown(rows, self._sent_columns()),
        )

    def _others(self, publisher_row: PresentRow, subscriber_row: PresentRow) -> OtherOwners:
        """Whose the subscriber's row may be, if the publisher has none for the subscription."""
        publisher, catalog = self.sides.publisher, self.sides.catalog
        is_surplus = bool(subscriber_row.rows) and (
            publisher_row.rows == 0 or publisher_row.is_published is False
        )
        if not is_surplus or self.target is None or publisher is None or catalog is None:
            return OtherOwners()
        log_state = LogState(self.request.change_log, catalog, self.request.configured)
        subscription, connection = self.request.subscription, self.sides.subscriber
        shared = SharedTable(subscription, connection, self.table.table.id, self.target)
        return shared.owners(log_state, publisher, self.key)

    def _sent_columns(self) -> set[str]:
        return {column.name for column in self.table.table.columns if column.generated is Generated.NO}

    def _shown(self, held_rows: HeldRows, columns: set[str]) -> Mapping[str, str | None] | None:
        if not self.request.with_values or not held_rows.count:
            return None
        return {name: value for name, value in held_rows.values.items() if name in columns}


def passes(clauses: Sequence[Clause]) -> bool | None:
    """Whether the publications' row filters pass a row (R3.4, R3.5); None if that is unknown."""
    if any(clause.role is ClauseRole.EVERY_ROW for clause in clauses):
        return True
    answers = [clause.new for clause in clauses if clause.role is ClauseRole.FILTER]
    if Answer.TRUE in answers:
        return True
    return None if {Answer.ERROR, Answer.UNKNOWN}.intersection(answers) else False


def _without_values(changes: Sequence[ExplainedChange]) -> tuple[ExplainedChange, ...]:
    return tuple(dataclasses.replace(change, values=None, old_values=None) for change in changes)
