"""The next window of a subscription, before any row is read: its tables, its routes, and where it ends."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from cdc_replay.changelog.content import LogSummary
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.opened import Opened
from cdc_replay.commands.rewritten import Rewrites, first_rewrites, rewrites_in
from cdc_replay.commands.shapes import fit
from cdc_replay.commands.window import definitions_and_summary
from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import QualifiedName
from cdc_replay.route.routes import Defined, Routes, Target, plan_routes
from cdc_replay.subscriber.tables import check_targets, read_target_tables

ROWS_PER_WINDOW: Final = 2_000_000
"""About how many messages of the log are one transaction of the subscriber at most, if they are several."""


@dataclass(frozen=True, slots=True)
class Content:
    """What the log says of a window without decoding it."""

    defined: tuple[Defined, ...]
    summary: LogSummary
    rewrites: Rewrites


ContentOf: TypeAlias = Callable[[Window], Content]


@dataclass(frozen=True, slots=True)
class Plan:
    """The window of one subscription: what is known before any row is read."""

    opened: Opened
    window: Window
    behind: tuple[QualifiedName, ...]
    """The tables that the window advances; one that was copied since is ahead, and stays there."""
    routes: Routes
    began: float
    messages: int
    transactions: int
    unsubscribed: tuple[QualifiedName, ...]
    """Tables that the window changes, and that are published, but not subscribed to (R7.12)."""
    asked: Lsn
    """The position that was asked for; the window ends before it where shapes change (`commands.shapes`),
    behind a rewrite (`commands.rewritten`), or where it would be long."""
    obstacle: SubscriberNotReady | None = None
    """Why the rest cannot be applied; without it, the rest is another window."""
    rewritten: tuple[QualifiedName, ...] = ()
    """Tables that the last transaction of the window has rewritten without sending it (R11.9)."""

    @property
    def name(self) -> str:
        """The subscription's."""
        return self.opened.subscription.name

    @property
    def is_part(self) -> bool:
        """More is to come behind the window."""
        return self.window.upto < self.asked


def content_of(change_log: ChangeLog, window: Window) -> Content:
    """What the log holds of the window; reads small columns."""
    defined, summary = definitions_and_summary(change_log, window)
    return Content(defined, summary, rewrites_in(change_log, window, summary))


def plan_window(
    change_log: ChangeLog, content: ContentOf, at_work: Opened, upto: Lsn, *, may_be_cut: bool = True
) -> Plan:
    """The subscription's next window: up to `upto`, or as far as what changes its shape can be one window.

    A long one is cut if it may be, so that neither memory nor what is repeated after a failure grows with it.

    Raises:
        SubscriberNotReady: if it has no tables yet, needs changes that the log does not have, or its next
            transaction does not fit its tables.
        PublicationRefused: where PostgreSQL refuses to decode for its publications.
    """
    began = time.monotonic()
    if not at_work.has_tables_listed():
        raise SubscriberNotReady(
            f'subscription "{at_work.subscription.name}" has no tables yet',
            hint=f"Run `cdc-replay snapshot {at_work.subscription.name}` first.",
        )
    behind = min(at_work.ready_tables().values(), default=upto)
    is_cut = may_be_cut and behind < upto
    end = change_log.first_cut(Window(behind, upto), ROWS_PER_WINDOW) if is_cut else upto
    plan = _planned(change_log, content, at_work, end)
    return dataclasses.replace(plan, began=began, asked=upto)


def _planned(change_log: ChangeLog, content: ContentOf, at_work: Opened, upto: Lsn) -> Plan:
    ready = at_work.ready_tables()
    behind = {name: lsn for name, lsn in ready.items() if lsn < upto}
    _check_no_gap(change_log, at_work.subscription.name, behind)
    upto = upto if behind else min(ready.values(), default=upto)
    window = Window(min(behind.values(), default=upto), upto)
    found = content(window)
    publications = at_work.subscription.publications
    rewritten = first_rewrites(behind, found.rewrites, publications)
    if rewritten and (end := min(rewritten.values())) < upto:
        return dataclasses.replace(_planned(change_log, content, at_work, end), asked=upto)
    targets = read_target_tables(at_work.connection, tuple(behind))
    wanted = {name: Target.of(targets.get(name), lsn) for name, lsn in behind.items()}
    routes = plan_routes(found.defined, publications, wanted)
    fitting = fit(change_log, window, routes, targets)
    if fitting.stale:
        defined = [each for each in found.defined if each.relation.version not in fitting.stale]
        routes = plan_routes(defined, publications, wanted)
    obstacle = None
    try:
        check_targets({table.name: table.columns for table in routes.tables}, targets)
    except SubscriberNotReady as error:
        if not window.after < fitting.upto < upto:
            raise
        obstacle = error if fitting.is_obstructed else None
    if fitting.upto < upto:
        plan = _planned(change_log, content, at_work, fitting.upto)
        # The way to the obstacle may be more than one window; then the next one finds it.
        return dataclasses.replace(plan, asked=upto, obstacle=None if plan.is_part else obstacle)
    summary = found.summary
    unsubscribed = sorted(routes.elsewhere - at_work.table_states().keys()) if routes.elsewhere else ()
    return Plan(
        at_work,
        window,
        tuple(behind),
        routes,
        0.0,
        summary.messages,
        summary.transactions,
        tuple(unsubscribed),
        upto,
        rewritten=tuple(sorted(rewritten)),
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
