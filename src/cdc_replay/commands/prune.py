"""`prune`: drop the segments of a publisher's change log that no subscription needs any more.

If one subscription cannot be asked, nothing is pruned. The publisher need not answer: when a disk is full, it
may not.
"""

from __future__ import annotations

import psycopg

from cdc_replay.changelog.retention import Confirm, PruneRequest, prune_log
from cdc_replay.config import Config, SubscriptionConfig
from cdc_replay.errors import CdcReplayError, PruneLimitUnknown
from cdc_replay.model.log_requirement import LogExtent, LogRequirement
from cdc_replay.model.results import PruneResult
from cdc_replay.postgres.connection import connect_with_deadline
from cdc_replay.subscriber.log_requirement import read_log_requirement


def prune(
    config: Config,
    publisher: str,
    *,
    before: str | None = None,
    keep_hours: float | None = None,
    dry_run: bool = False,
    confirm: Confirm | None = None,
) -> PruneResult:
    """Drop what no subscription of the configuration needs; merge small segments of the rest.

    Args:
        config: the configuration, which must name all subscriptions that use the log.
        publisher: the log's publisher; its `keep` applies if the next two are omitted.
        before: keep transactions that commit after this WAL position or timestamp.
        keep_hours: keep transactions committed within this time.
        dry_run: change nothing.
        confirm: called with the planned result before anything is dropped; its exception ends the command.

    Raises:
        PruneLimitUnknown: if a subscription cannot be asked what it needs; nothing is pruned.
        CdcReplayError: as `prune_log`.
    """
    configured = config.publisher(publisher)
    request = PruneRequest(publisher, configured.change_log, configured.keep, before, keep_hours)

    def read_requirements(log: LogExtent) -> tuple[LogRequirement, ...]:
        return tuple(_read(config, subscription, log) for subscription in config.subscriptions_of(publisher))

    return prune_log(request, read_requirements, dry_run=dry_run, confirm=confirm)


def _read(config: Config, subscription: SubscriptionConfig, log: LogExtent) -> LogRequirement:
    name, seconds = subscription.name, config.timeouts.answer.total_seconds()
    dsn, purpose = config.dsn_of(subscription), f"prune {subscription.name}"
    try:
        with connect_with_deadline(dsn, purpose=purpose, seconds=seconds) as connection:
            return read_log_requirement(connection, name, log)
    except PruneLimitUnknown:
        raise
    except (CdcReplayError, psycopg.Error) as error:
        raise PruneLimitUnknown(
            f'subscription "{name}" cannot be asked what it still needs, so nothing is pruned',
            detail=str(error).strip(),
            hint="Start its subscriber, or remove the subscription from the configuration.",
        ) from error
