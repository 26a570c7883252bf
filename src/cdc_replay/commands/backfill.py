"""`backfill`: apply a range of the log again, to the subscriber or to another database."""

from __future__ import annotations

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.opening import capture_source, open_subscription
from cdc_replay.config import Config
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.results import BackfillResult
from cdc_replay.replay.backfill import backfill_range, parse_range


def backfill(  # noqa: PLR0913 - the options of the command
    config: Config,
    subscription: str,
    start: str,
    end: str,
    *,
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
        into: DSN of another database; default: the subscriber.
        dry_run: read and compact the range, write nothing.
        report: called while it runs.

    Raises:
        InvalidConfiguration: if the range is empty, or not in the log.
        CdcReplayError: as `backfill_range`.
    """
    source = capture_source(config, config.subscription(subscription).subscription.publisher, report)
    window = parse_range(ChangeLog.open(source.change_log), start, end)
    writes = into is None and not dry_run
    with open_subscription(config, subscription, "backfill", writes=writes, report=report) as session:
        return backfill_range(source, session, window, into=into, dry_run=dry_run)
