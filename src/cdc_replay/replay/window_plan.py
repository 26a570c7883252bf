"""The next window of a subscription, before any row is read: its tables, its routes, and where it ends.

`plan` is pure. From what was read of the tables and the log it makes the plan, or says what else has to be
read: facts (`Unread`), or a shorter window (`WindowEnd`), which has other inputs. `plan_window` reads, and
asks again until there is a plan.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import QualifiedName
from cdc_replay.replay.log_window import read_definitions_and_summary
from cdc_replay.replay.route.routes import Routes, Target, plan_routes
from cdc_replay.replay.schema_changes import already_applied, schema_limits
from cdc_replay.replay.table_rewrites import first_rewrites, rewrites_in
from cdc_replay.replay.unsubscribed_tables import find_unfit, unsubscribed_limit, without_rights
from cdc_replay.replay.window_end import EndReason, Limit, WindowEnd
from cdc_replay.replay.window_inputs import (
    ReadContent,
    Unread,
    WindowContent,
    WindowInputs,
    read_inputs,
    read_unread,
)
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.target_checks import check_targets
from cdc_replay.subscriber.target_tables import TargetTable

ROWS_PER_WINDOW: Final = 2_000_000
"""A window of several transactions has about this many messages of the log at most."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The window of one subscription: what is known before any row is read."""

    session: SubscriptionSession
    window: Window
    advanced: tuple[int, ...]
    """Oids of the tables that the window advances, also of dropped ones: a table that was copied since is
    ahead."""
    relations: Mapping[QualifiedName, int]
    """Oids of the subscription's tables."""
    routes: Routes
    messages: int
    transactions: int
    unsubscribed: tuple[QualifiedName, ...]
    """Tables that the window changes and that are published and exist, but are not subscribed to (R7.12)."""
    stops_at_error: SubscriberNotReady | None
    """Why the changes after the window cannot be applied; None: they are another window."""
    rewritten: tuple[QualifiedName, ...]
    """Tables that the last transaction of the window has rewritten without sending the rows (R11.9)."""
    invalid_rewrites: tuple[str, ...]
    """Sentences about messages that only look like those of a rewrite."""
    found_by_name: tuple[int, ...]
    """Oids of tables that the subscriber has renamed: changes reach them by the new name."""
    requested_upto: Lsn
    """The window ends here, or earlier for an `EndReason`."""
    oldest_commit_time: int | None
    """That of the window's transactions, in microseconds since 1970-01-01 UTC."""
    began: float = 0.0

    @property
    def name(self) -> str:
        """The subscription's name."""
        return self.session.subscription.name

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

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was seen in the window that somebody should look at."""
        if not self.unsubscribed:
            return self.invalid_rewrites
        skipped = (
            f"skipped changes of {', '.join(map(str, self.unsubscribed))}: published but not in the"
            " subscription (new on the publisher or recreated on the subscriber);"
            f" run `cdc-replay refresh {self.name}` to add them"
        )
        return (*self.invalid_rewrites, skipped)


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
    """The subscription's next window: up to `upto`, or less for an `EndReason`.

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
    inputs = read_inputs(change_log, content, session, WindowEnd(end, EndReason.LENGTH))
    while True:
        match plan(inputs):
            case WindowEnd() as shorter:
                inputs = read_inputs(change_log, content, session, shorter)
            case Unread() as unread:
                inputs = read_unread(change_log, inputs, unread)
            case WindowPlan() as window_plan:
                return dataclasses.replace(window_plan, began=began, requested_upto=upto)


def plan(inputs: WindowInputs) -> WindowPlan | WindowEnd | Unread:
    """The plan of the window that the inputs are of; an earlier end, if it has one; or what is not known.

    Raises:
        SubscriberNotReady, PublicationRefused: as `plan_window`.
    """
    tables, window = inputs.tables, inputs.tables.window
    publications = inputs.session.subscription.publications
    rewritten = first_rewrites(tables.lagging, inputs.content.rewrites, publications, inputs.renamed)
    if rewritten and (first := min(rewritten.values())) < window.upto:
        # Later changes need not be publishable.
        return WindowEnd(first, EndReason.REWRITE)
    routing = _route(inputs)
    if isinstance(routing, Unread):
        return routing
    if (end := _earliest_end(inputs, routing)) is not None:
        return end
    routes = routing.routes
    by_name = {table.name for table in routes.tables}.difference(inputs.renamed.values())
    return WindowPlan(
        session=inputs.session,
        window=window,
        advanced=(*(tables.relations[name] for name in tables.lagging), *tables.dropped),
        relations=tables.relations,
        routes=routes,
        messages=inputs.content.summary.messages,
        transactions=inputs.content.summary.transactions,
        unsubscribed=tuple(sorted(routing.others)),
        stops_at_error=inputs.ended_by.error,
        rewritten=tuple(sorted(rewritten)),
        invalid_rewrites=inputs.content.rewrites.invalid,
        found_by_name=tables.renamed_tables(by_name),
        requested_upto=window.upto,
        oldest_commit_time=inputs.content.summary.oldest_commit_time,
    )


@dataclass(frozen=True, slots=True)
class _Routing:
    """The routes of a window, what may end it, and the published tables that are not subscribed to."""

    routes: Routes
    limits: tuple[Limit, ...]
    others: Mapping[QualifiedName, TargetTable]
    """Those that exist on the subscriber."""
    required: Mapping[QualifiedName, tuple[str, ...]]
    """The columns of those that cannot take their changes."""


def _route(inputs: WindowInputs) -> _Routing | Unread:
    tables = inputs.tables
    routes = _plan_routes(inputs)
    limits = tuple(schema_limits(tables.window, routes, tables.targets))
    names = frozenset(unrouted.name for unrouted in routes.unsubscribed).difference(tables.relations)
    unread = Unread(frozenset(limits).difference(inputs.ends), names.difference(inputs.others))
    if unread != Unread():
        return unread
    if versions := already_applied(limits, inputs.ends):
        routes = _plan_routes(inputs, versions)
    unrouted = [relation for relation in routes.unsubscribed if relation.name in names]
    others = {
        name: without_rights(table)
        for name in dict.fromkeys(relation.name for relation in unrouted)
        if (table := inputs.others[name]) is not None
    }
    unfit = find_unfit(unrouted, others)
    if unfit:
        limits = (*limits, unsubscribed_limit(tables.window, unfit))
    if unread_limits := frozenset(limits).difference(inputs.ends):
        return Unread(unread_limits)
    return _Routing(routes, limits, others, {relation.name: relation.columns for relation in unfit})


def _plan_routes(inputs: WindowInputs, already_applied: Collection[int] = ()) -> Routes:
    tables = inputs.tables
    defined = (
        versioned for versioned in inputs.content.defined if versioned.relation.version not in already_applied
    )
    wanted = {name: Target.from_table(tables.targets.get(name), lsn) for name, lsn in tables.lagging.items()}
    return plan_routes(defined, inputs.session.subscription.publications, wanted, inputs.renamed)


def _earliest_end(inputs: WindowInputs, routing: _Routing) -> WindowEnd | None:
    """The first position at which the window has to end; None if it need not end before its requested end.

    Raises:
        SubscriberNotReady: if its first transaction does not fit the tables, or no end would make it fit.
    """
    window, targets = inputs.tables.window, inputs.tables.targets
    end = min(_ends(inputs, routing.limits), key=lambda end: (end.lsn, end.reason), default=None)
    columns = {table.name: table.columns for table in routing.routes.tables}
    if end is not None and end.reason is EndReason.UNSUBSCRIBED:
        columns, targets = {**columns, **routing.required}, {**targets, **routing.others}
    try:
        check_targets(columns, targets)
    except SubscriberNotReady as error:
        if end is None or end.lsn == window.after:
            raise
        return dataclasses.replace(end, error=error if end.reason.stops else None)
    return end


def _ends(inputs: WindowInputs, limits: Iterable[Limit]) -> Iterator[WindowEnd]:
    for limit in limits:
        end = inputs.ends[limit]
        # Of changes that cannot be folded together, one kind is the first.
        is_first_kind = limit.reason is EndReason.UNFOLDABLE and end == limit.window.after
        if end < inputs.tables.window.upto and not is_first_kind:
            yield WindowEnd(end, limit.reason)
