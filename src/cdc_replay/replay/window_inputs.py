"""What the plan of a window depends on, as values, and where it is read: subscriber's catalog and log."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from cdc_replay.arrow.version_index import CatalogVersions
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.queries import LogSummary
from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.model.table_state import Ready
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.route.routes import VersionedRelation
from cdc_replay.replay.table_rewrites import TableRewrites
from cdc_replay.replay.unsubscribed_tables import tables_renamed_alike
from cdc_replay.replay.window_end import Limit, WindowEnd
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.subscription_tables import KnownTable
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables


@dataclass(frozen=True, slots=True)
class WindowContent:
    """What the log holds of a window, without decoding it."""

    defined: tuple[VersionedRelation, ...]
    summary: LogSummary
    rewrites: TableRewrites


ReadContent: TypeAlias = Callable[[Window], WindowContent]


@dataclass(frozen=True)
class TableSurvey:
    """The subscription's tables before a window, as one read of the subscriber's catalog shows them."""

    known: tuple[KnownTable, ...]
    targets: Mapping[QualifiedName, TargetTable]
    lagging: Mapping[QualifiedName, Lsn]
    """Applied LSN of the tables that exist and end before the window does."""
    dropped: Mapping[int, Lsn]
    """The same of tables that were dropped, by oid: their changes must be seen (R8.1)."""
    window: Window

    @functools.cached_property
    def relations(self) -> dict[QualifiedName, int]:
        """The oids of the tables that exist."""
        return {table.name: table.relation for table in self.known if table.name is not None}

    def renamed_tables(self, names: Collection[QualifiedName]) -> tuple[int, ...]:
        """The oids of tables that have one of the names, and are recorded under another."""
        return tuple(table.relation for table in self.known if table.name in names and table.is_renamed)


@dataclass(frozen=True, slots=True)
class WindowInputs:
    """All that the plan of a window depends on; planning asks `session` nothing.

    `ended_by` is the end up to which the log was read, and why. `renamed` are the publisher's tables that
    reach a table of another name. `others` and `ends` are answers to `Unread`.
    """

    session: SubscriptionSession
    ended_by: WindowEnd
    tables: TableSurvey
    content: WindowContent
    renamed: Mapping[RelationId, QualifiedName]
    others: Mapping[QualifiedName, TargetTable | None] = field(default_factory=dict)
    ends: Mapping[Limit, Lsn] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unread:
    """What a plan depends on besides: where limits are, and tables that are not subscribed to."""

    limits: frozenset[Limit] = frozenset()
    tables: frozenset[QualifiedName] = frozenset()


def read_inputs(
    change_log: ChangeLog, content: ReadContent, session: SubscriptionSession, end: WindowEnd
) -> WindowInputs:
    """The tables, and what the log holds from their positions up to `end`.

    Raises:
        SubscriberNotReady: if a table needs changes from before the log.
    """
    tables = _read_tables(session, end.lsn)
    _check_no_gap(change_log, session.subscription.name, tables.lagging)
    window = tables.window
    window_content = content(window)
    renamed = tables_renamed_alike(change_log, window.after, tables.known)
    return WindowInputs(session, end, tables, window_content, renamed)


def read_unread(change_log: ChangeLog, inputs: WindowInputs, unread: Unread) -> WindowInputs:
    """The inputs with the answers."""
    targets = read_target_tables(inputs.session.connection, unread.tables) if unread.tables else {}
    others = {name: targets.get(name) for name in unread.tables}
    ends = {limit: _find_end(change_log, limit) for limit in unread.limits}
    return dataclasses.replace(inputs, others={**inputs.others, **others}, ends={**inputs.ends, **ends})


def _find_end(change_log: ChangeLog, limit: Limit) -> Lsn:
    window = limit.window
    end = change_log.last_lsn_without(window, limit.versions) if limit.versions else window.upto
    if limit.sent is None:
        return end
    catalogs = CatalogVersions.from_positions(catalog_history(change_log).positions)
    return min(end, change_log.end_before(window, limit.sent, catalogs))


def _read_tables(session: SubscriptionSession, upto: Lsn) -> TableSurvey:
    known = session.known_tables()
    ready = {table: table.state.applied_lsn for table in known if isinstance(table.state, Ready)}
    lagging = {table.name: lsn for table, lsn in ready.items() if table.name is not None and lsn < upto}
    dropped = {table.relation: lsn for table, lsn in ready.items() if table.name is None and lsn < upto}
    positions = [*lagging.values(), *dropped.values()]
    upto = upto if positions else min(ready.values(), default=upto)
    targets = session.read_targets(lagging)
    survey = TableSurvey(known, targets, lagging, dropped, Window(min(positions, default=upto), upto))
    if any(name not in targets or targets[name].oid != survey.relations[name] for name in lagging):
        return _read_tables(session, upto)  # a table was renamed or dropped between the two reads
    return survey


def _check_no_gap(change_log: ChangeLog, subscription: str, lagging: Mapping[QualifiedName, Lsn]) -> None:
    start = change_log.header.start_lsn
    stale = [name for name, lsn in lagging.items() if lsn < start]
    if stale:
        raise SubscriberNotReady(
            f'subscription "{subscription}" needs changes from before the change log',
            detail=f"The log starts at {start}; these tables end before it: {', '.join(map(str, stale))}.",
            hint="Copy them again: `cdc-replay snapshot {} {}`.".format(
                subscription, " ".join(f"--table {name.argument}" for name in stale)
            ),
            rule="R1.33",
        )
