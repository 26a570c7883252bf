"""Update the values of tables that the publisher has rewritten without sending the rows (R11.9).

A rewrite neither inserts nor deletes rows. So of the rows that both sides have, paired by key, those that
differ get the publisher's values; no row is inserted or deleted:

| a row is                                        | it                                                |
|-------------------------------------------------|---------------------------------------------------|
| published, and here with other values           | is updated; columns of the subscriber's own stay  |
| published, and not here                         | is counted: a filter may let it in now            |
| here, and on the publisher, and not published   | is counted: a filter may have excluded it         |
| here, and not on the publisher                  | stays: it is the subscriber's own, or another     |
|                                                 | subscription's, or its DELETE was not sent        |

Nothing is updated if the subscriber need not have the publisher's values, or if rows cannot be paired:
without a key, or if both sides have keys that the other does not have. Then differing rows are counted too. A
warning has the counts, and the command that moves such rows. If a rewrite has changed no value, nothing is
logged.

Both sides are compared at a fence: an exported snapshot, up to which the log is captured and replayed. All
subscriptions of a `sync` end there. A table that cannot be compared, because the subscriber lacks a column
for example, stays marked; replay continues.

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
from cdc_replay.compare.reconcile import ComparedTable, ReconcileRequest, compare_values
from cdc_replay.compare.table_pair import common_key
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
from cdc_replay.replay.log_view import LogView
from cdc_replay.subscriber import recorded_results, subscription_tables
from cdc_replay.subscriber.session import SubscriptionSession, export_after_applied
from cdc_replay.subscriber.target_tables import read_target_tables

logger = logging.getLogger(__name__)

ORIGIN_IS_NONE: Final = "a value that differs may have been committed here, with origin: none"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of a comparison at the fence; `tables` are those compared, by subscription."""

    captured: CaptureResult
    replayed: tuple[ReplayResult, ...]
    tables: Mapping[str, tuple[TableCompared, ...]]


def compare_marked(source: CaptureSource, sessions: Sequence[SubscriptionSession]) -> Comparison | None:
    """Bring subscriptions of one publisher to a fence and compare their marked tables; None without any.

    The caller holds their locks.

    Raises:
        CdcReplayError: if there is no fence, with nothing changed. An error of one table is a warning.
    """
    if not any(
        subscription_tables.rewritten_tables(session.connection, session.subscription.name)
        for session in sessions
    ):
        return None
    with export_snapshot(source.dsn) as exported:
        return _compare_at(source, sessions, exported)


def compare_marked_tables(source: CaptureSource, session: SubscriptionSession) -> tuple[TableCompared, ...]:
    """The same for one subscription, whose lock is released while open transactions are waited for.

    An error is a warning: the tables stay marked.
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
    """Warn that the marked tables are not compared this time."""
    name = session.subscription.name
    logger.warning(
        "subscription %s: values of tables that the publisher rewrote (R11.9) were not compared; the next run"
        " retries that: %s",
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
        session.subscription.name: _MarkedTables(session, exported, catalog, source.change_log).compare()
        for session in sessions
    }
    return Comparison(captured, replayed, tables)


@dataclass(frozen=True, slots=True)
class _MarkedTables:
    """The marked tables of a subscription, and the fence at which they are compared."""

    session: SubscriptionSession
    exported: ExportedSnapshot
    catalog: PublisherCatalog
    change_log: str
    _results: list[TableCompared] = field(default_factory=list)

    def compare(self) -> tuple[TableCompared, ...]:
        """Compare the tables that replay has advanced to the fence."""
        session, name = self.session, self.session.subscription.name
        try:
            marked = subscription_tables.rewritten_tables(session.connection, name)
            ready = session.ready_tables()
            published = {
                synced.table.name: synced
                for synced in synced_tables(self.catalog, session.subscription.publications)
            }
            for table, rewritten_at in marked.items():
                if table not in published:
                    # It is not replicated any more; a refresh removes it.
                    subscription_tables.clear_rewrite(session.connection, name, table)
                elif ready.get(table) == self.exported.consistent_point:
                    self._compare(published[table], rewritten_at)
        except (CdcReplayError, psycopg.Error) as error:
            warn_of_failure(session, error)
        return tuple(self._results)

    def _compare(self, synced: SyncedTable, rewritten_at: Lsn) -> None:
        subscription, table = self.session.subscription, synced.table.name
        dsn, report = self.session.dsn, self.session.report
        request = ReconcileRequest(subscription, self.exported, dsn, (synced,), report=report)
        results: list[TableCompared] = []
        try:
            reason = self._why_not_updated(synced)

            def record(connection: Connection, compared: ComparedTable) -> None:
                subscription_tables.clear_rewrite(connection, subscription.name, table)
                results.append(_result(subscription.name, compared, rewritten_at, reason))
                recorded = results[-1].to_dict()
                recorded_results.record_result(connection, subscription.name, "compare", recorded)

            compare_values(request, record, update_rows=reason is None)
        except (CdcReplayError, psycopg.Error) as error:
            logger.warning(
                "subscription %s: the values of %s, which the publisher rewrote by the transaction that"
                " committed at %s (R11.9), could not be compared and will be compared again: %s",
                *(subscription.name, table, rewritten_at, error),
            )
            return
        (result,) = results
        if result.warning is not None:
            logger.warning("subscription %s: %s", subscription.name, result.warning)
        self._results.append(result)

    def _why_not_updated(self, synced: SyncedTable) -> str | None:
        """Why the subscriber's rows need not have the publisher's values, or cannot be paired."""
        session, subscription = self.session, self.session.subscription
        if not subscription.copy_data:
            return "copy_data is false"
        if subscription.origin is OriginPolicy.NONE:
            return ORIGIN_IS_NONE
        if reason := why_values_may_differ(self.catalog, subscription.publications, synced):
            return reason
        drifts = definition_drifts(session.connection, subscription, LogView(self.change_log), self.catalog)
        if synced.table.name in drifts:
            return "its row filter or columns have changed since its rows were copied"
        return None if self._has_key(synced) else "its rows have no key"

    def _has_key(self, synced: SyncedTable) -> bool:
        target = read_target_tables(self.session.connection, [synced.table.name]).get(synced.table.name)
        # Without a target, the comparison reports that.
        return target is None or bool(common_key(synced.table, target, synced.columns))


def _result(
    subscription: str, compared: ComparedTable, rewritten_at: Lsn, reason: str | None
) -> TableCompared:
    values = compared.values
    return TableCompared(
        table=str(compared.name),
        rewritten_at=rewritten_at,
        updated=values.update,
        differing=values.different - values.update,
        missing=values.missing,
        taken_out=values.unpublished_rows,
        rows_read=compared.rows,
        bytes=compared.bytes,
        seconds=compared.seconds,
        warning=_warning(subscription, compared, rewritten_at, reason),
    )


def _warning(subscription: str, compared: ComparedTable, rewritten_at: Lsn, reason: str | None) -> str | None:
    """What still differs, how many rows, and what moves them; None if nothing does."""
    values = compared.values
    differing = values.different - values.update
    # If rows may be missing anyway, missing ones point to a rewrite only if there are surplus rows too.
    is_missing = values.missing and (reason is None or values.subscriber_only)
    if not (differing or values.unpublished_rows or is_missing):
        return None
    counts = (
        (differing, "of both sides have other values"),
        (values.missing, "are published and not here"),
        (values.unpublished_rows, "are here, and on the publisher, and not published"),
    )
    summary = "; ".join(f"{count} rows {state_of_rows}" for count, state_of_rows in counts if count)
    remedy = f"`cdc-replay refresh {subscription} --reconcile` moves them"
    if reason == ORIGIN_IS_NONE:
        remedy = f"an UPDATE of {compared.name} on the publisher that touches them (SET v = v) sends them"
    if reason is None and differing:
        reason = "its key may have been rewritten"
    because = "" if reason is None else f", because {reason}"
    return (
        f"table {compared.name} still has rows that differ since the publisher rewrote it by the transaction"
        f" that committed at {rewritten_at}, which sends no changes (R11.9){because}: {summary}; {remedy}"
    )
