"""The next window of a subscription, before any row is read: its tables, its routes, and where it ends."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.queries import LogSummary
from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Ready
from cdc_replay.replay.log_window import read_definitions_and_summary
from cdc_replay.replay.route.routes import Routes, Target, VersionedRelation, plan_routes
from cdc_replay.replay.schema_changes import fit_schema
from cdc_replay.replay.table_rewrites import TableRewrites, first_rewrites, rewrites_in
from cdc_replay.replay.unsubscribed_tables import plan_unsubscribed_changes, tables_renamed_alike
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.subscription_tables import KnownTable
from cdc_replay.subscriber.target_checks import check_targets
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables

ROWS_PER_WINDOW: Final = 2_000_000
"""A window of several transactions has about this many messages of the log at most."""


@dataclass(frozen=True, slots=True)
class WindowContent:
    """What the log holds of a window, without decoding it."""

    defined: tuple[VersionedRelation, ...]
    summary: LogSummary
    rewrites: TableRewrites


ReadContent: TypeAlias = Callable[[Window], WindowContent]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The window of one subscription: what is known before any row is read."""

    session: SubscriptionSession
    window: Window
    tables_to_advance: tuple[QualifiedName, ...]
    """A table that was copied since is ahead of the window, and not among them."""
    relations: Mapping[QualifiedName, int]
    """Oids of the subscription's tables."""
    dropped: tuple[int, ...]
    """Oids of tables that the window advances, and that were dropped on the subscriber."""
    routes: Routes
    began: float
    messages: int
    transactions: int
    unsubscribed: tuple[QualifiedName, ...]
    """Tables that the window changes and that are published and exist, but are not subscribed to (R7.12)."""
    requested_upto: Lsn
    """The window ends earlier before a schema change (`replay.schema_changes`), after a table rewrite
    (`replay.table_rewrites`), or where it would be long."""
    stops_at_error: SubscriberNotReady | None = None
    """Why the changes after the window cannot be applied; None: they are another window."""
    rewritten: tuple[QualifiedName, ...] = ()
    """Tables that the last transaction of the window has rewritten without sending the rows (R11.9)."""
    found_by_name: tuple[int, ...] = ()
    """Oids of tables that the subscriber has renamed: changes reach them by the new name."""
    oldest_commit_time: int | None = None
    """That of the window's transactions, in microseconds since 1970-01-01 UTC."""

    @property
    def name(self) -> str:
        """The subscription's name."""
        return self.session.subscription.name

    @property
    def advanced(self) -> tuple[int, ...]:
        """The oids of all tables that end at the window's end."""
        return (*(self.relations[name] for name in self.tables_to_advance), *self.dropped)

    def lag_seconds(self) -> float:
        """The age of the window's oldest transaction now."""
        oldest = self.oldest_commit_time
        return 0.0 if oldest is None else max(0.0, time.time() - oldest / 1e6)

    @property
    def lag_bytes(self) -> int:
        """The distance to what was requested before the window was applied."""
        return max(0, self.requested_upto.value - self.window.after.value)

    @property
    def is_partial(self) -> bool:
        """The window ends before `requested_upto`."""
        return self.window.upto < self.requested_upto


def read_content(change_log: ChangeLog, window: Window) -> WindowContent:
    """What the log holds of the window; reads small columns."""
    defined, summary = read_definitions_and_summary(change_log, window)
    return WindowContent(defined, summary, rewrites_in(change_log, window, summary))


def plan_window(
    change_log: ChangeLog,
    content: ReadContent,
    session: SubscriptionSession,
    upto: Lsn,
    *,
    may_be_cut: bool = True,
) -> WindowPlan:
    """The subscription's next window: up to `upto`, or less where a schema change or a rewrite ends it.

    With `may_be_cut` a long window is split, which bounds memory and what is repeated after a failure.

    Raises:
        SubscriberNotReady: if it has no tables yet, needs changes that the log does not have, or its next
            transaction does not fit its tables.
        PublicationRefused: where PostgreSQL refuses to decode for its publications.
    """
    began = time.monotonic()
    if not session.tables_are_listed():
        raise SubscriberNotReady(
            f'subscription "{session.subscription.name}" has no tables yet',
            hint=f"Run `cdc-replay snapshot {session.subscription.name}` first.",
        )
    after = session.position() or upto
    is_cut = may_be_cut and after < upto
    end = change_log.split_lsn(Window(after, upto), ROWS_PER_WINDOW) if is_cut else upto
    plan = _plan_up_to(change_log, content, session, end)
    return dataclasses.replace(plan, began=began, requested_upto=upto)


@dataclass(frozen=True, slots=True)
class _TableSurvey:
    """The subscription's tables before a window, as one read of the subscriber's catalog shows them."""

    known: tuple[KnownTable, ...]
    targets: Mapping[QualifiedName, TargetTable]
    lagging: Mapping[QualifiedName, Lsn]
    """Applied LSN of the tables that exist and end before the window does."""
    dropped: Mapping[int, Lsn]
    """The same of tables that were dropped, by oid: their changes must be seen (R8.1)."""
    window: Window

    @property
    def names(self) -> frozenset[QualifiedName]:
        return frozenset(table.name for table in self.known if table.name is not None)

    @property
    def relations(self) -> dict[QualifiedName, int]:
        return {table.name: table.relation for table in self.known if table.name is not None}

    def renamed_tables(self, names: Collection[QualifiedName]) -> tuple[int, ...]:
        """The oids of tables that have one of the names, and are recorded under another."""
        return tuple(table.relation for table in self.known if table.name in names and table.is_renamed)


def _read_tables(session: SubscriptionSession, upto: Lsn) -> _TableSurvey:
    known = session.known_tables()
    ready = {table: table.state.applied_lsn for table in known if isinstance(table.state, Ready)}
    lagging = {table.name: lsn for table, lsn in ready.items() if table.name is not None and lsn < upto}
    dropped = {table.relation: lsn for table, lsn in ready.items() if table.name is None and lsn < upto}
    positions = [*lagging.values(), *dropped.values()]
    upto = upto if positions else min(ready.values(), default=upto)
    run_as_owner = session.subscription.run_as_owner
    targets = read_target_tables(session.connection, tuple(lagging), run_as_owner=run_as_owner)
    survey = _TableSurvey(known, targets, lagging, dropped, Window(min(positions, default=upto), upto))
    if any(name not in targets or targets[name].oid != survey.relations[name] for name in lagging):
        return _read_tables(session, upto)  # a table was renamed or dropped between the two reads
    return survey


def _plan_up_to(
    change_log: ChangeLog, content: ReadContent, session: SubscriptionSession, upto: Lsn
) -> WindowPlan:
    survey = _read_tables(session, upto)
    lagging, targets, window = survey.lagging, survey.targets, survey.window
    upto = window.upto
    _check_no_gap(change_log, session.subscription.name, lagging)
    window_content = content(window)
    publications = session.subscription.publications
    renamed = tables_renamed_alike(change_log, window.after, survey.known)
    rewritten = first_rewrites(lagging, window_content.rewrites, publications, renamed)
    if rewritten and (end := min(rewritten.values())) < upto:
        return dataclasses.replace(_plan_up_to(change_log, content, session, end), requested_upto=upto)
    wanted = {name: Target.from_table(targets.get(name), lsn) for name, lsn in lagging.items()}
    routes = plan_routes(window_content.defined, publications, wanted, renamed)
    fit = fit_schema(change_log, window, routes, targets)
    if fit.already_applied:
        defined = [
            versioned
            for versioned in window_content.defined
            if versioned.relation.version not in fit.already_applied
        ]
        routes = plan_routes(defined, publications, wanted, renamed)
    unsubscribed = plan_unsubscribed_changes(session, change_log, window, routes.unsubscribed, survey.names)
    columns = {table.name: table.columns for table in routes.tables}
    if unsubscribed.upto < upto and unsubscribed.upto <= fit.last_lsn:
        fit = dataclasses.replace(fit, last_lsn=unsubscribed.upto, has_missing_column=True)
        columns, targets = {**columns, **unsubscribed.required}, {**targets, **unsubscribed.targets}
    error = None
    try:
        check_targets(columns, targets)
    except SubscriberNotReady as not_ready:
        if not window.after < fit.last_lsn < upto:
            raise
        error = not_ready if fit.has_missing_column else None
    if fit.last_lsn < upto:
        plan = _plan_up_to(change_log, content, session, fit.last_lsn)
        # More than one window may lie before the error; then a later one finds it.
        return dataclasses.replace(
            plan, requested_upto=upto, stops_at_error=None if plan.is_partial else error
        )
    by_name = {table.name for table in routes.tables}.difference(renamed.values())
    return WindowPlan(
        session,
        window,
        tuple(lagging),
        survey.relations,
        tuple(survey.dropped),
        routes,
        0.0,
        window_content.summary.messages,
        window_content.summary.transactions,
        unsubscribed.skipped,
        upto,
        rewritten=tuple(sorted(rewritten)),
        found_by_name=survey.renamed_tables(by_name),
        oldest_commit_time=window_content.summary.oldest_commit_time,
    )


def _check_no_gap(change_log: ChangeLog, subscription: str, lagging: Mapping[QualifiedName, Lsn]) -> None:
    start = change_log.header.start_lsn
    stale = [str(name) for name, lsn in lagging.items() if lsn < start]
    if stale:
        raise SubscriberNotReady(
            f'subscription "{subscription}" needs changes from before the change log',
            detail=f"The log starts at {start}; these tables end before it: {', '.join(stale)}.",
            hint="Copy them again: `cdc-replay snapshot {} {}`.".format(
                subscription, " ".join(f"--table {name}" for name in stale)
            ),
            rule="R1.33",
        )
