"""`backfill`: apply a range of the log again, to the subscriber or to another database."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.config import Config
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import BackfillPlan, BackfillResult
from cdc_replay.monitoring.progress import read_progress, read_table_states
from cdc_replay.opening import capture_source, open_subscription
from cdc_replay.replay.backfill import backfill_range, choose_tables, describe_log, parse_range


def backfill(  # noqa: PLR0913 - the options of the command
    config: Config,
    subscription: str,
    start: str,
    end: str,
    *,
    tables: Sequence[QualifiedName] = (),
    into: str | None = None,
    dry_run: bool = False,
    report: Report = unreported,
) -> BackfillResult:
    """Apply the transactions in `(start, end]` again; with `dry_run` only count what would be applied.

    Args:
        config: the configuration.
        subscription: the subscription whose publications filter the range.
        start: WAL position, or timestamp: then the last transaction committed by that time.
        end: likewise.
        tables: only these, by their names on the subscriber; default: all that are ready.
        into: DSN of another database; default: the subscriber.
        dry_run: read and compact the range, write nothing.
        report: called while it runs.

    Raises:
        InvalidConfiguration: if the range is empty, or not in the log, or there is no such table.
        CdcReplayError: as `backfill_range`.
    """
    source = capture_source(config, config.subscription(subscription).subscription.publisher, report)
    window = parse_range(ChangeLog.open(source.change_log), start, end)
    writes = into is None and not dry_run
    with open_subscription(config, subscription, "backfill", writes=writes, report=report) as session:
        return backfill_range(source, session, window, tables=tables, into=into, dry_run=dry_run)


def plan_backfill(
    config: Config,
    subscription: str,
    start: str | None,
    end: str | None,
    *,
    tables: Sequence[QualifiedName] = (),
    into_subscriber: bool,
) -> BackfillPlan:
    """The range of a backfill as WAL positions, and what the log holds of it; nothing is applied.

    Without `start` the range begins with the log. Without `end` it ends with what the subscriber has applied,
    or, if it goes into another database, with the log.

    Raises:
        InvalidConfiguration: if the range is empty, or not in the log, or there is no such table.
        SubscriberNotReady: if one of the tables is not ready.
        CdcReplayError: if the log or, without `end` or with `tables`, the subscriber cannot be read.
    """
    began = time.monotonic()
    publisher = config.subscription(subscription).subscription.publisher
    change_log = ChangeLog.open(config.publisher(publisher).change_log)
    if not end:
        applied = read_progress(config, subscription).applied_lsn if into_subscriber else None
        end = str(min(applied or change_log.end_lsn, change_log.end_lsn))
    window = parse_range(change_log, start or str(change_log.start_lsn), end)
    if tables:
        choose_tables(subscription, read_table_states(config, subscription), tables)
    summary = change_log.summary(window)
    return BackfillPlan(
        subscription=subscription,
        from_lsn=window.after,
        to_lsn=window.upto,
        seconds=time.monotonic() - began,
        transactions=summary.transactions,
        changes=summary.messages,
        log_range=describe_log(change_log),
        tables=tuple(map(str, dict.fromkeys(tables))),
    )
