"""Bring the values of tables that the publisher has rewritten without sending anything (R11.9).

A rewrite neither makes nor removes rows. So of the rows that both sides have, paired by key, those that
differ get the publisher's values; no row is inserted, none deleted:

| a row is                                        | it                                                |
|-------------------------------------------------|---------------------------------------------------|
| published, and here with other values           | is updated; columns of the subscriber's own stay  |
| published, and not here                         | is counted: a filter may let it in now            |
| here, and on the publisher, and not published   | is counted: a filter may have taken it out        |
| here, and not on the publisher                  | stays: it is the subscriber's own, or that of     |
|                                                 | another subscription, or its DELETE was not sent  |

Nothing is moved where the subscriber need not have the publisher's values, or where rows cannot be told to
belong together: without a key, or where rows of both sides have keys that the other does not have. Then what
differs is counted too. A warning gives the numbers, and the command that moves such rows. Where a rewrite has
changed no value, nothing differs, and nothing is said.

Both sides are compared at a fence: an exported snapshot, up to which the log is captured and replayed. All
subscriptions of a `sync` end there. A table that cannot be compared, such as one of which the subscriber
lacks a column, stays marked; changes go on.

Each table is one transaction, which updates its rows and removes its mark. Killed before it, the next run
compares the table again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import psycopg

from cdc_replay.capture.capture_to import ensure_captured
from cdc_replay.capture.pull import CaptureSource
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.compare import digest
from cdc_replay.compare.reconcile import ComparedTable, ReconcileRequest, compare_values
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.results import CaptureResult, ReplayResult, TableCompared
from cdc_replay.model.subscription import OriginPolicy
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, export_snapshot, import_snapshot
from cdc_replay.publication.resolve import SyncedTable, synced_tables, why_values_may_differ
from cdc_replay.replay.definition_drift import definition_drifts
from cdc_replay.replay.engine import replay_sessions
from cdc_replay.subscriber import recorded_results, subscription_tables
from cdc_replay.subscriber.session import SubscriptionSession, export_after_applied
from cdc_replay.subscriber.target_tables import read_target_tables

logger = logging.getLogger(__name__)

ORIGIN_IS_NONE: Final = "a value that differs may have been committed here, with origin: none"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What bringing subscriptions to the fence has come to; `tables` are those compared, by subscription."""

    captured: CaptureResult
    replayed: tuple[ReplayResult, ...]
    tables: Mapping[str, tuple[TableCompared, ...]]


def compare_marked(source: CaptureSource, sessions: Sequence[SubscriptionSession]) -> Comparison | None:
    """Bring subscriptions of one publisher to a fence and compare their marked tables; None without any.

    The caller holds their locks.

    Raises:
        CdcReplayError: if there is no fence, with nothing changed. What fails for one table is a warning.
    """
    if not any(
        subscription_tables.rewritten_tables(each.connection, each.subscription.name) for each in sessions
    ):
        return None
    with export_snapshot(source.dsn) as exported:
        return _compare_at(source, sessions, exported)


def compare_marked_tables(source: CaptureSource, session: SubscriptionSession) -> tuple[TableCompared, ...]:
    """The same for one subscription, on which others may work while open transactions are waited for.

    What is in the way is a warning: the tables stay marked.
    """
    name = session.subscription.name
    if not subscription_tables.rewritten_tables(session.connection, name):
        return ()
    try:
        with export_after_applied(source.dsn, session) as exported:
            return _compare_at(source, [session], exported).tables[name]
    except (CdcReplayError, psycopg.Error) as error:
        warn_of_failure(session, error)
        return ()


def warn_of_failure(session: SubscriptionSession, error: Exception) -> None:
    """Tell that the marked tables are not compared this time."""
    name = session.subscription.name
    logger.warning(
        "subscription %s: values of tables that the publisher rewrote (R11.9) are not compared; the next run"
        " tries it again: %s",
        *(name, error),
    )


def _compare_at(
    source: CaptureSource, sessions: Sequence[SubscriptionSession], exported: ExportedSnapshot
) -> Comparison:
    captured = ensure_captured(source, exported.consistent_point)
    replayed = replay_sessions(source, sessions, exported.consistent_point, fence=exported)
    with import_snapshot(exported, purpose="catalog") as connection:
        catalog = read_catalog(connection, exported.consistent_point)
    tables = {
        session.subscription.name: _Marked(session, exported, catalog, source.change_log).compared()
        for session in sessions
    }
    return Comparison(captured, replayed, tables)


@dataclass(frozen=True, slots=True)
class _Marked:
    """The marked tables of a subscription, and the fence at which they are compared."""

    session: SubscriptionSession
    exported: ExportedSnapshot
    catalog: PublisherCatalog
    change_log: str
    _found: list[TableCompared] = field(default_factory=list)

    def compared(self) -> tuple[TableCompared, ...]:
        """Compare those that replay has brought to the fence."""
        session, name = self.session, self.session.subscription.name
        try:
            marked = subscription_tables.rewritten_tables(session.connection, name)
            ready = session.ready_tables()
            published = {
                each.table.name: each
                for each in synced_tables(self.catalog, session.subscription.publications)
            }
            for table, rewritten_at in marked.items():
                if table not in published:
                    # Nothing of it comes any more; a refresh forgets it.
                    subscription_tables.clear_rewrite(session.connection, name, table)
                elif ready.get(table) == self.exported.consistent_point:
                    self._compare(published[table], rewritten_at)
        except (CdcReplayError, psycopg.Error) as error:
            warn_of_failure(session, error)
        return tuple(self._found)

    def _compare(self, synced: SyncedTable, rewritten_at: Lsn) -> None:
        subscription, table = self.session.subscription, synced.table.name
        request = ReconcileRequest(subscription, self.exported, self.session.dsn, (synced,))
        results: list[TableCompared] = []
        try:
            reason = self._why_not_moved(synced)

            def record(connection: Connection, done: ComparedTable) -> None:
                subscription_tables.clear_rewrite(connection, subscription.name, table)
                results.append(_result(subscription.name, done, rewritten_at, reason))
                recorded = results[-1].to_dict()
                recorded_results.record_result(connection, subscription.name, "compare", recorded)

            compare_values(request, record, update_rows=reason is None)
        except (CdcReplayError, psycopg.Error) as error:
            logger.warning(
                "subscription %s: the values of %s, which the publisher rewrote by the transaction that"
                " committed at %s (R11.9), cannot be compared; they will be tried again: %s",
                *(subscription.name, table, rewritten_at, error),
            )
            return
        (result,) = results
        if result.warning is not None:
            logger.warning("subscription %s: %s", subscription.name, result.warning)
        self._found.append(result)

    def _why_not_moved(self, synced: SyncedTable) -> str | None:
        """Why the subscriber's rows need not have the publisher's values, or cannot be told apart."""
        session, subscription = self.session, self.session.subscription
        if not subscription.copy_data:
            return "copy_data is false"
        if subscription.origin is OriginPolicy.NONE:
            return ORIGIN_IS_NONE
        if reason := why_values_may_differ(self.catalog, subscription.publications, synced):
            return reason
        changed = definition_drifts(session.connection, subscription, self.change_log, self.catalog)
        if synced.table.name in changed:
            return "its row filter or columns have changed since its rows were brought"
        return None if self._has_key(synced) else "its rows have no key"

    def _has_key(self, synced: SyncedTable) -> bool:
        target = read_target_tables(self.session.connection, [synced.table.name]).get(synced.table.name)
        # Where there is no target, the comparison says so.
        return target is None or bool(digest.common_key(synced.table, target, synced.columns))


def _result(subscription: str, done: ComparedTable, rewritten_at: Lsn, reason: str | None) -> TableCompared:
    values = done.values
    return TableCompared(
        table=str(done.name),
        rewritten_at=rewritten_at,
        updated=values.update,
        differing=values.different - values.update,
        missing=values.missing,
        taken_out=values.unpublished_rows,
        rows_read=done.rows,
        bytes=done.bytes,
        seconds=done.seconds,
        warning=_warning(subscription, done, rewritten_at, reason),
    )


def _warning(subscription: str, done: ComparedTable, rewritten_at: Lsn, reason: str | None) -> str | None:
    """What stays different, how many rows that are, and what moves them; None where nothing does."""
    values = done.values
    left = values.different - values.update
    # Where rows need not all be here, those that are missing tell of a rewrite only if others are left over.
    is_missing = values.missing and (reason is None or values.subscriber_only)
    if not (left or values.unpublished_rows or is_missing):
        return None
    counts = (
        (left, "of both sides have other values"),
        (values.missing, "are published and not here"),
        (values.unpublished_rows, "are here, and on the publisher, and not published"),
    )
    told = "; ".join(f"{count} rows {what}" for count, what in counts if count)
    remedy = f"`cdc-replay refresh {subscription} --reconcile` moves them"
    if reason == ORIGIN_IS_NONE:
        remedy = f"an UPDATE of {done.name} on the publisher that touches them (SET v = v) sends them"
    if reason is None and left:
        reason = "its key may have been rewritten"
    because = "" if reason is None else f", because {reason}"
    return (
        f"table {done.name} goes on with rows that differ since the publisher rewrote it by the transaction"
        f" that committed at {rewritten_at}, which sends no changes (R11.9){because}: {told}; {remedy}"
    )
