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
from cdc_replay.replay.schema_changes import fit
from cdc_replay.replay.table_rewrites import TableRewrites, first_rewrites, rewrites_in
from cdc_replay.replay.unsubscribed_tables import renamed_alike, strangers
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.state import KnownTable
from cdc_replay.subscriber.tables import TargetTable, check_targets, read_target_tables

ROWS_PER_WINDOW: Final = 2_000_000
"""About how many messages of the log are one transaction of the subscriber at most, if they are several."""


@dataclass(frozen=True, slots=True)
class WindowContent:
    """What the log says of a window without decoding it."""

    defined: tuple[VersionedRelation, ...]
    summary: LogSummary
    rewrites: TableRewrites


ReadContent: TypeAlias = Callable[[Window], WindowContent]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The window of one subscription: what is known before any row is read."""

    opened: SubscriptionSession
    window: Window
    behind: tuple[QualifiedName, ...]
    """The tables that the window advances; one that was copied since is ahead, and stays there."""
    relations: Mapping[QualifiedName, int]
    """Their oids."""
    dropped: tuple[int, ...]
    """The oids of tables that the window advances, and that were dropped on the subscriber."""
    routes: Routes
    began: float
    messages: int
    transactions: int
    unsubscribed: tuple[QualifiedName, ...]
    """Tables that the window changes, and that are published and there, but not subscribed to (R7.12)."""
    asked: Lsn
    """The requested position. The window ends before it at a schema change (`replay.schema_changes`), after a
    table rewrite (`replay.table_rewrites`), or where it would be long."""
    obstacle: SubscriberNotReady | None = None
    """Why the rest cannot be applied; without it, the rest is another window."""
    rewritten: tuple[QualifiedName, ...] = ()
    """Tables that the last transaction of the window has rewritten without sending it (R11.9)."""
    found_by_name: tuple[int, ...] = ()
    """The oids of tables that changes reach by another name than before: the subscriber has renamed them."""

    @property
    def name(self) -> str:
        """The subscription's."""
        return self.opened.subscription.name

    @property
    def advanced(self) -> tuple[int, ...]:
        """The oids of all tables that end at the window's end."""
        return (*(self.relations[name] for name in self.behind), *self.dropped)

    @property
    def is_part(self) -> bool:
        """More is to come behind the window."""
        return self.window.upto < self.asked


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
    """The subscription's next window: up to `upto`, or as far as what changes its shape can be one window.

    A long one is cut if it may be, so that neither memory nor what is repeated after a failure grows with it.

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
    behind = session.position() or upto
    is_cut = may_be_cut and behind < upto
    end = change_log.split_lsn(Window(behind, upto), ROWS_PER_WINDOW) if is_cut else upto
    plan = _planned(change_log, content, session, end)
    return dataclasses.replace(plan, began=began, asked=upto)


@dataclass(frozen=True, slots=True)
class _Lagging:
    """The subscription's tables in front of a window, as one look at the subscriber shows them."""

    known: tuple[KnownTable, ...]
    targets: Mapping[QualifiedName, TargetTable]
    behind: Mapping[QualifiedName, Lsn]
    """Those that are there and end before the window does, with their positions."""
    dropped: Mapping[int, Lsn]
    """Those, by oid, that are not there any more; what comes for them must be seen (R8.1)."""
    window: Window

    @property
    def names(self) -> frozenset[QualifiedName]:
        """What all that are there are called."""
        return frozenset(each.name for each in self.known if each.name is not None)

    @property
    def relations(self) -> dict[QualifiedName, int]:
        """Their oids."""
        return {each.name: each.relation for each in self.known if each.name is not None}

    def found_by(self, names: Collection[QualifiedName]) -> tuple[int, ...]:
        """The oids of those that have one of the names, and were recorded by another."""
        return tuple(each.relation for each in self.known if each.name in names and each.is_renamed)


def _lagging(session: SubscriptionSession, upto: Lsn) -> _Lagging:
    known = session.known_tables()
    ready = {each: each.state.applied_lsn for each in known if isinstance(each.state, Ready)}
    behind = {each.name: lsn for each, lsn in ready.items() if each.name is not None and lsn < upto}
    dropped = {each.relation: lsn for each, lsn in ready.items() if each.name is None and lsn < upto}
    lagging = [*behind.values(), *dropped.values()]
    upto = upto if lagging else min(ready.values(), default=upto)
    run_as_owner = session.subscription.run_as_owner
    targets = read_target_tables(session.connection, tuple(behind), run_as_owner=run_as_owner)
    found = _Lagging(known, targets, behind, dropped, Window(min(lagging, default=upto), upto))
    if any(name not in targets or targets[name].oid != found.relations[name] for name in behind):
        return _lagging(session, upto)  # one was renamed or dropped between the two looks
    return found


def _planned(
    change_log: ChangeLog, content: ReadContent, session: SubscriptionSession, upto: Lsn
) -> WindowPlan:
    lagging = _lagging(session, upto)
    behind, targets, window = lagging.behind, lagging.targets, lagging.window
    upto = window.upto
    _check_no_gap(change_log, session.subscription.name, behind)
    found = content(window)
    publications = session.subscription.publications
    renamed = renamed_alike(change_log, window.after, lagging.known)
    rewritten = first_rewrites(behind, found.rewrites, publications, renamed)
    if rewritten and (end := min(rewritten.values())) < upto:
        return dataclasses.replace(_planned(change_log, content, session, end), asked=upto)
    wanted = {name: Target.from_table(targets.get(name), lsn) for name, lsn in behind.items()}
    routes = plan_routes(found.defined, publications, wanted, renamed)
    fitting = fit(change_log, window, routes, targets)
    if fitting.stale:
        defined = [each for each in found.defined if each.relation.version not in fitting.stale]
        routes = plan_routes(defined, publications, wanted, renamed)
    unknown = strangers(session, change_log, window, routes.unsubscribed, lagging.names)
    columns = {table.name: table.columns for table in routes.tables}
    if unknown.upto < upto and unknown.upto <= fitting.upto:
        fitting = dataclasses.replace(fitting, upto=unknown.upto, is_obstructed=True)
        columns, targets = {**columns, **unknown.wanted}, {**targets, **unknown.targets}
    obstacle = None
    try:
        check_targets(columns, targets)
    except SubscriberNotReady as error:
        if not window.after < fitting.upto < upto:
            raise
        obstacle = error if fitting.is_obstructed else None
    if fitting.upto < upto:
        plan = _planned(change_log, content, session, fitting.upto)
        # The way to the obstacle may be more than one window; then the next one finds it.
        return dataclasses.replace(plan, asked=upto, obstacle=None if plan.is_part else obstacle)
    summary = found.summary
    by_name = {table.name for table in routes.tables}.difference(renamed.values())
    return WindowPlan(
        session,
        window,
        tuple(behind),
        lagging.relations,
        tuple(lagging.dropped),
        routes,
        0.0,
        summary.messages,
        summary.transactions,
        unknown.passed_over,
        upto,
        rewritten=tuple(sorted(rewritten)),
        found_by_name=lagging.found_by(by_name),
    )


def _check_no_gap(change_log: ChangeLog, subscription: str, behind: Mapping[QualifiedName, Lsn]) -> None:
    start = change_log.header.start_lsn
    stale = [str(name) for name, lsn in behind.items() if lsn < start]
    if stale:
        raise SubscriberNotReady(
            f'subscription "{subscription}" needs changes from before the change log',
            detail=f"The log starts at {start}; these tables end before it: {', '.join(stale)}.",
            hint="Copy them again: `cdc-replay snapshot {} {}`.".format(
                subscription, " ".join(f"--table {name}" for name in stale)
            ),
            rule="R1.33",
        )
